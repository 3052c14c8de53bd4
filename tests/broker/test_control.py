"""The control port: what a test in any language can ask a broker for, over HTTP."""

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from pamqp import commands, frame
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker, NackError

from reliablepub.testing import FakeBroker, NodeOptions, control, faults
from reliablepub.testing.control import ControlServer
from tests.broker.raw_tcp import opened
from tests.broker.sans_io import encode_publish
from tests.broker.test_broker import channel_of

PATIENCE_S = 60


@pytest.fixture
def fake_broker_options() -> NodeOptions:
    return NodeOptions(virtual_hosts=("/", "shop"))


class Control:
    """Requests to the control port of a broker."""

    def __init__(self, url: str) -> None:
        self.address = urlsplit(url)

    def ask(
        self, request: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send `METHOD path`; the status and the decoded answer."""
        method, path = request.split(" ", 1)
        assert self.address.hostname is not None
        connection = http.client.HTTPConnection(
            self.address.hostname, self.address.port, timeout=PATIENCE_S
        )
        encoded = body if isinstance(body, bytes) or body is None else json.dumps(body)
        connection.request(method, path, encoded, headers or {})
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "application/json"
        said = json.loads(answer.read())
        connection.close()
        return answer.status, said

    def do(self, request: str, body: object = None) -> Any:
        """The answer of a request that succeeds."""
        status, answer = self.ask(request, body)
        assert status == 200, answer
        return answer


@pytest.fixture
def server(fake_broker: FakeBroker) -> Iterator[Control]:
    with ControlServer(fake_broker, "127.0.0.1", 0) as server:
        yield Control(server.url)


def test_the_root_names_every_request(server: Control, fake_broker: FakeBroker) -> None:
    said = server.do("GET /")
    assert said["url"] == fake_broker.url
    assert said["is_up"] is True
    assert said["requests"]["/faults"] == ["GET", "POST", "DELETE"]
    assert said["requests"]["/messages/NAME"] == ["GET"]


def test_messages_are_put_into_queues_and_looked_at(
    server: Control, fake_broker: FakeBroker
) -> None:
    assert server.do("PUT /queues/in%2Fvoices") == {}
    server.do("PUT /exchanges/orders", {"type": "topic"})
    bound = {"queue": "in/voices", "exchange": "orders", "routing_key": "created.#"}
    server.do("POST /bindings", bound)
    properties = {"message_id": "m", "timestamp": 5, "headers": {"a": [1, {"b": None}]}}
    sent = {"exchange": "orders", "routing_key": "created.x", "properties": properties}
    assert server.do("POST /messages", {**sent, "body": "hé"}) == {"is_routed": True}
    assert server.do("POST /messages", {**sent, "body_base64": "/w=="}) == {"is_routed": True}
    assert server.do("POST /messages", {"routing_key": "nowhere"}) == {"is_routed": False}
    first, second = server.do("GET /messages/in%2Fvoices")
    assert first == {
        "exchange": "orders",
        "routing_key": "created.x",
        "properties": {"delivery_mode": 2, **properties},
        "redelivered": False,
        "body": "hé",
    }
    assert second["body_base64"] == "/w=="
    assert server.do("GET /messages/in%2Fvoices?limit=1") == [first]
    assert fake_broker.messages("in/voices")[1].body == b"\xff"
    fake_broker.crash()  # what was put there is on disk
    fake_broker.start()
    assert len(fake_broker.messages("in/voices")) == 2
    server.do("DELETE /queues/in%2Fvoices")
    server.do("DELETE /exchanges/orders")
    assert server.do("GET /queues") == []


def test_consumers_and_what_they_have_not_acknowledged(
    server: Control, fake_broker: FakeBroker
) -> None:
    fake_broker.declare_queue("q")
    for body in (b"one", b"two", b"three"):
        assert fake_broker.publish(body, "q")
    with channel_of(fake_broker) as channel:
        channel.basic_get("q")
        channel.basic_qos(prefetch_count=1)
        channel.basic_consume("q", print, consumer_tag="worker")
        fake_broker.wait_for(lambda: len(fake_broker.unacked()) == 2, PATIENCE_S)
        (consumer,) = server.do("GET /consumers")
        got, delivered = server.do("GET /unacked")
        (queue,) = server.do("GET /queues")
    assert consumer == {
        "tag": "worker",
        "queue": "q",
        "connection": 1,
        "channel": 1,
        "no_ack": False,
        "exclusive": False,
        "prefetch": 1,
        "priority": 0,
        "unacked": 1,
    }
    assert (got["body"], got["consumer_tag"], got["delivery_tag"]) == ("one", None, 1)
    assert (delivered["body"], delivered["consumer_tag"]) == ("two", "worker")
    assert (queue["ready"], queue["unacked"], queue["consumers"]) == (1, 2, 1)
    fake_broker.wait_for(lambda: not fake_broker.connections, PATIENCE_S)
    assert server.do("GET /unacked") == server.do("GET /consumers") == []
    assert server.do("GET /unacked?vhost=shop") == []


def test_faults_are_injected_listed_and_cleared(server: Control, fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    any_of = {"kind": "any_of", "nth": 9, "faults": [{"kind": "nack"}, {"kind": "return"}]}
    server.do("POST /faults", any_of)
    injected = server.do("POST /faults", {"kind": "nack", "times": 2})
    assert injected == server.do("GET /faults") == [any_of, {"kind": "nack", "times": 2}]
    assert fake_broker.faults[1] == faults.Nack(times=2)
    with channel_of(fake_broker) as channel:
        with pytest.raises(NackError):
            channel.basic_publish("", "q", b"one")
        server.do("DELETE /faults")
        assert server.do("GET /faults") == []
        channel.basic_publish("", "q", b"two")
    assert [one["fate"] for one in server.do("GET /published")["messages"]] == [
        "nacked",
        "accepted",
    ]


@pytest.mark.parametrize("release", ["POST /release-confirms", "DELETE /faults"])
def test_confirms_are_held_and_released(
    server: Control, fake_broker: FakeBroker, release: str
) -> None:
    fake_broker.declare_queue("q")
    server.do("POST /faults", {"kind": "hold_confirms"})
    with opened(fake_broker) as client:
        client.settimeout(PATIENCE_S)
        client.sendall(encode_publish("q", b"held"))
        assert server.do(f"GET /published?at_least=1&timeout_s={PATIENCE_S}")["count"] == 1
        server.do(release)
        client.sendall(encode_publish("q", b"confirmed at once"))
        heard = b""
        while not heard.endswith(confirm_of(2)):
            heard += client.recv(4096)
    assert heard.startswith(confirm_of(1))


def confirm_of(tag: int) -> bytes:
    return frame.marshal(commands.Basic.Ack(tag), 1)


def test_crash_start_restart_stop(server: Control, fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    for request in ("POST /crash", "POST /stop"):
        server.do(request)
        assert server.do("GET /")["is_up"] is False
        with pytest.raises(AMQPConnectionError):
            pika.BlockingConnection(pika.URLParameters(fake_broker.url))
        server.do("POST /start")
        assert server.do("GET /")["is_up"] is True
    server.do("POST /crash", {"lose_unsynced": False})
    server.do("POST /restart")
    with channel_of(fake_broker) as channel:
        channel.basic_publish("", "q", b"x", mandatory=True)
        server.do("POST /drop-connections")
        with pytest.raises(AMQPConnectionError):
            channel.basic_publish("", "q", b"x")


def test_true_and_false_may_be_in_the_query(server: Control, fake_broker: FakeBroker) -> None:
    server.do("PUT /queues/kept?durable=false")
    assert [queue.durable for queue in fake_broker.queues()] == [False]
    server.do("POST /crash?lose_unsynced=true")
    assert not fake_broker.is_up
    status, answer = server.ask("POST /crash?lose_unsynced=yes")
    assert (status, answer) == (400, {"error": "'lose_unsynced' must be true or false"})


def test_alarms_and_freezes(server: Control, fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    server.do("POST /block", {"reason": "low on disk"})
    with opened(fake_broker) as client:
        client.settimeout(PATIENCE_S)
        client.sendall(encode_publish("q", b"withheld"))
        (publish,) = server.do(f"GET /published?at_least=1&timeout_s={PATIENCE_S}")["messages"]
        assert publish["fate"] == "withheld"
        server.do("POST /unblock")
        server.do("POST /freeze")
        client.sendall(encode_publish("q", b"taken"))
        server.do("POST /thaw")
        fake_broker.wait_for(2, PATIENCE_S)
    assert [one.body for one in fake_broker.messages("q")] == [b"withheld", b"taken"]


def test_reset_leaves_an_empty_broker_on_the_same_port(
    server: Control, fake_broker: FakeBroker
) -> None:
    port = fake_broker.port
    fake_broker.declare_queue("q")
    fake_broker.inject(faults.Nack(keep=True))
    with channel_of(fake_broker) as channel:
        with pytest.raises(NackError):
            channel.basic_publish("", "q", b"x")
        server.do("POST /reset")
        with pytest.raises(AMQPConnectionError):
            channel.basic_publish("", "q", b"x")
    said = server.do("GET /")
    assert (said["is_up"], said["published"], said["faults"]) == (True, 0, 0)
    assert fake_broker.port == port
    assert server.do("GET /queues") == []
    server.do("POST /stop")
    server.do("POST /reset")
    assert server.do("GET /")["is_up"] is False


def test_published_is_waited_for_and_cut(server: Control, fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    with channel_of(fake_broker) as channel:
        for body in (b"one", b"two"):
            channel.basic_publish("", "q", body)
    said = server.do("GET /published?at_least=2&limit=1")
    assert said["count"] == 2
    (last,) = said["messages"]
    assert (last["body"], last["fate"], last["delivery_tag"]) == ("two", "accepted", 2)
    assert server.do("GET /published?limit=0")["messages"] == []
    status, said = server.ask("GET /published?at_least=3&timeout_s=0.01")
    assert status == 408
    assert "accepted" in said["error"]


def test_a_virtual_host_and_permissions(server: Control, fake_broker: FakeBroker) -> None:
    server.do("PUT /queues/q?vhost=shop", {"durable": False})
    assert [one["name"] for one in server.do("GET /queues?vhost=shop")] == ["q"]
    assert server.do("GET /queues") == []
    server.do("PUT /permissions/guest", {"write": "^never$"})
    fake_broker.declare_queue("q")
    with channel_of(fake_broker) as channel, pytest.raises(ChannelClosedByBroker):
        channel.basic_publish("amq.direct", "q", b"x")


def test_a_password_of_a_user(server: Control, fake_broker: FakeBroker) -> None:
    server.do("PUT /users/guest", {"password": "other"})
    assert "guest:other@" in fake_broker.url
    with channel_of(fake_broker) as channel:
        assert channel.is_open


@pytest.mark.parametrize(
    ("request_line", "body", "status", "text"),
    [
        ("GET /nope", None, 404, "there is no /nope"),
        ("GET /queues/a/b", None, 404, "there is no /queues/a/b"),
        ("GET /messages/nope", None, 404, "there is no 'nope'"),
        ("GET /queues?vhost=nope", None, 404, "there is no 'nope'"),
        ("POST /messages", {"exchange": "nope"}, 404, "there is no 'nope'"),
        ("DELETE /exchanges/nope", None, 404, "there is no 'nope'"),
        ("PUT /published", None, 405, "/published takes GET"),
        ("GET /queues?x=1", None, 400, "there is no argument 'x' here"),
        ("GET /published?limit=x", None, 400, "'limit' must be a whole number"),
        ("GET /published?timeout_s=true", None, 400, "'timeout_s' must be a number"),
        ("GET /published?at_least=1&timeout_s=1e10", None, 400, "timeout_s must be at most"),
        ("GET /published?at_least=1&timeout_s=nan", None, 400, "timeout_s must be at most"),
        ("POST /advance", {"seconds": 1e12}, 400, "up to the year 9999"),
        ("POST /advance", {"seconds": 10**400}, 400, "too large"),
        ("PUT /users/guest", None, 400, "'password' is missing"),
        ("POST /block", {"reason": 5}, 400, "'reason' must be a string"),
        ("POST /crash", {"lose_unsynced": 1}, 400, "'lose_unsynced' must be true or false"),
        ("POST /crash", [], 400, "must be a JSON object"),
        ("POST /crash", b"{", 400, "not JSON"),
        ("POST /crash", b"\xff", 400, "not JSON"),
        ("POST /crash", b"[" * 100_000, 400, "not JSON"),
        ("POST /bindings", {"queue": "q"}, 400, "'exchange' is missing"),
        ("POST /faults", {"kind": "nakc"}, 400, "kind 'nakc' is not one of"),
        ("POST /faults", {"kind": "nack", "nth": 0}, 400, "nth counts from 1"),
        ("POST /messages", {"body": "a", "body_base64": ""}, 400, "either body or body_base64"),
        ("POST /messages", {"body_base64": "?"}, 400, "base64"),
        ("POST /messages", {"properties": {"x": 1}}, 400, "there is no property 'x'"),
        ("POST /messages", {"properties": {"priority": 999}}, 400, "cannot be encoded"),
        ("POST /messages", {"properties": {"timestamp": 10**30}}, 400, "cannot be encoded"),
        ("PUT /exchanges/x", {"type": "nope"}, 400, "unknown exchange type 'nope'"),
    ],
)
def test_a_request_that_is_wrong_is_told_so(
    server: Control, request_line: str, body: object, status: int, text: str
) -> None:
    got, said = server.ask(request_line, body)
    assert got == status
    assert text in said["error"]


def test_a_broker_that_is_not_running_says_so(server: Control, fake_broker: FakeBroker) -> None:
    fake_broker.stop()
    status, said = server.ask("POST /freeze")
    assert status == 409
    assert "not running" in said["error"]


def test_a_port_that_is_gone_is_an_answer(server: Control, fake_broker: FakeBroker) -> None:
    fake_broker.stop()
    with socket.create_server(("127.0.0.1", fake_broker.port)):
        status, said = server.ask("POST /start")
    assert status == 500
    assert "in use" in said["error"]


def test_a_request_that_is_too_large_is_refused(
    server: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "REQUEST_MAX_BYTES", 10)
    assert server.ask("POST /messages", b"x" * 11)[0] == 413
    assert server.ask("POST /messages", b"", {"Content-Length": "-1"})[0] == 413


def test_a_request_that_does_not_end_is_given_up(
    server: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control._Handler, "timeout", 0.05)
    assert server.ask("POST /reset", b"", {"Content-Length": "5"})[0] == 408


def test_web_pages_are_refused(server: Control, fake_broker: FakeBroker) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        status, said = server.ask("POST /stop", None, headers)
        assert status == 403
        assert said["error"]
    assert fake_broker.is_up
    assert server.ask("GET /", None, {"Host": "localhost:1"})[0] == 200
    with ControlServer(fake_broker, "127.0.0.1", 0, is_remote=True) as remote:
        assert Control(remote.url).ask("GET /", None, {"Host": "broker:15673"})[0] == 200


def test_values_that_json_has_no_form_for(server: Control, fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    with channel_of(fake_broker) as channel:
        headers: dict[str, Any] = {"bytes": b"\xff", "deep": [{"big": 2**40}]}
        channel.basic_publish("", "q", b"", pika.BasicProperties(headers=headers))
        channel.queue_declare("limited", arguments={"x-max-length": 5})
    (message,) = server.do("GET /messages/q")
    assert message["properties"]["headers"] == {
        "bytes": {"base64": "/w=="},
        "deep": [{"big": 2**40}],
    }
    assert server.do("GET /queues")[1]["arguments"] == {"x-max-length": 5}


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_it_listens_on_ipv6_too(fake_broker: FakeBroker) -> None:
    try:
        server = ControlServer(fake_broker, "::1", 0)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with server:
        assert Control(server.url).do("GET /")["is_up"] is True


def test_the_clock_is_set_ahead(server: Control, fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q", arguments={"x-message-ttl": 60_000})
    fake_broker.publish(b"a", "q")
    server.do("POST /advance", {"seconds": 59})
    assert fake_broker.messages("q")
    server.do("POST /advance?seconds=2")
    assert not fake_broker.messages("q")
    status, said = server.ask("POST /advance", {"seconds": -1})
    error = "the clock can only be set ahead, up to the year 9999"
    assert (status, said) == (400, {"error": error})


def test_a_fault_of_deliveries(server: Control, fake_broker: FakeBroker) -> None:
    server.do("POST /faults", {"kind": "repeat_delivery", "queue": "q"})
    assert fake_broker.faults == (faults.RepeatDelivery(queue="q"),)
