"""Sockets around a node: one thread, one selector, real TCP.

Knows: how to listen and accept, when to serve which socket (`link` reads and writes), how to carry
out a crash or a freeze. Must never know: AMQP; the node and its connections have deadlines.

It uses the node only under the lock that it shares with `FakeBroker`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Final

from reliablepub.testing.connection import Connection
from reliablepub.testing.faults import Crash, Freeze
from reliablepub.testing.link import Link

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from reliablepub.testing.node import Node

LOGGER = logging.getLogger("reliablepub.testing")

_FREE_PORTS: Final = range(20_000, 32_000)
_APART: Final = 7_417
"""Between the starts of processes with consecutive ids: the golden section of the range."""
_DRAWN: Final = itertools.count()
_WAIT_MAX_S = 3600.0
_SERVERS: Final[weakref.WeakSet[Server]] = weakref.WeakSet()


def _close_in_child() -> None:
    """In a forked child, which has no thread that serves: close its copies of the sockets.

    As long as a copy is open, the port of a broker that crashed accepts connections and cannot be
    bound again, and connections that the broker ended stay open.
    """
    for server in list(_SERVERS):
        server.close_sockets()


os.register_at_fork(after_in_child=_close_in_child)


class Server:
    """Serves one node on one port, in a thread of its own, until `stop`."""

    def __init__(
        self,
        node: Node,
        lock: threading.Condition,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._node = node
        self._lock = lock
        self._host = host
        self._tls = tls
        self._listener = self._bind(port)
        self.port: int = self._listener.getsockname()[1]
        self.is_up: bool = False
        self.is_frozen: bool = False
        self._resumes_at: float | None = None
        """When a crash or a freeze with a duration ends; None without one."""
        self._is_stopping = False
        self._is_full = False
        self._links: dict[int, Link] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)  # noqa: FBT003
        self._wake_out.setblocking(False)  # noqa: FBT003
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wakes)
        self._thread = threading.Thread(target=self._run, name="fake-broker", daemon=True)
        _SERVERS.add(self)
        self.listen()
        self._thread.start()

    # ------------------------------------------------------------------ called under the lock

    def listen(self) -> None:
        """Accept connections; again after a crash."""
        self._listener.listen(128)
        self.is_up = True
        self._resumes_at = None

    def thaw(self) -> None:
        """Resume after a freeze."""
        if not self.is_frozen:
            return
        self.is_frozen = False
        self._resumes_at = None
        self._node.tick()
        self._node.thaw()

    def reset_connections(self) -> None:
        """End every connection by RST."""
        for connection in list(self._node.connections.values()):
            connection.drop(reset=True)

    def wake(self) -> None:
        """Wake the server's thread."""
        with contextlib.suppress(OSError):  # full: the thread is awake anyway; closed: it has ended
            self._wake_in.send(b"\x00")

    def ask_to_stop(self) -> None:
        """Close every connection with connection.close, and end the thread."""
        self._is_stopping = True
        self.wake()

    # ------------------------------------------------------------------ called without it

    def join(self) -> None:
        """Wait until the thread ends."""
        self._thread.join()

    def close_sockets(self) -> None:
        """Close every socket of this process; what the node has of its connections stays."""
        for link in self._links.values():
            link.sock.close()
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        wait_s: float | None = 0  # the first turn begins to watch the listener
        try:
            while not self._is_stopping:
                events = self._selector.select(wait_s)
                with self._lock:
                    self._node.tick()
                    for key, mask in events:
                        key.data(mask)
                    self._advance()
                    wait_s = self._wait_s()
                    self._lock.notify_all()
        finally:  # also after a bug: no caller may wait for a thread that has ended
            with self._lock:
                self._shut_down()
                self._lock.notify_all()

    def _advance(self) -> None:
        """Do everything that is due now, and write all pending output."""
        node = self._node
        is_due = self._resumes_at is not None and node.now >= self._resumes_at
        if is_due and self.is_frozen:
            self.thaw()
        elif is_due:
            self.listen()
        self._carry_out_faults()  # before the write that is due: a crash loses this turn's messages
        if not self.is_frozen:
            node.handle_timeout()
            for link in list(self._links.values()):
                link.connection.handle_timeout()
        self._carry_out_faults()  # of publishes that an alarm withheld until now
        for fd, link in list(self._links.items()):
            if not self.is_frozen and (not link.write(node.now) or link.finish(node.now)):
                self._forget(fd, link)
            else:
                self._watch(link.sock, link.interest(node.now), self._on_link(fd, link))
        listens = selectors.EVENT_READ if self.is_up else 0
        self._watch(self._listener, listens, self._accept)

    def _carry_out_faults(self) -> None:
        while self._node.triggered:
            self._node.flush()
            self._carry_out(self._node.triggered.popleft())

    def _carry_out(self, fault: Crash | Freeze) -> None:
        if isinstance(fault, Freeze):
            self.is_frozen = True
            duration_s = fault.for_s
        else:
            self._crash(lose_unsynced=fault.lose_unsynced)
            duration_s = fault.down_for_s
        self._resumes_at = None if duration_s is None else self._node.now + duration_s

    def _crash(self, *, lose_unsynced: bool) -> None:
        self.is_up = self.is_frozen = False
        self._node.restart(keep_unwritten=not lose_unsynced)  # ends all connections at once
        for fd, link in list(self._links.items()):
            link.prepare_reset()
            self._forget(fd, link)
        self._unwatch(self._listener)
        self._listener.close()
        # Bound but not listening: the port refuses, and no other process can take it.
        self._listener = self._bind(self.port)

    def _shut_down(self) -> None:
        for connection in list(self._node.connections.values()):
            connection.close(
                320,
                "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'",
            )
        for link in self._links.values():
            if not self.is_frozen:
                link.write(self._node.now)
        self.close_sockets()
        self._node.restart(keep_unwritten=True)
        self._links.clear()
        self.is_up = self.is_frozen = False

    def _on_link(self, fd: int, link: Link) -> Callable[[int], None]:
        def handle(mask: int) -> None:
            if mask & selectors.EVENT_READ and not link.read(self._node.now):
                self._forget(fd, link)

        return handle

    def _forget(self, fd: int, link: Link) -> None:
        self._unwatch(link.sock)
        link.connection.handle_lost()
        link.sock.close()
        self._links.pop(fd, None)

    def _accept(self, _mask: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:
            return
        if len(self._links) >= self._node.options.connections_max:
            self._refuse(sock)
            return
        self._is_full = False
        sock.setblocking(False)  # noqa: FBT003
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fired = self._node.script.on_connection()
        connection = Connection(self._node, self._node.next_connection_number(), fired)
        self._links[sock.fileno()] = Link(sock, connection, fired, self._tls)

    def _refuse(self, sock: socket.socket) -> None:
        """Close a connection above the limit; of several in a row, log the first."""
        sock.close()
        if not self._is_full:
            self._is_full = True
            LOGGER.warning(
                "refusing connections: %d are open, which is NodeOptions.connections_max",
                len(self._links),
            )

    def _watch(self, sock: socket.socket, interest: int, handle: Callable[[int], None]) -> None:
        watched = self._selector.get_map().get(sock)
        if self.is_frozen or not interest:
            self._unwatch(sock)
        elif watched is None:
            self._selector.register(sock, interest, handle)
        elif watched.events != interest:
            self._selector.modify(sock, interest, handle)

    def _unwatch(self, sock: socket.socket) -> None:
        if sock in self._selector.get_map():
            self._selector.unregister(sock)

    def _wait_s(self) -> float | None:
        times: list[float | None] = [self._resumes_at]
        if not self.is_frozen:
            times.append(self._node.timers.deadline)
            times += [link.deadline(self._node.now) for link in self._links.values()]
        soonest = min((time for time in times if time is not None), default=None)
        if soonest is None:
            return None
        wait_s = max(0.0, soonest - self._node.clock.monotonic())
        return min(wait_s, _WAIT_MAX_S)  # select() overflows at ten years

    def _drain_wakes(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)

    def _bind(self, port: int) -> socket.socket:
        if port:
            return self._bound(port)
        # Below the ephemeral range: from there, the kernel gives the port of a stopped broker to
        # any client that connects, even to one that tries to reconnect to it. And one after the
        # other, from a start of its own for each process, so that no broker gets it soon either.
        for _ in range(20):
            chosen = _FREE_PORTS[(os.getpid() * _APART + next(_DRAWN)) % len(_FREE_PORTS)]
            with contextlib.suppress(OSError):
                return self._bound(chosen)
        return self._bound(0)

    def _bound(self, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)  # noqa: FBT003
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, port))
        except BaseException:
            listener.close()
            raise
        return listener
