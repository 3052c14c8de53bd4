"""What the fake does otherwise, on purpose: one test for each row of the page that lists them.

The docstring of a test is the name of its row. A test fails when the fake comes to do as RabbitMQ
does: then the row has to go.
"""

import inspect
import re
import sys
import time
from pathlib import Path

import pytest
from pamqp import commands, frame, header

from tests.amqp_probe import unique
from tests.facts.conftest import Connect
from tests.facts.raw_client import END, PERSISTENT, Properties, RawClient
from tests.facts.site import MAX_MESSAGE_SIZE, Site

PAGE = Path(__file__).parents[2] / "docs" / "fake-broker.md"
TABLE = PAGE.read_text().partition("## Where it differs from RabbitMQ")[2].partition("\nLater")[0]
ROWS = re.findall(r"^\| ([a-z][^|]*?) \|", TABLE, re.MULTILINE)
SOON_S = 1.0


def test_every_row_of_the_page_is_shown_here() -> None:
    tests = inspect.getmembers(sys.modules[__name__], inspect.isfunction)
    shown = [inspect.getdoc(test) for name, test in tests if name.startswith("test_")]
    named = [name.removesuffix(".").lower() for name in shown if name]
    assert sorted(named) == sorted(row.lower() for row in ROWS)


def is_ended(client: RawClient) -> bool:
    """Whether the connection ends soon, without another word."""
    client.patience(SOON_S)
    try:
        return client.told() == [END]
    except TimeoutError:
        return False


def test_the_socket(site: Site, client: RawClient) -> None:
    """The socket after the client's connection.close."""
    client.send(commands.Connection.Close(200, "", 0, 0), 0).hear_only(commands.Connection.CloseOk)
    assert is_ended(client) == site.is_fake


def test_refusals(site: Site, connect: Connect) -> None:
    """A refusal without a reply."""
    client = connect()
    client.start()
    client.log_in(mechanism="NONE", response="")
    assert is_ended(client) == site.is_fake


def test_permissions(site: Site, connect: Connect) -> None:
    """A user without permissions."""
    user = site.add_nobody()  # before the connection, whose login may take 10 s
    client = connect()
    client.user = client.password = user
    client.start()
    client.log_in()
    client.hear_only(commands.Connection.Tune)
    client.enter()
    refusal = "NOT_ALLOWED - access to vhost '/' refused for user 'nobody'"
    expected = f"connection.close 530 {refusal} (10, 40)"
    assert client.told() == ["connection.openok" if site.is_fake else expected]


def test_transactions(site: Site, connect: Connect, queue: str) -> None:
    """A publish in a transaction."""
    client = connect().opened(confirm=False)
    exchange = client.declare_exchange(unique("exchange"), "fanout")
    client.call(commands.Tx.Select(), commands.Tx.SelectOk)
    client.publish("", exchange=exchange, mandatory=False)
    client.bind(queue, exchange)
    client.call(commands.Tx.Commit(), commands.Tx.CommitOk)
    assert client.drained(queue) == ([b"x"] if site.is_fake else [])


def test_large_bodies(site: Site, client: RawClient, queue: str) -> None:
    """A body that is too large."""
    client.send(commands.Basic.Publish(routing_key=queue))
    client.write(frame.marshal(header.ContentHeader(0, MAX_MESSAGE_SIZE + 1, PERSISTENT), 1))
    client.patience(SOON_S)
    if site.is_fake:
        client.hear_only(commands.Channel.Close)
    else:
        with pytest.raises(TimeoutError):
            client.hear()


def test_nesting(site: Site, client: RawClient, queue: str) -> None:
    """Nested tables."""
    table = b""
    for _ in range(40):
        table = b"\x01aF" + len(table).to_bytes(4, "big") + table
    client.send(commands.Basic.Publish(routing_key=queue))
    properties = (1 << 13).to_bytes(2, "big") + len(table).to_bytes(4, "big") + table
    client.write_frame(2, 1, bytes([0, 60, 0, 0]) + bytes(8) + properties)
    refusal = "connection.close 541 INTERNAL_ERROR (0, 0)"
    assert client.told() == [refusal if site.is_fake else "basic.ack 1"]


def test_types(site: Site, client: RawClient) -> None:
    """An exchange type that is a word of Erlang, such as `classic`."""
    client.send(commands.Exchange.Declare(exchange="x", exchange_type="classic"))
    text = f"{'unknown' if site.is_fake else 'invalid'} exchange type 'classic' (40, 10)"
    if site.version < (4, 0):
        assert client.told() == [f"connection.close 503 COMMAND_INVALID - {text}"]
    else:
        assert client.told() == [f"channel.close 406 PRECONDITION_FAILED - {text}"]


@pytest.mark.usefixtures("of_3_10")
def test_expiry(site: Site, client: RawClient) -> None:
    """An expired message that overtook one with a longer TTL, by its priority."""
    name = client.declare(unique("queue"), arguments={"x-max-priority": 5})
    client.publish(name, b"first", properties=Properties(expiration="100000"))
    client.publish(name, b"mortal", properties=Properties(expiration="1", priority=5)).verdicts(2)
    time.sleep(0.1)
    assert client.drained(name) == ([b"first"] if site.is_fake else [b"mortal", b"first"])


@pytest.mark.usefixtures("of_3_10")
def test_consumers(site: Site, client: RawClient) -> None:
    """Consumers of a quorum queue."""
    arguments = {"x-queue-type": "quorum"}
    name = client.declare(unique("queue"), arguments=arguments)
    client.publish(name).verdicts(1)
    client.send(commands.Basic.Get(queue=name)).told(3)
    client.send(commands.Queue.Declare(queue=name, passive=True))
    assert client.told() == [f"queue.declareok {name} 0 {0 if site.is_fake else 1}"]


def test_versions(site: Site, connect: Connect) -> None:
    """The version it announces."""
    announced = connect().start().server_properties["version"]
    assert isinstance(announced, str)
    version = tuple(int(part) for part in announced.split("."))
    assert (version[:2] == site.version[:2]) != site.is_fake
