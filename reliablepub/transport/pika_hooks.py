"""The one place that reaches behind pika's public interface: batches out, confirms in, for speed.

Knows: a few private names of pika's connection, in the versions it was tested with. Must never
know: messages, epochs, outcomes.

pika builds and writes one publish at a time, and decodes and dispatches one confirm at a time,
copying its receive buffer for each frame: 35 and 38 microseconds, where the work itself takes two.
So a batch of finished frames is put into its output in one go, and runs of ``basic.ack`` and
``basic.nack`` are taken off what was received before pika sees the rest. Everything else stays
pika's: handshake, TLS, heartbeats, blocked, returns, closing.

Where pika is not what it was when this was written, `is_recognized` is False, and the transport
uses the public interface: slower, and just as correct.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Final

import pika
from pika.adapters.select_connection import SelectConnection

TESTED_VERSIONS: Final = ("1.4.",)

_CONFIRM: Final = Struct(">11sQBB")  # a whole basic.ack or basic.nack frame; up to its tag:
_CONFIRM_HEAD: Final = Struct(">BHIHH")
_METHOD_FRAME: Final = 1
_PAYLOAD: Final = 13
_BASIC: Final = 60
_ACK, _NACK = 80, 120
_FRAME_END: Final = 0xCE
_MULTIPLE: Final = 1

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
        self._output_marshaled_frames(frames)

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
        count, run_head, run_bits, tags = 0, b"", 0, list[int]()
        for head, tag, bits, end in _CONFIRM.iter_unpack(whole):
            if head != run_head or bits != run_bits:
                self._call_out(run_head, run_bits, tags)
                run_head, run_bits, tags = head, bits, []
                if head not in self._on_confirms:
                    break
            if end != _FRAME_END:
                break
            tags.append(tag)
            count += 1
        self._call_out(run_head, run_bits, tags)
        self.bytes_received += count * _CONFIRM.size  # pika's heartbeat looks at this
        self.frames_received += count
        return count * _CONFIRM.size

    def _call_out(self, head: bytes, bits: int, tags: list[int]) -> None:
        if tags:
            on_confirms, is_ack = self._on_confirms[head]
            on_confirms(is_ack, tags, bits & _MULTIPLE == _MULTIPLE)


def is_recognized() -> bool:
    """Whether this pika is one that the hooks were tested with, and has what they hook into."""
    if not pika.__version__.startswith(TESTED_VERSIONS):
        return False
    try:
        received = inspect.signature(SelectConnection._on_data_available)  # noqa: SLF001
        written = inspect.signature(SelectConnection._output_marshaled_frames)  # noqa: SLF001
    except AttributeError:
        return False
    return list(received.parameters) == ["self", "data_in"] and list(written.parameters) == [
        "self",
        "marshaled_frames",
    ]
