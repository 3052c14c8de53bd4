"""What the fake decides by itself: when it confirms, who is served first, what it shares.

What it has in common with RabbitMQ is in `tests/facts`, where both are asked.
"""

import struct
from typing import Any

from pamqp import commands

from reliablepub.testing.history import Fate
from reliablepub.testing.node import Node
from tests.broker.sans_io import TRANSIENT, Client, Properties, encode_publish, fates

Queue, Exchange, Basic = commands.Queue, commands.Exchange, commands.Basic


# -------------------------------------------------------------------------------- publishing


def test_a_refused_publish_leaves_those_before_it_undecided(client: Client) -> None:
    client.write(encode_publish() * 2 + encode_publish(exchange="x") + encode_publish())
    client.wait(0.01)
    client.only(commands.Channel.Close)
    assert client.confirms() == []
    assert len(client.node.vhost.queues["q"].ready) == 2
    assert fates(client.node) == [Fate.ACCEPTED, Fate.ACCEPTED, Fate.REFUSED]


def test_a_return_carries_properties_and_body_as_they_came(client: Client) -> None:
    properties = Properties(headers={"attempt": "7"}, message_id="m", delivery_mode=2)
    client.publish("nowhere", b"x" * 300_000, properties=properties)
    (_, _), (_, head), *bodies = client.frames[:-1]
    assert head.properties == properties  # type: ignore[union-attr]
    assert b"".join(one.value for _, one in bodies) == b"x" * 300_000  # type: ignore[union-attr]


def test_unroutable_and_transient_are_confirmed_at_once_persistent_later(client: Client) -> None:
    parts = [
        encode_publish(),
        encode_publish(properties=TRANSIENT),
        encode_publish(),
        encode_publish("nowhere", mandatory=False),
    ]
    assert client.write(b"".join(parts)).confirms() == ["ack 2", "ack 4"]
    assert client.wait(0.01).confirms() == ["ack 3 multiple"]


def test_persistent_in_a_queue_that_is_not_durable_is_confirmed_at_once(client: Client) -> None:
    assert client.send(Queue.Declare(queue="brief")).publish("brief").confirms() == ["ack 1"]


def test_a_graceful_close_leaves_confirms_unsaid(node: Node, client: Client) -> None:
    client.publish()
    client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)
    assert client.wait(0.01).confirms() == []
    assert fates(node) == [Fate.ACCEPTED]


# -------------------------------------------------------------------------------- consuming


def filled(client: Client, count: int) -> None:
    client.write(b"".join(encode_publish(content=b"%d" % i) for i in range(count)))
    client.wait(0.01)
    client.frames.clear()


def tags(client: Client) -> list[int | None]:
    return [delivery.delivery_tag for delivery in client.of(Basic.Deliver)]


def test_a_prefetch_for_the_channel(client: Client) -> None:
    filled(client, 3)
    client.call(Basic.Qos(prefetch_count=1, global_=True), Basic.QosOk)
    client.call(Basic.Consume(queue="q", consumer_tag="c"), Basic.ConsumeOk)
    assert tags(client) == [1]
    client.send(Basic.Reject(delivery_tag=1, requeue=False))
    assert tags(client) == [2]


def test_consumers_take_turns_and_cancel(node: Node, client: Client) -> None:
    other = Client(node).open()
    for one in (client, other):
        one.call(Basic.Consume(queue="q", consumer_tag="c", no_ack=True), Basic.ConsumeOk)
    filled(Client(node).open(), 4)
    client.listen()
    other.listen()
    assert tags(client) == tags(other) == [1, 2]
    client.call(Basic.Cancel("c"), Basic.CancelOk)
    client.call(Basic.Cancel("never there"), Basic.CancelOk)
    filled(other, 1)
    assert not node.vhost.queues["q"].ready


def test_a_lost_consumer_gives_its_messages_back(node: Node, client: Client) -> None:
    filled(client, 3)
    client.call(Basic.Consume(queue="q", consumer_tag="c"), Basic.ConsumeOk)
    client.connection.handle_lost()
    ready = node.vhost.queues["q"].ready
    assert [(entry.publish.body, entry.redelivered) for entry in ready] == [
        (b"0", True),
        (b"1", True),
        (b"2", True),
    ]


# ----------------------------------------------------- manners seen on RabbitMQ 3.10.8


def consume(client: Client, tag: str, **arguments: Any) -> None:
    table = {key.replace("_", "-"): value for key, value in arguments.items()}
    client.send(commands.Basic.Consume(queue="q", consumer_tag=tag, arguments=table))


def test_recover_async_does_not_answer(client: Client) -> None:
    client.publish()
    consume(client, "c")
    client.frames.clear()
    client.write(struct.pack(">BHI", 1, 1, 5) + b"\x00\x3c\x00\x64\x01\xce")
    assert client.names()[0] == "Basic.Deliver"
    client.write(struct.pack(">BHI", 1, 1, 5) + b"\x00\x3c\x00\x64\x00\xce")
    close = client.only(commands.Connection.Close)
    assert (close.reply_code, close.reply_text) == (540, "NOT_IMPLEMENTED - requeue=false")
    assert (close.class_id, close.method_id) == (60, 100)


def test_consumers_of_a_higher_priority_are_served_first(client: Client) -> None:
    consume(client, "low")
    consume(client, "high", x_priority=5)
    for _ in range(2):
        client.publish()
    assert [one.consumer_tag for one in client.of(commands.Basic.Deliver)] == ["high", "high"]


def test_the_last_queue_declared_has_no_need_of_its_name(client: Client) -> None:
    name = client.call(commands.Queue.Declare(), commands.Queue.DeclareOk).queue
    client.call(commands.Queue.Bind(exchange="amq.fanout"), commands.Queue.BindOk)
    client.publish("", exchange="amq.fanout")
    client.frames.clear()
    got = client.call(commands.Basic.Get(no_ack=True), commands.Basic.GetOk)
    assert (got.exchange, got.message_count) == ("amq.fanout", 0)
    assert str(name).startswith("amq.gen-")


def test_a_queue_that_is_deleted_says_so_before_it_cancels(client: Client) -> None:
    consume(client, "c")
    client.frames.clear()
    client.send(commands.Queue.Delete(queue="q"))
    assert client.names() == ["Queue.DeleteOk", "Basic.Cancel"]


def test_if_empty_looks_only_at_what_is_ready(client: Client) -> None:
    for _ in range(2):
        client.publish()
    client.send(commands.Basic.Get(queue="q"))
    client.frames.clear()
    client.send(commands.Basic.Get(queue="q"))
    assert (
        client.call(
            commands.Queue.Delete(queue="q", if_empty=True), commands.Queue.DeleteOk
        ).message_count
        == 0
    )


# ------------------------------------------------------------------------------- memory, time


def test_equal_publishes_share_what_is_equal(client: Client) -> None:
    for content in (bytes(1024), bytes(1024), b"other", bytes(70_000), bytes(70_000)):
        client.publish(content=content, properties=Properties(message_id="a"))
    first, second, other, *_ = (entry.publish for entry in client.node.vhost.queues["q"].ready)
    assert second.body is first.body
    assert second.header is first.header
    assert second.properties is first.properties
    assert other.body == b"other"
    assert other.properties.message_id == "a"
    assert [one.delivery_tag for one in (first, second, other)] == [1, 2, 3]


def test_a_header_that_is_rewritten_is_not_shared(client: Client) -> None:
    hidden = Properties(headers={"BCC": ["q"], "o": 5})
    for routing_key in ("q", "nowhere", "nowhere"):
        client.publish(routing_key, b"", properties=hidden)
    publishes = [entry.publish for entry in client.node.vhost.queues["q"].ready]
    assert [one.properties.headers for one in publishes] == [{"o": 5}] * 3
    client.publish(content=b"", properties=Properties(headers={"o": 5}))
    client.publish(content=b"", properties=hidden)
    assert len(client.node.vhost.queues["q"].ready) == 5


def test_a_persistent_publish_is_confirmed_as_soon_as_all_input_is_processed(
    client: Client,
) -> None:
    client.publish()
    client.publish()
    client.frames.clear()
    assert client.wait(0).only(Basic.Ack).delivery_tag == 2
