"""A consumed message is published again as it was received, whichever client has consumed it."""

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import aio_pika
import kombu
import pika
import pytest

from reliablepub import InvalidMessage, Message, Publisher
from reliablepub.testing import FakeBroker

AT = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
GIVEN = Message(
    b"body",
    routing_key="q",
    headers={"n": 1, "at": AT, "list": ["a", {"b": True}], "bytes": b"\xff", "d": Decimal("1.5")},
    message_id="m",
    persistent=False,
    priority=3,
    expiration=60_000,
    timestamp=AT,
    content_type="text/plain",
    content_encoding="utf-8",
    correlation_id="c",
    reply_to="r",
    type="t",
    app_id="a",
)


def by_pika(url: str) -> Message:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        _, properties, body = connection.channel().basic_get("q", auto_ack=True)
        assert properties is not None
        assert body is not None
        return Message.received(body, properties, routing_key="q")


def by_aio_pika(url: str) -> Message:
    async def get() -> Message:
        async with await aio_pika.connect(url) as connection:
            channel = await connection.channel()
            message = await (await channel.get_queue("q")).get(no_ack=True)
            assert message is not None
            received = Message.received(message.body, message.properties, routing_key="q")
            assert received == Message.received(message.body, message, routing_key="q")
            return received

    return asyncio.run(get())


def by_kombu(url: str) -> Message:
    with kombu.Connection(url) as connection:
        message: Any = kombu.Queue("q", channel=connection.channel()).get(no_ack=True)
        received = Message.received(message.body, message.properties, routing_key="q")
        assert received == Message.received(message.body, message, routing_key="q")
        return received


@pytest.mark.parametrize("consume", [by_pika, by_aio_pika, by_kombu])
def test_a_consumed_message_is_published_again(consume: Any) -> None:
    with FakeBroker() as broker:
        broker.declare_queue("q")
        with Publisher(broker.url, outbox=None) as publisher:
            publisher.publish(GIVEN).result(30)
            message = consume(broker.url)
            assert message == GIVEN
            publisher.publish(message).result(30)
        [again] = broker.messages("q")
        assert again.body == b"body"


def test_what_belongs_to_its_first_way_is_left_out() -> None:
    properties = SimpleNamespace(headers={"rp-attempt": "1-2-3"}, user_id="them", delivery_mode=2)
    assert Message.received(b"x", properties, routing_key="q") == Message(b"x", routing_key="q")


def test_a_field_replaces_a_property() -> None:
    properties = {"timestamp": 7, "expiration": "1000", "headers": {"at": datetime(2026, 1, 1)}}  # noqa: DTZ001
    message = Message.received(bytearray(b"x"), properties, expiration=5, user_id="us")
    assert (message.expiration, message.user_id) == (5, "us")
    assert message.timestamp == datetime.fromtimestamp(7, UTC)
    assert message.headers == {"at": datetime(2026, 1, 1, tzinfo=UTC)}


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"expiration": "soon"}, "expiration"),
        ({"timestamp": 10**20}, "timestamp"),
        ({"priority": "x"}, "priority"),
        (None, "properties: is None"),
        ("text", "properties: is 'text'"),
    ],
)
def test_what_is_no_property_is_named(properties: object, words: str) -> None:
    with pytest.raises(InvalidMessage, match=words):
        Message.received(b"x", properties)


def test_a_text_is_encoded_as_the_message_says() -> None:
    assert Message.received("ü", {"content_encoding": "utf-16"}).body == "ü".encode("utf-16")
    for encoding in ("ascii", "none such"):
        with pytest.raises(InvalidMessage, match="is not a valid text in"):
            Message.received("ü", {"content_encoding": encoding})
