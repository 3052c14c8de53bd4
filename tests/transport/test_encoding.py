"""Properties as bytes: two other people's decoders read what we wrote."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pamqp.decode
import pamqp.header
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import data as pika_data
from pika import spec

from reliablepub.errors import InvalidMessage
from reliablepub.headers import ATTEMPT_HEADER, FieldValue
from reliablepub.message import EXPIRATION_MS_MAX, HEADER_BYTES_MAX, Message
from reliablepub.transport.frames import attempt_number, attempt_tag, encode_properties

ATTEMPT = attempt_number(899, 99, 10**11 - 1)
FRAME_MAX = 131_072
FRAME_OVERHEAD = 7 + 1 + 12  # type, channel, size; end; class, weight, body size

short_strings = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
moments = st.integers(0, 4_000_000_000).map(lambda seconds: datetime.fromtimestamp(seconds, UTC))
decimals = st.builds(
    lambda number, places: Decimal(number).scaleb(-places),
    st.integers(-(2**31) + 1, 2**31 - 1),
    st.integers(0, 20),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | short_strings
    | st.binary(max_size=20)
    | decimals
    | moments
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(short_strings, inner, max_size=4),
    max_leaves=10,
)
tables = st.dictionaries(
    short_strings.filter(lambda name: name not in {"CC", "BCC", ATTEMPT_HEADER}), values, max_size=6
)
messages = st.builds(
    Message,
    body=st.just(b""),
    headers=st.none() | tables,
    message_id=st.none() | short_strings.filter(bool),
    persistent=st.booleans(),
    priority=st.none() | st.integers(0, 255),
    expiration=st.none() | st.integers(0, EXPIRATION_MS_MAX),
    timestamp=st.none() | moments,
    content_type=st.none() | short_strings,
    content_encoding=st.none() | short_strings,
    correlation_id=st.none() | short_strings,
    reply_to=st.none() | short_strings,
    type=st.none() | short_strings,
    user_id=st.none() | short_strings,
    app_id=st.none() | short_strings,
)
TEXTS = (
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "message_id",
    "type",
    "user_id",
    "app_id",
)


def by_pika(encoded: bytes) -> Any:
    return spec.BasicProperties().decode(encoded)


def by_pamqp(encoded: bytes) -> Any:
    header = pamqp.header.ContentHeader()
    header.unmarshal(bytes(12) + encoded)
    return header.properties


def plain(value: Any) -> Any:
    """The same value, in whatever types a decoder uses for it."""
    match value:
        case datetime():
            return value.replace(tzinfo=value.tzinfo or UTC).timestamp()
        case bytearray():
            return bytes(value)
        case list():
            return [plain(item) for item in value]
        case dict():
            return {name: plain(item) for name, item in value.items()}
        case _:
            return value


def whole(value: Any) -> Any:
    """Pika cuts the fraction off every float it reads."""
    match value:
        case float():
            return int(value)
        case list():
            return [whole(item) for item in value]
        case dict():
            return {name: whole(item) for name, item in value.items()}
        case _:
            return value


def headers_of(message: Message) -> dict[str, Any]:
    return {**(message.headers or {}), ATTEMPT_HEADER: ATTEMPT}


def check(decoded: Any, message: Message) -> None:
    for name in TEXTS:
        its_name = "message_type" if name == "type" and hasattr(decoded, "message_type") else name
        assert getattr(decoded, its_name) == getattr(message, name), name
    assert decoded.delivery_mode == (2 if message.persistent else 1)
    assert decoded.priority == message.priority
    expiration = None if message.expiration is None else str(message.expiration)
    assert decoded.expiration == expiration


@given(messages)
def test_pika_reads_what_was_written(message: Message) -> None:
    decoded = by_pika(encode_properties(message, ATTEMPT))
    check(decoded, message)
    assert whole(plain(decoded.headers)) == whole(plain(headers_of(message)))
    seconds = None if message.timestamp is None else int(message.timestamp.timestamp())
    assert decoded.timestamp == seconds


@given(messages)
def test_pamqp_reads_what_was_written(message: Message) -> None:
    decoded = by_pamqp(encode_properties(message, ATTEMPT))
    check(decoded, message)
    assert plain(decoded.headers) == plain(headers_of(message))
    assert plain(decoded.timestamp) == plain(message.timestamp)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("headers", [None, {}, {"n": 1}])
@pytest.mark.parametrize("content_type", [None, "", "text/plain", "\u00e4" * 127])
def test_few_properties_are_written_as_many_are(
    content_type: str | None, headers: dict[str, FieldValue] | None, *, persistent: bool
) -> None:
    message = Message(
        b"x", "", "q", headers, "id", persistent=persistent, content_type=content_type
    )
    assert message.is_plain
    encoded = encode_properties(message, ATTEMPT)
    for decoded in (by_pika(encoded), by_pamqp(encoded)):
        check(decoded, message)
        assert decoded.headers == headers_of(message)


@pytest.mark.parametrize(
    ("value", "letter"),
    [
        (None, b"V"),
        (True, b"t"),
        (1, b"I"),
        (-(2**31), b"I"),
        (2**31, b"l"),
        (-(2**31) - 1, b"l"),
        (0.1, b"d"),
        ("ü", b"S"),
        (b"\xff", b"x"),
        (Decimal("-1.50"), b"D"),
        (datetime(2026, 1, 1, tzinfo=UTC), b"T"),
        ([1, "a"], b"A"),
        ({"a": {"b": 1}}, b"F"),
    ],
)
def test_every_type_has_its_letter_and_keeps_its_value(value: Any, letter: bytes) -> None:
    encoded = encode_properties(Message(b"", headers={"k": value}), ATTEMPT)
    at = encoded.index(b"\x01k") + 2
    assert encoded[at : at + 1] == letter
    decoded, _ = pika_data.decode_value(encoded, at)
    assert plain(decoded) == whole(plain(value))


def test_a_moment_is_written_in_utc_whatever_its_zone() -> None:
    moment = datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    decoded = by_pika(encode_properties(Message(b"", timestamp=moment), ATTEMPT))
    assert decoded.timestamp == int(moment.timestamp())


@given(st.integers(HEADER_BYTES_MAX - 3_000, HEADER_BYTES_MAX + 10), st.integers(0, 255))
def test_what_a_message_allows_fits_into_a_frame(size: int, filler: int) -> None:
    texts: dict[str, Any] = dict.fromkeys(TEXTS, "x" * filler or "x")
    try:
        message = Message(
            b"",
            headers={"large": "y" * size},
            priority=255,
            expiration=EXPIRATION_MS_MAX,
            timestamp=datetime(2026, 1, 1, tzinfo=UTC),
            **texts,
        )
    except InvalidMessage:
        return
    assert len(encode_properties(message, ATTEMPT)) + FRAME_OVERHEAD <= FRAME_MAX


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.integers(1, 10**11 - 1))
def test_a_tag_is_read_back_from_its_number(run: int, epoch: int, tag: int) -> None:
    number = attempt_number(run, epoch, tag)
    headers = {ATTEMPT_HEADER: number}
    assert number < 2**53
    assert attempt_tag(headers, run, epoch) == tag
    assert attempt_tag(headers, run, epoch + 1) == 0
    assert attempt_tag(headers, run + 1, epoch) == 0


@pytest.mark.parametrize(
    "headers",
    [None, {}, "text", {ATTEMPT_HEADER: None}, {ATTEMPT_HEADER: str(attempt_number(1, 1, 1))},
     {ATTEMPT_HEADER: attempt_number(1, 1, 0)}, {ATTEMPT_HEADER: attempt_number(1, 1, -1)},
     {ATTEMPT_HEADER: float(attempt_number(1, 1, 1))}, {ATTEMPT_HEADER: 0}],
)  # fmt: skip
def test_what_is_not_ours_has_no_tag(headers: object) -> None:
    assert attempt_tag(headers, 1, 1) == 0
