"""The one place that reaches behind pika's public interface: batches out, confirms in, for speed.

Knows: a few private names of pika's connection, in the versions it was tested with. Must never
know: messages, epochs, outcomes.

pika builds and writes one publish at a time, and decodes and dispatches one confirm at a time,
copying its receive buffer for each frame: 35 and 38 microseconds, where the work itself takes two.
So a batch of finished frames is put into its output in one go, and runs of ``basic.ack`` and
``basic.nack`` are taken off what was received before pika sees the rest.

Beside a turn of a few messages, its I/O loop costs as much as they do: it watches the socket for
room before each write, and reads until there is nothing more, which is an exception. So, on a
socket without TLS, what it takes at once is written at once, and it is read from once for each
time that it is ready. Everything else stays pika's: handshake, TLS, heartbeats, blocked, returns,
closing; and whatever goes wrong, which it is left to find out by itself.

Where pika is not what it was when this was written, `is_recognized` is False, and the transport
uses the public interface: slower, and just as correct.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import Any, Final

import pika
from pika.adapters.select_connection import SelectConnection
from pika.adapters.utils import io_services_utils

TESTED_VERSIONS: Final = ("1.4.",)

_CONFIRM: Final = Struct(">11sQH")  # a whole basic.ack or basic.nack frame; up to its tag:
_CONFIRM_HEAD: Final = Struct(">BHIHH")
_METHOD_FRAME: Final = 1
_PAYLOAD: Final = 13
_BASIC: Final = 60
_ACK, _NACK = 80, 120
_OCTET: Final = 0xFF
_FRAME_END: Final = 0xCE
_MULTIPLE: Final = 1 << 8  # of the two octets behind the tag, the second of which ends the frame

_Plaintext: Final = getattr(io_services_utils, "_AsyncPlaintextTransport", None)
_RECEIVE_BYTES: Final = 64 * 1024  # pika's 4 KiB are small for a message that comes back

OnConfirms = Callable[[bool, list[int], bool], None]
"""Called with a run of confirms: are they acks, their tags, their ``multiple``."""


class HookedConnection(SelectConnection):
    """A `SelectConnection` that takes finished frames, and hands out confirms undecoded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - pika's own
        self._on_confirms: dict[bytes, tuple[OnConfirms, bool]] = {}
        super().__init__(*args, **kwargs)

    def confirm_to(self, channel: int, on_confirms: OnConfirms) -> None:
        """Have the confirms of a channel called out directly from now on."""
        for method, is_ack in ((_ACK, True), (_NACK, False)):
            head = _CONFIRM_HEAD.pack(_METHOD_FRAME, channel, _PAYLOAD, _BASIC, method)
            self._on_confirms[head] = on_confirms, is_ack

    def write_frames(self, frames: Sequence[bytes]) -> None:
        """Write finished frames; each item should hold many, it is one write."""
        self._output_marshaled_frames(self._write_at_once(frames))

    def _write_at_once(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        """Write what the socket takes now, unless something waits already; the rest of it."""
        transport: Any = self._transport
        if type(transport) is not _Plaintext or transport.get_write_buffer_size():
            return frames
        if transport._state != transport._STATE_ACTIVE:  # noqa: SLF001
            return frames
        for index, data in enumerate(frames):
            try:
                sent = transport._sock.send(data)  # noqa: SLF001
            except OSError:  # no room, or no connection any more: pika will see which
                return frames[index:]
            self.bytes_sent += sent  # pika's heartbeat looks at this
            if sent < len(data):
                return [data[sent:], *frames[index + 1 :]]
            self.frames_sent += 1
        return ()

    def _proto_connection_made(self, transport: Any) -> None:  # noqa: ANN401 - pika's own
        if type(transport) is _Plaintext:
            transport._consume = partial(_receive_once, transport)  # noqa: SLF001
        super()._proto_connection_made(transport)

    def _on_data_available(self, data_in: bytes) -> None:
        if self._frame_buffer:
            data_in = self._frame_buffer + data_in
            self._frame_buffer = b""
        rest = self._take_confirms(data_in)
        if rest < len(data_in):
            super()._on_data_available(data_in[rest:] if rest else data_in)

    def _take_confirms(self, data: bytes) -> int:
        """Call out the confirms that the data begins with, by runs of a kind; where the rest is."""
        whole = memoryview(data)[: len(data) // _CONFIRM.size * _CONFIRM.size]
        count, run_head, run_end, tags = 0, b"", 0, list[int]()
        for head, tag, end in _CONFIRM.iter_unpack(whole):
            if head != run_head or end != run_end:
                count += self._call_out(run_head, run_end, tags)
                run_head, run_end, tags = head, end, []
                if head not in self._on_confirms or end & _OCTET != _FRAME_END:
                    break
            tags.append(tag)
        count += self._call_out(run_head, run_end, tags)
        self.bytes_received += count * _CONFIRM.size  # pika's heartbeat looks at this
        self.frames_received += count
        return count * _CONFIRM.size

    def _call_out(self, head: bytes, end: int, tags: list[int]) -> int:
        """Tell of a run; how many there are in it."""
        if tags:
            on_confirms, is_ack = self._on_confirms[head]
            on_confirms(is_ack, tags, bool(end & _MULTIPLE))
        return len(tags)


def _receive_once(transport: Any) -> None:  # noqa: ANN401 - pika's own
    """Receive; if there is more, the loop comes back at once."""
    data = transport._sock.recv(_RECEIVE_BYTES)  # noqa: SLF001
    if not data:
        raise transport.RxEndOfFile
    transport.get_protocol().data_received(data)


def is_recognized() -> bool:
    """Whether this pika is one that the hooks were tested with, and has what they hook into."""
    if not pika.__version__.startswith(TESTED_VERSIONS):
        return False
    try:
        return hasattr(_Plaintext, "_STATE_ACTIVE") and all(
            list(inspect.signature(getattr(owner, name)).parameters) == parameters
            for owner, name, parameters in (
                (SelectConnection, "_on_data_available", ["self", "data_in"]),
                (SelectConnection, "_output_marshaled_frames", ["self", "marshaled_frames"]),
                (SelectConnection, "_proto_connection_made", ["self", "transport"]),
                (_Plaintext, "_consume", ["self"]),
                (_Plaintext, "RxEndOfFile", []),
            )
        )
    except (AttributeError, TypeError):
        return False
