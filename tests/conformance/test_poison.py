"""Messages that cost more than themselves: a channel, or the whole connection.

No client would send most of these, so their bytes are bent on the way out, and the brokers answer
as they would to any client.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pika
import pytest
from pika import spec
from tenacity import wait_none

from reliablepub import Message, Outbox, Refused, StillOpen
from reliablepub.relay import wire
from reliablepub.transport import frames
from reliablepub.transport.frames import PublishFrames
from tests.amqp_probe import AmqpProbe
from tests.conformance.conftest import FrontDoor, is_guest
from tests.policies import AT_ONCE
from tests.stores import Where

FORBIDDEN = "immediate"


def skip_guests(front_door: FrontDoor) -> None:
    """Who ended the connection, aiormq does not say; it may have been the application."""
    if is_guest(front_door):
        pytest.skip("on the application's connection no message of ours is blamed for its end")


@pytest.fixture
def immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishes with the routing key `FORBIDDEN` have the bit ``immediate`` set: 540."""
    method = PublishFrames._method
    encode: Any = spec.Basic.Publish.encode

    def with_bit(frames: PublishFrames, destination: tuple[str, str]) -> bytes:
        frame = method(frames, destination)
        if destination[1] == FORBIDDEN:
            frame = frames._methods[destination] = frame[:-2] + b"\x03" + frame[-1:]
        return frame

    def with_argument(publish: Any) -> Any:
        publish.immediate = publish.routing_key == FORBIDDEN
        return encode(publish)

    monkeypatch.setattr(PublishFrames, "_method", with_bit)
    monkeypatch.setattr(spec.Basic.Publish, "encode", with_argument)


def mixed(queue: str, *bad: Message, good: int) -> list[Message]:
    """So many good messages, and the bad ones spread among them."""
    messages = [Message(b"%d" % n, routing_key=queue, message_id=f"good-{n}") for n in range(good)]
    step = good // (len(bad) + 1)
    for n, message in enumerate(bad, 1):
        messages.insert(n * step + n - 1, message)
    return messages


def assert_all_good_arrived(probe: AmqpProbe, queue: str, count: int) -> Counter[str]:
    """How often each of them came."""
    arrived = Counter(properties.message_id or "" for _, properties in probe.drain(queue, count))
    assert set(arrived) == {f"good-{n}" for n in range(count)}
    return arrived


def closes_lived_through(outbox: Where) -> Counter[str]:
    """How often each message was in flight when its channel or connection ended."""
    rows = Outbox(outbox).rows("history")
    return Counter(str(row["message_id"]) for row in rows if row["outcome"] == "uncertain")


@pytest.mark.usefixtures("immediate")
def test_a_message_that_closes_the_connection_is_refused_and_the_others_pass(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    skip_guests(front_door)
    queue = broker.declare_queue()
    bad = [Message(b"x", routing_key=FORBIDDEN, message_id=f"bad-{n}") for n in range(2)]
    with front_door(broker.url, outbox=outbox, retry=AT_ONCE) as publisher:
        receipt = publisher.publish_many(mixed(queue, *bad, good=100)).wait(60)
        assert (receipt.confirmed, receipt.failed) == (100, 2)
        assert {type(error) for error in receipt.failures} == {Refused}
        assert {error.message_id for error in receipt.failures} == {"bad-0", "bad-1"}
        assert "540 NOT_IMPLEMENTED - immediate=true" in str(receipt.failures[0])
        assert publisher.status.connects <= 2 + 2 * 10  # k log n
        publisher.publish(b"after", routing_key=queue, message_id="good-100").result(60)
    arrived, closes = assert_all_good_arrived(broker, queue, 101), closes_lived_through(outbox)
    assert all(count <= 1 + closes[id_] for id_, count in arrived.items())


@pytest.fixture
def bend(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes | None], None]:
    """Gives the message "bad" these properties on the wire; None lets it go as it is."""
    bent: list[bytes | None] = [None]
    as_it_is = frames.encode_properties

    def encode(message: Message, attempt: int) -> bytes:
        is_bad = message.message_id == "bad" and bent[-1] is not None
        return bent[-1] or b"" if is_bad else as_it_is(message, attempt)

    monkeypatch.setattr(frames, "encode_properties", encode)
    monkeypatch.setattr(frames, "HEADER_OVERHEAD", -1_000_000)  # any size is let through
    monkeypatch.setattr(wire, "_WAITS", wait_none())
    return bent.append


def test_a_frame_that_the_broker_cannot_read_is_blamed_on_whom_it_was_alone_with(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor, bend: Callable[[bytes], None]
) -> None:
    """A header frame that is too large: 501, and no method, for it was never read."""
    skip_guests(front_door)
    bend(b"".join(pika.BasicProperties(headers={"large": "x" * 140_000}).encode()))
    queue = broker.declare_queue()
    with front_door(broker.url, outbox=outbox, retry=AT_ONCE) as publisher:
        bad = Message(b"x", routing_key=queue, message_id="bad")
        receipt = publisher.publish_many(mixed(queue, bad, good=20)).wait(30)
    assert (receipt.confirmed, receipt.failed) == (20, 1)
    [error] = receipt.failures
    assert (error.message_id, error.reply_code) == ("bad", 501)
    assert_all_good_arrived(broker, queue, 20)


def test_a_message_that_breaks_connections_without_blame_is_set_aside_and_never_refused(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor, bend: Callable[[bytes | None], None]
) -> None:
    """Properties that cannot be decoded make a channel's process crash: 541, and no method."""
    bend(b"\x80\x00\x10abc")
    queue = broker.declare_queue()
    with front_door(broker.url, outbox=outbox, retry=AT_ONCE) as publisher:
        bad = publisher.publish(b"x", routing_key=queue, message_id="bad")
        receipt = publisher.publish_many(mixed(queue, good=15)).wait(60)
        assert receipt.confirmed == 15
        with pytest.raises(StillOpen):
            bad.result(0.1)
        bend(None)  # the broker has been mended
        bad.result(30)
        counters = publisher.flush(60).counters
    assert (counters.confirmed, counters.parked) == (16, 0)
    arrived = Counter(properties.message_id or "" for _, properties in broker.drain(queue, 16))
    assert set(arrived) == {"bad", *(f"good-{n}" for n in range(15))}
