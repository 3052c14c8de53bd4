"""connection.blocked: who is told, and what happens to what was published meanwhile."""

from collections.abc import Iterator

import pytest
from pamqp import commands

from tests.facts.conftest import Connect
from tests.facts.raw_client import RawClient
from tests.facts.site import Site


@pytest.fixture
def alarmed(site: Site, client: RawClient, queue: str) -> Iterator[RawClient]:
    """A client that has published before the alarm."""
    client.publish(queue).verdicts(1)
    site.block()
    yield client
    site.unblock()


def test_the_first_publish_is_told_and_withheld(
    site: Site, connect: Connect, alarmed: RawClient, queue: str
) -> None:
    assert alarmed.told_now() == []  # the alarm alone changes nothing
    alarmed.publish(queue)
    assert alarmed.publish("nowhere").told() == ["connection.blocked low on memory"]
    other = connect().opened()
    assert other.drained(queue) == [b"x"]  # the one of before
    site.unblock()
    assert alarmed.told() == ["connection.unblocked"]
    assert alarmed.told_until("basic.return")[-1].startswith("basic.return 312")
    assert len(other.drained(queue)) == 1


def test_a_connection_that_opens_during_the_alarm(
    site: Site, connect: Connect, alarmed: RawClient, queue: str
) -> None:
    other = connect().opened()
    assert other.told_now() == []
    assert other.publish(queue).told() == ["connection.blocked low on memory"]
    site.unblock()
    assert other.told(2) == ["connection.unblocked", "basic.ack 1"]


def test_consumers_go_on(connect: Connect, alarmed: RawClient, queue: str) -> None:
    other = connect().opened()
    other.call(commands.Basic.Consume(queue=queue), commands.Basic.ConsumeOk)
    assert other.told(3)[-1] == "body b'x'"
    assert other.send(commands.Basic.Ack(1)).told_now() == []


def test_who_does_not_understand_it_is_not_told(
    site: Site, connect: Connect, alarmed: RawClient, queue: str
) -> None:
    other = connect().opened(capabilities=())
    other.publish(queue)
    site.unblock()
    assert other.told() == ["basic.ack 1"]


def test_everything_behind_the_withheld_publish_waits_too(
    site: Site, alarmed: RawClient, queue: str
) -> None:
    assert alarmed.publish(queue).told() == ["connection.blocked low on memory"]
    alarmed.send(commands.Channel.Open(), 2)
    site.unblock()
    assert alarmed.told() == ["connection.unblocked"]
    assert alarmed.told_until("2: channel.openok")[-1] == "2: channel.openok"
