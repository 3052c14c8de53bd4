"""Our way and a peer's from a message to its confirm, in one thread, without a network.

The same messages, each confirmed by a frame of its own; so whatever is counted is the same on each
run. ``python -m tests.speed.unplugged PROGRAM COUNT FOLDER`` is one of them alone. It knows the
parts of the relay, and pika's insides. It must never know what is counted.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pika
from pamqp import commands, frame
from pika.adapters.select_connection import IOLoop, SelectConnection

from reliablepub._core.events import AckedEach, ChannelOpened, Connected, Event
from reliablepub._core.session import Session
from reliablepub.front.receipt import IssuedBatch
from reliablepub.message import Message
from reliablepub.outbox.chunks import Cutter, cut
from reliablepub.outbox.entry import Store, size_of
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.policy import RetryPolicy
from reliablepub.relay.clock import Clock
from reliablepub.relay.handover import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX, Chunk, Inbox, limits
from reliablepub.relay.relay import Relay
from reliablepub.transport.frames import PublishFrames, encode_batch
from reliablepub.transport.pika_hooks import HookedConnection
from tests.speed.peers import BODY, WINDOW, WindowByHand

ROOT = Path(__file__).parent.parent.parent
QUEUES = [f"q{n}" for n in range(8)]
LIMITS = limits(None, None, window_max=WINDOW, window_bytes_max=16 * 1024 * 1024, is_durable=True)
_PROPERTIES: Any = {"capabilities": {"publisher_confirms": True, "basic.nack": True}}


class Wire:
    """A transport that makes real frames, and confirms each publish at the next listen."""

    hooks_off = ""
    trying = ""
    certificate_ends_at = None

    def __init__(self) -> None:
        self._frames = PublishFrames(1, 131_072)
        self._events: list[Event] = []
        self.bytes = 0

    def connect(self) -> None:
        self._events.append(Connected())

    def open_channel(self, epoch: int) -> None:
        self._events.append(ChannelOpened(epoch))

    def send(self, epoch: int, first_tag: int, messages: Sequence[Message]) -> None:
        properties = encode_batch(messages, 1, epoch, first_tag, 131_072)
        self.bytes += sum(len(one.data) for one in self._frames.encode(messages, properties))
        tags = range(first_tag, first_tag + len(messages))
        self._events.append(AckedEach(epoch, tags))

    def listen(self, timeout_s: float | None) -> list[Event]:
        events, self._events = self._events, []
        return events


class Stored:
    """Nobody waits for the commit."""

    def set(self) -> None: ...


class Unplugged:
    """A relay with a connection, a channel, and nothing to do."""

    def __init__(self, store: Store) -> None:
        self._inbox = Inbox(lambda: None)
        self.wire = Wire()
        transport: Any = self.wire
        session = Session(
            size_of, window_max=WINDOW, window_bytes_max=16 * 1024 * 1024, confirm_timeout_s=30.0
        )
        self._relay = Relay(
            store=store,
            transport=transport,
            session=session,
            inbox=self._inbox,
            policy=RetryPolicy(),
            limits=LIMITS,
            clock=Clock(),
            hooks={},
        )
        for _ in range(3):
            self._turn()

    def publish(self, chunks: Sequence[Chunk[Any]], receipt: IssuedBatch) -> None:
        """From the inbox to the last confirm."""
        count = sum(len(chunk.messages) for chunk in chunks)
        receipt.accepted(count)
        for chunk in chunks:
            self._inbox.put(chunk)
            self._turn()
            assert chunk.error is None
        while receipt.confirmed < count:
            self._turn(is_flushing=True)

    def _turn(self, *, is_flushing: bool = False) -> None:
        self._relay.turn(is_flushing=is_flushing)
        self._relay.handle(self.wire.listen(0))


def nobody_waits() -> IssuedBatch:
    is_ended: Any = None
    return IssuedBatch(is_ended)


def messages(count: int) -> list[Message]:
    return [Message(BODY, routing_key=QUEUES[n % len(QUEUES)]) for n in range(count)]


def chunks_of(messages: Sequence[Message], receipt: IssuedBatch) -> list[Chunk[Any]]:
    return [
        Chunk(piece, Stored(), receipt)
        for piece in cut(messages, Cutter(CHUNK_MESSAGES_MAX, CHUNK_BYTES_MAX))
    ]


def confirms(tags: Sequence[int]) -> bytes:
    return b"".join(frame.marshal(commands.Basic.Ack(tag), 1) for tag in tags)


class Heard:
    """A listener that keeps tags."""

    def __init__(self, tags: list[int]) -> None:
        self._tags = tags

    def confirmed(self, _is_ack: bool, tags: list[int], _multiple: bool) -> None:  # noqa: FBT001
        self._tags += tags

    def returned(self, *_: object) -> None:
        raise AssertionError("nothing came back")


def hear_confirms(data: bytes) -> int:
    """Take confirms off the wire, as our transport does.

    Returns:
        how many there were.
    """
    heard: list[int] = []
    with closing(IOLoop()) as loop:
        connection = HookedConnection(custom_ioloop=loop, internal_connection_workflow=False)
        connection.listen_on(1, Heard(heard))
        connection._on_data_available(data)
    return len(heard)


class UnpluggedPika(SelectConnection):
    """Pika's connection without a socket: it is fed with frames, and what it writes is counted."""

    def __init__(self, loop: IOLoop, window: WindowByHand) -> None:
        self.bytes = 0
        super().__init__(
            pika.ConnectionParameters(heartbeat=0),
            on_open_callback=window.opened,
            custom_ioloop=loop,
            internal_connection_workflow=False,
        )
        self._on_stream_connected()
        for channel, method in (
            (0, commands.Connection.Start(server_properties=_PROPERTIES)),
            (0, commands.Connection.Tune()),
            (0, commands.Connection.OpenOk()),
            (1, commands.Channel.OpenOk()),
            (1, commands.Confirm.SelectOk()),
        ):
            self._on_data_available(frame.marshal(method, channel))

    def _adapter_emit_data(self, data: bytes) -> None:
        self.bytes += len(data)


def pika_by_hand(count: int) -> int:
    """Publish through pika with a window by hand, to the last confirm.

    Returns:
        bytes written.
    """
    window = WindowByHand(QUEUES, count)
    with closing(IOLoop()) as loop:
        connection = UnpluggedPika(loop, window)
        while window.outstanding:
            connection._on_data_available(confirms(window.outstanding.tags))
        return connection.bytes


def relay_by_itself(store: Store, count: int) -> None:
    """From messages to confirms that came off the wire, all of it."""
    unplugged, receipt = Unplugged(store), nobody_waits()
    unplugged.publish(chunks_of(messages(count), receipt), receipt)
    assert hear_confirms(confirms(range(1, count + 1))) == receipt.confirmed == count


def on_disk(count: int, folder: Path) -> None:
    with closing(SqliteStore(folder / f"{count}.db")) as store:
        relay_by_itself(store, count)


PROGRAMS: dict[str, Callable[[int, Path], object]] = {
    "pika": lambda count, _: pika_by_hand(count),
    "memory": lambda count, _: relay_by_itself(MemoryStore(), count),
    "disk": on_disk,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
