"""The demo's consumer outlives whatever a crashing broker does to its connections."""

import errno
import socket
import threading
import time
from pathlib import Path

import pika
import pytest

from reliablepub.demo import story
from reliablepub.demo.consumer import Consumer, Topology
from reliablepub.testing import FakeBroker
from tests.waiting import until


def test_a_socket_reset_as_soon_as_it_is_connected_does_not_end_the_consumer(
    fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between ``connect`` and ``getpeername``: pika raises a ValueError out of its loop."""
    topology = Topology("flights", ("UA",))
    topology.declare(fake_broker.url)
    said: list[str] = []
    consumer = Consumer(fake_broker.url, topology, [0], said.append)
    peer, resets = socket.socket.getpeername, [1]

    def getpeername(self: socket.socket) -> object:
        if threading.current_thread() is consumer and resets:
            resets.pop()
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return peer(self)

    monkeypatch.setattr(socket.socket, "getpeername", getpeername)
    consumer.start()
    try:
        fake_broker.publish(b'{"n": 1}', "flights.UA")
        until(lambda: 1 in consumer.count.ids or not consumer.is_alive(), 10)
        assert not resets
        assert consumer.is_alive()
        assert 1 in consumer.count.ids
    finally:
        consumer.end()


def test_what_a_slow_consumer_has_not_taken_is_not_lost(
    fake_broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds deliveries, and has counted none when the demo stops waiting."""

    def hold(self: Consumer, connection: pika.BlockingConnection) -> None:
        channel = connection.channel()
        for queue, _ in self._topology.queues():
            channel.basic_consume(queue, lambda *_: None)
        while not self._ending.is_set():
            time.sleep(0.01)

    monkeypatch.setattr(Consumer, "_consume", hold)
    monkeypatch.setattr(story, "_MISSING_S", 0.2)
    ledger = story.tell(tmp_path, records=100, url=fake_broker.url, say=lambda _: None)
    assert (ledger.confirmed, ledger.lost) == (100, 0)
