"""A message is checked at birth: every limit, at it and one beyond."""

import copy
import dataclasses
import enum
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal, Inexact, localcontext
from typing import Any

import pytest

from reliablepub.errors import InvalidMessage
from reliablepub.headers import NESTING_MAX, SHORT_STRING_MAX
from reliablepub.message import (
    BODY_BYTES_MAX,
    EXPIRATION_MS_MAX,
    HEADER_BYTES_MAX,
    PRIORITY_MAX,
    Message,
)
from reliablepub.transport.frames import encode_properties
from tests.lazy import Lazy

SHORT_STRINGS = [
    "exchange",
    "routing_key",
    "message_id",
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "type",
    "user_id",
    "app_id",
]


class Color(enum.IntEnum):
    RED = 7


class Route(enum.StrEnum):
    PAID = "orders.paid"


class Old(str, enum.Enum):  # noqa: UP042 - how it was written before Python 3.11
    PAID = "orders.paid"


class Seconds(float):
    """As numpy's ``float64``."""


class Nowhere(tzinfo):
    """A time zone that knows nothing: such a datetime is naive all the same."""

    def utcoffset(self, _when: datetime | None) -> None:
        return None

    def dst(self, _when: datetime | None) -> None:
        return None

    def tzname(self, _when: datetime | None) -> None:
        return None


def problem_with(**fields: Any) -> str:
    """The words of the error that these fields raise."""
    with pytest.raises(InvalidMessage) as caught:
        Message(**{"body": b"", **fields})
    assert caught.value.field in str(caught.value)
    return str(caught.value)


def header(value: Any) -> Any:
    """What a header's value becomes."""
    headers = Message(b"", headers={"h": value}).headers
    assert headers is not None
    return headers["h"]


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


def test_a_message_needs_only_a_body() -> None:
    message = Message(b"")
    assert (message.exchange, message.routing_key, message.headers) == ("", "", None)
    assert message.persistent


@dataclass
class Order:
    number: int
    to: str


CYCLE: list[object] = []
CYCLE.append(CYCLE)


# ------------------------------------------------------------------------------------------ body


@pytest.mark.parametrize("body", ["text", bytearray(b"x"), memoryview(b"x"), None, 1])
def test_a_body_is_bytes(body: object) -> None:
    kind = "None" if body is None else type(body).__name__
    assert f"body: is {kind}, not bytes" in problem_with(body=body)


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ("text", "body.encode()"),
        (bytearray(b"x"), "bytes(body)"),
        ({"order": 17}, "Message.json(value, routing_key=...)"),
        ([17], "Message.json(value, routing_key=...)"),
        (Order(17, "é"), "Message.json(value, routing_key=...)"),
    ],
)
def test_a_body_of_another_type_is_told_how_to_become_bytes(body: object, hint: str) -> None:
    assert hint in problem_with(body=body)


# ------------------------------------------------------------------------------------------ JSON


def test_json_is_written_as_utf8_and_named() -> None:
    message = Message.json({"orders": [Order(17, "é")], "paid": None}, routing_key="orders")
    assert message.body == '{"orders":[{"number":17,"to":"é"}],"paid":null}'.encode()
    assert (message.content_type, message.routing_key) == ("application/json", "orders")
    typed = Message.json(1.5, content_type="application/vnd.price+json", type="price")
    assert (typed.body, typed.content_type) == (b"1.5", "application/vnd.price+json")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"at": datetime(2026, 1, 1, tzinfo=UTC)}, "datetime is not a type that JSON has"),
        (Order, "type is not a type that JSON has"),
        (float("nan"), "not JSON compliant"),
        ({(1, 2): 3}, "keys must be str"),
        ("secret \ud800", "a text in it is not valid Unicode"),
        (CYCLE, "Circular"),
    ],
)
def test_what_json_cannot_express_is_refused(value: object, problem: str) -> None:
    with pytest.raises(InvalidMessage, match=problem) as raised:
        Message.json(value)
    assert raised.value.field == "body"
    assert "secret" not in str(raised.value)


def test_a_body_has_rabbitmqs_hard_limit() -> None:
    body = bytes(BODY_BYTES_MAX)
    assert len(Message(body).body) == BODY_BYTES_MAX
    assert "takes at most 536870912" in problem_with(body=body + b"x")


# --------------------------------------------------------------------------------- short strings


@pytest.mark.parametrize("name", SHORT_STRINGS)
@pytest.mark.parametrize(("letter", "bytes_"), [("a", 1), ("é", 2), ("漢", 3), ("🐇", 4)])
def test_short_strings_hold_255_bytes_of_utf8(name: str, letter: str, bytes_: int) -> None:
    fits = letter * (SHORT_STRING_MAX // bytes_)
    assert getattr(Message(b"", **{name: fits}), name) == fits  # type: ignore[arg-type]
    beyond = fits + letter
    assert f"{name}: has {len(beyond.encode())} bytes" in problem_with(**{name: beyond})


@pytest.mark.parametrize("name", SHORT_STRINGS)
@pytest.mark.parametrize("value", ["\ud800", b"bytes", 7])
def test_short_strings_are_strings_that_utf8_can_write(name: str, value: object) -> None:
    assert problem_with(**{name: value}).startswith(f"{name}: ")


@pytest.mark.parametrize("name", SHORT_STRINGS)
@pytest.mark.parametrize("member", [Route.PAID, Old.PAID])
def test_a_member_of_an_enum_of_texts_is_its_text(name: str, member: str) -> None:
    message = Message(b"", **{name: member})  # type: ignore[arg-type]
    value = getattr(message, name)
    assert type(value) is str
    assert value == "orders.paid"
    assert message == Message(b"", **{name: "orders.paid"})  # type: ignore[arg-type]
    assert message.size == Message(b"", **{name: "orders.paid"}).size  # type: ignore[arg-type]


def test_members_of_enums_become_plain_values_elsewhere_too() -> None:
    message = Message(
        b"",
        ordering_key=Route.PAID,
        priority=Color.RED,
        expires_in_s=Seconds(2),
        headers={Route.PAID: Old.PAID},
    ).with_message_id(Route.PAID)
    assert message.headers is not None
    ((name, value),) = message.headers.items()
    texts = (message.ordering_key, message.message_id, name, value)
    assert texts == ("orders.paid",) * 4
    assert {type(text) for text in texts} == {str}
    assert (type(message.priority), type(message.expires_in_s)) == (int, float)


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
VALUES: dict[str, object] = {
    "body": b"x",
    **dict.fromkeys((*SHORT_STRINGS, "ordering_key"), "x"),
    **dict.fromkeys(("priority", "expiration", "expires_in_s"), 1),
    **dict.fromkeys(("timestamp", "not_before"), NOON),
    "persistent": False,
}


@pytest.mark.parametrize(("name", "value"), VALUES.items())
def test_a_lazy_proxy_is_refused(name: str, value: object) -> None:
    """SQLite does not store it, and evaluating it may raise: both would end the relay."""
    Message(**{"body": b"", name: value})  # type: ignore[arg-type]
    assert problem_with(**{name: Lazy(value)}).startswith(f"{name}: is ")


def test_a_lazy_proxy_of_a_message_id_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="message_id: is Lazy, not str"):
        Message(b"").with_message_id(Lazy("id"))  # type: ignore[arg-type]


def test_an_empty_message_id_is_no_id() -> None:
    assert "message_id: is empty" in problem_with(message_id="")


def test_direct_reply_to_needs_a_consumer_that_we_never_have() -> None:
    assert "direct reply-to" in problem_with(reply_to="amq.rabbitmq.reply-to")
    assert Message(b"", reply_to="amq.rabbitmq.reply-to.g1h2").reply_to


# --------------------------------------------------------------------------------------- numbers


def test_times_and_order_are_kept() -> None:
    due = datetime(2030, 1, 1, tzinfo=UTC)
    message = Message(b"", expires_in_s=0.5, not_before=due, ordering_key="order ü")
    assert (message.expires_in_s, message.not_before) == (0.5, due)
    assert message.size == Message(b"").size + len("order ü".encode())


@pytest.mark.parametrize(
    "value", [0, -1, 0.0, float("nan"), float("inf"), 1.1e9, True, "5", timedelta(seconds=5)]
)
def test_a_deadline_is_a_number_of_seconds(value: Any) -> None:
    with pytest.raises(InvalidMessage, match=r"^expires_in_s: is .* a number of seconds"):
        Message(b"", expires_in_s=value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (datetime(2030, 1, 1), "without a time zone"),  # noqa: DTZ001
        (1_900_000_000, "int, not a datetime"),
    ],
)
def test_a_delay_is_a_time_that_every_reader_understands_alike(value: Any, problem: str) -> None:
    with pytest.raises(InvalidMessage, match=rf"^not_before: is .*{problem}"):
        Message(b"", not_before=value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "has 0 bytes"),
        ("ü" * 128, "has 256 bytes"),
        ("\ud800", "cannot be encoded"),
        (7, "is int, not str"),
    ],
)
def test_an_ordering_key_is_a_short_text(value: Any, problem: str) -> None:
    with pytest.raises(InvalidMessage, match=rf"^ordering_key: {problem}"):
        Message(b"", ordering_key=value)


@pytest.mark.parametrize(
    ("name", "most"), [("priority", PRIORITY_MAX), ("expiration", EXPIRATION_MS_MAX)]
)
def test_numbers_have_limits(name: str, most: int) -> None:
    for value in (None, 0, most):
        assert getattr(Message(b"", **{name: value}), name) == value  # type: ignore[arg-type]
    for wrong in (-1, most + 1, 1.0, "1", True, 10**5_000):
        assert f"{name}: is not a whole number from 0 to {most}" in problem_with(**{name: wrong})


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_persistent_is_a_bool(value: object) -> None:
    assert "persistent: is" in problem_with(persistent=value)


# ------------------------------------------------------------------------------------ timestamps

EARLY_ZONE = timezone(timedelta(hours=-14))


@pytest.mark.parametrize(
    ("moment", "problem"),
    [
        (datetime(2024, 1, 1), "without a time zone"),  # noqa: DTZ001
        (datetime(2024, 1, 1, tzinfo=Nowhere()), "without a time zone"),
        (datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC), "before 1970"),
        (datetime(9999, 12, 31, 23, 0, 0, tzinfo=EARLY_ZONE), "after the year 9999"),
    ],
)
def test_datetimes_that_amqp_cannot_say(moment: datetime, problem: str) -> None:
    assert problem in problem_with(timestamp=moment)
    assert problem in problem_with(headers={"h": moment})


@pytest.mark.parametrize(
    "moment", [datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)]
)
def test_datetimes_that_amqp_can_say(moment: datetime) -> None:
    assert Message(b"", timestamp=moment).timestamp == moment
    assert header(moment) == moment


def test_a_timestamp_is_a_datetime() -> None:
    assert "timestamp: is int, not a datetime" in problem_with(timestamp=1_700_000_000)


# --------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**63 - 1,
        1.5,
        "",
        "text",
        b"",
        b"bytes",
        Decimal("3.14"),
        Decimal(2**31 - 1),
        Decimal("1E+9"),
        Decimal("-1E-255"),
        Decimal("-2147483647E-255"),
        [],
        [1, "two", [3.0, None]],
        {},
        {"a": {"b": [{"c": 1}]}},
    ],
)
def test_headers_hold_what_amqp_tables_hold(value: object) -> None:
    assert header(value) == value
    assert header([value]) == [value]
    assert header({"inner": value}) == {"inner": value}


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_float_that_clients_cannot_read_back_is_refused(value: float) -> None:
    assert "many AMQP clients cannot decode" in problem_with(headers={"k": [value]})


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        1j,
        2**63,
        -(2**63) - 1,
        pytest.param(10**5_000, id="too long to print"),
        "\udfff",
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("Infinity"),
        Decimal(2**31),
        Decimal(-(2**31)),
        Decimal("1E-256"),
        Decimal("1E+10"),
        Decimal("1E+999999999999999999"),
        Decimal("1E-999999999999999999"),
        Decimal("1.0000000000"),
    ],
)
def test_headers_refuse_what_amqp_tables_cannot_hold(value: object) -> None:
    assert problem_with(headers={"h": value}).startswith("headers['h']: ")
    assert problem_with(headers={"h": [0, value]}).startswith("headers['h'][1]: ")
    assert problem_with(headers={"h": {"x": value}}).startswith("headers['h']['x']: ")


@pytest.mark.parametrize("value", [True, 7, 1.5, "text", b"bytes", Decimal(7), NOON])
def test_headers_refuse_lazy_proxies(value: object) -> None:
    words = "is Lazy, which AMQP tables cannot hold"
    assert problem_with(headers={"h": Lazy(value)}) == f"headers['h']: {words}"
    assert problem_with(headers={"h": [Lazy(value)]}) == f"headers['h'][0]: {words}"
    assert "which is not a str" in problem_with(headers={Lazy("name"): 1})


@pytest.mark.parametrize("value", [[1, "two"], {"a": 1}])
def test_a_lazy_proxy_of_a_table_or_list_is_copied(value: object) -> None:
    assert header(Lazy(value)) == value


def test_a_decimal_is_kept_whatever_the_decimal_context() -> None:
    """An application may round its own computations; a header is not one."""
    exact, loss = Decimal("1234567.89"), Decimal("-1234567.89")
    with localcontext() as context:
        context.prec = 4
        context.traps[Inexact] = True
        message = Message(b"", headers={"price": exact, "loss": loss})
        encoded = encode_properties(message, 1)
    assert message.headers == {"price": exact, "loss": loss}
    assert encoded == encode_properties(message, 1)


def test_an_enum_of_numbers_becomes_its_number() -> None:
    assert type(header(Color.RED)) is int


def test_a_tuple_becomes_a_list() -> None:
    assert header((1, (2,))) == [1, [2]]


def test_a_datetime_in_headers_becomes_utc() -> None:
    assert header(datetime(2024, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))).hour == 10


@pytest.mark.parametrize("headers", [[("a", 1)], "a=1", 7, {1: "one"}, {b"a": 1}, {"\ud800": 1}])
def test_headers_are_a_mapping_with_names(headers: object) -> None:
    assert problem_with(headers=headers).startswith("headers")


def test_header_names_are_short_strings() -> None:
    Message(b"", headers={"n" * SHORT_STRING_MAX: 1, "é" * 127: 2})
    assert "has a name of 256 bytes" in problem_with(headers={"n" * 256: 1})
    assert "has a name of 256 bytes" in problem_with(headers={"h": {"é" * 128: 1}})


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"n": inner}])
def test_headers_nest_only_so_deep(wrap: Callable[[Any], Any]) -> None:
    deepest = nested(NESTING_MAX - 1, wrap)
    assert header(deepest) == deepest
    assert "nested more than 32 deep" in problem_with(headers={"h": nested(NESTING_MAX, wrap)})


def test_headers_that_contain_themselves_end_too() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    assert "nested more than" in problem_with(headers=endless)


def test_our_own_header_names_are_reserved() -> None:
    assert "reserved" in problem_with(headers={"rp-attempt": "1"})
    assert header({"rp-attempt": "1"})  # only the top level is reserved


@pytest.mark.parametrize("name", ["CC", "BCC"])
def test_routing_headers_are_lists(name: str) -> None:
    assert "not a list of routing keys" in problem_with(headers={name: "key"})
    assert Message(b"", headers={name: ("key",)}).headers == {name: ["key"]}


def test_headers_fit_one_header_frame() -> None:
    name_and_type = 4 + 1 + len("h") + 5
    largest = HEADER_BYTES_MAX - name_and_type
    assert header("x" * largest)
    assert "put large data in the body" in problem_with(headers={"h": "x" * (largest + 1)})


def test_short_strings_count_against_the_header_frame() -> None:
    largest = "x" * (HEADER_BYTES_MAX - 10 - 1 - 200)
    Message(b"", headers={"h": largest}, app_id="a" * 200)
    assert "header frame holds" in problem_with(headers={"h": largest}, app_id="a" * 201)


def test_headers_are_copied_all_the_way_down() -> None:
    inner: dict[str, Any] = {"list": [1]}
    message = Message(b"", headers={"inner": inner})
    inner["list"].append(2)
    inner["new"] = True
    assert message.headers == {"inner": {"list": [1]}}


# --------------------------------------------------------------------------------- as a whole


def test_a_message_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Message(b"").body = b"other"  # type: ignore[misc]


def test_a_message_survives_pickling_and_copying() -> None:
    message = Message(b"body", headers={"a": [1, {"b": None}]}, message_id="id", priority=3)
    assert pickle.loads(pickle.dumps(message)) == message
    assert copy.deepcopy(message) == message


def test_with_message_id_changes_nothing_else() -> None:
    message = Message(b"body", exchange="e", headers={"a": 1})
    named = message.with_message_id("id")
    assert named.message_id == "id"
    assert named == Message(b"body", exchange="e", headers={"a": 1}, message_id="id")
    assert message.message_id is None


EMPTY = Message(b"").size


def test_size_counts_body_and_routing() -> None:
    assert Message(b"12345", exchange="ex", routing_key="key").size - EMPTY == 10


@pytest.mark.parametrize(
    ("properties", "size"),
    [
        ({"exchange": "é"}, 2),
        ({"message_id": "0123456789"}, 10),
        ({"content_type": "text/plain", "app_id": "app", "type": "t"}, 14),
        ({"correlation_id": "c" * 255, "reply_to": "r", "content_encoding": "gzip"}, 260),
        ({"headers": {}}, 4),
        ({"headers": {"é": "x" * 1_000}}, 4 + 1 + 2 + 5 + 1_000),
        ({"headers": {"a": [1, 2], "b": {"c": None}}}, 4 + 2 + 5 + 18 + 2 + 1 + 4 + 2 + 1),
    ],
)
def test_size_counts_what_the_properties_take(properties: dict[str, Any], size: int) -> None:
    assert Message(b"", **properties).size - EMPTY == size


def test_size_is_that_of_the_message_as_it_is_and_no_part_of_what_it_says() -> None:
    message = Message(b"body", headers={"a": "b"})
    named = message.with_message_id("0123456789")
    assert named.size - message.size == 10
    assert pickle.loads(pickle.dumps(named)).size == named.size
    assert EMPTY > 0
    with pytest.raises(TypeError):
        Message(b"", size=1)  # type: ignore[call-arg]


def test_repr_names_the_message_and_shows_neither_body_nor_headers() -> None:
    message = Message(b"secret", exchange="e", routing_key="k", headers={"h": "secret"})
    assert repr(message) == "<Message (no id yet) to 'e' 'k', 6 bytes>"
    assert repr(message.with_message_id("m1")) == "<Message m1 to 'e' 'k', 6 bytes>"


@pytest.mark.parametrize("value", [2**70, Decimal("NaN"), Decimal("9" * 12), "secret\ud800"])
def test_errors_do_not_show_the_values_of_headers(value: object) -> None:
    problem = problem_with(headers={"h": value})
    assert "secret" not in problem
    assert str(value) not in problem


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.__setitem__("n", object()),
        lambda table: table.update(n=1),
        lambda table: table.pop("a"),
        lambda table: table.setdefault("n", 1),
        lambda table: table.clear(),
        lambda table: table.popitem(),
        lambda table: table.__delitem__("a"),
        lambda table: table.__ior__({"n": 1}),
    ],
)
def test_headers_cannot_be_changed(change: Callable[[Any], object]) -> None:
    """A value that AMQP cannot hold would be found by the relay, in a turn with other messages."""
    headers = {"a": {"b": 1}}
    message = Message(b"x", headers=headers)
    for table in (message.headers, (message.headers or {})["a"]):
        with pytest.raises(
            TypeError, match=r"headers of a Message, .* cannot be changed; make another"
        ):
            change(table)
    assert message.headers == headers
    for twin in (pickle.loads(pickle.dumps(message)), copy.deepcopy(message)):
        assert twin == message
        with pytest.raises(TypeError):
            change(twin.headers)
    assert replace(message, headers={**headers, "n": 1}).headers == {**headers, "n": 1}


@pytest.mark.parametrize(
    "change",
    [
        lambda several: several.append(object()),
        lambda several: several.__setitem__(0, object()),
        lambda several: several.__iadd__([1]),
        lambda several: several.extend([1]),
        lambda several: several.sort(),
    ],
)
def test_nor_can_a_list_in_them(change: Callable[[Any], object]) -> None:
    headers = {"CC": ["a", ["b"]]}
    message = Message(b"x", headers=headers)
    for twin in (message, pickle.loads(pickle.dumps(message)), copy.deepcopy(message)):
        table: Any = twin.headers
        for several in (table["CC"], table["CC"][1]):
            with pytest.raises(TypeError, match=r"headers of a Message, .* cannot be changed"):
                change(several)
        assert twin.headers == headers
    assert dataclasses.asdict(message)["headers"] == headers


class Odd(Nowhere):
    """A time zone that works until the message is made."""

    is_broken = False

    def utcoffset(self, _when: datetime | None) -> timedelta:  # type: ignore[override]
        if self.is_broken:
            raise ZeroDivisionError
        return timedelta(hours=2)


class Bytes(bytes):
    def __len__(self) -> int:
        return 1


def test_nothing_of_the_callers_is_asked_later() -> None:
    zone = Odd()
    then = datetime(2030, 1, 1, 2, tzinfo=zone)
    message = Message(b"", timestamp=then, not_before=then, headers={"b": Bytes(b"long")})
    zone.is_broken = True
    assert message.timestamp == message.not_before == datetime(2030, 1, 1, tzinfo=UTC)
    assert message.headers is not None
    assert type(message.headers["b"]) is bytes
    assert (
        message.size
        == Message(
            b"", timestamp=message.timestamp, not_before=message.not_before, headers={"b": b"long"}
        ).size
    )


class Money(Decimal):
    def __str__(self) -> str:
        return f"{self:f} EUR"


class Moment(datetime):
    def isoformat(self, *_: object, **__: object) -> str:
        return "soon"


def test_values_of_subclasses_become_plain_ones() -> None:
    """The store calls their methods much later, which may do anything."""
    at = Moment(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    message = Message(b"", headers={"price": Money("12.50"), "at": at}, timestamp=at, not_before=at)
    assert message.headers == {"price": Decimal("12.50"), "at": at}
    assert message.headers is not None
    assert type(message.headers["price"]) is Decimal
    times = message.headers["at"], message.timestamp, message.not_before
    assert [type(time) for time in times] == [datetime] * 3
    assert str(message.headers["price"]) == "12.50"
