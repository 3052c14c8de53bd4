"""What comes out is what went in, byte for byte."""

import struct

import pytest
from pamqp import commands

from tests.facts.raw_client import RawClient
from tests.facts.site import Site

FIELDS = {
    "bool": b"t\x01",
    "int8": b"b\xff",
    "uint8": b"B\xff",
    "int16": b"s\xff\xfe",
    "uint16": b"u\xff\xfe",
    "int32": b"I\xff\xff\xff\xfe",
    "uint32": b"i\xff\xff\xff\xfe",
    "int64": b"l" + b"\xff" * 8,
    "float": b"f" + struct.pack(">f", 1.5),
    "double": b"d" + struct.pack(">d", 1.5),
    "decimal": b"D\x02\x00\x00\x01\x00",
    "text": b"S\x00\x00\x00\x05hello",
    "no text": b"S\x00\x00\x00\x00",
    "not UTF-8": b"S\x00\x00\x00\x02\xff\xfe",
    "bytes": b"x\x00\x00\x00\x02\x00\xff",
    "timestamp": b"T" + struct.pack(">Q", 1_700_000_000),
    "timestamp of 0": b"T" + bytes(8),
    "nothing": b"V",
    "array": b"A\x00\x00\x00\x04t\x00t\x01",
    "empty array": b"A\x00\x00\x00\x00",
    "table": b"F\x00\x00\x00\x04\x01at\x01",
    "empty table": b"F\x00\x00\x00\x00",
}


def nested(depth: int) -> bytes:
    """A table in a table in a table."""
    field = b"t\x01"
    for _ in range(depth):
        field = b"F" + struct.pack(">I", len(field) + 2) + b"\x01a" + field
    return field


def echoed(client: RawClient, queue: str, payload: bytes, body: bytes = b"") -> bytes:
    """The payload of the content header as it comes out of a queue."""
    client.send(commands.Basic.Publish(routing_key=queue))
    client.write_frame(2, 1, payload)
    assert client.write(client.encode_body(body)).told() == ["basic.ack 1"]
    client.send(commands.Basic.Get(queue=queue, no_ack=True)).hear_only(commands.Basic.GetOk)
    return client.hear_bytes()[7:-1]


def header_of(table: bytes) -> bytes:
    """The payload of a content header whose only property is a table of headers."""
    flags = 1 << 13
    return struct.pack(">HHQH", 60, 0, 0, flags) + struct.pack(">I", len(table)) + table


@pytest.mark.parametrize("name", FIELDS)
def test_a_header_of_each_type(client: RawClient, queue: str, name: str) -> None:
    payload = header_of(b"\x01h" + FIELDS[name])
    assert echoed(client, queue, payload) == payload


@pytest.mark.parametrize(
    "field",
    [
        b"d" + struct.pack(">d", float("nan")),
        b"d" + struct.pack(">d", float("inf")),
        b"f" + struct.pack(">f", float("-inf")),
        b"q\x00",  # no such type
    ],
)
def test_a_header_that_ends_the_connection(client: RawClient, queue: str, field: bytes) -> None:
    client.send(commands.Basic.Publish(routing_key=queue))
    client.write_frame(2, 1, header_of(b"\x01h" + field))
    assert client.told() == ["connection.close 541 INTERNAL_ERROR (0, 0)"]


@pytest.mark.parametrize("depth", [1, 5, 30])
def test_nested_tables(client: RawClient, queue: str, depth: int) -> None:
    payload = header_of(b"\x01h" + nested(depth))
    assert echoed(client, queue, payload) == payload


def test_a_header_twice(site: Site, client: RawClient, queue: str) -> None:
    payload = header_of(b"\x01ht\x01\x01ht\x00")
    once = header_of(b"\x01ht\x01")
    assert echoed(client, queue, payload) == (payload if site.version < (4, 0) else once)


def test_all_properties_at_once(client: RawClient, queue: str) -> None:
    texts = [b"\x04text"] * 14
    values = [
        texts[0],  # content_type
        texts[1],  # content_encoding
        struct.pack(">I", 4) + b"\x01ht\x01",  # headers
        b"\x02",  # delivery_mode
        b"\x07",  # priority
        texts[2],  # correlation_id
        texts[3],  # reply_to
        b"\x0560000",  # expiration
        texts[4],  # message_id
        struct.pack(">Q", 1_700_000_000),  # timestamp
        texts[5],  # type
        b"\x05guest",  # user_id
        texts[6],  # app_id
        texts[7],  # cluster_id
    ]
    payload = struct.pack(">HHQH", 60, 0, 3, 0xFFFC) + b"".join(values)
    assert echoed(client, queue, payload, b"abc") == payload


def test_no_property(client: RawClient, queue: str) -> None:
    payload = struct.pack(">HHQH", 60, 0, 0, 0)
    assert echoed(client, queue, payload) == payload
