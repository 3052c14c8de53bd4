"""A client of bare sockets: it says what it is told and hears single bytes."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from pamqp import commands, frame
from pamqp.base import Frame

from reliablepub.testing import FakeBroker
from tests.broker.sans_io import CAPABILITIES

_OPENING: tuple[tuple[Frame, int], ...] = (
    (commands.Connection.StartOk({"capabilities": {**CAPABILITIES}}, "PLAIN", "\0guest\0guest"), 0),
    (commands.Connection.TuneOk(2047, 131072, 0), 0),
    (commands.Connection.Open("/"), 0),
    (commands.Channel.Open(), 1),
    (commands.Confirm.Select(), 1),
)
OPENING = b"AMQP\x00\x00\x09\x01" + b"".join(frame.marshal(*one) for one in _OPENING)
"""Everything a client says until channel 1 is in confirm mode, in one piece."""
OPENED = frame.marshal(commands.Confirm.SelectOk(), 1)
"""The last thing it is answered."""


@contextmanager
def connected(broker: FakeBroker, timeout_s: float = 5) -> Iterator[socket.socket]:
    """A TCP connection on which nothing was said."""
    with socket.create_connection(("127.0.0.1", broker.port), timeout_s) as sock:
        yield sock


@contextmanager
def opened(broker: FakeBroker) -> Iterator[socket.socket]:
    """A connection whose channel 1 is in confirm mode."""
    with connected(broker) as sock:
        sock.sendall(OPENING)
        heard = b""
        while not heard.endswith(OPENED):
            heard += sock.recv(65536)
        yield sock


def hear_out(sock: socket.socket) -> tuple[bytes, bool]:
    """Everything until the end, and whether the end was a reset."""
    heard = b""
    try:
        while data := sock.recv(65536):
            heard += data
    except ConnectionResetError:
        return heard, True
    return heard, False
