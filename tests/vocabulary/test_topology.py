"""What a topology may say, in code and in TOML."""

from collections.abc import Callable
from typing import Any

import pytest

from reliablepub.errors import ConfigurationError
from reliablepub.topology import Binding, Exchange, Queue, Topology

FILE = """
declare = false

[[exchange]]
name = "orders"
type = "topic"

[[exchange]]
name = "audit"
internal = true

[[queue]]
name = "billing"
arguments = { x-queue-type = "quorum", x-max-length = 5 }

[[binding]]
exchange = "orders"
queue = "billing"
routing_key = "order.*"

[[binding]]
exchange = "orders"
to_exchange = "audit"
"""


def test_a_file_says_what_code_says() -> None:
    assert Topology.from_toml(FILE) == Topology(
        exchanges=(Exchange("orders", "topic"), Exchange("audit", internal=True)),
        queues=(Queue("billing", arguments={"x-queue-type": "quorum", "x-max-length": 5}),),
        bindings=(
            Binding("orders", queue="billing", routing_key="order.*"),
            Binding("orders", to_exchange="audit"),
        ),
        declare=False,
    )


def test_an_empty_file_wants_nothing() -> None:
    assert Topology.from_toml("") == Topology()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[exchange]", "is not valid TOML"),
        (f"a = {'[' * 3_000}", "is not valid TOML"),
        (f"declare = {'1' * 5_000}", "is not valid TOML: Exceeds the limit"),
        ("declare = 1", "declare is 1"),
        ("[[exchanges]]\nname = 'x'", "has exchanges; known are"),
        ("exchange = 'x'", r"write \[\[exchange\]\]"),
        ("[exchange]\nname = 'x'", r"write \[\[exchange\]\]"),
        ("[[exchange]]\ntype = 'topic'", "exchange: a value is missing.*name"),
        ("[[exchange]]\nname = 'x'\nkind = 'topic'", "has 'kind'; known are name, type"),
        ("[[exchange]]\nname = 7", "name is 7, not a str"),
        ("[[queue]]\nname = 'x'\ndurable = 'yes'", "durable is 'yes', not a bool"),
        ("[[queue]]\nname = 'x'\narguments = 'y'", "arguments is 'y', not a dict"),
        ("[[binding]]\nexchange = 'x'", "either a queue or to_exchange"),
    ],
)
def test_a_mistake_in_a_file_is_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Topology.from_toml(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Exchange(""),
        lambda: Exchange("x" * 256),
        lambda: Exchange("\udcff"),
        lambda: Queue(""),
        lambda: Queue("é" * 128),
        lambda: Binding("", queue="q"),
        lambda: Binding("x", queue="q", to_exchange="y"),
        lambda: Binding("x", queue="q", routing_key="k" * 256),
    ],
)
def test_what_amqp_cannot_carry_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_each_part_names_itself() -> None:
    assert str(Exchange("x")) == "exchange 'x'"
    assert str(Queue("q")) == "queue 'q'"
    assert str(Binding("x", queue="q", routing_key="k")) == (
        "binding of queue 'q' to exchange 'x' with key 'k'"
    )
    assert str(Binding("x", to_exchange="y")) == (
        "binding of exchange 'y' to exchange 'x' with key ''"
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"x-message-ttl": 60000.0}, r"arguments\['x-message-ttl'\]: is 60000.0; .* no fractions"),
        ({"x": [1, {"y": 0.5}]}, r"arguments\['x'\]\[1\]\['y'\]: is 0.5"),
        ({"x": 2**70}, "does not fit 64 bits"),
        ({"x": {1}}, "is set, which AMQP tables cannot hold"),
        ({"x": "\ud800"}, "cannot be encoded as UTF-8"),
        ({7: "x"}, "has the name 7, which is not a str"),
    ],
)
def test_arguments_that_cannot_be_sent_are_refused(
    arguments: dict[str, object], problem: str
) -> None:
    for make in (Exchange, Queue):
        with pytest.raises(ConfigurationError, match=problem):
            make("n", arguments=arguments)
    with pytest.raises(ConfigurationError, match=problem):
        Binding("x", queue="q", arguments=arguments)


def test_arguments_are_kept_as_they_were_given() -> None:
    arguments: dict[str, object] = {"x-max-length": 5, "x": (1, 2)}
    queue = Queue("q", arguments=arguments)
    arguments.clear()
    assert queue.arguments == {"x-max-length": 5, "x": [1, 2]}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"declare": "false"}, "declare is 'false'; it must be true or false"),
        ({"declare": None}, "declare is None"),
        ({"queues": None}, r"queues is None, not a list of Queue\(\.\.\.\)"),
        ({"queues": Queue("q")}, "not a list of Queue"),
    ],
)
def test_values_of_another_type_are_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Topology(**wrong)
