"""Publisher confirms: which publishes get one, which verdict, and in what form."""

import pytest
from pamqp import commands

from tests.amqp_probe import unique
from tests.facts.conftest import Connect
from tests.facts.raw_client import PERSISTENT, TRANSIENT, RawClient, covered_by


def test_tags_count_from_1_after_confirm_select(connect: Connect, queue: str) -> None:
    client = connect().opened(confirm=False)
    client.publish(queue)
    client.publish(queue)
    client.call(commands.Confirm.Select(), commands.Confirm.SelectOk)
    assert client.publish(queue).told() == ["basic.ack 1"]


def test_a_second_confirm_select_does_not_reset_them(client: RawClient, queue: str) -> None:
    client.publish(queue).verdicts(1)
    client.call(commands.Confirm.Select(), commands.Confirm.SelectOk)
    assert client.publish(queue).told() == ["basic.ack 2"]


def test_they_restart_on_a_channel_that_is_opened_again(client: RawClient, queue: str) -> None:
    client.publish(queue).verdicts(1)
    client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)
    client.open_channel()
    assert client.publish(queue).told() == ["basic.ack 1"]


def test_each_channel_counts_for_itself(connect: Connect, queue: str) -> None:
    client = connect().opened(channels=2)
    assert client.publish(queue, channel=1).told() == ["basic.ack 1"]
    assert client.publish(queue, channel=2).told() == ["2: basic.ack 1"]


def test_confirm_select_may_ask_for_no_answer(client: RawClient, queue: str) -> None:
    client.call(commands.Channel.Open(), commands.Channel.OpenOk, 2)
    client.send(commands.Confirm.Select(nowait=True), 2)
    assert client.publish(queue, channel=2).told() == ["2: basic.ack 1"]


def test_confirms_do_not_become_a_transaction(client: RawClient) -> None:
    text = "PRECONDITION_FAILED - cannot switch from confirm to tx mode"
    assert client.send(commands.Tx.Select()).told() == [f"channel.close 406 {text} (90, 10)"]


def test_nor_a_transaction_confirms(connect: Connect) -> None:
    client = connect().opened(confirm=False)
    client.call(commands.Tx.Select(), commands.Tx.SelectOk)
    text = "PRECONDITION_FAILED - cannot switch from tx to confirm mode"
    assert client.send(commands.Confirm.Select()).told() == [f"channel.close 406 {text} (85, 10)"]


def test_each_publish_of_many_is_settled_once(client: RawClient, queue: str) -> None:
    for number in range(500):
        client.publish(queue, properties=TRANSIENT if number % 3 else PERSISTENT)
    assert client.verdicts(500) == dict.fromkeys(range(1, 501), "ack")


def test_several_queues_confirm_as_one(client: RawClient) -> None:
    exchange = client.declare_exchange(unique("fanout"), "fanout")
    queues = [client.declare(unique("queue")) for _ in range(4)]
    for one in queues:
        client.bind(one, exchange)
    for _ in range(100):
        client.publish("", exchange=exchange)
    assert client.verdicts(100) == dict.fromkeys(range(1, 101), "ack")
    assert [len(client.drained(one)) for one in queues] == [100] * 4


def test_a_lone_ack_is_not_multiple(client: RawClient, queue: str) -> None:
    for properties in (TRANSIENT, PERSISTENT):
        client.publish(queue, properties=properties)
        (line,) = client.told()
        assert "multiple" not in line


def test_a_multiple_ack_covers_returned_publishes_too(client: RawClient, queue: str) -> None:
    # Where the two happen to be settled together; that each is settled once holds always.
    for number in range(1, 201):
        client.publish(queue if number % 10 else "nowhere")
    outstanding, returned = set(range(1, 201)), 0
    while outstanding:
        _, heard = client.hear()
        if isinstance(heard, commands.Basic.Return):
            returned += 1
            client.told(2)
        else:
            covered = covered_by(heard, outstanding)
            assert covered
            # Every return comes before its own ack.
            assert returned >= sum(tag % 10 == 0 for tag in covered | _done(outstanding))
            outstanding -= covered
    assert returned == 20


def _done(outstanding: set[int]) -> set[int]:
    return set(range(1, 201)) - outstanding


def test_an_unroutable_publish_is_acked(client: RawClient) -> None:
    assert client.publish("nowhere", mandatory=False).told() == ["basic.ack 1"]


@pytest.mark.parametrize("argument", ["x-max-length", "x-message-ttl"])
def test_what_a_queue_drops_or_expires_at_once_is_acked(client: RawClient, argument: str) -> None:
    name = client.declare(unique("queue"), arguments={argument: 0})
    assert client.publish(name).told() == ["basic.ack 1"]
    assert client.drained(name) == []


def test_a_full_queue_acks_and_drops_its_head(client: RawClient) -> None:
    name = client.declare(unique("queue"), arguments={"x-max-length": 2})
    for number in range(5):
        client.publish(name, b"%d" % number)
    assert set(client.verdicts(5).values()) == {"ack"}
    assert client.drained(name) == [b"3", b"4"]


def test_a_full_queue_that_rejects_nacks(client: RawClient) -> None:
    arguments = {"x-max-length": 3, "x-overflow": "reject-publish"}
    name = client.declare(unique("queue"), arguments=arguments)
    for number in range(6):
        client.publish(name, b"%d" % number)
    expected = dict.fromkeys((1, 2, 3), "ack") | dict.fromkeys((4, 5, 6), "nack")
    assert client.verdicts(6) == expected
    assert client.drained(name) == [b"0", b"1", b"2"]


def test_one_queue_that_rejects_makes_it_a_nack_and_the_other_keeps_it(client: RawClient) -> None:
    exchange = client.declare_exchange(unique("fanout"), "fanout")
    full = client.declare(
        unique("full"), arguments={"x-max-length": 0, "x-overflow": "reject-publish"}
    )
    healthy = client.declare(unique("healthy"))
    client.bind(full, exchange)
    client.bind(healthy, exchange)
    assert client.publish("", b"kept", exchange=exchange).verdicts(1) == {1: "nack"}
    assert client.drained(healthy) == [b"kept"]


def test_a_queue_deleted_with_publishes_under_way_acks(client: RawClient, queue: str) -> None:
    client.open_channel(2)
    for _ in range(50):
        client.publish(queue)
    client.send(commands.Queue.Delete(queue=queue), 2)
    outstanding = set(range(1, 51))
    while outstanding:
        channel, heard = client.hear()
        if channel == 1:
            assert isinstance(heard, commands.Basic.Ack | commands.Basic.Return), heard
            if isinstance(heard, commands.Basic.Ack):
                outstanding -= covered_by(heard, outstanding)
            else:
                client.told(2)


def test_what_is_consumed_at_once_is_acked(client: RawClient, queue: str) -> None:
    client.open_channel(2)
    client.call(commands.Basic.Consume(queue=queue, no_ack=True), commands.Basic.ConsumeOk, 2)
    client.publish(queue)
    lines = client.told(4)
    assert "basic.ack 1" in lines
    assert "2: body b'x'" in lines


def test_an_empty_body_is_a_message_like_any(client: RawClient, queue: str) -> None:
    assert client.publish(queue, b"").told() == ["basic.ack 1"]
    assert client.drained(queue) == [b""]


def test_a_body_of_many_frames_arrives_whole(client: RawClient, queue: str) -> None:
    body = bytes(range(256)) * 2048
    assert client.publish(queue, body).told() == ["basic.ack 1"]
    assert client.drained(queue) == [body]


def test_a_graceful_close_of_the_channel_leaves_verdicts_unsaid(
    client: RawClient, queue: str
) -> None:
    for _ in range(300):
        client.publish(queue)
    client.send(commands.Channel.Close(200, "", 0, 0))
    lines = client.told_until("channel.closeok")
    assert all(line.startswith("basic.ack") for line in lines[:-1])
    client.open_channel(2)
    assert len(client.drained(queue, 2)) == 300  # whatever was acked, all of them were taken


def test_a_graceful_close_of_the_connection_loses_no_message(
    connect: Connect, client: RawClient, queue: str
) -> None:
    for _ in range(300):
        client.publish(queue)
    client.send(commands.Connection.Close(200, "", 0, 0), 0)
    client.told_until("connection.closeok")
    assert len(connect().opened().drained(queue)) == 300
