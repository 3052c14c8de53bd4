"""tx.*, as seen on RabbitMQ 3.10.8 with the same frames."""

import pytest
from pamqp import commands

from reliablepub.testing.history import Fate
from reliablepub.testing.node import Node
from tests.broker.sans_io import PERSISTENT, TRANSIENT, Client


@pytest.fixture
def tx(node: Node) -> Client:
    client = Client(node).open(confirm=False)
    client.call(commands.Tx.Select(), commands.Tx.SelectOk)
    return client


def test_publishes_take_place_with_the_commit(node: Node, tx: Client) -> None:
    tx.publish(content=b"1", properties=TRANSIENT)
    tx.publish("nowhere")
    assert tx.names() == []
    assert not node.vhost.queues["q"].ready
    tx.send(commands.Tx.Commit())
    assert tx.names() == ["Basic.Return", "ContentHeader", "ContentBody", "Tx.CommitOk"]
    assert len(node.vhost.queues["q"].ready) == 1


def test_commit_ok_waits_for_the_disk(tx: Client) -> None:
    tx.publish(properties=PERSISTENT)
    tx.publish(properties=TRANSIENT)
    tx.send(commands.Tx.Commit())
    assert tx.names() == []
    tx.wait(0.01)
    assert tx.names() == ["Tx.CommitOk"]


def test_an_empty_commit(tx: Client) -> None:
    tx.call(commands.Tx.Commit(), commands.Tx.CommitOk)
    tx.call(commands.Tx.Select(), commands.Tx.SelectOk)


def test_rollback_forgets_publishes(node: Node, tx: Client) -> None:
    tx.publish()
    tx.call(commands.Tx.Rollback(), commands.Tx.RollbackOk)
    tx.call(commands.Tx.Commit(), commands.Tx.CommitOk)
    assert not node.vhost.queues["q"].ready
    assert node.history.snapshot()[0].fate is Fate.LOST


def test_what_is_wrong_with_a_publish_is_said_at_once(tx: Client) -> None:
    tx.publish(exchange="missing")
    assert tx.only(commands.Channel.Close).reply_code == 404


def test_acknowledgements_take_place_with_the_commit(node: Node, tx: Client) -> None:
    queue = node.vhost.queues["q"]
    for _ in range(2):
        tx.publish(properties=TRANSIENT)
    tx.send(commands.Tx.Commit())
    tx.send(commands.Basic.Get(queue="q"))
    tx.send(commands.Basic.Get(queue="q"))
    tx.frames.clear()
    tx.send(commands.Basic.Ack(1))
    tx.send(commands.Basic.Reject(2, requeue=True))
    assert not queue.ready
    tx.call(commands.Tx.Rollback(), commands.Tx.RollbackOk)
    tx.send(commands.Basic.Ack(1))  # it is unacknowledged again, and so is 2
    tx.call(commands.Tx.Commit(), commands.Tx.CommitOk)
    close = tx.call(commands.Basic.Ack(1), commands.Channel.Close)
    assert close.reply_text == "PRECONDITION_FAILED - unknown delivery tag 1"
    assert [entry.redelivered for entry in queue.ready] == [True]


def test_a_channel_that_closes_commits_nothing(node: Node, tx: Client) -> None:
    tx.publish(properties=TRANSIENT)
    tx.send(commands.Tx.Commit())
    tx.send(commands.Basic.Get(queue="q"))
    tx.publish()
    tx.send(commands.Basic.Ack(1))
    tx.send(commands.Channel.Close(200, "", 0, 0))
    assert len(node.vhost.queues["q"].ready) == 1
    assert [one.fate for one in node.history.snapshot()] == [Fate.ACCEPTED, Fate.LOST]


def test_a_queue_that_refuses_fails_the_commit(node: Node, tx: Client) -> None:
    limits = {"x-max-length": 1, "x-overflow": "reject-publish"}
    tx.send(commands.Queue.Declare(queue="full", arguments=limits))  # type: ignore[arg-type]
    tx.publish("full")
    tx.publish("full")
    tx.send(commands.Tx.Commit())
    close = tx.only(commands.Channel.Close)
    assert close.reply_text == "PRECONDITION_FAILED - partial tx completion"
    assert len(node.vhost.queues["full"].ready) == 1
