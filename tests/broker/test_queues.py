"""Dead letters, priorities, TTLs and expiry of queues, as seen on RabbitMQ 3.10.8."""

from datetime import UTC, datetime
from typing import Any

from pamqp import commands, header

from reliablepub.testing.content_header import rewritten
from reliablepub.testing.node import Node
from tests.broker.sans_io import PERSISTENT, Client, Properties

DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q"}


def declare(client: Client, name: str, **arguments: Any) -> None:
    table = {key.replace("_", "-"): value for key, value in arguments.items()}
    client.call(
        commands.Queue.Declare(queue=name, durable=True, arguments=table), commands.Queue.DeclareOk
    )


def bodies(node: Node, name: str = "q") -> list[bytes]:
    return [entry.publish.body for entry in node.vhost.queues[name].ready]


def dead(node: Node, name: str = "q") -> dict[str, Any]:
    """The headers of the one message in a queue; the time in them is checked and taken away."""
    (entry,) = node.vhost.queues[name].ready
    headers = dict(entry.publish.properties.headers or {})
    deaths = headers["x-death"]
    assert isinstance(deaths, list)
    for death in deaths:
        assert isinstance(death, dict)
        when = death.pop("time")
        assert isinstance(when, datetime)
        assert abs((datetime.now(UTC) - when).total_seconds()) < 60
    return headers


def get(client: Client, name: str) -> int:
    tag = client.call(commands.Basic.Get(queue=name), commands.Basic.GetOk).delivery_tag
    assert tag is not None
    client.frames.clear()
    return tag


# -------------------------------------------------------------------------------- dead letters


def test_a_rejected_message_is_dead_lettered(node: Node, client: Client) -> None:
    declare(client, "work", **DEAD)
    headers: dict[str, Any] = {"a": 1, "CC": ["other"], "BCC": ["hidden"]}
    properties = Properties(delivery_mode=2, headers=headers, expiration="60000", priority=3)
    client.publish("work", b"1", properties=properties)
    client.send(commands.Basic.Reject(get(client, "work"), requeue=False))
    death = {
        "count": 1,
        "reason": "rejected",
        "queue": "work",
        "exchange": "",
        "routing-keys": ["work", "other"],
        "original-expiration": "60000",
    }
    assert dead(node) == {
        "a": 1,  # CC went with the routing key that was replaced, BCC never came
        "x-death": [death],
        "x-first-death-exchange": "",
        "x-first-death-queue": "work",
        "x-first-death-reason": "rejected",
    }
    (entry,) = node.vhost.queues["q"].ready
    assert entry.publish.routing_key == "q"
    assert entry.publish.properties.expiration is None
    assert entry.publish.properties.priority == 3


def test_without_a_key_of_its_own_a_dead_letter_keeps_its_keys(node: Node, client: Client) -> None:
    declare(client, "work", x_dead_letter_exchange="amq.direct")
    client.call(
        commands.Queue.Bind(queue="q", exchange="amq.direct", routing_key="work"),
        commands.Queue.BindOk,
    )
    client.publish("work", properties=Properties(headers={"CC": ["other"]}))
    client.send(commands.Basic.Nack(get(client, "work"), requeue=False))
    assert dead(node)["CC"] == ["other"]
    assert node.vhost.queues["q"].ready[0].publish.exchange == "amq.direct"


def test_deaths_are_counted_by_queue_and_reason(node: Node, client: Client) -> None:
    declare(client, "a", x_dead_letter_exchange="", x_dead_letter_routing_key="b")
    declare(client, "b", x_dead_letter_exchange="", x_dead_letter_routing_key="a")
    client.publish("a")
    for name in ("a", "b", "a"):
        client.send(commands.Basic.Reject(get(client, name), requeue=False))
    deaths = dead(node, "b")["x-death"]
    assert [(one["queue"], one["count"]) for one in deaths] == [("a", 2), ("b", 1)]


def test_a_cycle_of_expiry_is_broken(node: Node, client: Client) -> None:
    declare(client, "loop", x_message_ttl=50, x_dead_letter_exchange="")
    client.publish("loop")
    client.wait(0.05)
    assert not bodies(node, "loop")


def test_what_is_refused_is_dead_lettered_when_told_so(node: Node, client: Client) -> None:
    declare(client, "work", x_max_length=1, x_overflow="reject-publish-dlx", **DEAD)
    client.publish("work", b"1")
    client.wait(0.01)
    client.frames.clear()
    assert client.publish("work", b"2").confirms() == ["nack 2 multiple"]
    assert bodies(node, "work") == [b"1"]
    assert bodies(node) == [b"2"]


def test_a_dead_letter_exchange_that_does_not_exist(node: Node, client: Client) -> None:
    declare(client, "work", x_max_length=1, x_dead_letter_exchange="nowhere")
    client.publish("work", b"1")
    client.publish("work", b"2")
    assert bodies(node, "work") == [b"2"]


def test_dead_letters_survive_a_crash_once_written(node: Node, client: Client) -> None:
    declare(client, "work", x_max_length=1, **DEAD)
    client.publish("work", b"1", properties=PERSISTENT)
    client.publish("work", b"2", properties=PERSISTENT)
    client.wait(0.01)
    node.restart(keep_unwritten=False)
    assert bodies(node) == [b"1"]


# -------------------------------------------------------------------------------- headers


def test_a_return_has_no_bcc_either(client: Client) -> None:
    client.publish("nowhere", properties=Properties(headers={"BCC": ["nowhere"], "o": 5}))
    (content,) = [heard for _, heard in client.frames if isinstance(heard, header.ContentHeader)]
    assert content.properties.headers == {"o": 5}


def test_other_headers_keep_their_bytes() -> None:
    table = b"\x01as\x00\x07" + b"\x01bl" + bytes(7) + b"\x05" + b"\x01cx\x00\x00\x00\x01\xff"
    start = b"\x00\x3c\x00\x00" + bytes(8)
    payload = start + b"\x21\x00" + len(table).to_bytes(4, "big") + table + b"\x0230"
    kept = b"\x01as\x00\x07" + b"\x01cx\x00\x00\x00\x01\xff"
    assert rewritten(payload) == payload
    assert rewritten(payload, drop=("b",), keep_expiration=False) == (
        start + b"\x20\x00" + len(kept).to_bytes(4, "big") + kept
    )


def test_headers_where_there_were_none() -> None:
    start = b"\x00\x3c\x00\x00" + bytes(8)
    added = b"\x01bS\x00\x00\x00\x01x"
    assert rewritten(start + b"\x10\x00\x02", add={"b": "x"}) == (
        start + b"\x30\x00" + len(added).to_bytes(4, "big") + added + b"\x02"
    )


# -------------------------------------------------------------------------------- order and time


def test_a_full_queue_drops_its_head_whatever_the_priority(node: Node, client: Client) -> None:
    declare(client, "p", x_max_priority=5, x_max_length=2)
    for priority in (1, 3, 2):
        client.publish("p", b"%d" % priority, properties=Properties(priority=priority))
    assert bodies(node, "p") == [b"2", b"1"]


def test_a_requeued_message_keeps_its_place_among_its_like(node: Node, client: Client) -> None:
    declare(client, "p", x_max_priority=5)
    for body in (b"low", b"low 2"):
        client.publish("p", body, properties=Properties(priority=1))
    tag = get(client, "p")
    client.publish("p", b"high", properties=Properties(priority=4))
    client.send(commands.Basic.Reject(tag, requeue=True))
    assert bodies(node, "p") == [b"high", b"low", b"low 2"]


def test_a_ttl_of_zero_is_for_who_waits(node: Node, client: Client) -> None:
    declare(client, "now", x_message_ttl=0)
    client.publish("now")
    client.wait(0)
    assert not bodies(node, "now")
    client.send(commands.Basic.Consume(queue="now", consumer_tag="c"))
    assert client.publish("now").only(commands.Basic.Deliver).consumer_tag == "c"


def test_an_unused_queue_expires(node: Node, client: Client) -> None:
    declare(client, "brief", x_expires=100)
    for _ in range(4):
        client.wait(0.09)
        client.send(commands.Basic.Get(queue="brief"))
    declare(client, "brief", x_expires=100)
    client.wait(0.09)
    assert "brief" in node.vhost.queues
    client.wait(0.02)
    assert "brief" not in node.vhost.queues


def test_a_queue_with_a_consumer_does_not_expire(node: Node, client: Client) -> None:
    declare(client, "brief", x_expires=100)
    client.send(commands.Basic.Consume(queue="brief", consumer_tag="c"))
    client.wait(1.0)
    client.send(commands.Basic.Cancel("c"))
    client.wait(0.05)
    assert "brief" in node.vhost.queues
    client.wait(0.06)
    assert "brief" not in node.vhost.queues


def test_a_durable_queue_expires_after_a_restart_too(node: Node, client: Client) -> None:
    declare(client, "brief", x_expires=100)
    node.restart(keep_unwritten=False)
    node.now += 0.2
    node.handle_timeout()
    assert "brief" not in node.vhost.queues


# -------------------------------------------------------------------------------- arguments


def test_a_dead_letter_exchange_is_a_name(client: Client) -> None:
    method = commands.Queue.Declare(queue="bad", arguments={"x-dead-letter-exchange": True})
    assert client.call(method, commands.Channel.Close).reply_text == (
        "PRECONDITION_FAILED - invalid type 'bool' for arg 'x-dead-letter-exchange' "
        "in queue 'bad' in vhost '/'"
    )


def test_one_consumer_at_a_time(client: Client) -> None:
    declare(client, "single", x_single_active_consumer=True)
    for tag in ("first", "second"):
        client.send(commands.Basic.Consume(queue="single", consumer_tag=tag))
    for _ in range(2):
        client.publish("single")
    assert [one.consumer_tag for one in client.of(commands.Basic.Deliver)] == ["first"] * 2
    client.send(commands.Basic.Cancel("first"))
    assert client.publish("single").only(commands.Basic.Deliver).consumer_tag == "second"


def test_the_next_consumer_gets_what_the_active_one_could_not_take(client: Client) -> None:
    declare(client, "single", x_single_active_consumer=True)
    client.send(commands.Basic.Qos(prefetch_count=1))
    for tag in ("first", "second"):
        client.send(commands.Basic.Consume(queue="single", consumer_tag=tag))
    for _ in range(2):
        client.publish("single")
    assert client.only(commands.Basic.Deliver).consumer_tag == "first"
    client.send(commands.Basic.Cancel("first"))
    assert client.only(commands.Basic.Deliver).consumer_tag == "second"
