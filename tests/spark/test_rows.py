"""From Arrow to messages, without Spark."""

import json
from collections.abc import Iterable
from datetime import UTC, date, datetime
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliablepub import ConfigurationError, Message
from spark_sink.identity import ByColumns, ByContent
from spark_sink.json_text import text_of
from spark_sink.rows import SLICE_BYTES_MAX, Invalid, Rows, slices
from spark_sink.schema import COLUMNS, Columns, Key

AT = datetime(2026, 1, 2, 3, 4, 5, 600, tzinfo=UTC)


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def rows_of(
    found: pa.RecordBatch, *, is_json: bool = False, **fixed: object
) -> list[Message | Invalid]:
    positions = {name: i for i, name in enumerate(found.schema.names)}
    columns = Columns(positions, fixed, is_json)
    return Rows(columns, ByContent("write", 0)).messages(found)


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
            user_id=["guest"],
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
        user_id="guest",
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


def test_headers_come_as_a_struct_whose_nulls_are_left_out() -> None:
    given = {
        "CC": ["a", None],
        "at": datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001
        "day": date(2026, 1, 2),
        "moment": AT,
        "none": None,
        "prices": [[Decimal("1.50")]],
    }
    kind = pa.struct(
        [
            ("prices", pa.list_(pa.list_(pa.decimal128(9, 2)))),
            ("none", pa.string()),
            ("moment", pa.timestamp("us", "America/New_York")),
            ("day", pa.date32()),
            ("at", pa.timestamp("us")),
            ("CC", pa.list_(pa.string())),
        ]
    )
    [message] = messages_of(batch(value=["v"], headers=pa.array([given], kind)), exchange="x")
    assert message.headers == {
        "CC": ["a", None],
        "at": "2026-01-02T03:04:05",
        "day": "2026-01-02",
        "moment": AT,
        "prices": [[Decimal("1.5")]],
    }
    assert list(message.headers) == sorted(message.headers)


def test_a_row_that_does_not_say_so_is_persistent() -> None:
    rows = messages_of(batch(value=["v"] * 3, persistent=[True, False, None]), exchange="x")
    assert [message.persistent for message in rows] == [True, False, True]


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


def test_a_decimal_in_a_header_needs_no_room_for_its_trailing_zeros() -> None:
    """Spark's default type has 18 decimal places; AMQP holds about nine digits in all."""
    kind = pa.map_(pa.string(), pa.decimal128(38, 18))
    given = [[("price", Decimal("1.5"))], [("price", Decimal(2500))]]
    half, whole = messages_of(batch(value=["a", "b"], headers=pa.array(given, kind)), exchange="x")
    assert half.headers is not None
    assert whole.headers is not None
    assert str(half.headers["price"]) == "1.5"
    assert str(whole.headers["price"]) == "2500"
    given = [[("price", Decimal("1.00000000001"))]]
    problem = problem_of(batch(value=["a"], headers=pa.array(given, kind)), exchange="x")
    assert "does not fit an AMQP decimal" in problem


def test_rows_that_are_none_change_no_id_of_another() -> None:
    """Equal rows are told apart by their number among the messages."""
    alone = messages_of(batch(value=["a", "a"]), exchange="x")
    among = rows_of(batch(value=["a", None, "a"]), exchange="x")
    assert [row for row in among if isinstance(row, Message)] == alone
    assert alone[0].message_id != alone[1].message_id


def test_a_struct_is_sent_as_json() -> None:
    value = {
        "when": AT,
        "day": date(2026, 1, 2),
        "price": Decimal("1.50"),
        "data": b"\x00\xff",
        "tags": [("b", 1), ("a", None)],
        "none": None,
        "list": [{"x": 1}, {"x": None}, None],
        "single": 0.1,
        "odd": float("nan"),
        "name": 'd"ög',
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
            ("single", pa.float32()),
            ("odd", pa.float64()),
            ("name", pa.string()),
        ]
    )
    [message] = messages_of(batch(value=pa.array([value], kind)), exchange="x", is_json=True)
    assert message.body.decode() == (
        '{"when":"2026-01-01T22:04:05.000-05:00","day":"2026-01-02","price":1.50,"data":"AP8=",'
        '"tags":{"a":null,"b":1},"list":[{"x":1},{},null],"single":0.1,"odd":"NaN",'
        '"name":"d\\"ög"}'
    )


def test_a_type_that_is_no_json_is_none() -> None:
    with pytest.raises(TypeError, match="duration"):
        text_of(pa.duration("us"))


def test_empty_maps_and_lists_stay_what_they_are() -> None:
    kind = pa.struct([("m", pa.map_(pa.string(), pa.int32())), ("l", pa.list_(pa.int32()))])
    found = batch(value=pa.array([{"m": [], "l": []}], kind))
    [message] = messages_of(found, exchange="x", is_json=True)
    assert json.loads(message.body) == {"m": {}, "l": []}


def test_json_of_null_is_no_message() -> None:
    found = batch(value=pa.array([None], pa.struct([("a", pa.int32())])))
    assert problem_of(found, exchange="x", is_json=True).startswith("value: is null")


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


NO_UTF8 = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
)
"""A text, and one that is none: Spark's `cast(X'FF' AS STRING)` makes such."""
FAR = pa.array([0, 300_000_000_000_000_000], pa.timestamp("us", "UTC"))
"""1970, and a year above 9999, which Spark's `timestamp` holds."""


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"routing_key": NO_UTF8}, "routing_key: holds text that is not UTF-8"),
        ({"timestamp": FAR}, "timestamp: holds a time outside of the years 1 to 9999"),
        (
            {"headers": pa.MapArray.from_arrays([0, 1, 2], ["a", "b"], NO_UTF8)},
            "headers: holds text that is not UTF-8",
        ),
        (
            {"headers": pa.MapArray.from_arrays([0, 1, 2], ["a", "b"], FAR)},
            "headers: holds a time outside",
        ),
    ],
)
def test_a_value_that_python_has_not_makes_its_row_invalid(
    columns: dict[str, pa.Array], problem: str
) -> None:
    first, second = rows_of(batch(value=["a", "b"], **columns), exchange="x")
    assert isinstance(first, Message)
    assert isinstance(second, Invalid)
    assert second.problem.startswith(problem)


@pytest.mark.parametrize("values", [NO_UTF8, FAR])
def test_the_same_in_json(values: pa.Array) -> None:
    value = pa.StructArray.from_arrays([values], ["a"])
    first, second = rows_of(batch(value=value), is_json=True, exchange="x")
    assert isinstance(first, Message)
    assert isinstance(second, Invalid)
    assert second.problem.startswith("value: holds")


def test_a_body_of_text_is_sent_as_the_bytes_it_has() -> None:
    assert [m.body for m in messages_of(batch(value=NO_UTF8), exchange="x")] == [b"a", b"\xff"]


def test_a_time_at_the_end_of_its_zone_is_invalid_too() -> None:
    late = pa.array(
        [datetime(9999, 12, 31, 23, tzinfo=UTC)], pa.timestamp("us", "America/New_York")
    )
    headers = pa.MapArray.from_arrays([0, 1], ["a"], late.cast(pa.timestamp("us", "Asia/Tokyo")))
    assert "years 1 to 9999" in problem_of(batch(value=["v"], headers=headers), exchange="x")


@pytest.mark.parametrize(
    ("zone", "offset"),
    [
        ("GMT+3", "+03:00"),
        ("UTC-03:30", "-03:30"),
        ("UT+0330", "+03:30"),
        ("+3", "+03:00"),
        ("GMT+00:00", "Z"),
        ("Z", "Z"),
        ("Etc/GMT-3", "+03:00"),
    ],
)
def test_a_time_zone_that_java_knows_by_another_name(zone: str, offset: str) -> None:
    times = pa.array([AT, None, AT], pa.timestamp("us", zone))
    pairs = pa.MapArray.from_arrays([0, 1, 2, 3], ["a", "b", "c"], times)
    found = batch(value=["v"] * 3, headers=pairs, timestamp=times).slice(1)
    assert [m.headers for m in messages_of(found, exchange="x")] == [{"b": None}, {"c": AT}]
    nested = pa.StructArray.from_arrays(
        [pa.ListArray.from_arrays([0, 1, 2, 3], times), pairs], ["list", "map"]
    )
    *_, message = messages_of(batch(value=nested), exchange="x", is_json=True)
    [one] = json.loads(message.body)["list"]
    assert one.endswith(offset)
    assert json.loads(message.body)["map"] == {"c": one}
    assert datetime.fromisoformat(one) == AT.replace(microsecond=0)


def test_a_time_zone_that_python_does_not_know_is_no_fault_of_the_rows() -> None:
    times = pa.array([AT], pa.timestamp("us", "Mars/Olympus"))
    pairs = pa.MapArray.from_arrays([0, 1], ["a"], times)
    with pytest.raises(ConfigurationError, match=r"'Mars/Olympus' .* spark.sql.session.timeZone"):
        rows_of(batch(value=["v"], headers=pairs), exchange="x")


def keyed(**columns: pa.Array) -> list[str | None]:
    """The ids of rows that these columns name."""
    kinds = {
        "int": "integer",
        "str": "string",
        "tim": "timestamp",
        "dat": "date",
        "dec": "decimal",
        "bin": "binary",
        "boo": "boolean",
    }
    found = batch(value=["v"] * len(next(iter(columns.values()))), **columns)
    keys = tuple(
        Key(name, position, kinds[name[:3]]) for position, name in enumerate(columns, start=1)
    )
    made = Rows(
        Columns({"value": 0}, {"exchange": "x"}, is_json=False, keys=keys),
        ByColumns([(key.name, key.kind) for key in keys]),
    )
    return [
        row.message_id if isinstance(row, Message) else row.problem for row in made.messages(found)
    ]


def test_a_field_of_a_struct_is_a_key_in_any_piece() -> None:
    inner = [{"a": 1}, {"a": 2}, {"a": None}, None]
    column = pa.array(
        [{"k": k} for k in inner[:3]] + [None], pa.struct([("k", pa.struct([("a", pa.int32())]))])
    )
    found = batch(value=["v"] * 4, s=column)
    key = Key("s.k.a", 1, "integer", (0, 0))
    rows = Rows(
        Columns({"value": 0}, {"exchange": "x"}, is_json=False, keys=(key,)),
        ByColumns([("s.k.a", "integer")]),
    )
    first, second, third, fourth = rows.messages(found)
    assert isinstance(first, Message)
    assert isinstance(second, Message)
    assert first.message_id != second.message_id
    assert rows.messages(found.slice(1))[0] == second
    assert third == fourth == Invalid("s.k.a: is null")


def test_columns_name_a_row_in_one_form_whatever_their_width_scale_and_zone() -> None:
    one = keyed(
        int=pa.array([5], pa.int8()),
        dec=pa.array([Decimal("1.50")], pa.decimal128(9, 2)),
        tim=pa.array([AT], pa.timestamp("us", "UTC")),
    )
    other = keyed(
        int=pa.array([5], pa.int64()),
        dec=pa.array([Decimal("1.500")], pa.decimal128(38, 3)),
        tim=pa.array([AT], pa.timestamp("us", "Asia/Tokyo")),
    )
    assert one == other


def test_ids_by_columns_do_not_change_with_a_release() -> None:
    """A consumer remembers them for months, whatever writes the next ones."""
    assert keyed(
        int_order=pa.array([7, 2**40]),
        str_eu=pa.array(["ä", "b"]),
        dat=pa.array([date(2026, 1, 2)] * 2),
        bin=pa.array([b"\xff"] * 2, pa.binary()),
        boo=pa.array([True, False]),
        dec=pa.array([Decimal("-0.10")] * 2, pa.decimal128(38, 18)),
        tim=pa.array([AT] * 2, pa.timestamp("us", "UTC")),
    ) == ["0f8ce08380f8a332cd5bc3043a4b366d", "bc37756b36abe1b5a920b1a91404087a"]


def test_values_of_different_kinds_and_columns_are_different_keys() -> None:
    of_one = {
        *keyed(int=pa.array([1])),
        *keyed(str=pa.array(["1"])),
        *keyed(int_b=pa.array([1])),
        *keyed(boo=pa.array([True])),
        *keyed(bin=pa.array([b"1"], pa.binary())),
        *keyed(str_a=pa.array(["1, 1"])),
    }
    assert len(of_one) == 6


def test_a_key_of_years_beyond_pythons_is_a_key() -> None:
    assert keyed(tim=FAR)[1] == keyed(tim=FAR[1:])[0]
    assert "years" not in str(keyed(tim=FAR))


def test_a_null_in_a_key_names_no_row() -> None:
    first, second = keyed(int=pa.array([1, None]), str=pa.array(["a", "b"]))
    assert (len(str(first)), second) == (32, "int: is null")


def test_a_key_that_cannot_be_read_names_no_row() -> None:
    assert keyed(str=NO_UTF8)[1] == "str: holds text that is not UTF-8"


@given(st.lists(st.integers(-5, 5), min_size=1), st.randoms())
def test_by_columns_a_row_keeps_its_id_in_any_order_and_company(
    numbers: list[int], random: Random
) -> None:
    shuffled = random.sample(numbers, len(numbers))
    first = dict(zip(numbers, keyed(int=pa.array(numbers)), strict=True))
    assert first == dict(zip(shuffled, keyed(int=pa.array(shuffled)), strict=True))
    assert len(set(first.values())) == len(set(numbers))
