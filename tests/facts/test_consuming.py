"""Consumers: who gets what, when they are cancelled, and their mistakes."""

import time
from typing import Any

import pytest
from pamqp import commands

from tests.amqp_probe import unique
from tests.facts.conftest import Connect
from tests.facts.raw_client import Properties, RawClient
from tests.facts.site import Site


def consume(client: RawClient, queue: str, tag: str = "me", **options: Any) -> None:
    method = commands.Basic.Consume(queue=queue, consumer_tag=tag, **options)
    client.call(method, commands.Basic.ConsumeOk)


def publish(client: RawClient, queue: str, *bodies: bytes) -> None:
    client.open_channel(9)
    for body in bodies:
        client.publish(queue, body, channel=9)
    client.verdicts(len(bodies), 9)
    client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk, 9)


def test_a_delivery_and_its_ack(client: RawClient, queue: str) -> None:
    publish(client, queue, b"a")
    consume(client, queue)
    assert client.told(3) == [f"basic.deliver me 1 False  {queue}", "header 1", "body b'a'"]
    assert client.send(commands.Basic.Ack(1)).told_now() == []
    text = "PRECONDITION_FAILED - unknown delivery tag 1"
    assert client.send(commands.Basic.Ack(1)).told() == [f"channel.close 406 {text} (60, 80)"]


def test_what_was_not_acked_comes_again(client: RawClient, queue: str) -> None:
    publish(client, queue, b"a", b"b")
    consume(client, queue)
    client.told(6)
    client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)
    client.open_channel()
    consume(client, queue)
    lines = client.told(6)
    assert lines[0] == f"basic.deliver me 1 True  {queue}"
    assert [lines[2], lines[5]] == ["body b'a'", "body b'b'"]


def test_get(client: RawClient, queue: str) -> None:
    publish(client, queue, b"a", b"b")
    client.send(commands.Basic.Get(queue=queue))
    assert client.told(3) == [f"basic.getok 1 False  {queue} 1", "header 1", "body b'a'"]
    client.send(commands.Basic.Reject(1, requeue=True))
    client.send(commands.Basic.Get(queue=queue, no_ack=True))
    assert client.told(3)[0] == f"basic.getok 2 True  {queue} 1"
    client.send(commands.Basic.Get(queue=queue, no_ack=True)).told(3)
    assert client.send(commands.Basic.Get(queue=queue)).told() == ["basic.getempty"]


def test_a_prefetch(client: RawClient, queue: str) -> None:
    publish(client, queue, b"a", b"b", b"c", b"d", b"e")
    client.call(commands.Basic.Qos(prefetch_count=2), commands.Basic.QosOk)
    consume(client, queue)
    assert client.told(6)[5] == "body b'b'"
    assert client.send(commands.Basic.Ack(2, multiple=True)).told(6)[5] == "body b'd'"
    client.send(commands.Basic.Ack(0, multiple=True))  # 0: all of them
    assert client.told(3)[2] == "body b'e'"


def test_a_deleted_queue_cancels_its_consumers(client: RawClient, queue: str) -> None:
    consume(client, queue)
    client.open_channel(2)
    client.send(commands.Queue.Delete(queue=queue), 2)
    assert sorted(client.told(2)) == ["2: queue.deleteok 0", "basic.cancel me True"]


def test_but_only_where_they_understand_it(connect: Connect, queue: str) -> None:
    client = connect().opened(capabilities=())
    consume(client, queue)
    assert client.send(commands.Queue.Delete(queue=queue)).told_now() == ["queue.deleteok 0"]


def test_a_consumer_tag_twice(client: RawClient, queue: str) -> None:
    consume(client, queue)
    client.send(commands.Basic.Consume(queue=queue, consumer_tag="me"))
    text = "NOT_ALLOWED - attempt to reuse consumer tag 'me'"
    assert client.told() == [f"connection.close 530 {text} (60, 20)"]


def test_a_consumer_tag_is_looked_at_before_the_queue(client: RawClient, queue: str) -> None:
    consume(client, queue)
    client.send(commands.Basic.Consume(queue="nowhere", consumer_tag="me"))
    assert client.hear_only(commands.Connection.Close).reply_code == 530


def test_who_waits_gets_what_a_queue_has_no_place_for(client: RawClient) -> None:
    name = client.declare(unique("queue"), arguments={"x-max-length": 0})
    consume(client, name, no_ack=True)
    client.publish(name)
    assert "body b'x'" in client.told(4)


def test_an_exclusive_consumer(client: RawClient, queue: str) -> None:
    consume(client, queue, exclusive=True)
    client.send(commands.Basic.Consume(queue=queue, consumer_tag="you"))
    text = f"ACCESS_REFUSED - queue '{queue}' in vhost '/' in exclusive use"
    assert client.told() == [f"channel.close 403 {text} (60, 20)"]


def test_an_exclusive_one_where_one_at_a_time_is_active(client: RawClient) -> None:
    queue = client.declare(unique("queue"), arguments={"x-single-active-consumer": True})
    client.send(commands.Basic.Consume(queue=queue, consumer_tag="me", exclusive=True))
    text = f"ACCESS_REFUSED - queue '{queue}' in vhost '/' in exclusive use"
    assert client.told() == [f"channel.close 403 {text} (60, 20)"]


@pytest.mark.usefixtures("of_3_10")
@pytest.mark.parametrize(("kind", "next_one"), [("classic", "high"), ("quorum", "low")])
def test_who_becomes_the_active_one(client: RawClient, kind: str, next_one: str) -> None:
    """The priority does not count among the consumers of a quorum queue, but their order."""
    arguments = {"x-queue-type": kind, "x-single-active-consumer": True}
    queue = client.declare(unique("queue"), arguments=arguments)
    for tag, priority in {"active": 0, "low": 1, "high": 5, "second": 5}.items():
        consume(client, queue, tag, arguments={"x-priority": priority})
    client.call(commands.Basic.Cancel("active"), commands.Basic.CancelOk)
    client.publish(queue)
    assert f"basic.deliver {next_one} 1 False  {queue}" in client.told(4)


def test_a_priority_that_is_no_number(client: RawClient, queue: str) -> None:
    client.send(commands.Basic.Consume(queue=queue, arguments={"x-priority": "high"}))
    reason = '"expected integer, got longstr"'
    text = f"invalid arg 'x-priority' for queue '{queue}' in vhost '/': {reason}"
    assert client.told() == [f"channel.close 406 PRECONDITION_FAILED - {text} (60, 20)"]


def test_an_auto_delete_queue_goes_with_its_last_consumer(client: RawClient) -> None:
    name = unique("queue")
    method = commands.Queue.Declare(queue=name, durable=True, auto_delete=True)
    client.call(method, commands.Queue.DeclareOk)
    consume(client, name)
    client.call(commands.Basic.Cancel("me"), commands.Basic.CancelOk)
    passive = commands.Queue.Declare(queue=name, passive=True)
    for channel in range(2, 100):  # RabbitMQ may answer first, and delete then
        client.open_channel(channel)
        client.send(passive, channel)
        (line,) = client.told()
        if line.startswith(f"{channel}: channel.close"):
            break
    assert "404 NOT_FOUND" in line


def test_recover(client: RawClient, queue: str) -> None:
    publish(client, queue, b"a")
    consume(client, queue)
    client.told(3)
    client.send(commands.Basic.Recover(requeue=True))
    assert client.told(4)[:2] == ["basic.recoverok", f"basic.deliver me 2 True  {queue}"]


def test_an_ack_of_many_names_one_that_is_outstanding(client: RawClient, queue: str) -> None:
    publish(client, queue, b"a", b"b")
    consume(client, queue)
    client.told(6)
    client.send(commands.Basic.Ack(3, multiple=True))
    text = "PRECONDITION_FAILED - unknown delivery tag 3"
    assert client.told() == [f"channel.close 406 {text} (60, 80)"]
    client.send(commands.Channel.CloseOk())
    client.open_channel()
    assert client.drained(queue) == [b"a", b"b"]  # so it has settled nothing


def test_what_has_expired_behind_others_is_not_delivered(client: RawClient, queue: str) -> None:
    client.publish(queue, b"first")
    client.publish(queue, b"mortal", properties=Properties(expiration="0"))
    client.publish(queue, b"last").verdicts(3)
    consume(client, queue, no_ack=True)
    lines = client.told(6)
    assert [lines[2], lines[5]] == ["body b'first'", "body b'last'"]


def test_priorities(client: RawClient) -> None:
    name = client.declare(unique("queue"), arguments={"x-max-priority": 10})
    for priority in (None, 1, 9, 5, 200, 0, 10):
        client.publish(name, b"%d" % (priority or 0), properties=Properties(priority=priority))
    client.verdicts(7)
    assert client.drained(name) == [b"200", b"10", b"9", b"5", b"1", b"0", b"0"]


DEATHS: dict[str, dict[str, Any]] = {
    "rejected": {},
    "expired": {"x-message-ttl": 1},
    "maxlen": {"x-max-length": 0},
}


@pytest.mark.parametrize("reason", DEATHS)
def test_dead_letters(client: RawClient, queue: str, reason: str) -> None:
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
    arguments |= DEATHS[reason]
    name = client.declare(unique("source"), arguments=arguments)
    client.publish(name, b"dead").verdicts(1)
    if reason == "rejected":
        client.send(commands.Basic.Get(queue=name)).told(3)
        client.send(commands.Basic.Reject(1, requeue=False))
    consume(client, queue)
    client.hear_only(commands.Basic.Deliver)
    headers = client.hear()[1].properties.headers
    (death,) = headers["x-death"]
    assert {
        key: death[key] for key in ("count", "exchange", "queue", "reason", "routing-keys")
    } == {"count": 1, "exchange": "", "queue": name, "reason": reason, "routing-keys": [name]}
    assert headers["x-first-death-reason"] == reason
    assert headers["x-first-death-queue"] == name
    assert headers["x-first-death-exchange"] == ""


@pytest.mark.parametrize("kind", ["classic", "quorum"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_what_expires_while_it_is_delivered_is_dead_when_it_comes_back(
    client: RawClient, queue: str, kind: str, *, is_lost: bool
) -> None:
    arguments = {"x-queue-type": kind, "x-message-ttl": 1_000, "x-dead-letter-exchange": ""}
    arguments["x-dead-letter-routing-key"] = queue
    name = client.declare(unique("source"), arguments=arguments)
    consume(client, queue, no_ack=True)
    client.open_channel(2)
    client.publish(name).verdicts(1)
    assert client.send(commands.Basic.Get(queue=name), 2).told(3)[0].startswith("2: basic.getok")
    time.sleep(1.2)
    if is_lost:
        client.send(commands.Channel.Close(200, "", 0, 0), 2)
    else:
        client.send(commands.Basic.Nack(1, requeue=True), 2)
    assert f"basic.deliver me 1 False  {queue}" in client.told_until("basic.deliver")


@pytest.mark.usefixtures("of_3_10")
def test_dead_letters_go_to_their_copies_too(client: RawClient, queue: str) -> None:
    """A key that is no string is ignored; a blind one is not among the keys of the death."""
    blind = client.declare(unique("blind"))
    name = client.declare(unique("source"), arguments={"x-dead-letter-exchange": ""})
    headers: dict[str, Any] = {"CC": [queue, 7], "BCC": [blind]}
    client.publish(name, properties=Properties(headers=headers)).verdicts(1)
    assert [client.drained(one) for one in (queue, blind)] == [[b"x"], [b"x"]]
    client.send(commands.Basic.Get(queue=name)).told(3)
    client.send(commands.Basic.Reject(3, requeue=False))
    for one in (queue, blind):
        consume(client, one, one)
        client.hear_only(commands.Basic.Deliver)
        (death,) = client.hear()[1].properties.headers["x-death"]
        client.told()
        assert death["routing-keys"] == [name, queue]


def test_a_delivery_that_is_not_acked_in_time(site: Site, connect: Connect, queue: str) -> None:
    if site.version >= (4, 3):
        pytest.skip("RabbitMQ 4.3 has no such time-out for classic queues")
    with site.consumer_timeout_ms() as timeout_ms:
        client = connect().opened()
        publish(client, queue, b"a")
        consume(client, queue)
        client.told(3)
        site.let_pass(timeout_ms)
        text = (
            "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value "
            f"used: {timeout_ms} ms. This timeout value can be configured, see consumers doc guide "
            "to learn more"
        )
        assert client.told() == [f"channel.close 406 {text} (0, 0)"]
        client.send(commands.Channel.CloseOk())
    client = connect().opened()
    client.send(commands.Basic.Get(queue=queue))
    assert client.told(3)[0] == f"basic.getok 1 True  {queue} 0"


def bodies(lines: list[str]) -> list[str]:
    return [line.removeprefix("body ") for line in lines if line.startswith("body")]


def test_a_prefetch_for_consumers_ends_that_of_the_channel(
    site: Site, client: RawClient, queue: str
) -> None:
    publish(client, queue, b"a", b"b", b"c")
    client.call(commands.Basic.Qos(prefetch_count=1, global_=True), commands.Basic.QosOk)
    consume(client, queue)
    assert bodies(client.told(3)) == ["b'a'"]
    client.call(commands.Basic.Qos(prefetch_count=5), commands.Basic.QosOk)
    if site.version >= (4, 3):  # what is global is each consumer's own: `global_qos` is denied
        assert client.told_now() == []
        return
    assert bodies(client.told(6)) == ["b'b'", "b'c'"]


@pytest.mark.parametrize(("count", "more"), [(2, ["b'b'"]), (0, ["b'b'", "b'c'"])])
def test_another_prefetch_of_the_channel_applies_at_once(
    site: Site, client: RawClient, queue: str, count: int, more: list[str]
) -> None:
    publish(client, queue, b"a", b"b", b"c")
    client.call(commands.Basic.Qos(prefetch_count=1, global_=True), commands.Basic.QosOk)
    consume(client, queue)
    client.told(3)
    client.call(commands.Basic.Qos(prefetch_count=count, global_=True), commands.Basic.QosOk)
    if site.version >= (4, 3):  # as above
        assert client.told_now() == []
        return
    assert bodies(client.told(3 * len(more))) == more


def test_a_get_does_not_count_against_the_prefetch_of_the_channel(
    client: RawClient, queue: str
) -> None:
    publish(client, queue, b"a", b"b")
    client.call(commands.Basic.Qos(prefetch_count=1, global_=True), commands.Basic.QosOk)
    client.send(commands.Basic.Get(queue=queue)).told(3)
    consume(client, queue)
    assert bodies(client.told(3)) == ["b'b'"]


def test_what_comes_back_counts_against_the_length(client: RawClient) -> None:
    name = client.declare(unique("queue"), arguments={"x-max-length": 1})
    publish(client, name, b"a")
    client.send(commands.Basic.Get(queue=name)).told(3)
    publish(client, name, b"b")
    client.send(commands.Basic.Nack(1, requeue=True))
    assert client.drained(name) == [b"b"]  # the head, which has come back, is dropped


def test_deliveries_are_settled_one_consumer_after_the_other(client: RawClient, queue: str) -> None:
    publish(client, queue, b"a", b"b", b"c", b"d")
    client.call(commands.Basic.Qos(prefetch_count=1), commands.Basic.QosOk)
    for tag in ("z", "b"):
        consume(client, queue, tag)
        client.told(3)
    client.send(commands.Basic.Nack(0, multiple=True, requeue=True))
    lines = client.told(6)
    assert [line for line in lines if "deliver" in line] == [
        f"basic.deliver b 3 True  {queue}",
        f"basic.deliver z 4 True  {queue}",
    ]
    assert bodies(lines) == ["b'b'", "b'a'"]


def test_a_last_queue_that_is_direct_reply_to(client: RawClient) -> None:
    client.send(commands.Queue.Declare(queue="amq.rabbitmq.reply-to")).told()
    consume(client, "", no_ack=True)
