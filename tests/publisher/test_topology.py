"""A topology, declared or checked: all problems at once, and nothing is sent before."""

import gc
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from reliablepub import Credentials, Link, PasswordFile, Publisher, TopologyError, provision
from reliablepub.testing import FakeBroker, NodeOptions, Permissions, faults
from reliablepub.topology import Binding, Exchange, Queue, Topology
from tests.amqp_probe import AmqpProbe, unique
from tests.names import HANGS_UP, half_dead_name
from tests.rabbitmq import RabbitMQNode, free_ports
from tests.waiting import until


def wanted(*, declare: bool = True) -> Topology:
    exchange, queue, audit = unique("exchange"), unique("queue"), unique("audit")
    return Topology(
        exchanges=[Exchange(exchange, "topic"), Exchange(audit, "fanout", internal=True)],
        queues=[Queue(queue, arguments={"x-max-length": 100})],
        bindings=[
            Binding(exchange, to_exchange=audit, routing_key="#"),
            Binding(audit, queue=queue),
        ],
        declare=declare,
    )


def test_what_is_missing_is_made_before_the_first_publish(
    broker: AmqpProbe, tmp_path: Path
) -> None:
    topology = wanted()
    exchange, queue = topology.exchanges[0].name, topology.queues[0].name
    with Publisher(broker.url, outbox=tmp_path / "o.db", topology=topology) as publisher:
        publisher.publish(b"x", exchange=exchange, routing_key="k").result(60)
    assert [body for body, _ in broker.drain(queue, 1)] == [b"x"]
    provision(broker.url, topology)  # it is all there, and may be said again
    checked = Topology(topology.exchanges, topology.queues, topology.bindings, declare=False)
    provision(broker.url, checked)
    assert broker.drain(queue) == [], "a check publishes nothing that arrives"


def test_a_check_reports_everything_at_once_and_makes_nothing(broker: AmqpProbe) -> None:
    other, durable = broker.declare_exchange(kind="fanout"), broker.declare_queue()
    topology = Topology(
        exchanges=[Exchange(other, "topic"), Exchange("missing-1"), Exchange("missing-2")],
        queues=[Queue(durable, durable=False), Queue("missing-3")],
        bindings=[Binding("missing-4", queue="missing-5")],
        declare=False,
    )
    for _ in range(2):
        with pytest.raises(TopologyError) as error:
            provision(broker.url, topology)
        problems = [problem.split(" - ")[0] for problem in error.value.problems]
        assert sorted(problems) == sorted(
            [
                f"exchange '{other}': 406 PRECONDITION_FAILED",
                "exchange 'missing-1': 404 NOT_FOUND",
                "exchange 'missing-2': 404 NOT_FOUND",
                f"queue '{durable}': 406 PRECONDITION_FAILED",
                "queue 'missing-3': 404 NOT_FOUND",
                "exchange 'missing-4': 404 NOT_FOUND",
                "queue 'missing-5': 404 NOT_FOUND",
            ]
        )


def test_while_the_broker_is_not_so_nothing_is_sent_and_nothing_refused(
    broker: AmqpProbe, tmp_path: Path
) -> None:
    queue = unique("queue")
    topology = Topology(queues=[Queue(queue)], declare=False)
    with Publisher(broker.url, outbox=tmp_path / "o.db", topology=topology) as publisher:
        receipt = publisher.publish(b"x", routing_key=queue)
        until(lambda: f"queue '{queue}': 404" in publisher.status.reason)
        assert publisher.status.link is not Link.CONNECTED
        until(lambda: publisher.status.counters.open == 1)
        broker.declare_queue(queue)
        receipt.result(60)


@pytest.mark.parametrize(
    "options",
    [NodeOptions(channel_max=1), NodeOptions(user_channel_max={"guest": 1})],
    ids=["a number for one channel", "a user with one channel"],
)
def test_one_channel_is_enough(options: NodeOptions) -> None:
    there = wanted()
    exchanges, queues = [Exchange("missing-1"), Exchange("missing-2")], [Queue("missing-3")]
    with FakeBroker(options=options) as broker:
        provision(broker.url, there)
        provision(broker.url, replace(there, declare=False))
        with pytest.raises(TopologyError) as error:
            provision(broker.url, Topology(exchanges, queues, declare=False))
    problems = [problem.partition(" - ")[0] for problem in error.value.problems]
    assert problems == [f"{one}: 404 NOT_FOUND" for one in (*exchanges, *queues)]


@pytest.mark.parametrize("fault", [HANGS_UP, faults.StallHandshake(keep=True)])
def test_the_next_address_of_a_name_gets_a_share_of_the_time(fault: faults.Fault) -> None:
    with FakeBroker() as broker, half_dead_name(broker, fault) as url:
        provision(url, wanted(), timeout_s=4)
        provision([f"amqp://127.0.0.1:{free_ports(1)[0]}/", url], wanted(), timeout_s=8)


def test_the_addresses_of_a_name_are_tried_once_each() -> None:
    begun = time.monotonic()
    with FakeBroker() as broker, half_dead_name(broker) as url:
        broker.inject(HANGS_UP)
        with pytest.raises(TopologyError) as error:
            provision(url, wanted())
    assert len(error.value.problems) == 1, "the reason is the same each time"
    assert time.monotonic() - begun < 10


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.rabbit)])
def clerk(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A user who may publish to `allowed` only and configure nothing; both exchanges are there."""
    if request.param == "fake":
        permissions = {"clerk": {"/": Permissions(configure="", write="^allowed$", read="")}}
        options = NodeOptions(users={"guest": "guest", "clerk": "secret"}, permissions=permissions)
        with FakeBroker(options=options) as broker:
            yield broker.url, broker.url_of("clerk", "/")
        return
    node: RabbitMQNode = request.getfixturevalue("rabbitmq_node")
    node.add_user("clerk", "secret")
    node.set_permissions("clerk", configure="", write="^allowed$", read="")
    yield node.url, node.url.replace("guest:guest", "clerk:secret")
    node.delete_user("clerk")


def test_a_missing_permission_is_found_without_publishing(clerk: tuple[str, str]) -> None:
    admin, user = clerk
    exchanges = [Exchange("allowed", "fanout"), Exchange("forbidden", "fanout")]
    queue = unique("queue")
    bindings = [Binding(exchange.name, queue=queue) for exchange in exchanges]
    provision(admin, Topology(exchanges, [Queue(queue)], bindings))
    probe = AmqpProbe(admin)
    with pytest.raises(TopologyError) as error:
        provision(user, Topology(exchanges, declare=False))
    [problem] = error.value.problems
    assert problem.startswith("exchange 'forbidden': 403 ACCESS_REFUSED")
    assert probe.drain(queue) == []
    with pytest.raises(TopologyError, match=r"exchange 'new': 403"):
        provision(user, Topology([Exchange("new")]))
    for exchange in exchanges:
        probe.delete_exchange(exchange.name)
    probe.delete_queue(queue)


@pytest.mark.rabbit
def test_a_permission_for_some_routing_keys_is_enough(
    rabbitmq_node: RabbitMQNode, path: Path
) -> None:
    admin, exchange, queue = rabbitmq_node.url, unique("exchange"), unique("queue")
    topology = Topology([Exchange(exchange, "topic")], [Queue(queue)])
    provision(admin, replace(topology, bindings=(Binding(exchange, queue=queue, routing_key="#"),)))
    rabbitmq_node.add_user("clerk", "secret")
    rabbitmq_node.set_permissions("clerk", configure="", write=".*", read="")
    rabbitmq_node.set_topic_permissions("clerk", exchange, write="^orders[.]")
    user = admin.replace("guest:guest", "clerk:secret")
    try:
        checked = Topology([Exchange(exchange, "topic")], declare=False)
        with Publisher(user, outbox=path, topology=checked) as publisher:
            publisher.publish(b"x", exchange=exchange, routing_key="orders.new").result(30)
    finally:
        rabbitmq_node.delete_user("clerk")
        probe = AmqpProbe(admin)
        probe.delete_exchange(exchange)
        probe.delete_queue(queue)


def test_no_broker_is_a_problem_too() -> None:
    with pytest.raises(TopologyError, match=r"no connection held: .*refused"):
        provision("amqp://127.0.0.1:1", Topology())


def test_every_broker_that_was_not_reached_is_named(fake_broker: FakeBroker) -> None:
    wrong = fake_broker.url.replace(":guest@", ":wrong@")
    with pytest.raises(TopologyError) as caught:
        provision(["amqp://127.0.0.1:1", wrong], Topology())
    away, refused = caught.value.problems
    assert away.startswith("127.0.0.1:1: ")
    assert "the broker refused the credentials" in refused


def test_the_next_broker_is_asked_when_one_does_not_answer(broker: AmqpProbe) -> None:
    queue = broker.declare_queue()
    provision(["amqp://127.0.0.1:1", broker.url], Topology(queues=[Queue(queue)], declare=False))


def test_a_broker_that_says_nothing_leaves_time_for_the_next_one(broker: AmqpProbe) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        urls = [f"amqp://127.0.0.1:{one.getsockname()[1]}/" for one in silent]
        provision([urls[0], broker.url], Topology(queues=[Queue(unique("there"))]), timeout_s=8)
        with pytest.raises(TopologyError, match=r"no connection held: .*no answer in time"):
            provision(urls, Topology(), timeout_s=0.2)
    gc.collect()  # a socket that was not closed is a warning, so a failure


def test_a_provider_gives_the_credentials(fake_broker: FakeBroker) -> None:
    url = fake_broker.url.replace("guest:guest@", "")
    provision(url, Topology([Exchange("e")]), credentials=lambda: Credentials("guest", "guest"))
    expired = fake_broker.issue_token(-1)
    for provider, reason in (
        (lambda: Credentials(expired), "the broker refused the credentials"),
        (PasswordFile("nowhere"), "no credentials: cannot read the password file nowhere: "),
    ):
        with pytest.raises(TopologyError, match=reason):
            provision(url, Topology([Exchange("other")]), credentials=provider)
    with pytest.raises(TopologyError, match="404"):
        provision(fake_broker.url, Topology([Exchange("other")], declare=False))
