"""basic.return and where a message goes when nothing is bound."""

import pytest
from pamqp import commands

from tests.amqp_probe import unique
from tests.facts.conftest import Connect
from tests.facts.raw_client import Properties, RawClient
from tests.facts.site import Site

ROUTED = ["basic.ack 1"]


def returned(exchange: str, key: str) -> list[str]:
    """A return, with the content that was published, and then the ack."""
    return [f"basic.return 312 NO_ROUTE {exchange} {key}", "header 1", "body b'x'", *ROUTED]


def test_a_return_comes_before_its_ack(client: RawClient) -> None:
    assert client.publish("nowhere").told(4) == returned("", "nowhere")


def test_a_return_with_an_empty_body_has_no_body_frame(client: RawClient) -> None:
    client.publish("nowhere", b"")
    assert client.told(3) == ["basic.return 312 NO_ROUTE  nowhere", "header 0", "basic.ack 1"]


def test_a_return_outside_confirm_mode(connect: Connect) -> None:
    client = connect().opened(confirm=False)
    assert client.publish("nowhere").told_now() == returned("", "nowhere")[:-1]


def test_a_return_tells_the_exchange_and_key_it_was_published_with(client: RawClient) -> None:
    exchange = client.declare_exchange(unique("topic"), "topic")
    assert client.publish("a.b", exchange=exchange).told(4) == returned(exchange, "a.b")


def test_an_alternate_exchange_that_routes(client: RawClient, queue: str) -> None:
    alternate = client.declare_exchange(unique("alternate"), "fanout")
    client.bind(queue, alternate)
    first = client.declare_exchange(unique("first"), arguments={"alternate-exchange": alternate})
    assert client.publish("key", exchange=first).told() == ROUTED
    assert client.drained(queue) == [b"x"]


def test_alternate_exchanges_in_a_row(client: RawClient, queue: str) -> None:
    last = client.declare_exchange(unique("last"), "fanout")
    client.bind(queue, last)
    middle = client.declare_exchange(unique("middle"), arguments={"alternate-exchange": last})
    first = client.declare_exchange(unique("first"), arguments={"alternate-exchange": middle})
    assert client.publish("key", exchange=first).told() == ROUTED


def test_alternate_exchanges_in_a_circle(client: RawClient) -> None:
    one, two = unique("one"), unique("two")
    client.declare_exchange(one, arguments={"alternate-exchange": two})
    client.declare_exchange(two, arguments={"alternate-exchange": one})
    assert client.publish("key", exchange=one).told(4) == returned(one, "key")


def test_an_alternate_exchange_without_a_binding(client: RawClient) -> None:
    alternate = client.declare_exchange(unique("alternate"), "fanout")
    first = client.declare_exchange(unique("first"), arguments={"alternate-exchange": alternate})
    assert client.publish("key", exchange=first).told(4) == returned(first, "key")


def test_an_alternate_exchange_that_does_not_exist(client: RawClient) -> None:
    first = client.declare_exchange(unique("first"), arguments={"alternate-exchange": "nowhere"})
    assert client.publish("key", exchange=first).told(4) == returned(first, "key")


def test_the_default_exchange_as_alternate_exchange_routes_nothing(
    client: RawClient, queue: str
) -> None:
    arguments = {"alternate-exchange": ""}
    exchange = client.declare_exchange(unique("exchange"), arguments=arguments)
    client.publish(queue, exchange=exchange)
    assert client.told(4)[0] == f"basic.return 312 NO_ROUTE {exchange} {queue}"


def test_a_binding_between_exchanges(client: RawClient, queue: str) -> None:
    source = client.declare_exchange(unique("source"), "topic")
    target = client.declare_exchange(unique("target"), "fanout")
    bind = commands.Exchange.Bind(destination=target, source=source, routing_key="a.#")
    client.call(bind, commands.Exchange.BindOk)
    client.publish("a.b", exchange=source)
    assert client.told(4) == returned(source, "a.b")  # a dead end
    client.bind(queue, target)
    assert client.publish("a.b", exchange=source).told() == ["basic.ack 2"]
    unbind = commands.Exchange.Unbind(destination=target, source=source, routing_key="a.#")
    client.call(unbind, commands.Exchange.UnbindOk)
    assert client.publish("a.b", exchange=source).told(4)[0] == returned(source, "a.b")[0]


@pytest.mark.parametrize("header", ["CC", "BCC"])
def test_a_copy_that_arrives_is_enough(client: RawClient, queue: str, header: str) -> None:
    assert (
        client.publish("nowhere", properties=Properties(headers={header: [queue]})).told() == ROUTED
    )
    client.send(commands.Basic.Get(queue=queue, no_ack=True)).hear_only(commands.Basic.GetOk)
    assert client.hear()[1].properties.headers == ({"CC": [queue]} if header == "CC" else {})


def test_a_key_and_its_copy_to_one_queue_are_one_message(client: RawClient, queue: str) -> None:
    assert (
        client.publish(queue, properties=Properties(headers={"CC": [queue, queue]})).told()
        == ROUTED
    )
    assert client.drained(queue) == [b"x"]


PATTERNS = [
    ("a.b", "a.b", True),
    ("a.b", "a.c", False),
    ("a.b", "a.b.c", False),
    ("#", "a.b", True),
    ("#", "", True),
    ("*", "a", True),
    ("*", "", False),  # an empty key has no words
    ("", "", True),
    ("*.*", ".", True),
    ("*", "a.b", False),
    ("a.*.c", "a.b.c", True),
    ("a.#.c", "a.c", True),
    ("a.#.c", "a.b.b.c", True),
    ("a.#.c", "a.b", False),
    ("a.#", "a", True),
    ("a.#", "b", False),
    ("a.#.*", "a", False),
    ("a.#.*", "a.b", True),
    ("#.c", "c", True),
    ("#.#", "", True),
    ("*.#", "a", True),
    ("a.*", "a", False),
    ("a..c", "a..c", True),
    ("a.*.c", "a..c", True),
]


@pytest.mark.parametrize(("pattern", "key", "matches"), PATTERNS)
def test_topics(client: RawClient, queue: str, pattern: str, key: str, *, matches: bool) -> None:
    exchange = client.declare_exchange(unique("topic"), "topic")
    client.bind(queue, exchange, pattern)
    client.publish(key, exchange=exchange)
    assert (client.told() == ROUTED) == matches


HEADERS: list[tuple[dict[str, object], dict[str, object], bool]] = [
    ({"a": "1", "b": "2"}, {"a": "1", "b": "2"}, True),
    ({"a": "1", "b": "2"}, {"a": "1"}, False),
    ({"x-match": "any", "a": "1", "b": "2"}, {"a": "1"}, True),
    ({"x-match": "any", "a": "1"}, {"a": "2"}, False),
    ({"a": None}, {"a": "anything"}, True),
    ({"a": None}, {}, False),
    ({"x-extra": "1"}, {}, True),
    ({"x-match": "all-with-x", "x-extra": "1"}, {}, False),
    ({"x-match": "any-with-x", "x-extra": "1"}, {"x-extra": "1"}, True),
    ({}, {"a": "1"}, True),
    ({"x-match": "any"}, {"a": "1"}, False),
    ({"a": 1}, {"a": 1}, True),
    ({"a": 1}, {"a": True}, False),
]


@pytest.mark.parametrize(("wanted", "headers", "matches"), HEADERS)
def test_headers(
    client: RawClient,
    queue: str,
    wanted: dict[str, object],
    headers: dict[str, object],
    *,
    matches: bool,
) -> None:
    assert is_routed(client, queue, wanted, headers) == matches


def test_a_number_of_another_type_in_headers(site: Site, client: RawClient, queue: str) -> None:
    assert is_routed(client, queue, {"a": 1}, {"a": 1.0}) == (site.version < (4, 0))


def is_routed(
    client: RawClient, queue: str, wanted: dict[str, object], headers: dict[str, object]
) -> bool:
    """Whether a headers exchange takes these headers for the queue that wants those."""
    exchange = client.declare_exchange(unique("headers"), "headers")
    method = commands.Queue.Bind(queue=queue, exchange=exchange, arguments=wanted)  # type: ignore[arg-type]
    client.call(method, commands.Queue.BindOk)
    client.publish("", exchange=exchange, properties=Properties(headers=headers))  # type: ignore[arg-type]
    return client.told() == ROUTED
