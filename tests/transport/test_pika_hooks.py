"""However the received bytes are cut, the hooks and pika see each frame once, and in order."""

from contextlib import closing
from itertools import pairwise
from typing import Any

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, frame, heartbeat
from pika.adapters.select_connection import IOLoop, SelectConnection

from reliablepub.transport.pika_hooks import HookedConnection, is_recognized

HOOKED_CHANNEL, OTHER_CHANNEL = 1, 2


class Wire(HookedConnection):
    """A connection without a socket, that writes down who got what."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        with closing(IOLoop()) as loop:
            super().__init__(custom_ioloop=loop, internal_connection_workflow=False)
        self.confirm_to(HOOKED_CHANNEL, self._note)

    def _note(self, is_ack: bool, tags: list[int], multiple: bool) -> None:  # noqa: FBT001
        self.seen += [("hook", is_ack, tag, multiple) for tag in tags]

    def _process_frame(self, frame_value: Any) -> None:
        method = getattr(frame_value, "method", None)
        self.frames_received += 1
        name = type(method).__name__ if method is not None else type(frame_value).__name__
        self.seen.append(("pika", frame_value.channel_number, name))


confirms = st.builds(
    lambda kind, channel, tag, multiple: (kind, channel, tag, multiple),
    st.sampled_from(["ack", "nack"]),
    st.sampled_from([HOOKED_CHANNEL, OTHER_CHANNEL]),
    st.integers(0, 2**63 - 1),
    st.booleans(),
)
others = st.sampled_from(["heartbeat", "close-ok", "blocked"])


def bytes_of(item: Any) -> bytes:
    if item == "heartbeat":
        return frame.marshal(heartbeat.Heartbeat(), 0)
    if item == "close-ok":
        return frame.marshal(commands.Channel.CloseOk(), HOOKED_CHANNEL)
    if item == "blocked":
        return frame.marshal(commands.Connection.Blocked("low on memory"), 0)
    kind, channel, tag, multiple = item
    method = (
        commands.Basic.Ack(tag, multiple) if kind == "ack" else commands.Basic.Nack(tag, multiple)
    )
    return frame.marshal(method, channel)


def expected(item: Any) -> tuple[Any, ...]:
    names = {
        "heartbeat": ("pika", 0, "Heartbeat"),
        "close-ok": ("pika", HOOKED_CHANNEL, "CloseOk"),
        "blocked": ("pika", 0, "Blocked"),
    }
    if item in names:
        return names[item]
    kind, channel, tag, multiple = item
    if channel == HOOKED_CHANNEL:
        return ("hook", kind == "ack", tag, multiple)
    return ("pika", channel, kind.capitalize())


@given(
    items=st.lists(st.one_of(confirms, others), max_size=20),
    cuts=st.lists(st.integers(0, 500), max_size=10),
)
def test_every_frame_is_seen_once_and_in_order(items: list[Any], cuts: list[int]) -> None:
    data = b"".join(map(bytes_of, items))
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    wire = Wire()
    for start, end in pairwise(edges):
        wire._on_data_available(data[start:end])
    assert len(wire.seen) == len(items)
    for seen, item in zip(wire.seen, items, strict=True):
        if seen[0] == "hook":
            assert seen == expected(item)
        else:  # pika dispatches what came behind a frame of its own
            kind, channel = (item[0], item[1]) if isinstance(item, tuple) else (item, seen[1])
            assert seen[1] == channel
            assert seen[2].lower() == kind.replace("-", "")
    assert wire.frames_received == len(items)
    assert wire.bytes_received == len(data)


def test_confirms_alone_never_reach_pika() -> None:
    wire = Wire()
    items = [("ack", HOOKED_CHANNEL, n, False) for n in range(1, 100)]
    data = b"".join(map(bytes_of, items))
    for start in range(0, len(data), 13):
        wire._on_data_available(data[start : start + 13])
    assert wire.seen == [expected(item) for item in items]


def test_this_pika_is_recognized() -> None:
    assert is_recognized()


def test_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pika, "__version__", "2.0.0")
    assert not is_recognized()


@pytest.mark.parametrize("name", ["_on_data_available", "_output_marshaled_frames"])
def test_a_pika_without_what_is_hooked_into_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(SelectConnection, name, lambda self: None)
    assert not is_recognized()
