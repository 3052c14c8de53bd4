"""The bytes of the headers that the broker adds: the type of each field, and their order."""

import re
from typing import Any

import pytest
from pamqp import commands

from tests.amqp_probe import unique
from tests.facts.raw_client import RawClient
from tests.facts.site import Site

HEADERS_FLAG = b"\x20\x00"
PROPERTIES_AT = 7 + 12
NOW = b"\x04timeT" + b"(now)..."


@pytest.fixture
def of_version_3(site: Site) -> None:
    """Later ones do not read the deaths that a publisher tells, and write theirs otherwise."""
    if site.version >= (4,):
        pytest.skip("facts of RabbitMQ 3")


def sized(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def text(name: str, value: str) -> bytes:
    return bytes([len(name)]) + name.encode() + b"S" + sized(value.encode())


def keys(value: str) -> bytes:
    return b"\x0crouting-keysA" + sized(b"S" + sized(value.encode()))


def count(value: int) -> bytes:
    return b"\x05countl" + value.to_bytes(8, "big")  # int64, also when it is small


def deaths(*entries: bytes) -> bytes:
    return b"\x07x-deathA" + sized(b"".join(b"F" + sized(entry) for entry in entries))


def first(queue: str, reason: str) -> bytes:
    """An entry as RabbitMQ makes it."""
    return b"".join(
        (
            count(1),
            text("reason", reason),
            text("queue", queue),
            NOW,
            text("exchange", ""),
            keys(queue),
        )
    )


def later(queue: str, reason: str, times: int = 1) -> bytes:
    """An entry that was added to others, or counted up: sorted."""
    return b"".join(
        (
            count(times),
            text("exchange", ""),
            text("queue", queue),
            text("reason", reason),
            keys(queue),
            NOW,
        )
    )


def origin(queue: str, reason: str) -> bytes:
    return b"".join(
        (
            text("x-first-death-exchange", ""),
            text("x-first-death-queue", queue),
            text("x-first-death-reason", reason),
        )
    )


def publish(client: RawClient, queue: str, table: bytes) -> None:
    """A publish without a body, with these headers."""
    method = b"\x00\x3c\x00\x28\x00\x00\x00" + bytes([len(queue)]) + queue.encode() + b"\x00"
    client.write_frame(1, 1, method)
    client.write_frame(2, 1, b"\x00\x3c\x00\x00" + bytes(8) + HEADERS_FLAG + sized(table))


def headers(client: RawClient) -> bytes:
    """The table of the next delivery; the times of deaths are replaced."""
    while not (heard := client.hear_bytes()).startswith(b"\x02"):
        assert heard
    assert heard[PROPERTIES_AT : PROPERTIES_AT + 2] == HEADERS_FLAG
    table = heard[PROPERTIES_AT + 6 : -1]
    return re.sub(rb"\x04timeT.{8}", lambda _: NOW, table, flags=re.DOTALL)


def dying(client: RawClient, onward: str, **limits: Any) -> str:
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": onward} | limits
    return client.declare(unique("source"), arguments=arguments)


def consume(client: RawClient, queue: str) -> None:
    method = commands.Basic.Consume(queue=queue, consumer_tag="me", no_ack=True)
    client.call(method, commands.Basic.ConsumeOk)


@pytest.mark.usefixtures("of_version_3")
def test_a_first_death(client: RawClient, queue: str) -> None:
    source = dying(client, queue, **{"x-max-length": 0})
    consume(client, queue)
    publish(client, source, b"\x02zzb\x01\x01ab\x02")
    expected = deaths(first(source, "maxlen")) + origin(source, "maxlen")
    assert headers(client) == b"\x01ab\x02" + expected + b"\x02zzb\x01"


@pytest.mark.usefixtures("of_version_3")
def test_a_count_that_grows_keeps_its_type(client: RawClient, queue: str) -> None:
    source = dying(client, queue, **{"x-max-length": 0})
    consume(client, queue)
    publish(client, source, b"")
    table = headers(client)
    for times in (2, 3):
        publish(client, source, table)
        table = headers(client)
        assert table == deaths(later(source, "maxlen", times)) + origin(source, "maxlen")


@pytest.mark.usefixtures("of_version_3")
def test_a_second_queue(client: RawClient, queue: str) -> None:
    second = dying(client, queue, **{"x-max-length": 0})
    source = dying(client, second, **{"x-message-ttl": 0})
    consume(client, queue)
    publish(client, source, b"")
    entries = later(second, "maxlen"), first(source, "expired")
    assert headers(client) == deaths(*entries) + origin(source, "expired")


@pytest.mark.usefixtures("of_version_3")
def test_a_third_queue_reverses_the_others(client: RawClient, queue: str) -> None:
    third = dying(client, queue, **{"x-max-length": 0})
    second = dying(client, third, **{"x-max-length": 0})
    source = dying(client, second, **{"x-max-length": 0})
    consume(client, queue)
    publish(client, source, b"")
    entries = later(third, "maxlen"), first(source, "maxlen"), later(second, "maxlen")
    assert headers(client) == deaths(*entries) + origin(source, "maxlen")


KINDS = b"".join(
    (
        b"\x01zt\x01",
        b"\x01yb\xff",
        b"\x01xB\xff",
        b"\x01ws\xff\xff",
        b"\x01vu\xff\xff",
        b"\x01uI\x00\x00\x00\x01",
        b"\x01ti\xff\xff\xff\xff",
        b"\x01sl" + bytes(7) + b"\x01",
        b"\x01rf\x3f\xc0\x00\x00",
        b"\x01qd\x3f\xf8" + bytes(6),
        b"\x01pD\x02\x00\x00\x01\x2c",
        b"\x01oT" + bytes(7) + b"\x01",
        b"\x01nT\x00\x00\x00\x3b\xff\xf4\x41\x80",  # after the year 9999
        b"\x01mV",
        b"\x01lx\x00\x00\x00\x01\xff",
        b"\x01kS\x00\x00\x00\x01\xff",
        b"\x01jA" + sized(b"b\x01l" + bytes(8)),
        b"\x01iF" + sized(b"\x01bb\x01\x01ab\x02"),
    )
)
"""A field of each type, not sorted."""


@pytest.mark.usefixtures("of_version_3")
def test_other_deaths_keep_their_types(client: RawClient, queue: str) -> None:
    source = dying(client, queue, **{"x-max-length": 0})
    consume(client, queue)
    publish(client, source, deaths(KINDS))
    assert headers(client) == deaths(later(source, "maxlen"), KINDS)
