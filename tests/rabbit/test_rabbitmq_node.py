"""The real broker of the other tests: that it can be killed, and that nothing of it is left."""

import contextlib
import socket
import time
from pathlib import Path

import pika
import pika.exceptions
import pytest

from tests.amqp_probe import AmqpProbe
from tests.rabbitmq import RabbitMQNode, can_handshake
from tests.waiting import until

pytestmark = pytest.mark.rabbit

PERSISTENT = pika.BasicProperties(delivery_mode=2)


def connect(url: str) -> contextlib.closing[pika.BlockingConnection]:
    return contextlib.closing(pika.BlockingConnection(pika.URLParameters(url)))


def publish_confirmed(url: str, queue: str, body: bytes) -> None:
    with connect(url) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", queue, body, PERSISTENT, mandatory=True)


def processes_of(folder: Path) -> list[int]:
    """Who has the node's folder in its environment."""
    mark = b"HOME=" + bytes(folder)
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile, or another user's
        if mark in variables:
            found.append(int(environ.parent.name))
    return found


def test_pid_is_the_virtual_machine(rabbitmq_node: RabbitMQNode) -> None:
    command = Path(f"/proc/{rabbitmq_node.pid}/cmdline").read_bytes()
    assert command.split(b"\0")[0].endswith(b"/beam.smp")


def test_listens_on_loopback_only(rabbitmq_node: RabbitMQNode) -> None:
    listeners = rabbitmq_node.eval(
        "[inet:sockname(P) || P <- erlang:ports(), "
        'erlang:port_info(P, name) =:= {name, "tcp_inet"}].'
    )
    assert "127,0,0,1" in listeners.replace(" ", "")
    assert "0,0,0,0" not in listeners.replace(" ", "")


def test_confirmed_message_arrives(broker: AmqpProbe) -> None:
    queue = broker.declare_queue()
    publish_confirmed(broker.url, queue, b"hello")
    assert [body for body, _ in broker.drain(queue, expected=1)] == [b"hello"]


def test_probe_binds_and_deletes(broker: AmqpProbe) -> None:
    queue, exchange = broker.declare_queue(), broker.declare_exchange(kind="topic")
    broker.bind(queue, exchange, "orders.*")
    with connect(broker.url) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish(exchange, "orders.created", b"1", mandatory=True)
        broker.delete_queue(queue)
        with pytest.raises(pika.exceptions.UnroutableError):
            channel.basic_publish(exchange, "orders.created", b"2", mandatory=True)


def test_too_large_a_message_closes_the_channel(broker: AmqpProbe) -> None:
    queue = broker.declare_queue()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as raised:
        publish_confirmed(broker.url, queue, bytes(1024 * 1024 + 1))
    assert raised.value.reply_code == 406


def test_confirmed_message_outlives_kill(rabbitmq_node: RabbitMQNode) -> None:
    probe = AmqpProbe(rabbitmq_node.url)
    queue = probe.declare_queue()
    publish_confirmed(rabbitmq_node.url, queue, b"durable")
    rabbitmq_node.eval("mnesia:sync_log().")  # the declaration is answered before it is on disk
    rabbitmq_node.kill()
    assert not can_handshake(rabbitmq_node.url)
    rabbitmq_node.start()
    assert [body for body, _ in probe.drain(queue, expected=1)] == [b"durable"]
    probe.close()


def test_stop_and_start_keep_the_port(rabbitmq_node: RabbitMQNode) -> None:
    url = rabbitmq_node.url
    rabbitmq_node.stop()
    assert not rabbitmq_node.is_running
    rabbitmq_node.start()
    assert rabbitmq_node.url == url
    assert can_handshake(url)


def test_memory_alarm_blocks_and_clears(rabbitmq_node: RabbitMQNode) -> None:
    seen: list[str] = []

    def wait_for(word: str) -> None:
        deadline = time.monotonic() + 60
        while word not in seen and time.monotonic() < deadline:
            connection.process_data_events(time_limit=0.05)

    with connect(rabbitmq_node.url) as connection:
        connection.add_on_connection_blocked_callback(lambda *_: seen.append("blocked"))
        connection.add_on_connection_unblocked_callback(lambda *_: seen.append("unblocked"))
        rabbitmq_node.set_memory_alarm()
        connection.channel().basic_publish("", "nowhere", b"")
        wait_for("blocked")
        rabbitmq_node.clear_memory_alarm()
        wait_for("unblocked")
    assert seen == ["blocked", "unblocked"]


def test_close_all_connections(rabbitmq_node: RabbitMQNode) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(rabbitmq_node.url))
    rabbitmq_node.close_all_connections("maintenance")
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="maintenance"):
        connection.process_data_events(time_limit=5)


def test_paused_node_is_silent(rabbitmq_node: RabbitMQNode) -> None:
    with socket.create_connection(("127.0.0.1", rabbitmq_node.amqp_port), timeout=0.2) as client:
        rabbitmq_node.pause()
        client.sendall(b"AMQP\x00\x00\x09\x01")
        with pytest.raises(TimeoutError):
            client.recv(1)
        rabbitmq_node.resume()
        client.settimeout(5)
        assert client.recv(1) == b"\x01"  # a method frame: connection.start


def test_nothing_is_left(rabbitmq_node: RabbitMQNode) -> None:
    assert rabbitmq_node.is_running  # it is here, and a second one does not disturb it
    with RabbitMQNode() as node:
        folder = node.folder
        assert len(processes_of(folder)) >= 2  # the virtual machine and its epmd
    until(lambda: not processes_of(folder))
    assert not folder.exists()
