"""Hooks into pika's private interface, for speed: write batches of frames, read runs of confirms.

Knows: a few private names of pika's connection, in the tested versions, and the public interface by
which pika has its loop watch sockets. Must never know: messages, epochs, outcomes.

pika encodes and writes one publish at a time (35 microseconds). It decodes and dispatches one
confirm at a time, and copies its receive buffer for each frame (38 microseconds). The work itself
takes 2. So the hooks put a batch of encoded frames into pika's output at once, and take runs of
``basic.ack`` and ``basic.nack`` from the received bytes before pika sees them.

With few messages in a turn, pika's I/O loop costs as much as the messages: before each write it
waits for the socket to be writable, and it reads until an exception says that nothing is left. So,
on a socket without TLS, the hooks write at once what the socket takes, and read once each time the
socket is ready. Everything else remains pika's: handshake, TLS, heartbeats, blocking, closing, and
the detection of failures.

`incoming` limits what a broker may send. Bodies of returned messages are dropped on arrival.

**Off at the first surprise.** The hooks are used only with the versions in `TESTED_VERSIONS`, only
after a self-test on a socket pair before first use (`try_hooks`, 3 ms), and only until one of them
fails. A name that another pika has changed shows in the self-test, as an exception or as missing
bytes. From then on this process uses pika's public interface, which is slower and equally correct.
`Hooks.why_off`, the log, `Status` and ``reliablepub doctor`` report the reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import Any, Final, Protocol

import pika
from pika import frame, spec
from pika.adapters import base_connection
from pika.adapters.select_connection import IOLoop, SelectConnection
from pika.adapters.utils import io_services_utils, selector_ioloop_adapter

from reliablepub.transport.incoming import (
    FRAME_HEAD,
    METHOD,
    NOT_WAITED_FOR,
    BadFrame,
    Contents,
    Incoming,
    Part,
)
from reliablepub.transport.quiet import quietly


class WatchedLoop(IOLoop):
    """pika's I/O loop for one connection at a time; exposes the connection's socket."""

    def __init__(self) -> None:
        self.fd: int | None = None  # of the socket that pika watches; None if there is none
        self.is_writing: bool = False  # pika has output left, and waits until it can write
        super().__init__()

    def add_handler(self, fd: int, handler: Callable[[int, int], None], events: int) -> None:
        """Start watching a socket."""
        self.fd = fd
        self.is_writing = bool(events & self.WRITE)
        super().add_handler(fd, handler, events)

    def update_handler(self, fd: int, events: int) -> None:
        """Change the events for which a socket is watched."""
        if fd == self.fd:
            self.is_writing = bool(events & self.WRITE)
        super().update_handler(fd, events)

    def remove_handler(self, fd: int) -> None:
        """Stop watching a socket."""
        if fd == self.fd:
            self.fd, self.is_writing = None, False
        super().remove_handler(fd)

    def watch(self, fd: int, handler: Callable[[int, int], None]) -> None:
        """Watch another descriptor for reading, beside the connection's socket."""
        super().add_handler(fd, handler, self.READ)

    def cut(self) -> None:
        """Shut the socket down at once; pika notices, and closes the socket."""
        if self.fd is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(self.fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)


TESTED_VERSIONS: Final = ("1.4.0", "1.4.1", "1.4.2", "1.4.4")

_LOG: Final = logging.getLogger("reliablepub.link")
# A complete basic.ack or basic.nack frame: the bytes up to the tag (`_CONFIRM_HEAD`), the tag, and
# two octets, ``multiple`` and the end of the frame.
_CONFIRM: Final = Struct(">11sQH")
_CONFIRM_HEAD: Final = Struct(">BHIHH")
_PAYLOAD: Final = 13
_BASIC: Final = 60
_ACK, _NACK = 80, 120
_OCTET: Final = 0xFF
_FRAME_END: Final = 0xCE
_MULTIPLE: Final = 1 << 8  # in the two octets after the tag

_Plaintext: Final = getattr(io_services_utils, "_AsyncPlaintextTransport", None)
_RECEIVE_BYTES: Final = 64 * 1024  # pika's own 4 KiB are too few for many confirms


class HookFailed(Exception):
    """A hook met something unexpected in pika; the hooks are off, and the connection must end."""


class Listener(Protocol):
    """Receives the confirms and returns of one channel."""

    def confirmed(self, is_ack: bool, tags: list[int], multiple: bool) -> None:  # noqa: FBT001
        """Called for a run of acks, or of nacks, with one value of ``multiple``."""

    def returned(self, method: spec.Basic.Return, headers: object, body_bytes: int) -> None:
        """Called for a returned message, whose body is dropped."""


class HookedConnection(SelectConnection):
    """A `SelectConnection` with hooks for writing frames and for reading confirms."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - pika's own
        self.ended_because: str = ""  # why a frame was rejected, or a hook failed; else empty
        self.reads_once: bool = False  # the socket is read once each time it is ready
        self._confirms: dict[bytes, tuple[Listener, bool]] = {}
        self._listeners: dict[int, Listener] = {}
        self._returns: dict[int, spec.Basic.Return] = {}  # returns whose header frame comes next
        self._contents = Contents()
        self._incoming = Incoming(lambda: int(self.params.frame_max or spec.FRAME_MAX_SIZE))
        super().__init__(*args, **kwargs)

    def listen_on(self, channel: int, listener: Listener) -> None:
        """Report confirms and returns of a channel in confirm mode to the listener from now on."""
        self._contents.open(channel)
        self._listeners[channel] = listener
        for method, is_ack in ((_ACK, True), (_NACK, False)):
            head = _CONFIRM_HEAD.pack(METHOD, channel, _PAYLOAD, _BASIC, method)
            self._confirms[head] = listener, is_ack

    def write_frames(self, frames: Sequence[bytes]) -> None:
        """Write encoded frames; each item holds one or more, and is one write."""
        try:
            if self._transport is not None:
                self._output_marshaled_frames(self._write_at_once(frames))
        except Exception as error:  # part of the frames may be written
            raise self._failed("writing", error) from error

    def _write_at_once(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        """Write what the socket takes now, unless pika has output waiting; return the rest."""
        transport: Any = self._transport
        if type(transport) is not _Plaintext or transport.get_write_buffer_size():
            return frames
        if transport._state != transport._STATE_ACTIVE:  # noqa: SLF001
            return frames
        for index, data in enumerate(frames):
            try:
                sent = transport._sock.send(data)  # noqa: SLF001
            except OSError:  # the socket is full, or the connection is lost: pika finds out which
                return frames[index:]
            self.bytes_sent += sent  # read by pika's heartbeat checker
            if sent < len(data):
                return [data[sent:], *frames[index + 1 :]]
            self.frames_sent += 1
        return ()

    def _proto_connection_made(self, transport: Any) -> None:  # noqa: ANN401 - pika's own
        if type(transport) is _Plaintext:
            assert transport._consume is not None  # noqa: SLF001 - the method to replace exists
            transport._consume = partial(self._receive_once, transport)  # noqa: SLF001
            self.reads_once = True
        super()._proto_connection_made(transport)

    def _receive_once(self, transport: Any) -> None:  # noqa: ANN401 - pika's own
        """Receive once. If there is more, the loop reports the socket as ready again."""
        try:
            data = transport._sock.recv(_RECEIVE_BYTES)  # noqa: SLF001
            end, protocol = transport.RxEndOfFile, transport.get_protocol()
        except OSError:
            raise
        except Exception as error:
            raise self._failed("reading", error) from error
        if not data:
            raise end
        protocol.data_received(data)

    def _on_data_available(self, data_in: bytes) -> None:
        for data in self._left_to_pika(data_in):
            super()._on_data_available(data)

    def _left_to_pika(self, data_in: bytes) -> Iterator[bytes]:
        """Take confirms and returned messages; yield all other frames, for pika, in order."""
        try:
            for one in self._incoming.frames(data_in, self._take_confirms):
                if not self._take_content(one):
                    yield one
        except BadFrame as error:
            self.ended_because = str(error)
            raise
        except Exception as error:
            raise self._failed("reading", error) from error

    def _take_confirms(self, data: memoryview) -> int:
        """Report the confirms at the beginning of the data, in runs of one kind; their size."""
        whole = data[: len(data) // _CONFIRM.size * _CONFIRM.size]
        count, run_head, run_end, tags = 0, b"", 0, list[int]()
        for head, tag, end in _CONFIRM.iter_unpack(whole):
            if head != run_head or end != run_end:
                count += self._tell(run_head, run_end, tags)
                run_head, run_end, tags = head, end, []
                if head not in self._confirms or end & _OCTET != _FRAME_END:
                    break
            tags.append(tag)
        count += self._tell(run_head, run_end, tags)
        self.bytes_received += count * _CONFIRM.size  # read by pika's heartbeat checker
        self.frames_received += count
        return count * _CONFIRM.size

    def _tell(self, head: bytes, end: int, tags: list[int]) -> int:
        """Report a run of confirms to its listener; return the number of confirms."""
        if tags:
            listener, is_ack = self._confirms[head]
            listener.confirmed(is_ack, tags, bool(end & _MULTIPLE))
        return len(tags)

    def _take_content(self, one: bytes) -> bool:
        """Take a frame of a returned message; return False for any other frame."""
        part = self._contents.part(one)
        if part is Part.NO_MESSAGE:
            return False
        _, channel, _ = FRAME_HEAD.unpack_from(one)
        listener = self._listeners.get(channel)
        if listener is None:
            raise BadFrame(NOT_WAITED_FOR)
        if part is Part.RETURN:
            self._returns[channel] = _read(one).method
        elif part is Part.HEADER:
            header = _read(one)
            method = self._returns.pop(channel)
            listener.returned(method, header.properties.headers, header.body_size)
        self.bytes_received += len(one)
        self.frames_received += 1
        return True

    def _failed(self, doing: str, error: Exception) -> HookFailed:
        """Switch the hooks off; return the error to raise."""
        why = f"pika {pika.__version__}: a hook failed {doing}, {type(error).__name__}: {error}"
        hooks.switch_off(why)
        self.ended_because = why
        return HookFailed(why)


def _read(one: bytes) -> Any:  # noqa: ANN401 - one of pika's frames
    """Decode a frame with pika."""
    try:
        return frame.decode_frame(one)[1]
    except Exception as error:
        raise BadFrame(f"the broker sent a return that cannot be read ({error!r})") from error


class Hooks:
    """Whether this process uses the hooks. Methods may be called from any thread."""

    def __init__(self, trial: Callable[[], None]) -> None:
        self._trial = trial
        self._lock = threading.Lock()
        self._why_off: str | None = None

    def why_off(self) -> str:
        """Why only pika's public interface is used; empty if the hooks are used.

        The first call in a process runs the self-test, which takes about 3 ms.
        """
        if self._why_off is None:
            why = self._look()
            with self._lock:
                is_news, self._why_off = self._why_off is None, self._why_off or why
            if is_news and why:
                self._log(why)
        return self._why_off

    def switch_off(self, why: str) -> None:
        """Use the public interface from now on."""
        with self._lock:
            is_news, self._why_off = not self._why_off, self._why_off or why
        if is_news:
            self._log(why)

    def _look(self) -> str:
        found = pika.__version__
        if found not in TESTED_VERSIONS:
            return f"pika is {found}; tested versions are {', '.join(TESTED_VERSIONS)}"
        try:
            self._trial()
        except Exception as error:  # noqa: BLE001 - any failure means an unknown pika
            return f"pika {found} differs from the tested one: {type(error).__name__}: {error}"
        return ""

    @staticmethod
    def _log(why: str) -> None:
        words = "only pika's public interface is used, which is slower but just as safe: %s"
        _LOG.warning(words, why, extra={"event": "hooks_off", "reason": why})


_CHANNEL: Final = 1
_LARGE: Final = bytes(64 * 1024)
_SOCKET_BYTES: Final = 8 * 1024
"""Send buffer of the self-test's socket: small, so that `_LARGE` does not fit."""
_TURNS_MAX: Final = 10_000


class Unexpected(Exception):
    """A step of the self-test had another result than expected."""


def try_hooks() -> None:
    """Run the self-test: open a connection on a socket pair, write, read confirms, close."""
    with quietly(), _plugged() as trial:
        trial.handshake()
        trial.write()
        trial.hear()
        trial.end()


hooks: Final = Hooks(try_hooks)
"""The hooks of this process."""


class _Trial:
    """A hooked connection on one end of a socket pair; the other end plays the broker."""

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
        """Record a run of confirms, as the connection's `Listener`."""
        self._heard.append((is_ack, tags, multiple))

    def returned(self, method: spec.Basic.Return, headers: object, body_bytes: int) -> None:
        """Record a returned message, as the connection's `Listener`."""
        self._heard.append((method.reply_code, headers, body_bytes))

    def handshake(self) -> None:
        """Check that pika opens the connection, with frames that it receives through the hooks."""
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
        """Check that the socket gets what it can take at once, and that pika writes the rest."""
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
        """Check that confirms and returns reach the listener, and that other frames reach pika."""
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
        """Check that the end of the stream ends the connection."""
        self._theirs.shutdown(socket.SHUT_WR)
        for _ in range(4):
            self._turn()
        if len(self._ends) != 1:
            raise Unexpected("an end was not heard")

    def _turn(self) -> None:
        self._loop.call_later(0.0, lambda: None)  # so that `poll` does not wait
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
