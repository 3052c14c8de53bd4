"""Faults between a queue and its consumers, and crashes."""

from collections.abc import Iterator

import pytest
from pamqp import commands

from reliablepub.testing import FakeBroker, faults
from tests.facts.raw_client import RawClient

Q = "q"


@pytest.fixture
def client(fake_broker: FakeBroker) -> Iterator[RawClient]:
    fake_broker.declare_queue(Q)
    with RawClient(fake_broker.url) as client:
        yield client.opened()


def consume(client: RawClient, tag: str, *, queue: str = Q, no_ack: bool = False) -> None:
    method = commands.Basic.Consume(queue=queue, consumer_tag=tag, no_ack=no_ack)
    client.call(method, commands.Basic.ConsumeOk)


def heard(client: RawClient, deliveries: int) -> list[str]:
    """Of each delivery, its consumer, tag, redelivered flag, and body."""
    lines = client.told(3 * deliveries)
    return [
        f"{' '.join(first.split()[1:4])} {body.removeprefix('body ')}"
        for first, body in zip(lines[::3], lines[2::3], strict=True)
    ]


def test_the_server_cancels_a_consumer_and_another_gets_the_message(
    fake_broker: FakeBroker, client: RawClient
) -> None:
    consume(client, "first")
    consume(client, "second")
    fake_broker.publish(b"0", Q)
    assert heard(client, 1) == ["first 1 False b'0'"]
    fake_broker.inject(faults.CancelConsumer())
    fake_broker.publish(b"1", Q)  # is the second one's, which is cancelled
    assert client.told() == ["basic.cancel second True"]
    assert heard(client, 1) == ["first 2 False b'1'"]
    assert [one.body for one in fake_broker.unacked()] == [b"0", b"1"]
    assert [one.tag for one in fake_broker.consumers()] == ["first"]
    assert not fake_broker.faults


def test_a_cancelled_consumer_leaves_its_messages_in_the_queue(
    fake_broker: FakeBroker, client: RawClient
) -> None:
    fake_broker.inject(faults.CancelConsumer(nth=2))
    consume(client, "c")
    fake_broker.publish(b"0", Q)
    fake_broker.publish(b"1", Q)
    assert heard(client, 1) == ["c 1 False b'0'"]
    assert client.told() == ["basic.cancel c True"]
    assert [one.body for one in fake_broker.messages(Q)] == [b"1"]
    consume(client, "c")
    assert heard(client, 1) == ["c 2 False b'1'"]


def test_a_late_delivery_is_overtaken(fake_broker: FakeBroker, client: RawClient) -> None:
    fake_broker.inject(faults.DelayDelivery(for_s=600.0))
    consume(client, "c")
    for body in (b"late", b"next"):
        fake_broker.publish(body, Q)
    assert heard(client, 1) == ["c 1 False b'next'"]
    fake_broker.advance(600.0)
    assert heard(client, 1) == ["c 2 False b'late'"]


def test_a_late_delivery_counts_for_the_prefetch(
    fake_broker: FakeBroker, client: RawClient
) -> None:
    client.call(commands.Basic.Qos(prefetch_count=1), commands.Basic.QosOk)
    fake_broker.inject(faults.DelayDelivery(for_s=600.0))
    consume(client, "c")
    for body in (b"late", b"next"):
        fake_broker.publish(body, Q)
    assert client.told_now() == []
    fake_broker.advance(600.0)
    assert heard(client, 1) == ["c 1 False b'late'"]


@pytest.mark.parametrize("ends", ["cancel", "close"])
def test_a_late_delivery_goes_to_another_consumer_if_its_own_is_gone(
    fake_broker: FakeBroker, client: RawClient, ends: str
) -> None:
    fake_broker.inject(faults.DelayDelivery(for_s=600.0))
    consume(client, "c")
    fake_broker.publish(b"late", Q)
    if ends == "cancel":
        client.call(commands.Basic.Cancel("c"), commands.Basic.CancelOk)
    else:
        client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)
        client.open_channel()
    consume(client, "d")
    assert heard(client, 1) == ["d 1 True b'late'"]
    fake_broker.advance(600.0)
    assert client.told_now() == []


def test_a_slow_get(fake_broker: FakeBroker, client: RawClient) -> None:
    fake_broker.inject(faults.DelayDelivery(for_s=600.0, queue=Q))
    fake_broker.publish(b"a", Q)
    client.send(commands.Basic.Get(queue=Q))
    fake_broker.wait_for(lambda: not fake_broker.messages(Q), timeout_s=60)
    assert client.told_now() == []
    fake_broker.advance(600.0)
    assert client.told(3)[0] == f"basic.getok 1 False  {Q} 0"


def test_a_message_is_delivered_twice(fake_broker: FakeBroker, client: RawClient) -> None:
    fake_broker.inject(faults.RepeatDelivery(keep=True))
    consume(client, "c")
    fake_broker.publish(b"a", Q)
    fake_broker.publish(b"b", Q)
    assert heard(client, 4) == [
        "c 1 False b'a'",
        "c 2 True b'a'",
        "c 3 False b'b'",
        "c 4 True b'b'",
    ]


def test_a_lost_ack(fake_broker: FakeBroker, client: RawClient) -> None:
    fake_broker.inject(faults.LoseAck())
    consume(client, "c")
    fake_broker.publish(b"a", Q)
    fake_broker.publish(b"b", Q)
    assert heard(client, 2) == ["c 1 False b'a'", "c 2 False b'b'"]
    client.send(commands.Basic.Ack(1))
    assert client.send(commands.Basic.Ack(2, multiple=True)).told_now() == []
    assert [one.body for one in fake_broker.unacked()] == [b"a"]
    client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)
    client.open_channel()
    consume(client, "c")
    assert heard(client, 1) == ["c 1 True b'a'"]


def test_a_fault_of_another_queue(fake_broker: FakeBroker, client: RawClient) -> None:
    fake_broker.inject(faults.RepeatDelivery(queue="other"))
    consume(client, "c", no_ack=True)
    fake_broker.publish(b"a", Q)
    assert heard(client, 1) == ["c 1 False b'a'"]
    assert client.told_now() == []


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_crash_gives_no_message_to_a_consumer_that_does_not_acknowledge(
    kind: str, fake_broker: FakeBroker, client: RawClient
) -> None:
    """It ends all connections at once, so the message would be lost."""
    fake_broker.declare_queue(kind, arguments={"x-queue-type": kind})
    fake_broker.inject(faults.LoseAck(nth=2))
    with RawClient(fake_broker.url) as other:
        consume(client, "c", queue=kind)
        fake_broker.publish(b"a", kind)
        consume(other.opened(), "d", queue=kind, no_ack=True)
        fake_broker.crash()
    assert [one.body for one in fake_broker.messages(kind)] == [b"a"]
    assert fake_broker.faults == (faults.LoseAck(nth=2),)  # it saw one delivery


def test_a_crash_counts_a_return_by_each_consumer_of_a_quorum_queue(
    fake_broker: FakeBroker, client: RawClient
) -> None:
    """As RabbitMQ 3.10.8 did after kill -9; faults do not see these deliveries."""
    fake_broker.declare_queue("quorum", arguments={"x-queue-type": "quorum"})
    fake_broker.inject(faults.LoseAck(nth=2))
    with RawClient(fake_broker.url) as other:
        for one in (client, other.opened()):
            consume(one, "c", queue="quorum")
        fake_broker.publish(b"a", "quorum")
        fake_broker.crash()
    assert fake_broker.faults == (faults.LoseAck(nth=2),)
    fake_broker.start()
    with RawClient(fake_broker.url) as later:
        later.opened().send(commands.Basic.Get(queue="quorum"))
        later.hear_only(commands.Basic.GetOk)
        assert later.hear()[1].properties.headers == {"x-delivery-count": 2}


def test_a_crash_deletes_no_durable_queue(fake_broker: FakeBroker, client: RawClient) -> None:
    """RabbitMQ deletes an auto-delete queue when its last consumer leaves, which none did."""
    method = commands.Queue.Declare(queue="brief", durable=True, auto_delete=True)
    client.call(method, commands.Queue.DeclareOk)
    consume(client, "c", queue="brief")
    fake_broker.publish(b"a", "brief")
    fake_broker.crash()
    assert [one.body for one in fake_broker.messages("brief")] == [b"a"]
