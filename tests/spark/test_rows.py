"""From Arrow to messages, without Spark."""

import json
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliablepub import Message
from spark_sink.identity import ByContent
from spark_sink.rows import SLICE_BYTES_MAX, Invalid, Rows, plain, slices
from spark_sink.schema import COLUMNS, Columns

AT = datetime(2026, 1, 2, 3, 4, 5, 600, tzinfo=UTC)


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def rows_of(
    found: pa.RecordBatch, *, is_json: bool = False, **fixed: object
) -> list[Message | Invalid]:
    positions = {name: i for i, name in enumerate(found.schema.names)}
    columns = Columns(positions, fixed, is_json)
    return list(Rows(columns, ByContent("write", 0)).messages(found))


def messages_of(found: pa.RecordBatch, **fixed: Any) -> list[Message]:
    rows = rows_of(found, **fixed)
    assert all(isinstance(row, Message) for row in rows)
    return [row for row in rows if isinstance(row, Message)]


def problem_of(found: pa.RecordBatch, **fixed: Any) -> str:
    [row] = rows_of(found, **fixed)
    assert isinstance(row, Invalid)
    return row.problem


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_text_and_bytes_become_the_body(kind: pa.DataType) -> None:
    [message] = messages_of(batch(value=pa.array(["dog"], pa.string()).cast(kind)), exchange="x")
    assert message.body == b"dog"
    assert message.exchange == "x"


def test_every_column_finds_its_property() -> None:
    [message] = messages_of(
        batch(
            app_id=["app"],
            type=["created"],
            reply_to=["back"],
            correlation_id=["c"],
            content_encoding=["gzip"],
            content_type=["text/plain"],
            message_id=["id"],
            routing_key=["key"],
            exchange=["x"],
            value=["v"],
            priority=[3],
            expiration=pa.array([60_000], pa.int64()),
            timestamp=pa.array([AT], pa.timestamp("us", "Europe/Berlin")),
            headers=pa.array([[("b", "2"), ("a", "1")]], pa.map_(pa.string(), pa.string())),
        ),
        persistent=False,
    )
    assert message == Message(
        b"v",
        exchange="x",
        routing_key="key",
        headers={"a": "1", "b": "2"},
        message_id="id",
        persistent=False,
        priority=3,
        expiration=60_000,
        timestamp=AT,
        content_type="text/plain",
        content_encoding="gzip",
        correlation_id="c",
        reply_to="back",
        type="created",
        app_id="app",
    )


def test_null_means_not_set_where_a_message_can_do_without() -> None:
    optional = sorted(set(COLUMNS) - {"value", "exchange", "routing_key", "message_id"})
    nulls = {name: pa.nulls(1) for name in optional}
    [message] = messages_of(batch(value=["v"], **nulls), exchange="x")
    assert message == Message(b"v", exchange="x", message_id=message.message_id)


@pytest.mark.parametrize("name", ["value", "exchange", "routing_key", "message_id"])
def test_null_where_a_message_needs_a_value_is_a_problem_of_that_row(name: str) -> None:
    columns = {"value": ["a", "b"], "exchange": ["x", "x"], name: ["a", None]}
    first, second = rows_of(batch(**columns))
    assert isinstance(first, Message)
    assert isinstance(second, Invalid)
    assert second.row == 1
    assert second.problem.startswith(f"{name}: is null")


@pytest.mark.parametrize(
    "kind",
    [
        pa.map_(pa.string(), pa.int64()),
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.int64())])),
    ],
)
def test_headers_come_as_a_map_or_as_pairs(kind: pa.DataType) -> None:
    pairs: list[Any] = [("b", 1), ("a", 2)]
    if not pa.types.is_map(kind):
        pairs = [{"key": key, "value": value} for key, value in pairs]
    [message] = messages_of(batch(value=["v"], headers=pa.array([pairs], kind)), exchange="x")
    assert message.headers == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ([{"key": "a", "value": "1"}, {"key": "a", "value": "2"}], "headers: have a name twice"),
        ([{"key": None, "value": "1"}], "headers: have a name that is null"),
        ([None], "headers: have a name that is null"),
        ([{"key": "rp-attempt", "value": "1"}], "headers['rp-attempt']: is reserved"),
    ],
)
def test_headers_that_are_none(pairs: list[Any], problem: str) -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
    found = batch(value=["v"], headers=pa.array([pairs], kind))
    assert problem_of(found, exchange="x").startswith(problem)


def test_a_row_that_amqp_cannot_carry_does_not_stop_the_others() -> None:
    first, second, third = rows_of(batch(value=["a", "b", "c"], routing_key=["k", "k" * 256, "k"]))
    assert isinstance(second, Invalid)
    assert second.problem.startswith("routing_key: has 256 bytes")
    assert isinstance(first, Message)
    assert isinstance(third, Message)


def test_a_struct_is_sent_as_json() -> None:
    value = {
        "when": AT,
        "day": date(2026, 1, 2),
        "price": Decimal("1.50"),
        "data": b"\x00\xff",
        "tags": [("b", 1), ("a", None)],
        "none": None,
        "list": [{"x": 1}],
        "span": timedelta(seconds=1.5),
        "name": "dög",
    }
    kind = pa.struct(
        [
            ("when", pa.timestamp("us", "America/New_York")),
            ("day", pa.date32()),
            ("price", pa.decimal128(9, 2)),
            ("data", pa.binary()),
            ("tags", pa.map_(pa.string(), pa.int32())),
            ("none", pa.string()),
            ("list", pa.list_(pa.struct([("x", pa.int32())]))),
            ("span", pa.duration("us")),
            ("name", pa.string()),
        ]
    )
    [message] = messages_of(batch(value=pa.array([value], kind)), exchange="x", is_json=True)
    assert message.body.decode() == (
        '{"when":"2026-01-02T03:04:05.000600Z","day":"2026-01-02","price":"1.50","data":"AP8=",'
        '"tags":{"a":null,"b":1},"none":null,"list":[{"x":1}],"span":1.5,"name":"dög"}'
    )


def test_empty_maps_and_lists_stay_what_they_are() -> None:
    kind = pa.struct([("m", pa.map_(pa.string(), pa.int32())), ("l", pa.list_(pa.int32()))])
    found = batch(value=pa.array([{"m": [], "l": []}], kind))
    [message] = messages_of(found, exchange="x", is_json=True)
    assert json.loads(message.body) == {"m": {}, "l": []}


def test_json_has_no_number_that_is_none() -> None:
    assert "JSON cannot" in problem_of(batch(value=[float("nan")]), exchange="x", is_json=True)


def test_json_of_null_is_no_message() -> None:
    found = batch(value=pa.array([None], pa.struct([("a", pa.int32())])))
    assert problem_of(found, exchange="x", is_json=True).startswith("value: is null")


def test_plain_leaves_what_json_knows() -> None:
    assert plain(pa.int64())(5) == 5


@given(st.lists(st.binary(max_size=20), max_size=40), st.integers(1, 50))
def test_slices_are_the_batch(bodies: list[bytes], rows_max: int) -> None:
    found = batch(value=pa.array(bodies, pa.binary()))
    cut = list(slices(found, rows_max))
    assert [body for piece in cut for body in piece.column(0).to_pylist()] == bodies
    assert all(0 < piece.num_rows <= rows_max for piece in cut)


def test_slices_of_large_rows_are_small() -> None:
    body = b"x" * (SLICE_BYTES_MAX // 2 - 100)
    assert [piece.num_rows for piece in slices(batch(value=[body] * 5))] == [2, 2, 1]


def ids(bodies: Iterable[bytes]) -> list[str | None]:
    found = batch(value=pa.array(bodies, pa.binary()))
    return [message.message_id for message in messages_of(found, exchange="x")]


def test_what_is_published_with_a_row_belongs_to_its_identity() -> None:
    one = messages_of(batch(value=["v", "v"], type=["a", "b"]), exchange="x")
    assert one[0].message_id != one[1].message_id
    assert not str(one[1].message_id).endswith("-1")


def test_the_order_of_a_map_does_not_matter() -> None:
    kind = pa.map_(pa.string(), pa.string())
    pairs = [("a", "1"), ("b", "2")]
    first, second = (
        messages_of(batch(value=["v"], headers=pa.array([order], kind)), exchange="x")[0]
        for order in (pairs, pairs[::-1])
    )
    assert first.message_id == second.message_id


def test_a_time_zone_of_the_session_does_not_matter() -> None:
    first, second = (
        messages_of(
            batch(value=["v"], timestamp=pa.array([AT], pa.timestamp("us", zone))), exchange="x"
        )[0]
        for zone in ("UTC", "Asia/Tokyo")
    )
    assert first.message_id == second.message_id
