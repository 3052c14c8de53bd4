"""However the received bytes are cut, the hooks and pika see each frame once, and in order."""

import socket
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import pika
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import body, commands, frame, header, heartbeat
from pika import spec
from pika.adapters.base_connection import _StreamingProtocolShim
from pika.adapters.select_connection import IOLoop
from pika.adapters.utils.io_services_utils import _AsyncPlaintextTransport
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter

from reliablepub.transport import pika_hooks
from reliablepub.transport.incoming import BadFrame
from reliablepub.transport.pika_hooks import HookedConnection, HookFailed, Hooks, try_hooks

HOOKED_CHANNEL, OTHER_CHANNEL = 1, 2


class Wire(HookedConnection):
    """A connection without a socket, that writes down who got what."""

    def __init__(self, loop: IOLoop) -> None:
        self.seen: list[tuple[Any, ...]] = []
        super().__init__(custom_ioloop=loop, internal_connection_workflow=False)
        self.listen_on(HOOKED_CHANNEL, self)

    @classmethod
    def unplugged(cls) -> "Wire":
        with closing(IOLoop()) as loop:
            return cls(loop)

    def returned(self, method: spec.Basic.Return, headers: object, body_bytes: int) -> None:
        self.seen.append(("returned", method.reply_code, headers, body_bytes))

    def confirmed(self, is_ack: bool, tags: list[int], multiple: bool) -> None:  # noqa: FBT001
        self.seen += [("hook", is_ack, tag, multiple) for tag in tags]

    def _process_frame(self, frame_value: Any) -> None:
        method = getattr(frame_value, "method", None)
        self.frames_received += 1
        name = type(method).__name__ if method is not None else type(frame_value).__name__
        self.seen.append(("pika", frame_value.channel_number, name))


confirms = st.builds(
    lambda kind, channel, tag, multiple: (kind, channel, tag, multiple),
    st.sampled_from(["ack", "nack"]),
    st.sampled_from([HOOKED_CHANNEL, OTHER_CHANNEL]),
    st.integers(0, 2**63 - 1),
    st.booleans(),
)
others = st.sampled_from(["heartbeat", "close-ok", "blocked"])


def bytes_of(item: Any) -> bytes:
    if item == "heartbeat":
        return frame.marshal(heartbeat.Heartbeat(), 0)
    if item == "close-ok":
        return frame.marshal(commands.Channel.CloseOk(), HOOKED_CHANNEL)
    if item == "blocked":
        return frame.marshal(commands.Connection.Blocked("low on memory"), 0)
    kind, channel, tag, multiple = item
    method = (
        commands.Basic.Ack(tag, multiple) if kind == "ack" else commands.Basic.Nack(tag, multiple)
    )
    return frame.marshal(method, channel)


def expected(item: Any) -> tuple[Any, ...]:
    names = {
        "heartbeat": ("pika", 0, "Heartbeat"),
        "close-ok": ("pika", HOOKED_CHANNEL, "CloseOk"),
        "blocked": ("pika", 0, "Blocked"),
    }
    if item in names:
        return names[item]
    kind, channel, tag, multiple = item
    if channel == HOOKED_CHANNEL:
        return ("hook", kind == "ack", tag, multiple)
    return ("pika", channel, kind.capitalize())


@settings(deadline=None)
@given(
    items=st.lists(st.one_of(confirms, others), max_size=20),
    cuts=st.lists(st.integers(0, 500), max_size=10),
)
def test_every_frame_is_seen_once_and_in_order(items: list[Any], cuts: list[int]) -> None:
    data = b"".join(map(bytes_of, items))
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    wire = Wire.unplugged()
    for start, end in pairwise(edges):
        wire._on_data_available(data[start:end])
    assert len(wire.seen) == len(items)
    for seen, item in zip(wire.seen, items, strict=True):
        if seen[0] == "hook":
            assert seen == expected(item)
        else:  # pika dispatches what came behind a frame of its own
            kind, channel = (item[0], item[1]) if isinstance(item, tuple) else (item, seen[1])
            assert seen[1] == channel
            assert seen[2].lower() == kind.replace("-", "")
    assert wire.frames_received == len(items)
    assert wire.bytes_received == len(data)


def test_confirms_alone_never_reach_pika() -> None:
    wire = Wire.unplugged()
    items = [("ack", HOOKED_CHANNEL, n, False) for n in range(1, 100)]
    data = b"".join(map(bytes_of, items))
    for start in range(0, len(data), 13):
        wire._on_data_available(data[start : start + 13])
    assert wire.seen == [expected(item) for item in items]


class Counted(socket.socket):
    """A socket that counts how often it was read from."""

    reads = 0

    def recv(self, *args: int) -> bytes:
        self.reads += 1
        return super().recv(*args)


class Plugged:
    """A connection with a socket, whose other end is ours."""

    def __init__(self, loop: IOLoop, ours: Counted, theirs: socket.socket) -> None:
        self._loop, self.ours, self.theirs = loop, ours, theirs
        ours.settimeout(0)
        theirs.settimeout(0)
        self.wire = Wire(loop)
        self.ended: list[object] = []
        self.wire.add_on_open_error_callback(lambda _, error: self.ended.append(error))
        shim = _StreamingProtocolShim(self.wire)
        transport = _AsyncPlaintextTransport(ours, shim, SelectorIOServicesAdapter(loop))
        self.wire._proto_connection_made(transport)

    def turn(self) -> None:
        """Let pika read, write and call back."""
        self._loop.call_later(0.0, lambda: None)  # so that it does not wait
        self._loop.poll()
        self._loop.process_timeouts()

    def arrived(self) -> bytes:
        """What is there at the other end now."""
        found = b""
        while True:
            try:
                found += self.theirs.recv(1 << 20)
            except BlockingIOError:
                return found


@pytest.fixture
def plugged() -> Iterator[Plugged]:
    loop = IOLoop()
    loop.activate_poller()
    one, theirs = socket.socketpair()
    ours = Counted(fileno=one.detach())
    with closing(loop), theirs, ours:
        plugged = Plugged(loop, ours, theirs)
        plugged.turn()
        assert plugged.arrived() == HEADER
        yield plugged
        loop.deactivate_poller()


HEADER = b"AMQP\0\0\x09\x01"
PIECES = [bytes([n]) * 64 * 1024 for n in range(64)]
"""More than a socket takes at once."""


def test_what_the_socket_takes_is_written_at_once(plugged: Plugged) -> None:
    before = plugged.wire.bytes_sent, plugged.wire.frames_sent
    plugged.wire.write_frames([b"one", b"two"])
    assert plugged.arrived() == b"onetwo"
    assert plugged.wire.bytes_sent - before[0] == len(b"onetwo")
    assert plugged.wire.frames_sent - before[1] == 2
    plugged.turn()
    assert plugged.arrived() == b""


def test_the_rest_is_left_to_pika_and_what_comes_then_is_behind_it(plugged: Plugged) -> None:
    before = plugged.wire.bytes_sent
    plugged.wire.write_frames(PIECES)
    first = plugged.arrived()
    assert 0 < len(first) < sum(map(len, PIECES))
    plugged.wire.write_frames([b"behind"])
    assert not plugged.arrived()
    for _ in range(1_000):
        plugged.turn()
        first += plugged.arrived()
    assert first == b"".join(PIECES) + b"behind"
    assert plugged.wire.bytes_sent - before == len(first)


def test_a_dead_connection_is_left_to_pika(plugged: Plugged) -> None:
    plugged.theirs.close()
    plugged.wire.write_frames([b"into nowhere"])
    plugged.wire.write_frames([b"again"])
    for _ in range(3):
        plugged.turn()
    [error] = plugged.ended
    assert isinstance(error, pika.exceptions.AMQPConnectionError)


def test_nothing_is_written_to_a_connection_that_was_given_up(plugged: Plugged) -> None:
    plugged.wire._terminate_stream(pika.exceptions.AMQPHeartbeatTimeout())
    plugged.wire.write_frames([b"too late"])
    assert plugged.arrived() == b""
    plugged.turn()


def test_however_much_there_is_to_read_all_of_it_is_read(plugged: Plugged) -> None:
    data = b"".join(bytes_of(("ack", HOOKED_CHANNEL, tag, False)) for tag in range(1, 10_001))
    sent = 0
    while len(plugged.wire.seen) < 10_000:
        if sent < len(data):
            sent += plugged.theirs.send(data[sent : sent + 100_000])
        before = plugged.wire.bytes_received
        plugged.turn()
        assert plugged.wire.bytes_received > before
    assert plugged.wire.seen == [("hook", True, tag, False) for tag in range(1, 10_001)]


def test_what_is_ready_is_read_with_one_look(plugged: Plugged) -> None:
    for tag in range(1, 4):
        plugged.theirs.sendall(bytes_of(("ack", HOOKED_CHANNEL, tag, False)))
        plugged.turn()
        assert (plugged.ours.reads, len(plugged.wire.seen)) == (tag, tag)


def test_the_end_of_what_can_be_read_is_told(plugged: Plugged) -> None:
    plugged.theirs.shutdown(socket.SHUT_WR)
    for _ in range(3):
        plugged.turn()
    assert len(plugged.ended) == 1


# -------------------------------------------------------------------- returns, and what is too much


def returned(body_bytes: int, *parts: bytes, channel: int = HOOKED_CHANNEL) -> bytes:
    """A return whose header promises so much, and the parts of its body that come."""
    properties = commands.Basic.Properties(headers={"n": 1})
    return b"".join(
        (
            frame.marshal(commands.Basic.Return(312, "NO_ROUTE", "", "q"), channel),
            frame.marshal(header.ContentHeader(0, body_bytes, properties), channel),
            *(frame.marshal(body.ContentBody(part), channel) for part in parts),
        )
    )


TOLD = ("returned", 312, {"n": 1})
ACK = ("ack", HOOKED_CHANNEL, 1, False)


@pytest.mark.parametrize("size", [1, 7, 21, 50, 10_000])
def test_a_return_is_told_once_and_its_body_dropped(size: int) -> None:
    data = returned(5, b"abc", b"de") + bytes_of(ACK) + returned(0) + bytes_of(ACK)
    wire = Wire.unplugged()
    for start in range(0, len(data), size):
        wire._on_data_available(data[start : start + size])
    assert wire.seen == [(*TOLD, 5), expected(ACK), (*TOLD, 0), expected(ACK)]
    assert wire.bytes_received == len(data)
    assert not any(wire._contents._expected.values())


def test_however_large_a_body_is_said_to_be_nothing_of_it_is_kept() -> None:
    wire = Wire.unplugged()
    wire._on_data_available(returned(2**62))
    assert wire.seen == [(*TOLD, 2**62)]
    part = frame.marshal(body.ContentBody(bytes(100_000)), HOOKED_CHANNEL)
    tracemalloc.start()
    for _ in range(200):
        wire._on_data_available(part)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x01\x00\x00\xff\xff\xff\xff", id="a frame of 4 GiB"),
        pytest.param(b"A" * 64, id="what begins like another version of AMQP"),
        pytest.param(struct.pack(">BHI", 3, 1, 131_072 - 7), id="a byte more than agreed on"),
        pytest.param(returned(5, b"abcdef"), id="more body than announced"),
        pytest.param(returned(0, b"a"), id="a body of nothing"),
        pytest.param(returned(5, channel=OTHER_CHANNEL), id="a return on another channel"),
        pytest.param(returned(5) + returned(5), id="a return within a return"),
        pytest.param(
            frame.marshal(header.ContentHeader(0, 5, commands.Basic.Properties()), HOOKED_CHANNEL),
            id="a header of nothing",
        ),
        pytest.param(
            frame.marshal(commands.Basic.Return(312, "NO_ROUTE", "", "q"), HOOKED_CHANNEL)
            + b"\x02\x00\x01\x00\x00\x00\x02\x00\x3c\xce",
            id="a header that ends early",
        ),
    ],
)
def test_what_a_broker_must_not_send_ends_the_connection_before_it_is_read(data: bytes) -> None:
    wire = Wire.unplugged()
    with pytest.raises(BadFrame) as raised:
        wire._on_data_available(data)
    assert wire.ended_because == str(raised.value)
    assert pika_hooks.hooks.why_off() == "", "it is none of our hooks' fault"


def test_a_frame_as_large_as_agreed_on_is_read() -> None:
    wire = Wire.unplugged()
    most = 131_072 - 8
    wire._on_data_available(returned(most, bytes(most)))
    assert wire.seen == [(*TOLD, most)]


# -------------------------------------------------------------------- off at the first surprise


def test_this_pika_is_one_of_those_tested() -> None:
    assert Hooks(try_hooks).why_off() == ""


def test_another_version_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pika, "__version__", "1.4.5")
    hooks = Hooks(try_hooks)
    for _ in range(2):
        assert hooks.why_off() == "pika is 1.4.5; tested versions are 1.4.0, 1.4.1, 1.4.2, 1.4.4"
    [record] = caplog.records
    assert (record.name, record.levelname) == ("reliablepub.link", "WARNING")
    assert record.__dict__["event"] == "hooks_off"


def test_a_trial_that_fails_leaves_the_hooks_off() -> None:
    def trial() -> None:
        raise AttributeError("no '_sock'")

    assert "differs from the tested one: AttributeError: no '_sock'" in Hooks(trial).why_off()


def test_they_are_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []
    hooks = Hooks(lambda: tries.append(1))
    assert [hooks.why_off() for _ in range(3)] == ["", "", ""]
    hooks.switch_off("one")
    hooks.switch_off("another")
    assert hooks.why_off() == "one"
    assert (len(tries), len(caplog.records)) == (1, 1)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    """Those of this process, for a test that ruins them."""
    monkeypatch.setattr(pika_hooks.hooks, "_why_off", "")
    return pika_hooks.hooks


def broken(*_: object) -> None:
    raise ZeroDivisionError


def test_a_hook_that_fails_writing_is_the_last(
    plugged: Plugged, hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_AsyncPlaintextTransport, "get_write_buffer_size", broken)
    with pytest.raises(HookFailed, match="a hook failed writing, ZeroDivisionError"):
        plugged.wire.write_frames([b"one"])
    assert hooks.why_off() == plugged.wire.ended_because != ""


@pytest.mark.parametrize(
    ("owner", "name"), [(_AsyncPlaintextTransport, "get_protocol"), (Wire, "confirmed")]
)
def test_a_hook_that_fails_reading_is_the_last_and_ends_the_connection(
    plugged: Plugged, hooks: Hooks, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    monkeypatch.setattr(owner, name, broken)
    plugged.theirs.sendall(bytes_of(ACK))
    for _ in range(3):
        plugged.turn()
    assert len(plugged.ended) == 1
    assert hooks.why_off() == plugged.wire.ended_because
    assert "a hook failed reading, ZeroDivisionError" in hooks.why_off()


def test_a_connection_that_is_gone_is_no_failure_of_a_hook(plugged: Plugged, hooks: Hooks) -> None:
    plugged.theirs.close()
    for _ in range(3):
        plugged.turn()
    plugged.wire.write_frames([b"late"])
    assert hooks.why_off() == ""
