"""The hooks into pika, tried on a socket pair before they are used.

Knows: what a broker and a client say to each other in a few frames, and pika's private way to put a
connection on a socket. Must never know: a network, what the hooks are for.

What was renamed or behaves otherwise in a pika shows here as an exception, or as bytes that do not
arrive; within some three milliseconds, and before a message depends on it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Final

import pika
from pika import frame, spec
from pika.adapters import base_connection
from pika.adapters.select_connection import IOLoop
from pika.adapters.utils import io_services_utils, selector_ioloop_adapter

from reliablepub.transport.pika_hooks import HookedConnection
from reliablepub.transport.quiet import quietly

_CHANNEL: Final = 1
_LARGE: Final = bytes(64 * 1024)
_SOCKET_BYTES: Final = 8 * 1024
"""What the socket takes at once, or a few times that: less than `_LARGE`."""
_TURNS_MAX: Final = 10_000


class Unexpected(Exception):
    """A step of the trial had another end."""


def try_hooks() -> None:
    """Open a connection, write, hear, and close it.

    Raises:
        Exception: of any kind; the hooks must not be used.
    """
    with quietly(), _plugged() as trial:
        trial.handshake()
        trial.write()
        trial.hear()
        trial.end()


class _Trial:
    """A connection of ours, and a broker that is played by hand."""

    def __init__(self, loop: IOLoop, ours: socket.socket, theirs: socket.socket) -> None:
        self._loop, self._theirs = loop, theirs
        self._heard: list[object] = []
        self._ends: list[object] = []
        self._connection = HookedConnection(
            pika.ConnectionParameters(heartbeat=0),
            on_open_error_callback=lambda _, error: self._ends.append(error),
            on_close_callback=lambda _, error: self._ends.append(error),
            custom_ioloop=loop,
            internal_connection_workflow=False,
        )
        shim: Any = base_connection._StreamingProtocolShim(self._connection)  # noqa: SLF001
        adapter = selector_ioloop_adapter.SelectorIOServicesAdapter(loop)
        plaintext: Any = io_services_utils._AsyncPlaintextTransport  # noqa: SLF001
        shim.connection_made(plaintext(ours, shim, adapter))

    def confirmed(self, is_ack: bool, tags: list[int], multiple: bool) -> None:  # noqa: FBT001
        """A `Listener`'s."""
        self._heard.append((is_ack, tags, multiple))

    def returned(self, method: spec.Basic.Return, headers: object, body_bytes: int) -> None:
        """A `Listener`'s."""
        self._heard.append((method.reply_code, headers, body_bytes))

    def handshake(self) -> None:
        """Pika opens the connection, by frames that it gets through the hooks."""
        self._expect(8)
        capabilities = {"publisher_confirms": True, "basic.nack": True}
        for method in (
            spec.Connection.Start(server_properties={"capabilities": capabilities}),
            spec.Connection.Tune(channel_max=9, frame_max=spec.FRAME_MAX_SIZE, heartbeat=0),
            spec.Connection.OpenOk(),
        ):
            self._say(frame.Method(0, method))
        if not (self._connection.is_open and self._connection.reads_once):
            raise Unexpected("no connection")
        self._drain()

    def write(self) -> None:
        """What the socket takes is written at once, pika writes the rest, and all is counted."""
        before = self._connection.bytes_sent
        self._connection.write_frames([b"one", b"two"])
        if self._drain() != b"onetwo":
            raise Unexpected("a write was late")
        self._connection.write_frames([b"a", _LARGE])
        self._connection.write_frames([b"z"])
        if self._expect(len(_LARGE) + 2) != b"a" + _LARGE + b"z":
            raise Unexpected("a large write was torn")
        if self._connection.bytes_sent - before != len(_LARGE) + 8:
            raise Unexpected("bytes are counted otherwise")

    def hear(self) -> None:
        """Confirms and returns come directly, and whatever is between them comes to pika."""
        self._connection.listen_on(_CHANNEL, self)
        before = self._connection.bytes_received
        ack, nack = spec.Basic.Ack(1), spec.Basic.Nack(2, multiple=True)
        returned = spec.Basic.Return(312, "NO_ROUTE", "", "")
        headers = {"n": 1}
        said = [
            *(frame.Method(_CHANNEL, method) for method in (ack, ack)),
            frame.Heartbeat(),
            *(frame.Method(_CHANNEL, method) for method in (nack, returned)),
            frame.Header(_CHANNEL, 2, spec.BasicProperties(headers=headers)),
            *(frame.Body(_CHANNEL, b"b"), frame.Body(_CHANNEL, b"b")),
        ]
        self._say(*said)
        if self._heard != [(True, [1, 1], False), (False, [2], True), (312, headers, 2)]:
            raise Unexpected("confirms are heard otherwise")
        if self._connection.bytes_received - before != sum(len(one.marshal()) for one in said):
            raise Unexpected("bytes are counted otherwise")

    def end(self) -> None:
        """The end of the stream ends the connection."""
        self._theirs.shutdown(socket.SHUT_WR)
        for _ in range(4):
            self._turn()
        if len(self._ends) != 1:
            raise Unexpected("an end was not heard")

    def _turn(self) -> None:
        self._loop.call_later(0.0, lambda: None)  # so that it does not wait
        self._loop.poll()
        self._loop.process_timeouts()

    def _say(self, *frames: Any) -> None:  # noqa: ANN401 - pika's
        self._theirs.sendall(b"".join(one.marshal() for one in frames))
        self._turn()

    def _drain(self) -> bytes:
        found = bytearray()
        with contextlib.suppress(BlockingIOError):
            while data := self._theirs.recv(1024 * 1024):
                found += data
        return bytes(found)

    def _expect(self, count: int) -> bytes:
        found = bytearray(self._drain())
        for _ in range(_TURNS_MAX):
            if len(found) >= count:
                return bytes(found)
            self._turn()
            found += self._drain()
        raise Unexpected("bytes were lost")


@contextlib.contextmanager
def _plugged() -> Iterator[_Trial]:
    loop = IOLoop()
    loop.activate_poller()
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            ours.setblocking(False)  # noqa: FBT003
            theirs.setblocking(False)  # noqa: FBT003
            yield _Trial(loop, ours, theirs)
    finally:
        loop.deactivate_poller()
        loop.close()
