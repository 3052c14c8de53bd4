"""Messages that cost more than themselves: a channel, or the whole connection.

No client would send most of these, so their bytes are bent on the way out, and the brokers answer
as they would to any client.
"""

from collections import Counter
from collections.abc import Callable

import pika
import pytest
from tenacity import wait_none

from reliablepub import Message, StillOpen
from reliablepub.relay import connection as relay_connection
from reliablepub.transport import frames
from tests.amqp_probe import AmqpProbe
from tests.conformance.conftest import FrontDoor
from tests.policies import AT_ONCE
from tests.stores import Where


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
    monkeypatch.setattr(relay_connection, "_WAITS", wait_none())
    return bent.append


TOO_LARGE = b"".join(pika.BasicProperties(headers={"large": "x" * 140_000}).encode())
UNREADABLE = b"\x80\x00\x10abc"


@pytest.mark.parametrize("properties", [TOO_LARGE, UNREADABLE], ids=["501", "541"])
def test_a_message_that_ends_connections_is_set_aside_and_never_refused(
    broker: AmqpProbe,
    outbox: Where,
    front_door: FrontDoor,
    bend: Callable[[bytes | None], None],
    properties: bytes,
) -> None:
    """A header frame that is too large: 501. Properties that crash a channel's process: 541."""
    bend(properties)
    queue = broker.declare_queue()
    with front_door(broker.url, outbox=outbox, retry=AT_ONCE) as publisher:
        bad = publisher.publish(b"x", routing_key=queue, message_id="bad")
        receipt = publisher.publish_many(
            Message(b"%d" % n, routing_key=queue, message_id=f"good-{n}") for n in range(15)
        ).wait(60)
        assert receipt.confirmed == 15
        with pytest.raises(StillOpen):
            bad.result(0.1)
        bend(None)  # the broker has been mended
        bad.result(30)
        counters = publisher.flush(60).counters
    assert (counters.confirmed, counters.parked) == (16, 0)
    arrived = Counter(properties.message_id or "" for _, properties in broker.drain(queue, 16))
    assert set(arrived) == {"bad", *(f"good-{n}" for n in range(15))}
