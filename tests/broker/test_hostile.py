"""Hostile input: whatever comes, the broker answers or closes, and keeps little of it.

The short runs are part of every test run; `-m soak` is the long one.
"""

import random
import struct
import time
import tracemalloc
from contextlib import ExitStack
from typing import Any

import pytest
from pamqp import commands, frame, header

from reliablepub.testing import FakeBroker, NodeOptions
from reliablepub.testing.connection import OUTPUT_MAX_BYTES
from reliablepub.testing.replies import AmqpError
from reliablepub.testing.wire import FrameBuffer
from tests.broker.raw_tcp import OPENING, connected, opened
from tests.broker.sans_io import Client, Properties, encode_publish, node_with_queue


def method(index: int, channel: int) -> bytes:
    """A method whose arguments are zeros, enough for any."""
    payload = struct.pack(">I", index) + bytes(12)
    return struct.pack(">BHI", 1, channel, len(payload)) + payload + b"\xce"


def corpus() -> list[bytes]:
    """Things that clients say, to be bent."""
    table: dict[str, Any] = {"n": 1, "t": {"u": ["v", 2.5, None]}}
    return [
        OPENING,
        encode_publish("q", bytes(5000)),
        encode_publish("q", properties=Properties(headers={"CC": ["q"], **table}, priority=2)),
        frame.marshal(commands.Queue.Declare(queue="d", arguments=table), 1),
        frame.marshal(commands.Queue.Bind(queue="q", exchange="amq.headers", arguments=table), 1),
        frame.marshal(commands.Basic.Consume(queue="q", consumer_tag="c"), 1),
        frame.marshal(commands.Basic.Nack(1, multiple=True, requeue=False), 1),
        frame.marshal(commands.Tx.Select(), 2),
        *(method(index, channel) for index in commands.INDEX_MAPPING for channel in (0, 1)),
    ]


SAYINGS = corpus()


def bend(draw: random.Random, data: bytes) -> bytes:
    """Data with a few bytes flipped, cut out, doubled or made up."""
    bent = bytearray(data)
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(bent) + 1)
        action = draw.randrange(4)
        if action == 0 and at < len(bent):
            bent[at] = draw.randrange(256)
        elif action == 1:
            del bent[at : at + draw.randrange(1, 9)]
        elif action == 2:
            bent[at:at] = draw.randbytes(draw.randrange(1, 9))
        else:
            bent[at:at] = bent[at : at + draw.randrange(1, 30)]
    return bytes(bent)


def attack(seed: int) -> None:
    """One client, many bent sayings; the node must be as before when it is gone."""
    draw = random.Random(seed)
    node = node_with_queue()
    client = Client(node)
    if draw.random() < 0.8:
        client.open(channels=2, confirm=draw.random() < 0.5)
    for _ in range(draw.randrange(1, 30)):
        saying = draw.choice(SAYINGS)
        client.connection.handle_data(bend(draw, saying) if draw.random() < 0.4 else saying)
        client.connection.poll_transmit()
        if client.connection.ending is not None:
            break
    node.now += 100.0
    node.handle_timeout()
    client.connection.handle_timeout()
    client.connection.handle_lost()
    assert not node.connections
    assert all(not queue.consumers for queue in node.vhost.queues.values())
    client = Client(node).open()  # it still serves
    client.send(commands.Queue.Declare(queue="after"))
    client.only(commands.Queue.DeclareOk)


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_bent_sayings(start: int) -> None:
    for seed in range(start, start + 20):
        attack(seed)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_bent_sayings_for_minutes() -> None:
    seed = random.SystemRandom().randrange(2**32)
    until = time.monotonic() + 300
    while time.monotonic() < until:
        try:
            attack(seed)
        except BaseException as error:
            error.add_note(f"attack({seed})")
            raise
        seed += 1


def test_noise_at_every_point_of_an_opening(fake_broker: FakeBroker) -> None:
    draw = random.Random(1)
    for at in range(0, len(OPENING), 7):
        with connected(fake_broker) as sock:
            sock.sendall(OPENING[:at] + draw.randbytes(50))
    fake_broker.wait_for(lambda: fake_broker.connections == 0, timeout_s=60)
    with opened(fake_broker) as sock:
        sock.sendall(encode_publish("q"))
        assert sock.recv(1)


def test_a_size_is_refused_before_it_is_believed() -> None:
    client = Client(node_with_queue()).open()
    tracemalloc.start()
    client.send(commands.Basic.Publish(routing_key="q"))
    client.write(frame.marshal(header.ContentHeader(0, 2**63, Properties()), 1))
    assert client.only(commands.Channel.Close).reply_code == 406
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_empty_body_frames_are_not_kept() -> None:
    client = Client(node_with_queue()).open()
    client.send(commands.Basic.Publish(routing_key="q"))
    client.write(frame.marshal(header.ContentHeader(0, 5, Properties()), 1))
    empty = struct.pack(">BHI", 3, 1, 0) + b"\xce"
    tracemalloc.start()
    client.write(empty * 20_000)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 500_000
    client.write(struct.pack(">BHI", 3, 1, 5) + b"hello\xce")
    assert client.wait(0.01).confirms() == ["ack 1"]


def test_who_asks_for_much_and_reads_nothing_is_not_answered_without_end() -> None:
    node = node_with_queue()
    client = Client(node).open()
    for _ in range(20):
        client.publish(content=bytes(1_000_000))
    client.frames.clear()
    for _ in range(20):
        client.connection.handle_data(frame.marshal(commands.Basic.Get(queue="q"), 1))
    assert OUTPUT_MAX_BYTES < len(client.connection.poll_transmit()) < OUTPUT_MAX_BYTES + 1_100_000
    client.connection.handle_drained()
    assert len(client.connection.poll_transmit()) > OUTPUT_MAX_BYTES


def test_a_frame_that_trickles_in_costs_little() -> None:
    buffer = FrameBuffer()
    buffer.frame_max = 131_072
    payload = bytes(100_000)
    data = struct.pack(">BHI", 3, 1, len(payload))
    began = time.process_time()
    for at in range(0, len(payload), 10):
        buffer.feed((data if not at else b"") + payload[at : at + 10])
        assert buffer.next_frame() is None
    buffer.feed(b"\xce")
    assert buffer.next_frame() == (3, 1, payload)
    assert time.process_time() - began < 2


def test_a_frame_too_large_is_refused_from_its_first_bytes() -> None:
    buffer = FrameBuffer()
    buffer.feed(struct.pack(">BHI", 1, 0, 2**32 - 1))
    with pytest.raises(AmqpError):
        buffer.next_frame()


def test_many_openings_at_once(fake_broker: FakeBroker) -> None:
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(connected(fake_broker)).sendall(OPENING)
        fake_broker.wait_for(lambda: fake_broker.connections == 50, timeout_s=60)
    fake_broker.wait_for(lambda: fake_broker.connections == 0, timeout_s=60)


def test_connections_above_the_limit_are_closed_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with FakeBroker(options=NodeOptions(connections_max=2)) as broker:
        with opened(broker), opened(broker):
            for _ in range(2):
                with connected(broker) as third:
                    assert third.recv(1) == b""
            assert broker.connections == 2
        expected = "refusing connections: 2 are open, which is NodeOptions.connections_max"
        assert caplog.messages == [expected]  # once for a row of refusals
