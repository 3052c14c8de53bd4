"""What differs for publishers from RabbitMQ 3.10 to 4.3; each test says since which version.

The fake follows 3.10, so these are facts of RabbitMQ alone.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pamqp import commands

from tests.amqp_probe import unique
from tests.facts.raw_client import Properties, RawClient
from tests.rabbitmq import RabbitMQNode

pytestmark = pytest.mark.rabbit

PAGE = Path(__file__).parents[2] / "docs" / "upgrading-rabbitmq.md"
LOCAL = "x-local-random"
QUORUM = {"x-queue-type": "quorum"}
REPLY_TO = "amq.rabbitmq.reply-to"
PATIENCE_S = 60.0
PUBLISHES = 20

DEFAULT_SIZE = """
{ok, [{application, rabbit, Keys}]} = file:consult(code:where_is_file("rabbit.app")),
proplists:get_value(max_message_size, proplists:get_value(env, Keys)).
"""
SYNCS = "[{prim_file, F, 1} || F <- [sync, datasync]]"


@pytest.fixture
def connect(rabbitmq_node: RabbitMQNode) -> Iterator[Callable[[], RawClient]]:
    """Opens connections whose channel 1 is in confirm mode."""
    clients: list[RawClient] = []

    def connect() -> RawClient:
        clients.append(RawClient(rabbitmq_node.url))
        clients[-1].patience(PATIENCE_S)
        return clients[-1].opened()

    yield connect
    for client in clients:
        client.__exit__()


@pytest.fixture
def client(connect: Callable[[], RawClient]) -> RawClient:
    """A connection whose channel 1 is in confirm mode."""
    return connect()


def test_the_default_limit_of_a_message(rabbitmq_node: RabbitMQNode) -> None:
    mebibytes = 16 if rabbitmq_node.version >= (4, 0) else 128
    assert int(rabbitmq_node.eval(DEFAULT_SIZE)) == mebibytes << 20


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_whether_a_confirm_stands_for_an_fsync(
    rabbitmq_node: RabbitMQNode, client: RawClient, kind: str
) -> None:
    name = client.declare(unique(kind), arguments={"x-queue-type": kind})
    client.publish(name)
    client.verdicts(1)  # the first one opens files
    rabbitmq_node.eval(f"[erlang:trace_pattern(F, true, [call_count]) || F <- {SYNCS}].")
    try:
        for tag in range(2, PUBLISHES + 2):
            assert client.publish(name).told() == [f"basic.ack {tag}"]
        counted = rabbitmq_node.eval(
            f"lists:sum([element(2, erlang:trace_info(F, call_count)) || F <- {SYNCS}])."
        )
    finally:
        rabbitmq_node.eval(f"[erlang:trace_pattern(F, false, [call_count]) || F <- {SYNCS}].")
    if kind == "classic" and rabbitmq_node.version >= (4, 0):
        # One or two are the node's own. What is confirmed may be lost with the machine's power.
        assert int(counted) < PUBLISHES / 2
    else:
        assert int(counted) >= PUBLISHES


def consume(client: RawClient, queue: str, channel: int) -> None:
    client.send(commands.Basic.Consume(queue=queue, consumer_tag="me"), channel)


def next_delivery(client: RawClient) -> tuple[int, int]:
    """The channel and the tag of the next delivery, whatever else is heard before it."""
    while True:
        channel, heard = client.hear()
        if isinstance(heard, commands.Basic.Deliver):
            return channel, int(heard.delivery_tag or 0)
        assert heard is not None


def deliveries(client: RawClient, arguments: dict[str, object], give_back: str) -> int:
    """How often a message comes whose consumer gives it back, at most 30: then it is dead."""
    dead = client.declare(unique("dead"))
    to_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    name = client.declare(unique("quorum"), arguments=QUORUM | to_dead | arguments)
    client.publish(name).verdicts(1)
    consume(client, dead, 1)
    for count in range(30):
        number = 2 + count if give_back == "channel.close" else 2
        if number > 2 or not count:
            client.send(commands.Channel.Open(), number)
            consume(client, name, number)
        channel, tag = next_delivery(client)
        if channel == 1:
            return count
        if give_back == "nack":
            client.send(commands.Basic.Nack(tag, requeue=True), channel)
        else:
            client.send(commands.Channel.Close(200, "", 0, 0), channel)
    return 30


@pytest.mark.parametrize("give_back", ["nack", "channel.close"])
def test_the_default_delivery_limit(
    rabbitmq_node: RabbitMQNode, client: RawClient, give_back: str
) -> None:
    """20 since 4.0, without a word to the publisher; what is put back counts no more since 4.3."""
    limits = rabbitmq_node.version >= (4, 0)
    if give_back == "nack" and rabbitmq_node.version >= (4, 3):
        limits = False
    assert deliveries(client, {}, give_back) == (21 if limits else 30)


def test_a_delivery_limit_of_none(rabbitmq_node: RabbitMQNode, client: RawClient) -> None:
    if rabbitmq_node.version < (4, 0):
        pytest.skip("a fact of RabbitMQ 4")
    assert deliveries(client, {"x-delivery-limit": -1}, "channel.close") == 30


def test_a_full_quorum_queue_nacks(client: RawClient) -> None:
    """A bit late, on every version: it tells its publishers after the limit is exceeded."""
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    name = client.declare(unique("quorum"), arguments=QUORUM | arguments)
    taken = 0
    while True:
        client.publish(name)
        _, heard = client.hear()
        if isinstance(heard, commands.Basic.Nack):
            break
        taken += 1
    assert taken >= 2
    assert len(client.drained(name)) == taken


def test_a_mandatory_reply_to_a_requester_that_is_gone(
    rabbitmq_node: RabbitMQNode, client: RawClient, connect: Callable[[], RawClient]
) -> None:
    """Since 4.2 it is confirmed as if it had arrived."""
    method = commands.Basic.Consume(queue=REPLY_TO, consumer_tag="me", no_ack=True)
    client.call(method, commands.Basic.ConsumeOk)
    queue = client.declare(unique("requests"))
    client.publish(queue, properties=Properties(reply_to=REPLY_TO)).verdicts(1)
    client.call(commands.Basic.Get(queue=queue, no_ack=True), commands.Basic.GetOk)
    name = client.hear()[1].properties.reply_to
    client.hear()
    client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)
    server = connect()
    server.publish(name)
    lines = server.told_until("basic.ack")
    if rabbitmq_node.version >= (4, 2):
        assert lines == ["basic.ack 1"]
    else:
        assert lines[0].startswith(f"basic.return 312 NO_ROUTE  {name}")


def test_a_local_random_exchange(rabbitmq_node: RabbitMQNode, client: RawClient) -> None:
    """Since 4.0: it routes to a queue on the node that the publisher uses, or nowhere."""
    if rabbitmq_node.version < (4, 0):
        method = commands.Exchange.Declare(exchange=unique("x"), exchange_type=LOCAL)
        client.send(method)
        (line,) = client.told()
        assert line.startswith(
            f"connection.close 503 COMMAND_INVALID - unknown exchange type '{LOCAL}'"
        )
        return
    root = rabbitmq_node.root
    with (
        RabbitMQNode(root=root) as node,
        RabbitMQNode(root=root, beside=node) as other,
        RawClient(node.url).opened() as here,
        RawClient(other.url).opened() as there,
    ):
        exchange = here.declare_exchange("local", LOCAL)
        here.bind(here.declare("requests", exclusive=True), exchange)
        here.publish("", exchange=exchange)
        assert here.told() == ["basic.ack 1"]
        there.publish("", exchange=exchange)
        returned, *_ = there.told_until("basic.ack")
        assert returned.startswith("basic.return 312 NO_ROUTE local")


def test_a_queue_that_is_neither_durable_nor_exclusive(rabbitmq_node: RabbitMQNode) -> None:
    """Denied by default since 4.3, and permitted again by Debian: 541 ends the whole connection."""
    if rabbitmq_node.version < (4, 3):
        pytest.skip("permitted by default before RabbitMQ 4.3")
    config = "deprecated_features.permit.transient_nonexcl_queues = false\n"
    with (
        RabbitMQNode(root=rabbitmq_node.root, config=config) as node,
        RawClient(node.url).opened() as client,
    ):
        client.patience(PATIENCE_S)
        client.declare(unique("exclusive"), durable=False, exclusive=True)
        client.send(commands.Queue.Declare(queue="transient", durable=False))
        (line,) = client.told()
        assert line.startswith("connection.close 541 INTERNAL_ERROR - ")
        assert "`transient_nonexcl_queues`" in line


def test_the_machine_version_that_a_quorum_queue_applies(
    rabbitmq_node: RabbitMQNode, client: RawClient
) -> None:
    """The expression of the page on upgrades."""
    if rabbitmq_node.version < (4, 0):
        pytest.skip("a fact of RabbitMQ 4")
    expression = re.search(r"```erlang\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert expression
    name = client.declare(unique("quorum"), arguments=QUORUM)
    listed = dict(
        re.findall(r"queue '(.*?)' in vhost '/'\",(\d+)", rabbitmq_node.eval(expression[1]))
    )
    assert int(listed[name]) >= 4
