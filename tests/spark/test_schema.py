"""Columns: what is accepted, what is refused, and in which words."""

import pickle

import pytest
from pyspark.sql import types
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from spark_sink.failures import SchemaError
from spark_sink.options import parse
from spark_sink.report import OUTCOME
from spark_sink.schema import OF_REPORT, Key, have_doubles, match

TEXT = StringType()
PAIR = StructType([StructField("key", TEXT), StructField("value", TEXT)])


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def problems(found: StructType, **options: str) -> str:
    with pytest.raises(SchemaError) as caught:
        match(found, parse(options))
    return str(pickle.loads(pickle.dumps(caught.value)))


def test_value_and_routing_key_are_enough() -> None:
    columns = match(schema(value=TEXT, routing_key=TEXT), parse({}))
    assert columns.positions == {"value": 0, "routing_key": 1}
    assert columns.fixed == {"persistent": True}


def test_an_option_overrides_its_column() -> None:
    found = schema(routing_key=TEXT, value=BinaryType(), priority=IntegerType())
    columns = match(found, parse({"routing_key": "orders", "priority": "3", "exchange": "x"}))
    assert columns.positions == {"value": 1}
    assert columns.fixed == {
        "routing_key": "orders",
        "priority": 3,
        "exchange": "x",
        "persistent": True,
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("value", BinaryType()),
        ("value", VarcharType(10)),
        ("headers", MapType(TEXT, TEXT)),
        ("headers", MapType(TEXT, BinaryType())),
        ("headers", MapType(TEXT, BooleanType())),
        ("headers", MapType(TEXT, DecimalType(9, 2))),
        ("headers", ArrayType(PAIR)),
        ("headers", MapType(TEXT, DateType())),
        ("headers", MapType(TEXT, ArrayType(TEXT))),
        ("headers", schema(CC=ArrayType(TEXT), at=TimestampNTZType(), n=LongType())),
        ("persistent", BooleanType()),
        ("user_id", TEXT),
        ("priority", LongType()),
        ("timestamp", TimestampType()),
        ("message_id", TEXT),
    ],
)
def test_types_that_a_column_may_have(name: str, kind: DataType) -> None:
    columns = {"value": TEXT, "exchange": TEXT} | {name: kind}
    assert name in match(schema(**columns), parse({})).positions


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("value", IntegerType(), "column 'value' is int; it must be string or binary"),
        ("value", schema(a=TEXT), "valueFormat=json"),
        ("headers", TEXT, "column 'headers' is string; it must be map<string, T>, array"),
        ("headers", MapType(LongType(), TEXT), "column 'headers' is map<bigint,string>"),
        ("headers", MapType(TEXT, ArrayType(PAIR)), "column 'headers' is"),
        ("headers", schema(a=PAIR), "column 'headers' is struct<a:"),
        (
            "headers",
            StructType([StructField("a", TEXT), StructField("a", TEXT)]),
            "column 'headers' is struct<a:string,a:string>",
        ),
        ("persistent", IntegerType(), "column 'persistent' is int; it must be boolean"),
        ("headers", ArrayType(schema(a=TEXT, b=TEXT)), "column 'headers' is"),
        ("priority", TEXT, "column 'priority' is string; it must be tinyint, smallint, int or"),
        ("timestamp", TimestampNTZType(), "column 'timestamp' is timestamp_ntz"),
        ("timestamp", DateType(), "column 'timestamp' is date; it must be timestamp (with"),
        ("exchange", NullType(), "column 'exchange' is void; it must be string"),
        ("rooting_key", TEXT, "column 'rooting_key' is not known (did you mean 'routing_key'"),
        ("Value2", TEXT, "column 'Value2' is not known"),
        ("amount", TEXT, "put your data into 'value'"),
    ],
)
def test_a_wrong_column_is_named(name: str, kind: DataType, words: str) -> None:
    columns = {"value": TEXT, "exchange": TEXT} | {name: kind}
    assert words in problems(schema(**columns))


def test_all_problems_are_named_at_once() -> None:
    text = problems(schema(key=TEXT, priority=TEXT))
    assert "'key' is not known" in text
    assert "'priority' is string" in text
    assert "'value' is missing" in text
    assert "neither an exchange nor a routing key" in text


def test_a_name_that_is_there_twice() -> None:
    twice = StructType([StructField("value", TEXT), StructField("value", TEXT)])
    assert "column 'value' occurs twice" in problems(twice, routing_key="q")


@pytest.mark.parametrize(
    ("kind", "is_so"),
    [
        (MapType(TEXT, DoubleType()), True),
        (ArrayType(schema(key=TEXT, value=FloatType())), True),
        (schema(a=TEXT, b=ArrayType(DoubleType())), True),
        (schema(double=TEXT, b=DecimalType()), False),
    ],
)
def test_doubles_in_headers_are_found(kind: DataType, *, is_so: bool) -> None:
    assert have_doubles(schema(value=DoubleType(), headers=kind)) == is_so
    assert not have_doubles(schema(value=DoubleType()))


def test_a_column_says_which_rows_are_persistent() -> None:
    found = schema(value=TEXT, exchange=TEXT, persistent=BooleanType())
    assert match(found, parse({})).fixed == {}
    assert match(found, parse({"persistent": "false"})).fixed == {"persistent": False}


def test_the_default_exchange_needs_a_routing_key() -> None:
    assert "neither an exchange nor a routing key" in problems(schema(value=TEXT), exchange="")
    match(schema(value=TEXT), parse({"exchange": "fan"}))
    match(schema(value=TEXT, exchange=TEXT), parse({}))


def test_with_json_the_value_may_be_anything() -> None:
    found = schema(value=schema(a=LongType()), exchange=TEXT)
    assert match(found, parse({"valueFormat": "json"})).is_json


@pytest.mark.parametrize("name", ["GeometryType", "GeographyType"])
def test_json_of_a_place_needs_another_function_than_other_types(name: str) -> None:
    """`to_json` fails for it in each task."""
    if not hasattr(types, name):
        pytest.skip("this Spark has no such type")
    place = getattr(types, name)(4326)
    words = problems(schema(value=schema(at=place)), exchange="x", valueFormat="json")
    assert f"'value.at' is {place.simpleString()}, which valueFormat=json" in words
    assert "use ST_AsBinary" in words


def test_failed_rows_are_written_again_without_what_the_report_has_added() -> None:
    assert tuple(OUTCOME.names) == OF_REPORT
    added = dict.fromkeys(OF_REPORT, TEXT)
    assert problems(schema(value=TEXT, **added), exchange="x") == (
        "this DataFrame cannot be published: _outcome, _reply_code, _reply_text, _message_id, "
        "_partition, _row come from the report of failed rows; drop them"
    )


def test_a_key_does_not_take_a_name_that_the_report_adds() -> None:
    """Parquet would have the column twice, and Spark reads no such file."""
    found = schema(value=TEXT, _Row=LongType())
    options = {"exchange": "x", "idColumns": "_row"}
    match(found, parse(options))
    deep = schema(value=TEXT, _Row=schema(a=LongType()))
    assert "names _Row; rename" in problems(deep, exchange="x", idColumns="_row.a", report="/r")
    assert problems(found, **options, report="/r") == (
        "this DataFrame cannot be published: the report adds columns of its own with the names "
        "_Row; rename these columns of idColumns"
    )


def test_columns_that_differ_in_case_only_are_no_key() -> None:
    found = schema(value=TEXT, k=LongType(), K=LongType())
    words = problems(found, exchange="x", idColumns="k")
    assert "idColumns: columns differ from 'k' only in upper and lower case; rename one" in words


def test_a_key_may_be_a_field_of_a_struct() -> None:
    """A column whose name has a dot comes first."""
    deep = schema(K=schema(a=LongType(), b=schema(C=TEXT)), value=TEXT)
    [first, second] = match(deep, parse({"exchange": "x", "idColumns": "k.A,k.b.c"})).keys
    assert first == Key("k.a", 0, "integer", (0,))
    assert second == Key("k.b.c", 0, "string", (1, 0))
    dotted = StructType([*deep.fields, StructField("k.a", BinaryType())])
    [first, second] = match(dotted, parse({"exchange": "x", "idColumns": "k.a,k.b.c"})).keys
    assert first == Key("k.a", 2, "binary")
    assert second == Key("k.b.c", 0, "string", (1, 0))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("k.z", "idColumns: there is no column 'k.z'"),
        ("value.z", "idColumns: there is no column 'value.z'"),
        ("k.b", "idColumns: column 'k.b' is struct<c:string>; a key is string, integer"),
        ("k.c", "idColumns: columns differ from 'k.c' only in upper and lower case"),
    ],
)
def test_a_field_that_is_no_key_is_named(name: str, words: str) -> None:
    deep = schema(k=schema(b=schema(c=TEXT), c=TEXT, C=TEXT), value=TEXT)
    assert words in problems(deep, exchange="x", idColumns=name)


def test_a_struct_with_two_fields_of_one_name_is_refused_before_any_task() -> None:
    """Spark would refuse it in each task; names that differ in case are two names."""
    twice = StructType([StructField("a", TEXT), StructField("a", TEXT)])
    other = StructType([StructField("a", TEXT), StructField("A", TEXT)])
    options = {"valueFormat": "json", "exchange": "x"}
    words = problems(schema(value=schema(deep=ArrayType(twice))), **options)
    assert "'value.deep[]' has two fields of the same name" in words
    match(schema(value=other), parse(options))


def test_there_are_not_two_identities() -> None:
    found = schema(value=TEXT, exchange=TEXT, message_id=TEXT)
    assert "both a column 'message_id' and identity=position" in problems(
        found, identity="position"
    )


def test_what_the_report_cannot_keep_is_named_before_any_row_is_sent() -> None:
    nothing = ArrayType(NullType(), containsNull=False)  # `array()`
    cases = MapType(TEXT, schema(a=TEXT, A=TEXT))
    value = schema(a=nothing, b=ArrayType(StructType()), c=ArrayType(NullType()), d=cases)
    options = {"valueFormat": "json", "exchange": "x"}
    match(schema(value=value), parse(options))
    words = problems(schema(value=value), **options, unroutable="collect", report="/r")
    assert "'value.a' is array<void>, which the report cannot keep" in words
    assert "'value.b[]' is a struct without fields, which" in words
    assert "'value.d[]' has fields that differ only in upper and lower case, which" in words
    assert "value.c" not in words
    found = schema(value=TEXT, headers=StructType())
    collecting = {"exchange": "x", "unroutable": "collect", "report": "/r"}
    words = problems(found, **collecting)
    assert "'headers' is a struct without fields, which the report cannot keep" in words
    found = schema(value=TEXT, k=schema(a=TEXT, b=StructType()))
    words = problems(found, idColumns="k.a", **collecting)
    assert "'k.b' is a struct without fields, which the report cannot keep" in words
