"""Ten thousand messages in flight, three of them bad, on RabbitMQ itself."""

import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from reliablepub import Message, Outbox, Publisher, RetryPolicy
from tests.amqp_probe import AmqpProbe
from tests.policies import ONCE

COUNT = 10_000


@pytest.mark.rabbit
def test_three_bad_ones_among_ten_thousand_in_flight(rabbitmq: AmqpProbe, tmp_path: Path) -> None:
    queue, outbox = rabbitmq.declare_queue(), tmp_path / "outbox.db"
    messages = [Message(b"x", routing_key=queue, message_id=f"good-{n}") for n in range(COUNT)]
    messages[2_500] = Message(b"x", exchange="no-such-exchange", message_id="exchange")
    messages[5_000] = Message(b"x" * 1_048_577, routing_key=queue, message_id="size")
    messages[7_500] = Message(b"x", routing_key=queue, user_id="somebody", message_id="user")
    with Publisher(
        rabbitmq.url,
        outbox=outbox,
        retry=RetryPolicy(refused=ONCE),
        window_min=COUNT,
        window_max=COUNT,
        window_bytes_max=64 * 1024 * 1024,
    ) as publisher:
        receipt = publisher.publish_many(messages).wait(60)
        assert (receipt.confirmed, receipt.failed) == (COUNT - 3, 3)
        assert publisher.status.connects == 1
    parked = {message.message_id: message.reply_text for message in Outbox(outbox).parked()}
    assert set(parked) == {"exchange", "size", "user"}
    assert parked["exchange"].startswith("NOT_FOUND - no exchange 'no-such-exchange'")
    assert "larger than configured max size" in parked["size"]
    assert "user_id property set to 'somebody'" in parked["user"]

    found = rabbitmq.drain(queue, rabbitmq.count(queue))
    arrived = Counter(properties.message_id for _, properties in found)
    assert set(arrived) == {message.message_id for message in messages} - set(parked)
    with sqlite3.connect(outbox) as db:
        closes = dict(
            db.execute(
                "SELECT message_id, count(*) FROM reliablepub_history"
                " WHERE outcome = 'uncertain' GROUP BY 1"
            ).fetchall()
        )
    db.close()
    # The last delivery, and one for each channel that was closed while the message was on it.
    assert all(count <= 1 + closes.get(id_, 0) for id_, count in arrived.items())
    assert max(closes.values()) <= 3 * 15, "k log n"
