"""Bytes of a broker, and bytes for the fake one, that were bent: it goes on, or the link ends."""

from contextlib import closing, suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import body, commands, frame, header, heartbeat
from pika.adapters.select_connection import IOLoop

from reliablepub.transport.incoming import FRAME_HEAD, BadFrame
from reliablepub.transport.pika_services import BoundedServices
from tests.broker.sans_io import Client, node_with_queue
from tests.broker.test_hostile import SAYINGS
from tests.fuzz.bending import bent
from tests.fuzz.bounds import bounded, for_long, short
from tests.transport.test_pika_hooks import HOOKED_CHANNEL, OTHER_CHANNEL, Wire

FRAME_MAX = 131_072
TABLE: dict[str, Any] = {"rp-attempt": 5, "t": {"u": ["v", 2.5, None, {"w": "x"}]}}


def returned(channel: int, size: int, *, said: int | None = None) -> bytes:
    """A message that comes back, with a header that says how long its body is."""
    head = header.ContentHeader(
        0, size if said is None else said, commands.Basic.Properties(headers=TABLE)
    )
    method = commands.Basic.Return(312, "NO_ROUTE", "e", "k")
    parts: list[Any] = [method, head, *([body.ContentBody(bytes(size))] if size else [])]
    return b"".join(frame.marshal(part, channel) for part in parts)


SAID = [
    *(frame.marshal(commands.Basic.Ack(n, n % 2 == 0), HOOKED_CHANNEL) for n in range(1, 9)),
    b"".join(frame.marshal(commands.Basic.Nack(n, False), HOOKED_CHANNEL) for n in range(40)),  # noqa: FBT003
    frame.marshal(commands.Basic.Ack(1, False), OTHER_CHANNEL),  # noqa: FBT003
    returned(HOOKED_CHANNEL, 0),
    returned(HOOKED_CHANNEL, 900),
    returned(HOOKED_CHANNEL, 900, said=2**62),
    returned(OTHER_CHANNEL, 20),
    frame.marshal(commands.Channel.Close(404, "NOT_FOUND", 60, 40), HOOKED_CHANNEL),
    frame.marshal(commands.Channel.OpenOk(), HOOKED_CHANNEL),
    frame.marshal(commands.Channel.CloseOk(), HOOKED_CHANNEL),
    frame.marshal(commands.Connection.Close(320, "CONNECTION_FORCED", 0, 0), 0),
    frame.marshal(commands.Connection.Blocked("low on memory"), 0),
    frame.marshal(commands.Basic.Deliver("c", 1, False, "e", "k"), HOOKED_CHANNEL),  # noqa: FBT003
    frame.marshal(heartbeat.Heartbeat(), 0),
    b"AMQP\x00\x00\x09\x01",
]


class Taker(Wire):
    """Takes each frame that is left to pika, whatever it is."""

    def _process_frame(self, frame_value: Any) -> None:
        self.frames_received += 1


@st.composite
def streams(draw: st.DrawFn, sayings: list[bytes]) -> list[bytes]:
    """What is said, bent here and there, and how it is cut on its way."""
    parts = [draw(st.sampled_from(sayings)) for _ in range(draw(st.integers(1, 20)))]
    whole = b"".join(draw(bent(part)) if draw(st.booleans()) else part for part in parts)
    cuts = draw(st.lists(st.integers(0, len(whole)), max_size=8))
    return [whole[a:b] for a, b in pairwise(sorted({0, len(whole), *cuts}))]


def is_read_or_ends(stream: list[bytes]) -> None:
    size, held = sum(map(len, stream)), 0
    with bounded(2 << 20 | 64 * size):
        wire = Taker.unplugged()
        with suppress(Exception):  # to the transport, whatever pika raises is a lost connection
            for data in stream:
                wire._on_data_available(data)
                held = max(held, len(wire._incoming.partial))
    assert held <= FRAME_MAX
    assert "a hook failed" not in wire.ended_because
    assert len(wire._contents._expected) <= 1 + size // 8


class Kept:
    """In pika's place: what it would have read, and what it would hold of it."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.frames.append(data)


def is_bounded_or_ends(stream: list[bytes]) -> None:
    """Nothing but whole frames comes to pika, and of a message no more than its head."""
    pika = Kept()
    with bounded(2 << 20 | 64 * sum(map(len, stream))), closing(IOLoop()) as loop:
        services = BoundedServices(loop)
        protocol = services._bound(pika)
        with suppress(BadFrame):
            for data in stream:
                protocol.data_received(data)
    for one in pika.frames:
        if one[:4] != b"AMQP":
            kind, _, size = FRAME_HEAD.unpack_from(one)
            assert size + 8 == len(one) <= FRAME_MAX
            assert kind != 3
            assert kind != 2 or one[11:19] == bytes(8)


def is_answered_or_ends(stream: list[bytes]) -> None:
    size = sum(map(len, stream))
    with bounded(4 << 20 | 200 * size):
        node = node_with_queue()
        client = Client(node).open(channels=2, confirm=True)
        for data in stream:
            client.connection.handle_data(data)
            client.connection.poll_transmit()
            if client.connection.ending is not None:
                break
        node.now += 100.0
        node.handle_timeout()
        client.connection.handle_timeout()
        client.connection.handle_lost()
    assert not node.connections


def test_bent_frames_of_a_broker() -> None:
    short(given(streams(SAID))(is_read_or_ends))()


def test_bent_frames_of_a_broker_for_pika_itself() -> None:
    short(given(streams(SAID))(is_bounded_or_ends))()


def test_bent_frames_to_the_fake_broker() -> None:
    some = settings(short, max_examples=40)
    some(given(streams(SAYINGS))(is_answered_or_ends))()


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_bent_frames_of_a_broker_for_long() -> None:
    for_long(given(streams(SAID))(is_read_or_ends))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_bent_frames_of_a_broker_for_pika_itself_for_long() -> None:
    for_long(given(streams(SAID))(is_bounded_or_ends))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_bent_frames_to_the_fake_broker_for_long() -> None:
    for_long(given(streams(SAYINGS))(is_answered_or_ends))
