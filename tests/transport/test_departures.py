"""What has left this host, and what is reported of what has not."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from reliablepub._core.events import Leaving
from reliablepub.transport.departures import Departures, acknowledged, held_by_kernel


def test_what_has_left_is_not_reported() -> None:
    departures = Departures()
    departures.add(100, 1, 1)
    departures.add(200, 1, 5)
    assert departures.look(100) == [Leaving(1, 5)]
    assert departures.look(200) == []
    assert not departures.under_way


def test_what_does_not_move_is_not_reported() -> None:
    departures = Departures()
    departures.add(100, 1, 1)
    assert departures.look(10) == [Leaving(1, 1)]
    assert departures.look(10) == []
    assert departures.look(5) == [], "the application has written more on its connection"
    assert departures.look(11) == [Leaving(1, 1)]


def test_each_channel_has_its_first() -> None:
    departures = Departures()
    for end, epoch, tag in ((10, 2, 7), (20, 1, 0), (30, 2, 8), (40, 1, 1)):
        departures.add(end, epoch, tag)
    assert departures.look(5) == [Leaving(2, 7), Leaving(1, 0)]
    assert departures.look(10) == [Leaving(1, 0), Leaving(2, 8)]


def test_another_stream_begins_at_its_beginning() -> None:
    departures = Departures()
    departures.add(100, 1, 1)
    departures.look(50)
    departures.clear()
    departures.add(10, 2, 1)
    assert departures.look(1) == [Leaving(2, 1)]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        with ours, theirs:
            yield ours, theirs


def test_the_kernel_tells_what_the_peer_has_not_acknowledged(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    before = acknowledged(ours.fileno())
    ours.settimeout(0.2)
    sent = 0
    with suppress(TimeoutError):
        while True:
            sent += ours.send(bytes(64 * 1024))
    held = held_by_kernel(ours.fileno())
    assert 0 < held < sent
    assert acknowledged(ours.fileno()) - before == sent - held
    received = 0
    while received < sent:
        received += len(theirs.recv(1 << 20))
    for _ in range(1_000):
        if held_by_kernel(ours.fileno()) == 0:
            break
        time.sleep(0.01)
    assert acknowledged(ours.fileno()) - before == sent


def test_what_is_no_tcp_socket_holds_nothing() -> None:
    one, other = socket.socketpair()
    with one, other:
        fd = one.fileno()
        assert acknowledged(fd) == 0
    assert (held_by_kernel(fd), acknowledged(fd)) == (0, 0)
