import json
import struct
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reliablepub.headers import ATTEMPT_HEADER, FieldValue
from reliablepub.message import EXPIRATION_MS_MAX, Message
from reliablepub.outbox.rows import from_text, to_text

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = st.one_of(
    TEXT, st.sampled_from(["$bytes", "$decimal", "$datetime", "$float", "$table", "$other"])
)
DECIMALS = st.builds(
    lambda unscaled, places: Decimal(unscaled).scaleb(-places),
    st.integers(-(2**31) + 1, 2**31 - 1),
    st.integers(0, 20),
)
TIMES = st.datetimes(
    datetime(1971, 1, 1),  # noqa: DTZ001 - hypothesis adds the zone
    datetime(2200, 1, 1),  # noqa: DTZ001
    timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=45))]),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXT,
    st.binary(max_size=20),
    DECIMALS,
    TIMES,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=12,
)
SHORT = st.one_of(st.none(), TEXT)


def is_free(name: str) -> bool:
    """Whether a header of this name may hold anything."""
    return name not in {"CC", "BCC", ATTEMPT_HEADER}


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, with types: 1, 1.0 and True are three values to AMQP."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, list):
        return bool(len(one) == len(other) and all(map(same, one, other)))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, Decimal):
        return bool(one.as_tuple() == other.as_tuple())
    return bool(one == other)


def round_trip(message: Message) -> Message:
    text = to_text(message)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return Message(
        message.body,
        message.exchange,
        message.routing_key,
        message_id=message.message_id,
        **from_text(text),
    )


@given(st.dictionaries(NAMES.filter(is_free), VALUES, max_size=4))
@example({"$bytes": "not bytes"})
@example({"x": {"$bytes": "not bytes"}})
@example({"x": {"$table": {"$table": 1}}})
@example({"x": {"$unknown": 1}})
@example({"x": '{"$bytes":"aGk="}'})
@example({"x": [-0.0, {"$decimal": "1"}]})
def test_headers_come_back_to_the_bit(headers: dict[str, FieldValue]) -> None:
    message = Message(b"", headers=headers)
    assert same(round_trip(message).headers, message.headers)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "headers": st.just({}),
            "persistent": st.booleans(),
            "priority": st.integers(0, 255),
            "expiration": st.integers(0, EXPIRATION_MS_MAX),
            "timestamp": TIMES,
            "content_type": SHORT,
            "content_encoding": SHORT,
            "correlation_id": SHORT,
            "reply_to": SHORT,
            "type": SHORT,
            "user_id": SHORT,
            "app_id": SHORT,
        },
    )
)
@example({"content_type": 'text/plain; x="1"'})
@example({"content_type": ""})
def test_properties_come_back(properties: dict[str, Any]) -> None:
    message = Message(b"body", "x", "k", message_id="m", **properties)
    assert round_trip(message) == message


def test_an_ordinary_message_has_no_properties() -> None:
    assert to_text(Message(b"body", "exchange", "key", message_id="m")) == "{}"


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"trace": "é", "n": 1}, '{"headers":{"trace":"é","n":1}}'),
        ({"raw": b"hi"}, '{"headers":{"raw":{"$bytes":"aGk="}}}'),
        ({"price": Decimal("1.50")}, '{"headers":{"price":{"$decimal":"1.50"}}}'),
        ({"a": {"b": b"hi"}}, '{"headers":{"a":{"b":{"$bytes":"aGk="}}}}'),
        ({"$bytes": {"$bytes": 1}}, '{"headers":{"$bytes":{"$table":{"$bytes":1}}}}'),
    ],
)
def test_people_can_read_it(headers: dict[str, FieldValue], text: str) -> None:
    assert to_text(Message(b"", headers=headers)) == text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "JSON: "),
        ("{", "JSON: "),
        ("[" * 100_000, "JSON: "),
        ("[]", "a JSON object$"),
        ("1", "a JSON object$"),
    ],
)
def test_what_we_did_not_write_is_refused(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"^the properties are not {what}"):
        from_text(text)
