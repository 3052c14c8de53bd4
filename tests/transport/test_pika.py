"""Pika's transport on a fake broker: requests in, events out, and nothing left behind."""

import errno
import gc
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pika
import pytest
from pamqp import commands, frame

from reliablepub._core.events import (
    Acked,
    AckedEach,
    Blocked,
    ChannelClosed,
    ChannelOpened,
    Connected,
    ConnectionLost,
    Event,
    Returned,
    Unblocked,
)
from reliablepub._core.session import COUNTED_OUT_S
from reliablepub.credentials import Credentials, CredentialsProvider
from reliablepub.message import Message
from reliablepub.testing import FakeBroker, NodeOptions, faults
from reliablepub.topology import Queue, Topology
from reliablepub.transport import provision
from reliablepub.transport.address import parse_addresses
from reliablepub.transport.base import CannotEncode
from reliablepub.transport.pika import PikaTransport
from reliablepub.transport.pika_hooks import HookedConnection, hooks
from tests.names import half_dead_name
from tests.rabbitmq import free_ports
from tests.waiting import until

SECRET = "s3cr3t"
Connect = Callable[..., "Wire"]


class Wire:
    """A transport, and every event it has reported."""

    def __init__(self, url: str, *, heartbeat_s: int = 10) -> None:
        self.transport = PikaTransport(parse_addresses(url), run=7, heartbeat_s=heartbeat_s)
        self.events: list[Event] = []
        self.epoch = 0
        self._is_closed = False

    def until(self, *kinds: type[Any], timeout_s: float = 60.0) -> Any:
        """Listen until an event of one of these kinds comes; the event."""
        deadline = time.monotonic() + timeout_s
        while True:
            for index, event in enumerate(self.events):
                if isinstance(event, kinds):
                    del self.events[: index + 1]
                    return event
            assert time.monotonic() < deadline, f"no {kinds}, only {self.events}"
            self.events += self.transport.listen(0.2)

    def until_acked(self) -> list[int]:
        """The tags that an ack names, however many came at once."""
        event = self.until(Acked, AckedEach)
        return list(event.tags) if isinstance(event, AckedEach) else [event.tag]

    def connect(self) -> None:
        self.transport.connect()
        self.until(Connected)

    def open_channel(self) -> int:
        self.epoch += 1
        self.transport.open_channel(self.epoch)
        assert self.until(ChannelOpened) == ChannelOpened(self.epoch)
        return self.epoch

    def send(self, first_tag: int, *messages: Message) -> None:
        self.transport.send(self.epoch, first_tag, messages)

    def lost(self) -> ConnectionLost:
        lost = self.until(ConnectionLost, timeout_s=60.0)
        assert isinstance(lost, ConnectionLost)
        return lost

    def lost_reason(self) -> str:
        return self.lost().reason

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.transport.close()


@pytest.fixture
def wire(fake_broker: FakeBroker) -> Iterator[Connect]:
    """Build transports; to the broker and connected, unless told otherwise."""
    wires: list[Wire] = []

    def build(url: str | None = None, **options: Any) -> Wire:
        wires.append(Wire(url or fake_broker.url, **options))
        if url is None:
            wires[-1].connect()
            wires[-1].open_channel()
        return wires[-1]

    yield build
    for one in wires:
        one.close()


def to(queue: str, **fields: Any) -> Message:
    return Message(b"body", routing_key=queue, message_id="m", **fields)


def test_listening_ends_when_a_watched_descriptor_is_readable(wire: Connect) -> None:
    own = wire(heartbeat_s=600)  # no timer of pika's ends a poll
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert own.transport.watch(ours.fileno())
        for _ in range(2):
            theirs.send(b"!")
            assert own.transport.listen(300.0) == []
            assert ours.recv(1) == b"!"
        own.transport.disconnect("enough")
        own.lost()
        assert theirs.send(b"!"), "the connection's socket is another one"
        own.close()


# -------------------------------------------------------------------- connecting


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("amqp://guest:{secret}@127.0.0.1:{port}/", "credentials"),
        ("amqp://guest:guest@127.0.0.1:{port}/nowhere", "vhost"),
        ("amqp://guest:{secret}@127.0.0.1:{free}/", "refused"),
        ("amqp://guest:{secret}@no-such-host.invalid/", "(?i)name|resolution"),
    ],
)
def test_a_failed_connection_gives_a_short_reason_without_secrets(
    wire: Connect, fake_broker: FakeBroker, url: str, reason: str
) -> None:
    w = wire(url.format(secret=SECRET, port=fake_broker.port, free=free_ports(1)[0]))
    w.transport.connect()
    said = w.lost_reason()
    assert SECRET not in said
    assert len(said) < 200
    assert "\n" not in said
    assert re.search(reason, said), said


def test_a_socket_reset_as_soon_as_it_is_connected_is_a_lost_connection(
    wire: Connect, fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between ``connect`` and ``getpeername``: pika raises that out of its loop."""
    w = wire(fake_broker.url)
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "getpeername", not_connected)
        w.transport.connect()
        assert "getpeername" in w.lost_reason()
    w.connect()
    assert w.open_channel() == 1


def not_connected(*_: object) -> None:
    raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")


def test_an_error_out_of_pikas_loop_loses_the_connection_and_no_more(wire: Connect) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    w = wire()
    w.transport._loop.call_later(0, fail)
    assert ": pika failed with ZeroDivisionError" in w.lost_reason()
    w.connect()
    assert w.open_channel() == 2


def test_hooks_that_are_off_are_off_for_every_connection_of_the_process(
    wire: Connect, fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_why_off", "")
    w = wire(fake_broker.url, heartbeat_s=1)
    w.connect()
    assert w.transport.hooks_off == ""
    hooks.switch_off("another one has failed")
    assert "hooks were switched off: another one has failed" in w.lost_reason()
    w.connect()
    assert w.transport.hooks_off == "another one has failed"
    fake_broker.declare_queue("q")
    w.open_channel()
    w.send(1, to("q"))
    assert w.until_acked() == [1]


def test_a_hook_that_fails_writing_loses_the_connection_and_is_the_last(
    wire: Connect, fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_why_off", "")
    fake_broker.declare_queue("q")
    w = wire()
    with monkeypatch.context() as patch:
        patch.setattr(HookedConnection, "_write_at_once", not_connected)
        w.send(1, to("q"))
    assert "a hook failed writing" in w.lost_reason()
    w.connect()
    assert "a hook failed writing" in w.transport.hooks_off
    w.open_channel()
    w.send(1, to("q"))
    assert w.until_acked() == [1]


def test_a_socket_closed_in_the_handshake_is_a_lost_connection(
    wire: Connect, fake_broker: FakeBroker
) -> None:
    fake_broker.inject(faults.RefuseHandshake(code=None))
    w = wire(fake_broker.url.replace("guest:guest", f"guest:{SECRET}"))
    w.transport.connect()
    assert SECRET not in w.lost_reason()


@pytest.mark.parametrize(
    ("fault", "is_refused", "words"),
    [
        (faults.RefuseHandshake(), True, "the broker refused the credentials"),
        (faults.RefuseHandshake(code=None), False, "the login without a reply"),
        (faults.RefuseHandshake(code=320, text="stops"), False, "320 CONNECTION_FORCED - stops"),
        (faults.RefuseHandshake(at="open", code=530), True, "refused access to the vhost '/'"),
        (faults.RefuseHandshake(at="open", code=None), False, "the login without a reply"),
        (
            faults.RefuseHandshake(at="open", code=530, text="vhost unlimited not found"),
            True,
            "refused access to the vhost '/'",
        ),
        (
            faults.RefuseHandshake(at="open", code=530, text="connection limit (1) is reached"),
            False,
            "530 NOT_ALLOWED - connection limit (1) is reached",
        ),
    ],
)
def test_only_the_broker_itself_says_that_it_refuses_a_login(
    wire: Connect, fake_broker: FakeBroker, fault: faults.Fault, words: str, *, is_refused: bool
) -> None:
    """A broker that is overloaded ends a login without a word; pika takes that for a refusal."""
    fake_broker.inject(fault)
    w = wire(fake_broker.url)
    w.transport.connect()
    lost = w.lost()
    assert words in lost.reason
    assert lost.is_refusal is is_refused


def test_a_port_without_tls_is_told_from_a_broken_one(
    wire: Connect, fake_broker: FakeBroker
) -> None:
    w = wire(fake_broker.url.replace("amqp:", "amqps:"))
    w.transport.connect()
    assert "the port does not speak TLS, which amqps:// asks for ([SSL: WRONG" in w.lost_reason()


def hang_up(server: socket.socket) -> None:
    peer, _ = server.accept()
    peer.close()


def test_a_peer_that_hangs_up_before_it_says_anything_is_told_in_words(wire: Connect) -> None:
    """A load balancer without a broker behind it, for instance."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        w = wire(f"amqp://127.0.0.1:{port}/")
        w.transport.connect()
        thread = threading.Thread(target=hang_up, args=[server])
        thread.start()
        words = "the peer ended the connection before the AMQP handshake: there is no broker"
        assert w.lost_reason().startswith(f"127.0.0.1:{port}: {words}")
        thread.join()


def answer_in_http(server: socket.socket) -> None:
    peer, _ = server.accept()
    with closing(peer):
        peer.recv(8)
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def offer_certificates_alone(server: socket.socket) -> None:
    """As a broker with ``auth_mechanisms.1 = EXTERNAL``: pika's error is the word PLAIN alone."""
    peer, _ = server.accept()
    with closing(peer):
        peer.recv(8)
        peer.sendall(frame.marshal(commands.Connection.Start(mechanisms="EXTERNAL"), 0))
        peer.recv(1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (answer_in_http, "the port answers in HTTP, not in AMQP"),
        (offer_certificates_alone, "the broker offers no login with a password"),
    ],
)
def test_a_peer_that_is_not_to_be_used_is_a_lost_connection(
    wire: Connect, answer: Callable[[socket.socket], None], words: str
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        w = wire(f"amqp://127.0.0.1:{server.getsockname()[1]}/")
        thread = threading.Thread(target=answer, args=[server])
        thread.start()
        w.transport.connect()
        assert words in w.lost_reason()
        thread.join()


@pytest.mark.parametrize(
    ("scheme", "backlog", "reason"),
    [
        ("amqps", 5, "the TLS handshake did not end in time"),
        ("amqp", 5, "the AMQP handshake did not end in time"),
        ("amqp", 0, "no answer to the TCP connection in time"),
    ],
)
def test_a_peer_that_stalls_is_a_lost_connection_that_says_where(
    wire: Connect, monkeypatch: pytest.MonkeyPatch, scheme: str, backlog: int, reason: str
) -> None:
    monkeypatch.setattr("reliablepub.transport.pika._CONNECT_TIMEOUT_S", 0.5)
    with ExitStack() as stack:
        server = stack.enter_context(closing(socket.socket()))
        server.bind(("127.0.0.1", 0))
        server.listen(backlog)
        for _ in range(3 if backlog == 0 else 0):  # no other client gets in
            filler = stack.enter_context(closing(socket.socket()))
            filler.settimeout(0)
            filler.connect_ex(server.getsockname())
        port = server.getsockname()[1]
        w = wire(f"{scheme}://127.0.0.1:{port}/")
        w.transport.connect()
        assert w.lost_reason() == f"127.0.0.1:{port}: {reason}"


def send_a_huge_frame(server: socket.socket) -> None:
    peer, _ = server.accept()
    with closing(peer), suppress(OSError):
        peer.recv(8)
        peer.sendall(b"\x01\x00\x00\xff\xff\xff\xff")
        for _ in range(10_000):
            peer.sendall(bytes(64 * 1024))


def test_a_frame_without_end_is_not_read_before_authentication_either(wire: Connect) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        w = wire(f"amqp://127.0.0.1:{server.getsockname()[1]}/")
        thread = threading.Thread(target=send_a_huge_frame, args=[server])
        thread.start()
        w.transport.connect()
        assert "began a frame of 4294967303 bytes, and 131072 are allowed" in w.lost_reason()
        thread.join()


def test_a_name_is_resolved_while_the_interpreter_shuts_down(
    wire: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 starts no thread then, and pika resolves names on one of its own."""
    monkeypatch.setattr(
        threading.Timer,
        "start",
        Mock(side_effect=RuntimeError("can't create new thread at interpreter shutdown")),
    )
    wire()
    w = wire("amqp://no-such-host.invalid/")
    w.transport.connect()
    assert "pika failed" not in w.lost_reason()


def test_an_attempt_that_fails_before_there_is_a_socket_leaves_waking_as_it_was(
    wire: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = wire("amqp://localhost:1/")
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Timer, "start", Mock(side_effect=RuntimeError("can't start new thread"))
        )
        w.transport.connect()
        assert "can't start new thread" in w.lost_reason()
    time.sleep(0.2)  # pika wakes once more for the timer of a `listen` that ended before its time
    while w.transport.listen(0.0):
        pass
    since = time.monotonic()
    w.transport.listen(0.3)
    assert time.monotonic() - since > 0.2, "it does not sleep any more"
    w.transport.wake()
    since = time.monotonic()
    w.transport.listen(60.0)
    assert time.monotonic() - since < 30.0


@pytest.mark.parametrize("provider", [None, lambda: Credentials("guest", "guest")])
def test_what_fails_before_connecting_is_a_failed_attempt(
    provider: CredentialsProvider | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "missing" / "keys"))
    addresses = parse_addresses("amqps://localhost:1/", credentials=provider)
    transport = PikaTransport(addresses, run=1, heartbeat_s=10, credentials=provider)
    with closing(transport):
        for _ in range(2):
            transport.connect()
            deadline = time.monotonic() + 60.0
            while not (events := transport.listen(0.05)):
                assert time.monotonic() < deadline, "the attempt never ends"
            (lost,) = events
            assert isinstance(lost, ConnectionLost)
            assert "connecting failed with FileNotFoundError" in lost.reason


def test_the_next_address_is_tried_when_one_fails(fake_broker: FakeBroker) -> None:
    urls = [f"amqp://127.0.0.1:{free_ports(1)[0]}/", fake_broker.url]
    transport = PikaTransport(parse_addresses(urls), run=1, heartbeat_s=10)
    kinds: list[type[Any]] = []
    for _ in range(2):
        transport.connect()
        while not (events := transport.listen(1.0)):
            pass
        kinds += map(type, events)
    transport.close()
    assert kinds == [ConnectionLost, Connected]


@pytest.mark.parametrize("why_off", [None, "switched off"])
def test_the_next_address_of_a_name_is_tried_when_one_accepts_tcp_and_no_more(
    wire: Connect, fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, why_off: str | None
) -> None:
    """Without the turn, pika itself would go no further."""
    monkeypatch.setattr(hooks, "_why_off", why_off)
    with half_dead_name(fake_broker) as url:
        w = wire(url)
        w.transport.connect()
        w.lost()
        assert w.transport.untried == 1
        w.connect()
        assert not w.transport.untried


# -------------------------------------------------------------------- publishing


def test_a_publish_is_confirmed_under_the_tag_of_the_core(
    wire: Connect, fake_broker: FakeBroker
) -> None:
    fake_broker.declare_queue("q")
    w = wire()
    w.send(1, to("q"), to("q"))
    w.send(3, to("q"))
    confirmed = 0
    while confirmed < 3:
        confirmed = max(confirmed, *w.until_acked())
    (first, *_) = fake_broker.messages("q")
    assert first.body == b"body"


def test_returns_are_matched_by_their_header_and_come_before_the_ack(
    wire: Connect, fake_broker: FakeBroker
) -> None:
    fake_broker.declare_queue("q")
    w = wire()
    w.send(1, to("q"), to("nowhere"), to("q"), to("nowhere"))
    returned = [w.until(Returned) for _ in range(2)]
    assert [(r.epoch, r.tag, r.reply_code) for r in returned] == [(1, 2, 312), (1, 4, 312)]


@pytest.mark.parametrize(
    "value",
    [1.5, 2**62, Decimal("1.5"), b"\xff", None, True, [1, [2]], {"a": {"b": 0.1}}, 1e308, -0.0],
)
def test_a_return_is_understood_whatever_its_headers_hold(wire: Connect, value: Any) -> None:
    w = wire()
    w.send(1, to("nowhere", headers={"k": value}))
    assert w.until(Returned, ConnectionLost) == Returned(1, 1, 312, "NO_ROUTE", 4)


def test_headers_beyond_the_negotiated_frame_are_refused_before_anything_is_written() -> None:
    with FakeBroker(options=NodeOptions(frame_max=8192)) as broker:
        w = Wire(broker.url)
        w.connect()
        w.open_channel()
        with pytest.raises(CannotEncode, match="8192") as raised:
            w.send(1, to("q"), to("q", headers={"large": "x" * 9000}))
        assert raised.value.index == 1
        w.send(1, to("q", headers={"small": "x" * 7000}))
        w.until_acked()
        assert broker.published_count == 1
        w.close()


# -------------------------------------------------------------------- what the broker ends


def test_a_channel_closed_by_a_publish_says_so(wire: Connect) -> None:
    w = wire()
    w.send(1, Message(b"", exchange="missing", message_id="m"))
    closed = w.until(ChannelClosed)
    assert (closed.epoch, closed.reply_code, closed.by_publish) == (1, 404, True)
    assert "missing" in closed.reply_text


def test_a_channel_closed_by_something_else_says_that_too(wire: Connect) -> None:
    w = wire()
    channel = w.transport._channels[1]
    channel.queue_declare("missing", passive=True)
    closed = w.until(ChannelClosed)
    assert (closed.reply_code, closed.by_publish) == (404, False)


def test_a_closed_channel_leaves_the_connection_for_the_next(wire: Connect) -> None:
    w = wire()
    w.send(1, Message(b"", exchange="missing", message_id="m"))
    w.until(ChannelClosed)
    w.open_channel()
    w.send(1, to("nowhere"))
    assert w.until(Returned).epoch == 2


def test_a_connection_closed_by_the_broker_is_lost_with_its_words(
    wire: Connect, fake_broker: FakeBroker
) -> None:
    w = wire()
    fake_broker.inject(faults.CloseConnection(code=320, text="maintenance"))
    w.send(1, to("q"))
    assert "maintenance" in w.lost_reason()


@pytest.mark.parametrize("code", [540, 541])
def test_a_closed_connection_has_the_brokers_reply(
    wire: Connect, fake_broker: FakeBroker, code: int
) -> None:
    w = wire()
    fake_broker.inject(faults.CloseConnection(code=code, text="no"))
    w.send(1, to("q"))
    lost = w.until(ConnectionLost)
    assert lost.close is not None
    assert lost.close.reply_code == code
    assert lost.reason == f"127.0.0.1:{fake_broker.port}: {code} {lost.close.reply_text}"
    w.connect()
    fake_broker.drop_connections()
    assert w.until(ConnectionLost).close is None, "the words were of the other one"


def test_a_reset_connection_is_lost_once(wire: Connect, fake_broker: FakeBroker) -> None:
    w = wire()
    fake_broker.drop_connections()
    assert w.lost_reason()
    assert w.transport.listen(0.1) == []


TOPOLOGY = Topology(queues=[Queue("q", durable=True)])


@pytest.mark.parametrize(
    ("name", "owed"),
    [
        ("reliablepub.transport.provision._declare_queue", "the declaration of queue 'q'"),
        ("pika.channel.Channel.close", "the closing of the channel for declarations"),
    ],
)
def test_a_step_of_the_topology_without_an_answer_ends_the_attempt(
    fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, name: str, owed: str
) -> None:
    monkeypatch.setattr("reliablepub.transport.pika._ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(name, lambda *_: None)
    addresses = parse_addresses(fake_broker.url)
    transport = PikaTransport(addresses, run=1, heartbeat_s=10, topology=TOPOLOGY)
    with closing(transport):
        transport.connect()
        deadline = time.monotonic() + 60.0
        while not (events := transport.listen(0.05)):
            assert time.monotonic() < deadline, "the attempt never ends"
    (lost,) = events
    assert isinstance(lost, ConnectionLost)
    assert lost.reason.endswith(f"no answer within 0.2 s to {owed}")


def test_blocked_during_the_topology_is_blocked_after_it(
    fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of a topology publishes, so an alarm may block the connection before it is ready."""
    addresses = parse_addresses(fake_broker.url)
    transport = PikaTransport(addresses, run=1, heartbeat_s=10, topology=TOPOLOGY)
    declare = provision._declare_queue

    def blocked(queue: Any, channel: Any, done: Any) -> None:
        method = SimpleNamespace(reason="low on disk")
        transport._on_blocked(channel.connection, SimpleNamespace(method=method))
        declare(queue, channel, done)

    monkeypatch.setattr(provision, "_declare_queue", blocked)
    events: list[Event] = []
    with closing(transport):
        transport.connect()
        deadline = time.monotonic() + 60.0
        while Connected() not in events:
            assert time.monotonic() < deadline
            events += transport.listen(0.05)
    assert events == [Blocked("low on disk"), Connected(), Blocked("low on disk")]


def test_an_ipv6_address_is_in_brackets(wire: Connect) -> None:
    w = wire("amqp://[::1]:1/")
    w.transport.connect()
    assert w.transport.trying == "[::1]:1"
    assert w.lost_reason().startswith("[::1]:1: ")


def test_one_that_cannot_be_made_leaves_the_application_s_logs_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        socket, "socketpair", Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    )
    with pytest.raises(OSError, match="Too many open files"):
        PikaTransport(parse_addresses("amqp://localhost"), run=1, heartbeat_s=10)
    logging.getLogger("pika.connection").warning("of the application's own connection")
    assert caplog.messages == ["of the application's own connection"]


def listened(transport: PikaTransport) -> Event:
    """The next event; there is only one."""
    deadline = time.monotonic() + 60.0
    while not (events := transport.listen(0.05)):
        assert time.monotonic() < deadline
    (event,) = events
    return event


def test_a_step_after_the_end_of_its_connection_is_not_taken(
    fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the next connection."""
    topology = Topology(queues=[Queue("q"), Queue("other")], declare=False)
    addresses = parse_addresses(fake_broker.url)
    transport = PikaTransport(addresses, run=1, heartbeat_s=10, topology=topology)
    with monkeypatch.context() as patched, closing(transport):

        def text(words: str) -> str:
            patched.undo()
            transport.disconnect("enough")
            transport.connect()
            return words

        patched.setattr(provision, "text", text)
        transport.connect()
        assert str(listened(transport)).count("enough") == 1
        last = listened(transport)
    assert isinstance(last, ConnectionLost)
    assert "queue 'q': 404" in last.reason
    assert "queue 'other': 404" in last.reason


def test_once_a_channel_is_refused_rabbitmq_has_time_to_count_one_out() -> None:
    options = NodeOptions(user_channel_max={"guest": 1})
    with FakeBroker(options=options) as broker, ExitStack() as stack:
        addresses = parse_addresses(broker.url)
        transport = PikaTransport(addresses, run=1, heartbeat_s=10, topology=TOPOLOGY)
        stack.enter_context(closing(transport))
        with closing(pika.BlockingConnection(pika.URLParameters(broker.url))) as other:
            other.channel()
            transport.connect()
            lost = listened(transport)
            assert isinstance(lost, ConnectionLost)
            assert "maximum allowed user limit" in lost.reason
        begun = time.monotonic()
        transport.connect()
        assert listened(transport) == Connected()
        assert time.monotonic() - begun >= COUNTED_OUT_S


def test_blocked_and_unblocked_are_reported(wire: Connect, fake_broker: FakeBroker) -> None:
    w = wire()
    fake_broker.block("low on disk")
    w.send(1, to("q"))
    assert w.until(Blocked) == Blocked("low on disk")
    fake_broker.unblock()
    w.until(Unblocked)
    w.until_acked()


def test_events_of_a_dropped_connection_are_not_reported_for_the_next(
    wire: Connect, fake_broker: FakeBroker
) -> None:
    w = wire()
    fake_broker.inject(faults.HoldConfirms())
    w.send(1, to("q"))
    w.transport.listen(0.1)
    fake_broker.wait_for(1, timeout_s=60)
    w.transport.disconnect("no confirm")
    assert w.lost_reason() == f"127.0.0.1:{fake_broker.port}: no confirm"
    w.connect()
    fake_broker.release_confirms()
    fake_broker.drop_connections()
    assert w.lost_reason()
    for _ in range(5):
        w.events += w.transport.listen(0.02)
    assert w.events == []


def test_a_batch_for_a_channel_that_is_not_open_is_answered_by_its_end(
    wire: Connect, fake_broker: FakeBroker
) -> None:
    w = wire()
    fake_broker.drop_connections()
    fake_broker.wait_for(lambda: fake_broker.connections == 0, timeout_s=60)
    w.send(1, to("q"))
    w.transport.open_channel(2)
    assert w.lost_reason()


def test_a_request_without_a_connection_raises_nothing(fake_broker: FakeBroker) -> None:
    w = Wire(fake_broker.url)
    w.transport.open_channel(1)
    w.transport.send(1, 1, [to("q")])
    w.transport.close_channel(1)
    w.transport.disconnect("x")
    assert w.lost_reason() == "x"
    w.close()


def test_a_broker_without_a_free_channel_does_not_stop_the_others() -> None:
    with FakeBroker(options=NodeOptions(channel_max=1)) as broker:
        broker.declare_queue("q")
        w = Wire(broker.url)
        w.connect()
        w.open_channel()
        w.transport.open_channel(2)
        w.send(1, to("q"))
        w.until_acked()
        w.close()


def test_a_channel_closed_before_it_was_open_never_opens(wire: Connect) -> None:
    w = wire()
    w.transport.open_channel(8)
    w.transport.close_channel(8)
    w.epoch = 8
    w.open_channel()
    assert ChannelOpened(8) not in w.events


# -------------------------------------------------------------------- listening


def test_listen_waits_as_long_as_it_was_told(wire: Connect, fake_broker: FakeBroker) -> None:
    w = wire(fake_broker.url)
    since = time.monotonic()
    assert w.transport.listen(0.2) == []
    assert time.monotonic() - since >= 0.19


def test_wake_ends_a_listen_of_another_thread(wire: Connect) -> None:
    w = wire()
    timer = threading.Timer(0.1, w.transport.wake)
    timer.start()
    since = time.monotonic()
    w.transport.listen(60.0)
    assert time.monotonic() - since < 30.0
    timer.join()


def test_wake_before_listen_is_not_lost(wire: Connect) -> None:
    w = wire()
    w.transport.listen(0.01)
    w.transport.wake()
    since = time.monotonic()
    w.transport.listen(60.0)
    assert time.monotonic() - since < 30.0


def test_wake_after_close_does_nothing(fake_broker: FakeBroker) -> None:
    w = Wire(fake_broker.url)
    w.close()
    w.transport.wake()


# -------------------------------------------------------------------- leaving nothing behind


def open_fds() -> set[str]:
    names = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            names.add(str(fd.readlink()))
    return names


def check_nothing_left(before: set[str], threads: set[threading.Thread]) -> None:
    left = {fd for fd in open_fds() - before if not fd.startswith("/")}
    assert left == set()
    assert set(threading.enumerate()) <= threads
    gc.collect()  # a socket that was only forgotten would warn here


@pytest.mark.parametrize("state", ["new", "connecting", "open", "frozen", "dropped", "unanswered"])
def test_close_leaves_no_socket_and_no_thread(fake_broker: FakeBroker, state: str) -> None:
    keep = Wire(fake_broker.url)  # the broker's side of a connection has sockets too
    keep.close()
    # Those of another test may still end: pika's, for instance, that resolves a name.
    before, threads = open_fds(), set(threading.enumerate())
    w = Wire(fake_broker.url, heartbeat_s=60)
    if state == "connecting":
        w.transport.connect()
    elif state != "new":
        w.connect()
        w.open_channel()
    if state in ("frozen", "unanswered"):
        fake_broker.freeze()
    if state in ("dropped", "unanswered"):
        w.transport.disconnect("dropped")
    since = time.monotonic()
    w.close()
    assert time.monotonic() - since < 30.0
    if state in ("frozen", "unanswered"):
        fake_broker.thaw()
    until(lambda: all(fd.startswith("/") for fd in open_fds() - before))
    until(lambda: set(threading.enumerate()) <= threads)
    check_nothing_left(before, threads)
