"""Faults of the network and the handshake: each one seen on the wire."""

import socket
import time
from typing import Self

import pytest
from pamqp import commands
from pamqp.base import Frame

from reliablepub.testing import FakeBroker, faults
from reliablepub.testing.connection import Connection, Ending
from reliablepub.testing.faults import ConnectionFault
from reliablepub.testing.flow import Flow
from reliablepub.testing.link import Link
from reliablepub.testing.node import Node
from tests.broker.raw_tcp import OPENED, OPENING, connected, hear_out, opened
from tests.broker.sans_io import TRANSIENT, Client, encode_publish

ACK_1 = b"\x01\x00\x01\x00\x00\x00\x0d\x00\x3c\x00\x50" + bytes(7) + b"\x01\x00\xce"


@pytest.fixture
def answer(fake_broker: FakeBroker) -> bytes:
    """All that a broker says to `OPENING`."""
    with connected(fake_broker) as sock:
        sock.sendall(OPENING)
        heard = b""
        while not heard.endswith(OPENED):
            heard += sock.recv(65536)
        return heard


# -------------------------------------------------------------------------------- cut


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("size", [1, 7, 8, 300, -1])
def test_the_stream_is_cut_after_a_byte_sent(
    fake_broker: FakeBroker,
    answer: bytes,
    size: int,
    reset: bool,  # noqa: FBT001
) -> None:
    size %= len(answer)
    fake_broker.inject(faults.CutStream(sent=size, reset=reset))
    with connected(fake_broker) as sock:
        sock.sendall(OPENING)
        assert hear_out(sock) == (answer[:size], reset)
    with opened(fake_broker):
        pass  # the next one is whole


@pytest.mark.parametrize(("less", "count"), [(0, 1), (1, 0), (30, 0)])
def test_the_stream_is_cut_after_a_byte_received(
    fake_broker: FakeBroker, less: int, count: int
) -> None:
    publish = encode_publish("q", bytes(100))
    fake_broker.inject(faults.CutStream(received=len(OPENING + publish) - less, reset=False))
    with connected(fake_broker) as sock:
        sock.sendall(OPENING + publish * 3)
        heard, _ = hear_out(sock)
        assert OPENED in heard
    assert fake_broker.published_count == count


@pytest.mark.parametrize("size", range(1, len(ACK_1) + 1))
def test_a_connection_is_dropped_within_a_confirm(fake_broker: FakeBroker, size: int) -> None:
    fake_broker.declare_queue("q")
    fake_broker.inject(faults.DropConnection(accepted=True, after_bytes=size))
    with opened(fake_broker) as sock:
        sock.sendall(encode_publish("q"))
        assert hear_out(sock) == (ACK_1[:size], True)
    assert len(fake_broker.messages("q")) == 1


@pytest.mark.parametrize("values", [{}, {"sent": 1, "received": 1}, {"sent": -1}, {"received": -1}])
def test_a_cut_is_at_one_place(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"either|from 0"):
        faults.CutStream(**values)  # type: ignore[arg-type]


def test_what_is_not_accepted_has_no_confirm_to_be_cut() -> None:
    with pytest.raises(ValueError, match="accepted"):
        faults.DropConnection(after_bytes=1)


# -------------------------------------------------------------------------------- slow


class Wire:
    """A link and the other end of its socket, in virtual time."""

    def __init__(self, node: Node, *fired: ConnectionFault) -> None:
        self.peer, ours = socket.socketpair()
        ours.setblocking(False)  # noqa: FBT003
        self.peer.setblocking(False)  # noqa: FBT003
        self.node = node
        self.link = Link(ours, Connection(node, 1, fired), fired, None)
        self.peer.sendall(OPENING)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.close()
        self.link.sock.close()

    def turn(self) -> bytes:
        """What arrives in one turn of the server."""
        self.link.read(self.node.now)
        self.link.write(self.node.now)
        try:
            return self.peer.recv(65536)
        except BlockingIOError:
            return b""

    def wait(self) -> float:
        """Until the link is due again."""
        due = self.link.deadline(self.node.now)
        assert due is not None
        waited = due - self.node.now
        self.node.now = due
        return waited


@pytest.mark.parametrize("size", [1, 5])
def test_slices(node: Node, answer: bytes, size: int) -> None:
    with Wire(node, faults.SliceOutput(size=size)) as wire:
        pieces = [wire.turn() for _ in range(len(answer) // size + 1)]
    assert b"".join(pieces) == answer
    assert {len(piece) for piece in pieces[:-1]} == {size}


def test_latency(node: Node, answer: bytes) -> None:
    with Wire(node, faults.Latency(delay_s=0.5)) as wire:
        assert wire.turn() == b""
        assert wire.wait() == 0.5
        assert wire.turn() == answer


def test_bandwidth_of_what_is_sent(node: Node, answer: bytes) -> None:
    with Wire(node, faults.Bandwidth(sent_per_s=1000)) as wire:
        heard = wire.turn()
        waited = 0.0
        while len(heard) < len(answer):
            waited += wire.wait()
            heard += wire.turn()
    assert heard == answer
    assert waited == pytest.approx(len(answer) / 1000, abs=0.02)


def test_bandwidth_of_what_is_received(node: Node) -> None:
    with Wire(node, faults.Bandwidth(received_per_s=1000)) as wire:
        heard = wire.turn()
        waited = 0.0
        while not heard.endswith(OPENED):
            waited += wire.wait()
            heard += wire.turn()
    assert waited == pytest.approx(len(OPENING) / 1000, abs=0.02)


def test_faults_of_a_connection_compose(node: Node, answer: bytes) -> None:
    fired = (faults.SliceOutput(size=2), faults.Latency(delay_s=1.0), faults.CutStream(sent=5))
    with Wire(node, *fired) as wire:
        assert wire.turn() == b""
        wire.wait()
        assert [wire.turn() for _ in range(4)] == [answer[:2], answer[2:4], answer[4:5], b""]
        assert wire.link.connection.ending is Ending.FLUSH_RESET
        assert wire.link.finish(node.now)


def test_without_faults_there_is_no_flow() -> None:
    cut = (faults.CutStream(sent=1),)
    assert Flow.outward(cut) is None
    assert Flow.inward(cut) is None


@pytest.mark.parametrize(
    ("fault", "least_s"),
    [
        (faults.SliceOutput(keep=True), 0.0),  # the pieces follow each other at once
        (faults.Latency(delay_s=0.001, keep=True), 0.001),
        (faults.Bandwidth(sent_per_s=100_000, received_per_s=100_000, keep=True), 0.001),
    ],
)
def test_a_slow_network_loses_nothing(
    fake_broker: FakeBroker, fault: ConnectionFault, least_s: float
) -> None:
    fake_broker.declare_queue("q")
    fake_broker.inject(fault)
    with opened(fake_broker) as sock:
        began = time.monotonic()
        sock.sendall(encode_publish("q", bytes(1000)))
        heard = b""
        while len(heard) < len(ACK_1):
            heard += sock.recv(100)
        assert heard == ACK_1
        assert time.monotonic() - began >= least_s
    assert len(fake_broker.messages("q")) == 1


# -------------------------------------------------------------------------------- handshake

SAYINGS: dict[str, tuple[Frame, ...]] = {
    "protocol_header": (),
    "start_ok": (commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest"),),
    "tune_ok": (commands.Connection.TuneOk(2047, 131072, 60),),
    "open": (commands.Connection.Open("/"),),
}
ANSWERED = {
    "protocol_header": [],
    "start_ok": ["Connection.Start"],
    "tune_ok": ["Connection.Start", "Connection.Tune"],
    "open": ["Connection.Start", "Connection.Tune"],
}


def shake_hands(client: Client) -> None:
    client.write(b"AMQP\x00\x00\x09\x01")
    for methods in SAYINGS.values():
        for method in methods:
            client.send(method, 0)


@pytest.mark.parametrize("step", faults.STEPS)
def test_stall_the_handshake(node: Node, step: str) -> None:
    client = Client(node, faults.StallHandshake(at=step))
    shake_hands(client)
    assert client.names() == ANSWERED[step]
    assert client.wait(1000.0).names() == ANSWERED[step]
    assert client.connection.ending is None  # the socket stays as it is
    assert not client.connection.is_open


@pytest.mark.parametrize("step", faults.STEPS)
def test_refuse_the_handshake_in_words(node: Node, step: str) -> None:
    client = Client(node, faults.RefuseHandshake(at=step, code=320, text="not now"))
    shake_hands(client)
    close = client.only(commands.Connection.Close)
    assert (close.reply_code, close.reply_text) == (320, "CONNECTION_FORCED - not now")
    assert client.names() == ANSWERED[step]


@pytest.mark.parametrize("step", faults.STEPS)
def test_refuse_the_handshake_without_a_word(node: Node, step: str) -> None:
    client = Client(node, faults.RefuseHandshake(at=step, code=None))
    shake_hands(client)
    assert client.names() == ANSWERED[step]
    assert client.connection.ending is Ending.FLUSH


def test_accept_tcp_and_say_nothing(fake_broker: FakeBroker) -> None:
    fake_broker.inject(faults.StallHandshake(at="protocol_header"))
    with connected(fake_broker, timeout_s=0.05) as sock:
        sock.sendall(OPENING)
        with pytest.raises(TimeoutError):
            sock.recv(1)


def test_a_step_that_is_none() -> None:
    with pytest.raises(ValueError, match="at must be one of protocol_header, start_ok"):
        faults.StallHandshake(at="login")


# -------------------------------------------------------------------------------- half-open


@pytest.mark.parametrize("accepted", [True, False])
def test_half_open(fake_broker: FakeBroker, accepted: bool) -> None:  # noqa: FBT001
    fake_broker.declare_queue("q")
    fake_broker.inject(faults.HalfOpen(accepted=accepted))
    with opened(fake_broker) as dead, opened(fake_broker) as alive:
        dead.sendall(encode_publish("q", b"one"))
        fake_broker.wait_for(1, timeout_s=60)
        dead.sendall(encode_publish("q", b"two"))
        alive.sendall(encode_publish("q", b"three", properties=TRANSIENT))
        assert alive.recv(100) == ACK_1
        dead.settimeout(0.02)
        with pytest.raises(TimeoutError):
            dead.recv(1)
        assert fake_broker.connections == 1
    assert fake_broker.published_count == 2
    assert len(fake_broker.messages("q")) == 1 + accepted


def test_a_half_open_connection_goes_with_its_client(node: Node) -> None:
    node.script.inject(faults.HalfOpen())
    client = Client(node).open(heartbeat=1)
    assert client.publish().wait(100.0).connection.ending is None
    assert client.names() == []
    client.connection.handle_lost()
    assert not node.connections
