"""The demo's consumer outlives whatever a crashing broker does to its connections."""

import errno
import socket
import threading

import pytest

from reliablepub.demo.arrivals import Consumer, declare
from reliablepub.testing import FakeBroker
from tests.waiting import until


def test_a_socket_reset_as_soon_as_it_is_connected_does_not_end_the_consumer(
    fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between ``connect`` and ``getpeername``: pika raises a ValueError out of its loop."""
    declare(fake_broker.url, "flights")
    said: list[str] = []
    consumer = Consumer(fake_broker.url, "flights", [0], said.append)
    peer, resets = socket.socket.getpeername, [1]

    def getpeername(self: socket.socket) -> object:
        if threading.current_thread() is consumer and resets:
            resets.pop()
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return peer(self)

    monkeypatch.setattr(socket.socket, "getpeername", getpeername)
    consumer.start()
    try:
        fake_broker.publish(b'{"n": 1}', "flights")
        until(lambda: 1 in consumer.count.ids or not consumer.is_alive(), 10)
        assert not resets
        assert consumer.is_alive()
        assert 1 in consumer.count.ids
    finally:
        consumer.stop()
