"""The fake broker over real TCP, seen by independent clients: pika and aio-pika."""

import asyncio
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aio_pika
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import (
    AMQPConnectionError,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    NackError,
    StreamLostError,
    UnroutableError,
)

from reliablepub.testing import FakeBroker, Fate, NodeOptions, faults
from tests.broker.raw_tcp import hear_out, opened
from tests.broker.sans_io import encode_publish

PERSISTENT = pika.BasicProperties(delivery_mode=2)


def connect(broker: FakeBroker, **settings: object) -> pika.BlockingConnection:
    parameters = pika.URLParameters(broker.url)
    for name, value in settings.items():
        setattr(parameters, name, value)
    return pika.BlockingConnection(parameters)


@contextmanager
def channel_of(broker: FakeBroker) -> Iterator[BlockingChannel]:
    """A pika channel in confirm mode; the connection may already be gone at the end."""
    connection = connect(broker)
    try:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel
    finally:
        if connection.is_open:
            connection.close()


def send(channel: BlockingChannel, body: bytes, key: str = "q", exchange: str = "") -> None:
    channel.basic_publish(exchange, key, body, PERSISTENT, mandatory=True)


def bodies(broker: FakeBroker, queue: str = "q") -> list[bytes]:
    return [message.body for message in broker.messages(queue)]


# -------------------------------------------------------------------------------- clients


def test_pika_blocking(fake_broker: FakeBroker) -> None:
    with channel_of(fake_broker) as channel:
        channel.exchange_declare("orders", "topic", durable=True)
        channel.queue_declare("q", durable=True)
        channel.queue_bind("q", "orders", "order.#")
        properties = pika.BasicProperties(delivery_mode=2, headers={"n": 1}, message_id="m-1")
        channel.basic_publish("orders", "order.new", b"one", properties, mandatory=True)
        with pytest.raises(UnroutableError):
            send(channel, b"two", "bill", "orders")
        (message,) = fake_broker.messages("q")
        assert (message.exchange, message.routing_key) == ("orders", "order.new")
        assert message.properties.headers == {"n": 1}
        assert message.properties.message_id == "m-1"
        method, _, body = channel.basic_get("q")
        assert method is not None
        assert body == b"one"
        channel.basic_ack(method.delivery_tag)
        channel.cancel()
    fake_broker.wait_for(lambda: fake_broker.connections == 0, timeout_s=60)
    assert [one.fate for one in fake_broker.published] == [Fate.ACCEPTED, Fate.RETURNED]
    assert [one.delivery_tag for one in fake_broker.published] == [1, 2]


def test_pika_consume(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    with channel_of(fake_broker) as channel:
        channel.basic_qos(prefetch_count=3)
        for i in range(10):
            send(channel, b"%d" % i)
        got = []
        for method, _, body in channel.consume("q"):
            assert method is not None
            got.append(body)
            channel.basic_ack(method.delivery_tag)
            if len(got) == 10:
                break
        channel.cancel()
    assert got == [b"%d" % i for i in range(10)]


def test_pika_select_connection_pipelines() -> None:
    with FakeBroker(options=NodeOptions(flush_delay_s=0.05)) as fake_broker:
        fake_broker.declare_queue("q")
        confirmed = _pipelined(fake_broker, 500)
        assert len(confirmed) < 250  # coalesced, the last one perhaps by itself
        assert any(multiple for _, multiple in confirmed)
        assert bodies(fake_broker) == [b"%d" % i for i in range(500)]


def _pipelined(fake_broker: FakeBroker, count: int) -> list[tuple[int, bool]]:
    """Confirms of so many publishes: tags, and whether each is multiple."""
    confirmed: list[tuple[int, bool]] = []

    def on_open(connection: pika.SelectConnection) -> None:
        connection.channel(on_open_callback=on_channel)

    def on_channel(channel: pika.channel.Channel) -> None:
        channel.confirm_delivery(on_confirm)
        for i in range(count):
            channel.basic_publish("", "q", b"%d" % i, PERSISTENT)

    def on_confirm(frame: pika.frame.Method) -> None:  # type: ignore[type-arg]
        confirmed.append((frame.method.delivery_tag, frame.method.multiple))
        if confirmed[-1][0] == count:
            connection.close()

    connection = pika.SelectConnection(
        pika.URLParameters(fake_broker.url),
        on_open_callback=on_open,
        on_close_callback=lambda *_: connection.ioloop.stop(),
    )
    connection.ioloop.start()
    connection.ioloop.close()
    return confirmed


def test_aio_pika(fake_broker: FakeBroker) -> None:
    async def publish() -> tuple[int, bytes]:
        async with await aio_pika.connect(fake_broker.url) as connection:
            channel = await connection.channel()
            exchange = await channel.declare_exchange("x", "direct", durable=True)
            queue = await channel.declare_queue("q", durable=True)
            await queue.bind(exchange, "k")
            message = aio_pika.Message(b"hello", delivery_mode=2, headers={"a": [1, {"b": True}]})
            confirms = await asyncio.gather(*(exchange.publish(message, "k") for _ in range(50)))
            got = await queue.get()
            assert got is not None
            assert got.headers == {"a": [1, {"b": True}]}
            await got.ack()
            return len(confirms), got.body

    assert asyncio.run(publish()) == (50, b"hello")
    assert len(fake_broker.messages("q")) == 49


def test_other_users_and_vhosts_are_in_the_url() -> None:
    options = NodeOptions(users={"app user": "p/w:@"}, virtual_hosts=("a/b",))
    with FakeBroker(options=options) as broker:
        assert broker.url == f"amqp://app%20user:p%2Fw%3A%40@127.0.0.1:{broker.port}/a%2Fb"
        with channel_of(broker) as channel:
            assert channel.is_open


# -------------------------------------------------------------------------------- life


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"virtual_hosts": "shop"}, r"write \('shop',\)"),
        ({"virtual_hosts": ()}, "at least one"),
        ({"users": {}}, "at least one"),
    ],
)
def test_a_node_that_nobody_can_enter_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NodeOptions(**options)


@pytest.fixture
def fork() -> Iterator[Callable[[], None]]:
    """Fork a process that sleeps, like a worker that a test has forked."""
    children: list[int] = []

    def start() -> None:
        reader, writer = os.pipe()
        children.append(os.fork())
        if not children[-1]:
            os.write(writer, b"!")  # after what is to be done in a forked child
            time.sleep(600)
            os._exit(0)
        os.read(reader, 1)
        os.close(reader)
        os.close(writer)

    yield start
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_keep_the_port(
    fake_broker: FakeBroker, fork: Callable[[], None]
) -> None:
    fork()
    fake_broker.crash()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", fake_broker.port), 5)
    fake_broker.start()
    fork()
    fake_broker.restart()
    connect(fake_broker).close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_keep_connections(
    fake_broker: FakeBroker, fork: Callable[[], None]
) -> None:
    with socket.create_connection(("127.0.0.1", fake_broker.port), 30) as client:
        client.sendall(b"AMQP\0\0\x09\1")
        client.recv(4096)  # connection.start
        fork()
        fake_broker.drop_connections()
        with pytest.raises(ConnectionResetError):
            client.recv(4096)


def test_it_listens_on_loopback_only() -> None:
    with pytest.raises(ValueError, match="allow_remote"):
        FakeBroker(host="0.0.0.0")
    with FakeBroker(host="0.0.0.0", allow_remote=True) as broker:
        assert broker.port


def test_it_starts_once_and_leaves_nothing_behind() -> None:
    threads = threading.active_count()
    broker = FakeBroker()
    broker.start()
    broker.start()
    assert threading.active_count() == threads + 1
    broker.stop()
    broker.stop()
    assert threading.active_count() == threads
    with (
        pytest.raises(ConnectionRefusedError),
        socket.create_connection(("127.0.0.1", broker.port)),
    ):
        pass


def test_the_port_of_a_stopped_broker_is_given_to_no_client(fake_broker: FakeBroker) -> None:
    """Clients get theirs from the ephemeral range, by default from 32 768 (Linux) or 49 152."""
    assert fake_broker.port < 32_768


def test_the_port_of_a_stopped_broker_is_given_to_no_other_one(fake_broker: FakeBroker) -> None:
    fake_broker.stop()
    for _ in range(1_000):
        with FakeBroker() as other:
            assert other.port != fake_broker.port


def test_stop_tells_the_clients_and_a_restart_keeps_the_port(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    fake_broker.declare_exchange("brief", "direct", durable=False)
    port = fake_broker.port
    connection = connect(fake_broker)
    channel = connection.channel()
    channel.confirm_delivery()
    send(channel, b"kept")
    channel.basic_publish("", "q", b"transient")
    fake_broker.restart()
    with pytest.raises(ConnectionClosedByBroker, match=r"320.*shutdown"):
        connection.process_data_events(1)
    assert fake_broker.port == port
    assert bodies(fake_broker) == [b"kept"]
    with channel_of(fake_broker) as channel, pytest.raises(ChannelClosedByBroker, match="404"):
        channel.exchange_declare("brief", passive=True)


def test_crash_resets_refuses_and_keeps_what_is_written(fake_broker: FakeBroker) -> None:
    fake_broker.declare_exchange("x", "direct")
    fake_broker.declare_queue("q")
    fake_broker.bind("q", "x", "k")
    with channel_of(fake_broker) as channel:
        send(channel, b"confirmed", "k", "x")
        fake_broker.crash()
        with pytest.raises(StreamLostError):
            send(channel, b"too late", "k", "x")
    with pytest.raises(AMQPConnectionError):
        connect(fake_broker)
    fake_broker.start()
    with channel_of(fake_broker) as channel:
        send(channel, b"after", "k", "x")
    assert bodies(fake_broker) == [b"confirmed", b"after"]


def test_a_crash_loses_what_was_not_written() -> None:
    with FakeBroker(options=NodeOptions(flush_delay_s=60.0)) as broker:
        broker.declare_queue("q")
        connection = connect(broker)
        channel = connection.channel()
        for count, body, lose_unsynced in ((1, b"one", False), (2, b"two", True)):
            channel.basic_publish("", "q", body, PERSISTENT)
            broker.wait_for(count, timeout_s=60)
            broker.crash(lose_unsynced=lose_unsynced)
            with pytest.raises((StreamLostError, ConnectionResetError)):
                connection.process_data_events(1)
            broker.start()
            assert bodies(broker) == [b"one"]
            connection = connect(broker)
            channel = connection.channel()
        connection.close()
        assert [one.fate for one in broker.published] == [Fate.ACCEPTED, Fate.LOST]


def test_a_crash_loses_what_arrived_in_the_same_moment(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    fake_broker.inject(faults.Crash(nth=2))
    with opened(fake_broker) as client:
        client.sendall(encode_publish("q", b"one") + encode_publish("q", b"two"))
        _, is_reset = hear_out(client)
    assert is_reset
    assert [one.fate for one in fake_broker.published] == [Fate.LOST, Fate.LOST]
    assert bodies(fake_broker) == []


def test_the_crash_fault_comes_back_by_itself(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    fake_broker.inject(faults.Crash(nth=2, accepted=True, down_for_s=0.05))
    with channel_of(fake_broker) as channel:
        send(channel, b"one")
        with pytest.raises(StreamLostError):
            send(channel, b"two")
    with channel_of_retrying(fake_broker) as channel:
        send(channel, b"three")
    assert bodies(fake_broker) == [b"one", b"two", b"three"]


@contextmanager
def channel_of_retrying(broker: FakeBroker) -> Iterator[BlockingChannel]:
    connection = connect(broker, connection_attempts=100, retry_delay=0.01)
    try:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel
    finally:
        connection.close()


# -------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("reset", [True, False])
def test_drop_connection_after_acceptance(fake_broker: FakeBroker, reset: bool) -> None:  # noqa: FBT001
    fake_broker.declare_queue("q")
    fake_broker.inject(faults.DropConnection(reset=reset, accepted=True))
    with channel_of(fake_broker) as channel, pytest.raises(StreamLostError) as lost:
        send(channel, b"one")
    assert ("ConnectionResetError" in str(lost.value)) is reset
    assert bodies(fake_broker) == [b"one"]


def test_drop_connections(fake_broker: FakeBroker) -> None:
    with channel_of(fake_broker) as channel:
        fake_broker.drop_connections()
        with pytest.raises(StreamLostError):
            channel.queue_declare("q")
    assert fake_broker.connections == 0


def test_refuse_handshake(fake_broker: FakeBroker) -> None:
    fake_broker.inject(faults.RefuseHandshake(), faults.RefuseHandshake(code=None))
    with pytest.raises(AMQPConnectionError):
        connect(fake_broker)
    with channel_of(fake_broker) as channel:
        assert channel.is_open


def test_freeze_answers_nothing_until_thawed(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    with channel_of(fake_broker) as channel:
        fake_broker.freeze()
        with socket.create_connection(("127.0.0.1", fake_broker.port)) as sock:
            sock.settimeout(0.05)
            sock.sendall(b"AMQP\x00\x00\x09\x01")
            with pytest.raises(TimeoutError):
                sock.recv(1)
            fake_broker.thaw()
            sock.settimeout(60)
            assert sock.recv(1) == b"\x01"
        send(channel, b"one")


def test_a_frozen_broker_can_still_be_stopped_or_crash() -> None:
    broker = FakeBroker()
    broker.start()
    broker.freeze()
    broker.crash()
    broker.start()
    broker.freeze()
    broker.stop()


def test_the_freeze_fault_thaws_by_itself(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    fake_broker.inject(faults.Freeze(for_s=0.05))
    with channel_of(fake_broker) as channel:
        began_at = time.monotonic()
        send(channel, b"one")
        assert time.monotonic() - began_at >= 0.05
    assert bodies(fake_broker) == [b"one"]


# -------------------------------------------------------------------------------- looking


def test_wait_for_says_what_there_is(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    with channel_of(fake_broker) as channel:
        send(channel, b"one")
        with pytest.raises(TimeoutError, match=r"publishes: \{'accepted': 1\}, connections: 1"):
            fake_broker.wait_for(2, timeout_s=0.01)


def test_a_condition_is_given_as_a_function(fake_broker: FakeBroker) -> None:
    """A value would be a number of publishes: False would wait for none."""
    with pytest.raises(TypeError, match="lambda"):
        fake_broker.wait_for(fake_broker.connections == 3)


def test_declaring_from_the_test(fake_broker: FakeBroker) -> None:
    fake_broker.declare_exchange("x", "headers", internal=False)
    fake_broker.declare_queue("q", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    fake_broker.bind("q", "x", arguments={"kind": "order"})
    with pytest.raises(KeyError, match="none"):
        fake_broker.bind("none", "x")
    with pytest.raises(ValueError, match="magic"):
        fake_broker.declare_exchange("y", "magic")
    with channel_of(fake_broker) as channel:
        properties = pika.BasicProperties(headers={"kind": "order"})
        channel.basic_publish("x", "", b"1", properties, mandatory=True)
        with pytest.raises(NackError):
            channel.basic_publish("x", "", b"2", properties, mandatory=True)
        fake_broker.delete_queue("q")
        with pytest.raises(UnroutableError):
            channel.basic_publish("x", "", b"3", properties, mandatory=True)
        fake_broker.delete_exchange("x")
        with pytest.raises(ChannelClosedByBroker):
            channel.basic_publish("x", "", b"4", properties, mandatory=True)
    assert [one.fate.value for one in fake_broker.published] == [
        "accepted",
        "nacked",
        "returned",
        "refused",
    ]


def test_misbehaving_needs_a_running_broker() -> None:
    with pytest.raises(RuntimeError, match="start"):
        FakeBroker().crash()


# -------------------------------------------------------------------------------- hostile


def received(sock: socket.socket) -> bytes:
    sock.settimeout(60)
    data = b""
    while chunk := sock.recv(65536):
        data += chunk
    return data


def test_http_gets_the_protocol_header_and_the_end(fake_broker: FakeBroker) -> None:
    with socket.create_connection(("127.0.0.1", fake_broker.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100_000))
        assert received(sock) == b"AMQP\x00\x00\x09\x01"


def test_a_huge_frame_is_refused_before_it_is_read(fake_broker: FakeBroker) -> None:
    with socket.create_connection(("127.0.0.1", fake_broker.port)) as sock:
        sock.sendall(b"AMQP\x00\x00\x09\x01" + struct.pack(">BHI", 1, 0, 2**32 - 1) + bytes(1000))
        assert b"FRAME_ERROR" not in received(sock)  # a stranger is not told why
    fake_broker.wait_for(lambda: fake_broker.connections == 0, timeout_s=60)


def test_a_consumer_that_does_not_read_gets_no_more(fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("q")
    body = bytes(1024 * 1024)
    with channel_of(fake_broker) as publisher, channel_of(fake_broker) as consumer:
        consumer.basic_consume("q", lambda *_: None, auto_ack=True)
        for _ in range(40):
            send(publisher, body)
        assert len(fake_broker.messages("q")) > 10
        deadline = time.monotonic() + 60
        while fake_broker.messages("q") and time.monotonic() < deadline:
            consumer.connection.process_data_events(0.01)
        assert not fake_broker.messages("q")


def test_an_async_context_manager() -> None:
    async def publish() -> FakeBroker:
        async with FakeBroker() as broker:
            broker.declare_queue("q")
            async with await aio_pika.connect(broker.url) as connection:
                channel = await connection.channel()
                await channel.default_exchange.publish(aio_pika.Message(b"one"), "q")
            await asyncio.to_thread(broker.wait_for, 1)
        return broker

    with pytest.raises(RuntimeError, match="not running"):
        asyncio.run(publish()).crash()


class TestOptionsOfTheFixture:
    @pytest.fixture
    def fake_broker_options(self) -> NodeOptions:
        return NodeOptions(users={"shop": "secret"}, virtual_hosts=("shop",))

    def test_they_are_the_brokers(self, fake_broker: FakeBroker) -> None:
        assert fake_broker.url == f"amqp://shop:secret@127.0.0.1:{fake_broker.port}/shop"
        with channel_of(fake_broker) as channel:
            assert channel.is_open
