"""Direct reply-to: the pseudo-queue amq.rabbitmq.reply-to, and the names generated for it."""

import re
from typing import Any

import pytest
from pamqp import commands

from tests.amqp_probe import unique
from tests.facts.conftest import Connect
from tests.facts.raw_client import Properties, RawClient
from tests.facts.site import Site

REPLY_TO = "amq.rabbitmq.reply-to"
REQUEST = Properties(reply_to=REPLY_TO, correlation_id="7", headers={"a": 1}, app_id="it")
REFUSAL = "connection.close 541 INTERNAL_ERROR (0, 0)"
BASE64 = "[A-Za-z0-9+/]+=*"


def consume(client: RawClient, tag: str = "me", **options: Any) -> list[str]:
    options = {"no_ack": True} | options
    client.send(commands.Basic.Consume(queue=REPLY_TO, consumer_tag=tag, **options))
    return client.told()


def name_of(client: RawClient, queue: str) -> str:
    """The name generated for the client's consumer, as a server that gets a request sees it."""
    client.publish(queue, properties=REQUEST).hear_only(commands.Basic.Ack)
    client.call(commands.Basic.Get(queue=queue, no_ack=True), commands.Basic.GetOk)
    properties = client.hear()[1].properties
    client.hear()
    assert (properties.correlation_id, properties.headers) == ("7", {"a": 1})
    assert properties.app_id == "it"
    return str(properties.reply_to)


@pytest.fixture
def name(client: RawClient, queue: str) -> str:
    """The generated name of a consumer `me` on channel 1."""
    assert consume(client) == ["basic.consumeok me"]
    return name_of(client, queue)


def declare(client: RawClient, name: str, bits: int = 1) -> list[str]:
    """queue.declare of a name that pamqp does not take; bit 0 is passive, bit 1 durable."""
    said = bytes([0, 50, 0, 10, 0, 0, len(name)]) + name.encode()
    client.write_frame(1, 1, said + bytes([bits]) + bytes(4))
    return client.told()


def test_a_request_carries_a_generated_name(name: str) -> None:
    assert re.fullmatch(rf"{re.escape(REPLY_TO)}\.g1h2{BASE64}\.{BASE64}", name)


def test_the_name_is_that_of_the_consumer(client: RawClient, name: str, queue: str) -> None:
    assert name_of(client, queue) == name
    client.call(commands.Basic.Cancel("me"), commands.Basic.CancelOk)
    consume(client)
    assert name_of(client, queue) != name


def test_replies(site: Site, client: RawClient, name: str, connect: Connect) -> None:
    server = connect().opened()
    for number, body in enumerate((b"a", b"b")):
        server.publish(name, body, mandatory=False, properties=Properties())
        assert server.told()[0].startswith("basic.ack")
        # The fixture's basic.get had tag 1. A reply does not use up the next one before 4.2.
        tag = 2 + number if site.version >= (4, 2) else 2
        expected = [f"basic.deliver me {tag} False  {name}", "header 1", f"body {body!r}"]
        assert client.told(3) == expected


def test_a_mandatory_reply_arrives_and_is_returned(
    site: Site, client: RawClient, name: str, connect: Connect
) -> None:
    """It is not returned since 4.2: test_versions."""
    if site.version >= (4, 2):
        pytest.skip("a fact of RabbitMQ before 4.2")
    server = connect().opened()
    server.publish(name)
    returned = [f"basic.return 312 NO_ROUTE  {name}", "header 1", "body b'x'"]
    assert server.told(4) == [*returned, "basic.ack 1"]
    assert client.told(3)[2] == "body b'x'"


def test_a_reply_by_a_copy(client: RawClient, name: str, queue: str, connect: Connect) -> None:
    server = connect().opened()
    assert server.publish(queue, properties=Properties(headers={"CC": [name]})).told() == [
        "basic.ack 1"
    ]
    assert client.told(3)[0] == f"basic.deliver me 2 False  {queue}"


def test_a_reply_through_another_exchange_is_not_one(
    client: RawClient, name: str, connect: Connect
) -> None:
    server = connect().opened()
    assert server.publish(name, exchange="amq.direct", mandatory=False).told() == ["basic.ack 1"]
    assert client.told_now() == []


@pytest.mark.parametrize("suffix", [".x", ".x..", ".x.y.z", "x", ".", ""])
def test_a_reply_to_no_consumer(client: RawClient, suffix: str) -> None:
    assert client.publish(REPLY_TO + suffix, mandatory=False).told() == ["basic.ack 1"]


@pytest.mark.parametrize("suffix", [".x.y", ".eA==.eA==", ".x..y"])
def test_a_reply_to_a_name_of_two_parts_that_was_not_generated(
    site: Site, client: RawClient, suffix: str
) -> None:
    client.publish(REPLY_TO + suffix, mandatory=False)
    assert client.told() == [REFUSAL if site.version < (4, 2) else "basic.ack 1"]


def test_a_reply_after_the_cancel(client: RawClient, name: str, connect: Connect) -> None:
    client.call(commands.Basic.Cancel("me"), commands.Basic.CancelOk)
    assert connect().opened().publish(name, mandatory=False).told() == ["basic.ack 1"]
    assert client.told_now() == []


def test_a_dead_letter_is_a_reply(
    site: Site, client: RawClient, name: str, connect: Connect
) -> None:
    server = connect().opened()
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": name, "x-max-length": 0}
    server.publish(server.declare(unique("source"), arguments=arguments))
    if site.version[:2] == (4, 0):  # the queue crashes in rabbit_dead_letter:detect_cycles
        assert server.told() == ["basic.nack 1 multiple"]
        assert client.told_now() == []
        return
    assert client.told(3)[0] == f"basic.deliver me 2 False  {name}"


def test_who_acknowledges(client: RawClient) -> None:
    text = "PRECONDITION_FAILED - reply consumer cannot acknowledge"
    assert consume(client, no_ack=False) == [f"channel.close 406 {text} (60, 20)"]


def test_a_second_one(client: RawClient) -> None:
    consume(client)
    text = "PRECONDITION_FAILED - reply consumer already set"
    assert consume(client, "you") == [f"channel.close 406 {text} (60, 20)"]


def test_a_second_one_that_acknowledges(client: RawClient) -> None:
    consume(client)
    text = "PRECONDITION_FAILED - reply consumer cannot acknowledge"
    assert consume(client, "you", no_ack=False) == [f"channel.close 406 {text} (60, 20)"]


def test_a_tag_that_another_consumer_has(client: RawClient, queue: str) -> None:
    method = commands.Basic.Consume(queue=queue, consumer_tag="me")
    client.call(method, commands.Basic.ConsumeOk)
    text = "NOT_ALLOWED - attempt to reuse consumer tag 'me'"
    assert consume(client) == [f"connection.close 530 {text} (60, 20)"]


def test_another_consumer_may_have_its_tag(client: RawClient, queue: str) -> None:
    consume(client)
    method = commands.Basic.Consume(queue=queue, consumer_tag="me")
    client.call(method, commands.Basic.ConsumeOk)


def test_a_generated_tag(client: RawClient) -> None:
    (line,) = consume(client, "")
    assert line.startswith("basic.consumeok amq.ctag-")


def test_the_consumer_is_looked_for_before_the_user_id(client: RawClient, queue: str) -> None:
    client.publish(queue, properties=Properties(reply_to=REPLY_TO, user_id="bob"))
    text = "PRECONDITION_FAILED - fast reply consumer does not exist"
    assert client.told() == [f"channel.close 406 {text} (60, 40)"]


@pytest.mark.parametrize("bits", [0, 1, 2])
def test_every_declaration_is_declare(client: RawClient, bits: int) -> None:
    assert declare(client, REPLY_TO, bits) == [f"queue.declareok {REPLY_TO} 0 1"]


def test_a_generated_name_is_declared_while_its_consumer_is_there(
    client: RawClient, name: str, connect: Connect
) -> None:
    server = connect().opened()
    assert declare(server, name) == [f"queue.declareok {name} 0 1"]
    client.call(commands.Basic.Cancel("me"), commands.Basic.CancelOk)
    text = f"NOT_FOUND - no queue '{name}' in vhost '/'"
    assert declare(server, name) == [f"channel.close 404 {text} (50, 10)"]


def test_a_generated_name_goes_with_its_channel(
    client: RawClient, name: str, connect: Connect
) -> None:
    client.call(commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)
    (line,) = declare(connect().opened(), name)
    assert line.startswith("channel.close 404")


@pytest.mark.parametrize("suffix", [".x", "x", ".x.y.z"])
def test_a_declaration_of_a_name_that_was_not_generated(
    site: Site, client: RawClient, suffix: str
) -> None:
    text = f"channel.close 404 NOT_FOUND - no queue '{REPLY_TO}{suffix}' in vhost '/' (50, 10)"
    assert declare(client, REPLY_TO + suffix) == [text if site.version < (4, 2) else REFUSAL]


def test_a_declaration_of_two_parts_that_were_not_generated(client: RawClient) -> None:
    assert declare(client, f"{REPLY_TO}.eA==.eA==") == [REFUSAL]


METHODS = {
    "get": (commands.Basic.Get(queue=REPLY_TO), (60, 70)),
    "purge": (commands.Queue.Purge(queue=REPLY_TO), (50, 30)),
    "bind": (commands.Queue.Bind(queue=REPLY_TO, exchange="amq.direct"), (50, 20)),
}


@pytest.mark.parametrize("method", METHODS)
def test_it_is_no_queue(client: RawClient, method: str) -> None:
    said, ids = METHODS[method]
    text = f"NOT_FOUND - no queue '{REPLY_TO}' in vhost '/'"
    assert client.send(said).told() == [f"channel.close 404 {text} {ids}"]


def test_a_delete(client: RawClient) -> None:
    assert client.send(commands.Queue.Delete(queue=REPLY_TO)).told() == ["queue.deleteok 0"]


def test_no_permission_is_needed(site: Site, connect: Connect) -> None:
    user = site.add_reader()  # before the connection, whose login may take 10 s
    client = connect()
    client.user = client.password = user
    client.opened()
    assert consume(client) == ["basic.consumeok me"]
    assert declare(client, REPLY_TO) == [f"queue.declareok {REPLY_TO} 0 1"]
