"""What a channel refuses, and in which words; consuming; what is confirmed when."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest
from pamqp import body, commands, frame, header

from reliablepub.testing.history import Fate
from reliablepub.testing.options import NodeOptions
from tests.broker.sans_io import TRANSIENT, Client, Properties, encode_publish, node_with_queue

if TYPE_CHECKING:
    from pamqp.base import Frame

    from reliablepub.testing.node import Node

Queue, Exchange, Basic = commands.Queue, commands.Exchange, commands.Basic


def fates(node: Node) -> list[Fate]:
    return [publish.fate for publish in node.history.snapshot()]


# -------------------------------------------------------------------------------- publishing


@pytest.mark.parametrize(
    ("exchange", "properties", "code", "text"),
    [
        ("x", Properties(), 404, "NOT_FOUND - no exchange 'x' in vhost '/'"),
        (
            "inside",
            Properties(),
            403,
            "ACCESS_REFUSED - cannot publish to internal exchange 'inside' in vhost '/'",
        ),
        (
            "",
            Properties(user_id="bob"),
            406,
            (
                "PRECONDITION_FAILED - user_id property set to 'bob' "
                "but authenticated user was 'guest'"
            ),
        ),
        *(
            (
                "",
                Properties(expiration=text),
                406,
                f"PRECONDITION_FAILED - invalid expiration '{text}': {reason}",
            )
            for text, reason in [
                ("soon", "no_integer"),
                ("10s", '{leftover_string,"s"}'),
                ("-1", "{value_negative,-1}"),
                ("315360000001", "{value_too_large,315360000001}"),
            ]
        ),
        (
            "",
            Properties(headers={"CC": "not a list"}),
            406,
            'PRECONDITION_FAILED - invalid message: {unacceptable_type_in_header,"CC",longstr}',
        ),
    ],
)
def test_a_refused_publish_closes_the_channel(
    client: Client, exchange: str, properties: Properties, code: int, text: str
) -> None:
    node = client.node
    client.send(Exchange.Declare(exchange="inside", internal=True))
    client.frames.clear()
    good, bad = encode_publish(), encode_publish(exchange=exchange, properties=properties)
    client.write(good + good + bad + good)
    client.wait(0.01)
    close = client.only(commands.Channel.Close)
    assert (close.reply_code, close.reply_text) == (code, text)
    assert (close.class_id, close.method_id) == (60, 40)
    assert client.confirms() == []  # the two before it are in the queue, and undecided
    assert len(node.vhost.queues["q"].ready) == 2
    assert fates(node) == [Fate.ACCEPTED, Fate.ACCEPTED, Fate.REFUSED]


def test_after_close_ok_the_channel_opens_again_and_tags_restart(client: Client) -> None:
    client.publish()
    client.publish(exchange="nope")
    client.only(commands.Channel.Close)
    client.send(commands.Channel.CloseOk())
    client.send(commands.Channel.Open())
    client.send(commands.Confirm.Select())
    client.publish(properties=TRANSIENT)
    assert client.confirms() == ["ack 1"]


def test_a_publish_behind_close_ok_is_a_hard_error(client: Client) -> None:
    client.publish(exchange="nope")
    client.send(commands.Channel.CloseOk())
    client.publish()
    assert client.only(commands.Connection.Close).reply_code == 504


def test_both_sides_close_the_channel_at_once(client: Client) -> None:
    client.publish(exchange="nope")
    client.send(commands.Channel.Close(200, "", 0, 0))
    client.only(commands.Channel.CloseOk)
    client.send(commands.Channel.CloseOk())
    client.call(commands.Channel.Open(), commands.Channel.OpenOk)


def test_a_body_that_is_too_large() -> None:
    client = Client(node_with_queue(NodeOptions(max_message_size=10))).open()
    client.publish(content=b"x" * 10)
    client.publish(content=b"x" * 11)
    assert client.only(commands.Channel.Close).reply_text == (
        "PRECONDITION_FAILED - message size 11 is larger than configured max size 10"
    )


def test_a_body_longer_than_declared_stalls_its_channel_silently(node: Node) -> None:
    client = Client(node).open(channels=2)
    client.send(Basic.Publish(routing_key="q"))
    client.write(frame.marshal(header.ContentHeader(0, 1), 1))
    for _ in range(3):
        client.write(frame.marshal(body.ContentBody(b"more than one"), 1))
    assert client.names() == []
    client.publish(properties=TRANSIENT, channel=2)
    assert client.confirms() == ["ack 1"]
    client.publish()
    assert client.only(commands.Connection.Close).reply_text == (
        "UNEXPECTED_FRAME - expected content body, got non content body frame instead"
    )


def test_confirm_and_tx_exclude_each_other(node: Node) -> None:
    client = Client(node).open(channels=2, confirm=False)
    client.call(commands.Confirm.Select(), commands.Confirm.SelectOk)
    client.call(commands.Confirm.Select(), commands.Confirm.SelectOk)
    close = client.call(commands.Tx.Select(), commands.Channel.Close)
    assert close.reply_text == "PRECONDITION_FAILED - cannot switch from confirm to tx mode"
    client.call(commands.Tx.Select(), commands.Tx.SelectOk, 2)
    close = client.call(commands.Confirm.Select(), commands.Channel.Close, 2)
    assert close.reply_text == "PRECONDITION_FAILED - cannot switch from tx to confirm mode"


def test_a_second_confirm_select_does_not_reset_the_tags(client: Client) -> None:
    client.publish(properties=TRANSIENT)
    client.send(commands.Confirm.Select())
    client.publish(properties=TRANSIENT)
    assert client.confirms() == ["ack 1", "ack 2"]


def test_publishes_before_confirm_select_are_not_counted(node: Node) -> None:
    client = Client(node).open(confirm=False)
    client.publish(properties=TRANSIENT)
    client.send(commands.Confirm.Select())
    client.publish(properties=TRANSIENT)
    assert client.confirms() == ["ack 1"]


def test_a_return_comes_before_its_ack_with_the_original_exchange(client: Client) -> None:
    client.send(Exchange.Declare(exchange="x", exchange_type="fanout"))
    client.frames.clear()
    client.publish("nowhere", exchange="x")
    assert client.names() == ["Basic.Return", "ContentHeader", "ContentBody", "Basic.Ack"]
    returned = client.only(Basic.Return)
    assert (returned.reply_code, returned.reply_text) == (312, "NO_ROUTE")
    assert (returned.exchange, returned.routing_key) == ("x", "nowhere")


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
    client.write(b"".join(parts))
    assert client.confirms() == ["ack 2", "ack 4"]
    client.wait(0.01)
    assert client.confirms() == ["ack 3 multiple"]


def test_persistent_in_a_queue_that_is_not_durable_is_confirmed_at_once(client: Client) -> None:
    client.send(Queue.Declare(queue="brief"))
    client.publish("brief")
    assert client.confirms() == ["ack 1"]


def test_one_queue_that_rejects_makes_it_a_nack(node: Node, client: Client) -> None:
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    client.send(Queue.Declare(queue="full", durable=True, arguments=arguments))  # type: ignore[arg-type]
    for queue in ("q", "full"):
        client.send(Queue.Bind(queue=queue, exchange="amq.fanout"))
    client.frames.clear()
    client.write(encode_publish(exchange="amq.fanout") * 2)
    client.wait(0.01)
    assert client.confirms() == ["nack 2", "ack 1"]
    assert [len(node.vhost.queues[name].ready) for name in ("q", "full")] == [2, 1]
    assert fates(node) == [Fate.ACCEPTED, Fate.NACKED]


def test_a_queue_deleted_while_messages_are_outstanding_acks(client: Client) -> None:
    client.publish()
    client.call(Queue.Delete(queue="q"), Queue.DeleteOk)
    client.wait(0.01)
    assert client.confirms() == ["ack 1"]


def test_a_graceful_close_leaves_confirms_unsaid(node: Node, client: Client) -> None:
    client.publish()
    client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)
    client.wait(0.01)
    assert client.confirms() == []
    assert fates(node) == [Fate.ACCEPTED]


# -------------------------------------------------------------------------------- declaring

ARGUMENTS: dict[str, object] = {"x-max-length": 5}


@pytest.mark.parametrize(
    ("method", "code", "text"),
    [
        (Queue.Declare(queue="no", passive=True), 404, "no queue 'no' in vhost '/'"),
        (
            Queue.Declare(queue="q"),
            406,
            (
                "inequivalent arg 'durable' for queue 'q' in vhost '/': "
                "received 'false' but current is 'true'"
            ),
        ),
        (
            Queue.Declare(queue="q", durable=True, arguments={"x-max-length": 5}),
            406,
            (
                "inequivalent arg 'x-max-length' for queue 'q' in vhost '/': "
                "received the value '5' of type 'byte' but current is none"
            ),
        ),
        (
            Queue.Declare(queue="new", arguments={"x-max-length": -1}),
            406,
            "invalid arg 'x-max-length' for queue 'new' in vhost '/': {value_negative,-1}",
        ),
        (
            Queue.Declare(queue="new", arguments={"x-max-length": "many"}),
            406,
            (
                "invalid arg 'x-max-length' for queue 'new' in vhost '/': "
                '"expected integer, got longstr"'
            ),
        ),
        (Queue.Declare(passive=True), 404, "no queue '' in vhost '/'"),
        (
            Exchange.Declare(exchange=""),
            403,
            "operation not permitted on the default exchange",
        ),
        (
            Exchange.Delete(exchange="amq.topic"),
            403,
            "deletion of system exchange 'amq.topic' in vhost '/' not allowed",
        ),
        (
            Queue.Declare(queue="amq.mine"),
            403,
            "queue name 'amq.mine' contains reserved prefix 'amq.*'",
        ),
        (Queue.Bind(queue="q", exchange="no"), 404, "no exchange 'no' in vhost '/'"),
        (Queue.Bind(queue="no", exchange="amq.topic"), 404, "no queue 'no' in vhost '/'"),
        (Queue.Bind(queue="q"), 403, "operation not permitted on the default exchange"),
        (Queue.Purge(queue="no"), 404, "no queue 'no' in vhost '/'"),
        (Exchange.Declare(exchange="no", passive=True), 404, "no exchange 'no' in vhost '/'"),
        (
            Exchange.Declare(exchange="amq.topic", exchange_type="fanout", durable=True),
            406,
            (
                "inequivalent arg 'type' for exchange 'amq.topic' in vhost '/': "
                "received 'fanout' but current is 'topic'"
            ),
        ),
        (
            Exchange.Declare(exchange="amq.mine"),
            403,
            "exchange name 'amq.mine' contains reserved prefix 'amq.*'",
        ),
        (Exchange.Delete(exchange=""), 403, "operation not permitted on the default exchange"),
        (Basic.Get(queue="no"), 404, "no queue 'no' in vhost '/'"),
        (Basic.Ack(delivery_tag=9), 406, "unknown delivery tag 9"),
        (Basic.Nack(delivery_tag=9, multiple=True), 406, "unknown delivery tag 9"),
        (commands.Tx.Commit(), 406, "channel is not transactional"),
    ],
)
def test_soft_errors_close_the_channel(client: Client, method: Frame, code: int, text: str) -> None:
    close = client.call(method, commands.Channel.Close)
    assert close.reply_code == code
    assert str(close.reply_text).split(" - ", 1)[1] == text
    assert (close.class_id, close.method_id) == (method.index >> 16, method.index & 0xFFFF)


def test_an_unknown_exchange_type_is_a_hard_error(client: Client) -> None:
    client.send(Exchange.Declare(exchange="x", exchange_type="magic"))
    close = client.only(commands.Connection.Close)
    assert (close.reply_code, close.reply_text) == (
        503,
        "COMMAND_INVALID - unknown exchange type 'magic'",
    )


def test_names_by_the_server_and_the_last_queue(node: Node, client: Client) -> None:
    declared = client.call(Queue.Declare(), Queue.DeclareOk)
    name = str(declared.queue)
    assert name.startswith("amq.gen-")
    client.send(Queue.Bind(exchange="amq.direct"))
    client.publish(name, exchange="amq.direct", properties=TRANSIENT)
    assert len(node.vhost.queues[name].ready) == 1


def test_exclusive_queues_belong_to_their_connection(node: Node, client: Client) -> None:
    client.call(Queue.Declare(queue="mine", exclusive=True), Queue.DeclareOk)
    other = Client(node).open()
    close = other.call(Queue.Declare(queue="mine", passive=True), commands.Channel.Close)
    assert close.reply_code == 405
    client.connection.handle_lost()
    assert "mine" not in node.vhost.queues


def test_if_unused_and_if_empty(client: Client) -> None:
    client.publish(properties=TRANSIENT)
    client.confirms()
    close = client.call(Queue.Delete(queue="q", if_empty=True), commands.Channel.Close)
    assert close.reply_text == "PRECONDITION_FAILED - queue 'q' in vhost '/' not empty"
    client.send(commands.Channel.CloseOk())
    client.call(commands.Channel.Open(), commands.Channel.OpenOk)
    client.call(Basic.Consume(queue="q"), Basic.ConsumeOk)
    close = client.call(Queue.Delete(queue="q", if_unused=True), commands.Channel.Close)
    assert close.reply_text == "PRECONDITION_FAILED - queue 'q' in vhost '/' in use"


def test_delete_and_purge_count_and_forgive(client: Client) -> None:
    client.write(encode_publish() * 3)
    assert client.call(Queue.Purge(queue="q"), Queue.PurgeOk).message_count == 3
    client.write(encode_publish() * 2)
    assert client.call(Queue.Delete(queue="q"), Queue.DeleteOk).message_count == 2
    assert client.call(Queue.Delete(queue="q"), Queue.DeleteOk).message_count == 0
    client.call(Exchange.Delete(exchange="never"), Exchange.DeleteOk)
    client.call(Queue.Unbind(queue="q", exchange="amq.topic"), Queue.UnbindOk)
    client.call(Queue.Unbind(queue="never", exchange="never"), Queue.UnbindOk)


# -------------------------------------------------------------------------------- consuming


def filled(client: Client, count: int) -> None:
    client.write(b"".join(encode_publish(content=b"%d" % i) for i in range(count)))
    client.wait(0.01)
    client.frames.clear()


def tags(client: Client) -> list[int | None]:
    return [delivery.delivery_tag for delivery in client.of(Basic.Deliver)]


def test_get_ack_and_empty(client: Client) -> None:
    filled(client, 2)
    got = client.call(Basic.Get(queue="q"), Basic.GetOk)
    assert (got.delivery_tag, got.message_count, got.redelivered) == (1, 1, False)
    client.send(Basic.Nack(delivery_tag=1))
    got = client.call(Basic.Get(queue="q"), Basic.GetOk)
    assert (got.delivery_tag, got.message_count, got.redelivered) == (2, 1, True)
    client.send(Basic.Ack(delivery_tag=2))
    client.call(Basic.Get(queue="q", no_ack=True), Basic.GetOk)
    client.call(Basic.Get(queue="q"), Basic.GetEmpty)


def test_prefetch_and_multiple_ack(client: Client) -> None:
    filled(client, 5)
    client.call(Basic.Qos(prefetch_count=2), Basic.QosOk)
    client.call(Basic.Consume(queue="q", consumer_tag="c"), Basic.ConsumeOk)
    assert tags(client) == [1, 2]
    client.send(Basic.Ack(delivery_tag=2, multiple=True))
    assert tags(client) == [3, 4]
    client.send(Basic.Ack(delivery_tag=0, multiple=True))
    assert tags(client) == [5]


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


def test_a_deleted_queue_cancels_its_consumers(client: Client) -> None:
    client.call(Basic.Consume(queue="q", consumer_tag="c"), Basic.ConsumeOk)
    client.send(Queue.Delete(queue="q"))
    assert client.only(Basic.Cancel).consumer_tag == "c"


def test_an_auto_delete_queue_goes_with_its_last_consumer(node: Node, client: Client) -> None:
    client.send(Queue.Declare(queue="brief", auto_delete=True))
    client.call(Basic.Consume(queue="brief", consumer_tag="c"), Basic.ConsumeOk)
    client.send(Basic.Cancel("c"))
    assert "brief" not in node.vhost.queues


def test_a_consumer_tag_twice_and_an_exclusive_consumer(node: Node, client: Client) -> None:
    client.send(Basic.Consume(queue="q", consumer_tag="c", exclusive=True))
    other = Client(node).open()
    close = other.call(Basic.Consume(queue="q"), commands.Channel.Close)
    assert close.reply_text == "ACCESS_REFUSED - queue 'q' in vhost '/' in exclusive use"
    client.send(Queue.Declare(queue="r"))
    client.send(Basic.Consume(queue="r", consumer_tag="c"))
    assert client.only(commands.Connection.Close).reply_text == (
        "NOT_ALLOWED - attempt to reuse consumer tag 'c'"
    )


def test_recover_requeues(client: Client) -> None:
    filled(client, 1)
    client.call(Basic.Get(queue="q"), Basic.GetOk)
    client.call(Basic.Recover(requeue=True), Basic.RecoverOk)
    assert client.call(Basic.Get(queue="q"), Basic.GetOk).redelivered


def test_exchange_to_exchange_over_the_wire(node: Node, client: Client) -> None:
    client.call(
        Exchange.Bind(destination="amq.fanout", source="amq.topic", routing_key="#"),
        Exchange.BindOk,
    )
    client.call(Queue.Bind(queue="q", exchange="amq.fanout"), Queue.BindOk)
    client.publish("any", exchange="amq.topic")
    client.call(
        Exchange.Unbind(destination="amq.fanout", source="amq.topic", routing_key="#"),
        Exchange.UnbindOk,
    )
    client.call(Queue.Unbind(queue="q", exchange="amq.fanout"), Queue.UnbindOk)
    client.publish("any", exchange="amq.topic")
    assert fates(node) == [Fate.ACCEPTED, Fate.RETURNED]


# ----------------------------------------------------- manners seen on RabbitMQ 3.10.8


def consume(client: Client, tag: str, **arguments: Any) -> None:
    table = {key.replace("_", "-"): value for key, value in arguments.items()}
    client.send(commands.Basic.Consume(queue="q", consumer_tag=tag, arguments=table))


def test_recover_answers_before_it_redelivers(client: Client) -> None:
    client.publish()
    consume(client, "c")
    client.frames.clear()
    client.send(commands.Basic.Recover(requeue=True))
    assert client.names()[:2] == ["Basic.RecoverOk", "Basic.Deliver"]
    assert client.only(commands.Basic.Deliver).redelivered


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


def test_a_consumer_priority_is_a_number(client: Client) -> None:
    consume(client, "c", x_priority="a")
    assert client.only(commands.Channel.Close).reply_text == (
        "PRECONDITION_FAILED - invalid arg 'x-priority' for queue 'q' in vhost '/': "
        '"expected integer, got longstr"'
    )


@pytest.mark.parametrize(
    "method",
    [
        commands.Queue.Delete(),
        commands.Queue.Purge(),
        commands.Queue.Bind(exchange="amq.direct"),
        commands.Queue.Unbind(exchange="amq.direct"),
        commands.Basic.Get(),
        commands.Basic.Consume(),
    ],
)
def test_an_empty_name_needs_a_queue_declared_before(node: Node, method: Frame) -> None:
    client = Client(node).open()
    close = client.call(method, commands.Channel.Close)
    assert close.reply_text == "NOT_FOUND - no previously declared queue"


def test_the_last_queue_declared_has_no_need_of_its_name(client: Client) -> None:
    name = client.call(commands.Queue.Declare(), commands.Queue.DeclareOk).queue
    client.call(commands.Queue.Bind(exchange="amq.fanout"), commands.Queue.BindOk)
    client.publish("", exchange="amq.fanout")
    client.frames.clear()
    got = client.call(commands.Basic.Get(no_ack=True), commands.Basic.GetOk)
    assert (got.exchange, got.message_count) == ("amq.fanout", 0)
    assert str(name).startswith("amq.gen-")


def test_a_headers_binding_says_how_it_matches(client: Client) -> None:
    method = commands.Queue.Bind(queue="q", exchange="amq.headers", arguments={"x-match": "some"})
    assert client.call(method, commands.Channel.Close).reply_text == (
        'PRECONDITION_FAILED - Invalid x-match field value <<"some">>; '
        "expected all, any, all-with-x, or any-with-x"
    )


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


def test_update_secret_is_taken(client: Client) -> None:
    client.send(commands.Connection.UpdateSecret("other", "reason"), 0)
    client.only(commands.Connection.UpdateSecretOk)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (
            commands.Exchange.Declare(exchange="x", passive=True),
            "NOT_FOUND - no exchange 'x' in vhost '/'",
        ),
        (
            commands.Exchange.Declare(exchange="amq.direct", exchange_type="fanout"),
            (
                "PRECONDITION_FAILED - inequivalent arg 'type' for exchange 'amq.direct' "
                "in vhost '/': received 'fanout' but current is 'direct'"
            ),
        ),
        (
            commands.Exchange.Delete(exchange="amq.direct"),
            ("ACCESS_REFUSED - deletion of system exchange 'amq.direct' in vhost '/' not allowed"),
        ),
        (
            commands.Queue.Bind(queue="nope", exchange="amq.direct"),
            "NOT_FOUND - no queue 'nope' in vhost '/'",
        ),
        (
            commands.Queue.Bind(queue="q", exchange="nope"),
            "NOT_FOUND - no exchange 'nope' in vhost '/'",
        ),
        (
            commands.Queue.Declare(queue="", passive=True),
            "NOT_FOUND - no queue '' in vhost '/'",
        ),
    ],
)
def test_what_is_not_there_or_not_so(client: Client, method: Frame, text: str) -> None:
    assert client.call(method, commands.Channel.Close).reply_text == text


def test_unbinding_what_is_not_there_is_no_error(client: Client) -> None:
    for queue, exchange in (("q", "nope"), ("nope", "amq.direct")):
        client.call(commands.Queue.Unbind(queue=queue, exchange=exchange), commands.Queue.UnbindOk)


def test_an_exchange_in_use_is_kept_when_told_so(client: Client) -> None:
    client.send(commands.Exchange.Declare(exchange="x"))
    client.send(commands.Queue.Bind(queue="q", exchange="x"))
    close = client.call(
        commands.Exchange.Delete(exchange="x", if_unused=True), commands.Channel.Close
    )
    assert close.reply_text == "PRECONDITION_FAILED - exchange 'x' in vhost '/' in use"


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
    client.wait(0)
    assert client.only(Basic.Ack).delivery_tag == 2
