"""The size that a message is checked by is never smaller than what goes over the wire.

Our own encoder is what counts; pamqp and pika are independent witnesses, though pika takes no
floats in a table and pamqp no bytes.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import pika
import pika.data
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, encode, frame, header

from reliablepub.headers import ATTEMPT_HEADER, NESTING_MAX, SHORT_STRING_MAX, _checked_table
from reliablepub.message import EXPIRATION_MS_MAX, HEADER_BYTES_MAX, PRIORITY_MAX, Message
from reliablepub.transport.frames import encode_properties

FRAME_MAX: Final = 131_072
ATTEMPT: Final = 2**53 - 1

NAMES = st.text(max_size=40).filter(
    lambda name: (
        len(name.encode()) <= 128
        and name not in {"CC", "BCC", ATTEMPT_HEADER}  # routing keys, and reserved
    )
)
DECIMALS = st.builds(
    lambda unscaled, places: Decimal(unscaled).scaleb(-places),
    st.integers(-(2**31) + 1, 2**31 - 1),
    st.integers(0, 20),
)
MOMENTS = st.datetimes(min_value=datetime(1970, 1, 2), timezones=st.just(UTC))  # noqa: DTZ001
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PAMQP_FLOAT_MAX: Final = 3e38  # it writes 32 bits
COMMON = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(max_size=60)
    | DECIMALS
    | MOMENTS
)


def has_no_routing(table: dict[str, Any]) -> bool:
    """Whether no name is one that RabbitMQ routes by."""
    return not {"CC", "BCC"} & set(table)


def tables(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    values = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
        max_leaves=12,
    )
    return st.dictionaries(NAMES, values, max_size=6)


@given(tables(COMMON | FINITE | st.binary(max_size=60)).filter(has_no_routing))
def test_no_table_is_larger_for_our_encoder(table: dict[str, Any]) -> None:
    _, size = checked(table)
    flags, mode, attempt = 2, 1, 1 + len(ATTEMPT_HEADER) + 1 + 8
    properties = encode_properties(Message(b"", headers=table), ATTEMPT)
    assert len(properties) - flags - mode - attempt <= size


@given(tables(COMMON | FINITE.filter(lambda value: abs(value) < PAMQP_FLOAT_MAX)))
def test_no_table_is_larger_for_pamqp(table: dict[str, Any]) -> None:
    copy, size = checked(table)
    assert len(encode.field_table(copy)) <= size


@given(tables(COMMON | st.binary(max_size=60)))
def test_no_table_is_larger_for_pika(table: dict[str, Any]) -> None:
    copy, size = checked(table)
    pieces: list[bytes] = []
    pika.data.encode_table(pieces, copy)
    assert len(b"".join(pieces)) <= size


def checked(table: Mapping[Any, Any]) -> tuple[Any, int]:
    """The copy of a table that a message keeps, and its size as the message counts it."""
    return _checked_table("headers", table, 1)


def short_string(data: st.DataObject) -> str:
    length = data.draw(st.integers(1, SHORT_STRING_MAX))
    return "s" * length


@given(data=st.data(), table=tables(COMMON).filter(has_no_routing), spare=st.integers(0, 3))
def test_the_largest_message_fits_one_header_frame(
    data: st.DataObject, table: dict[str, Any], spare: int
) -> None:
    texts = {
        name: short_string(data)
        for name in ("message_id", "content_type", "content_encoding", "correlation_id", "app_id")
    }
    texts |= {name: short_string(data) for name in ("reply_to", "type", "user_id")}
    table.pop("fill", None)
    _, size = checked(table)
    room = HEADER_BYTES_MAX - size - sum(map(len, texts.values())) - len("fill") - 6
    message = Message(
        b"",
        headers={**table, "fill": "x" * (room - spare)},
        priority=PRIORITY_MAX,
        expiration=EXPIRATION_MS_MAX,
        timestamp=datetime(2024, 1, 1, tzinfo=UTC),
        **texts,  # type: ignore[arg-type]
    )
    around = 8 + 12  # the frame's own bytes; class, weight and body size
    assert len(frame.marshal(as_pamqp(message), 1)) <= FRAME_MAX
    assert sum(map(len, as_pika(message).encode())) + around <= FRAME_MAX
    assert len(encode_properties(message, ATTEMPT)) + around <= FRAME_MAX


def with_attempt(message: Message) -> dict[str, Any]:
    return {**(message.headers or {}), ATTEMPT_HEADER: ATTEMPT}


def as_pamqp(message: Message) -> header.ContentHeader:
    properties = commands.Basic.Properties(
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        headers=with_attempt(message),
        delivery_mode=2,
        priority=message.priority,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        expiration=str(message.expiration),
        message_id=message.message_id,
        timestamp=message.timestamp,
        message_type=message.type,
        user_id=message.user_id,
        app_id=message.app_id,
    )
    return header.ContentHeader(0, len(message.body), properties)


def as_pika(message: Message) -> pika.BasicProperties:
    assert message.timestamp is not None
    return pika.BasicProperties(
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        headers=with_attempt(message),
        delivery_mode=2,
        priority=message.priority,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        expiration=str(message.expiration),
        message_id=message.message_id,
        timestamp=int(message.timestamp.timestamp()),
        type=message.type,
        user_id=message.user_id,
        app_id=message.app_id,
    )


@pytest.mark.parametrize("depth", [1, NESTING_MAX - 1])
def test_nesting_is_counted_byte_for_byte(depth: int) -> None:
    table: dict[str, Any] = {"leaf": "x"}
    for _ in range(depth):
        table = {"n": table}
    _, size = checked(table)
    assert len(encode.field_table(table)) == size
