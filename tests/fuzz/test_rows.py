"""Rows that anyone wrote into the file: each becomes an entry, or is damaged; nothing else."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliablepub.errors import OutboxSealed
from reliablepub.message import Message
from reliablepub.outbox.encryption import OutboxKeys, sealed
from reliablepub.outbox.entry import Entry
from reliablepub.outbox.rows import (
    MessageRow,
    Unreadable,
    checksum_of,
    entry_of,
    rekeyed,
    revised,
    to_text,
)
from tests.fuzz.bending import bent
from tests.fuzz.bounds import bounded, for_long, short

KEYS = OutboxKeys({"k": bytes(32)})
TEXTS = [
    to_text(Message(b"", headers={"a": [1, 2.5, None, {"b": b"c", "$bytes": "x"}]})),
    to_text(Message(b"", app_id="a", priority=1, expiration=5, persistent=False)),
    '{"headers":{"t":{"$datetime":"2026-01-01T00:00:00+00:00"},"d":{"$decimal":"1.5"}}}',
    '{"timestamp":"2026-01-01T00:00:00+00:00"}',
    "{}",
]
WHERE = ("m", "e", "r", None)
SEALED = sealed(KEYS, 7, WHERE, TEXTS[0], b"body")

TAGS = ["$bytes", "$decimal", "$datetime", "$table", "$key"]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(TAGS), inner, max_size=4)
    ),
    max_leaves=12,
)
names = st.sampled_from(
    ["headers", "app_id", "priority", "expiration", "timestamp", "persistent", "body", "exchange"]
)
properties = st.one_of(
    st.sampled_from(TEXTS).flatmap(lambda text: bent(text.encode())),
    st.dictionaries(names, json_values, max_size=3).map(lambda found: json.dumps(found).encode()),
    st.builds(
        lambda opening, depth, closing: (
            '{"headers":' + opening * depth + "1" + closing * depth + "}"
        ).encode(),
        st.sampled_from(['{"a":', "[", '{"$table":']),
        st.integers(1, 5_000),
        st.sampled_from(["}", "]"]),
    ),
    bent(SEALED[0].encode()),
    json_values.map(lambda value: json.dumps({"$key": value}).encode()),
)
texts = st.binary(max_size=300) | st.sampled_from([b"m", b"e", b""])
whole = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9)
times = st.floats(allow_nan=False) | st.floats(0, 1e10)


@st.composite
def rows(draw: st.DrawFn) -> MessageRow:
    """A row of ``any_message``, whose checksum fits."""
    m, e, r = draw(texts), draw(texts), draw(texts)
    p = draw(properties)
    body = draw(st.binary(max_size=50) | bent(SEALED[1]))
    key = draw(st.none() | texts)
    counts = [draw(whole) for _ in range(4)]
    checksum = checksum_of((m, e, r, p, key), body)
    due, expires, refused = (draw(st.none() | times) for _ in range(3))
    head = (draw(whole), m, e, r, p, draw(times), due)
    return MessageRow._make((*head, *counts, checksum, body, expires, key, refused, draw(whole)))


def becomes_an_entry_or_is_damaged(row: MessageRow, keys: OutboxKeys | None) -> None:
    size = sum(len(value) for value in row if isinstance(value, bytes))
    entry, words = None, ""
    with bounded(1 << 20 | 200 * size):
        try:
            entry = entry_of(row, keys)
        except (Unreadable, OutboxSealed) as error:
            words = str(error)
        with suppress(Unreadable, OutboxSealed):
            revised(row, keys, lambda message: replace(message, exchange="other"))
        if keys is not None:
            with suppress(Unreadable, OutboxSealed):
                rekeyed(row, keys)
    assert isinstance(entry, Entry) or 0 < len(words) < 4_000 + size


cases = st.tuples(rows(), st.sampled_from([None, KEYS]))


def test_rows_of_all_kinds() -> None:
    short(given(cases)(lambda case: becomes_an_entry_or_is_damaged(*case)))()


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_rows_of_all_kinds_for_long() -> None:
    for_long(given(cases)(lambda case: becomes_an_entry_or_is_damaged(*case)))
