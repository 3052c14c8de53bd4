"""How much work a message is, counted in function calls: a guard that a busy machine cannot break.

Seconds say more and depend on the machine; calls are the same everywhere. A limit is about a tenth
above what was counted with Python 3.11 when it was written. Who makes a message dearer learns it
here, and raises the limit if it is worth it; who makes it cheaper lowers it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from struct import Struct
from types import FrameType
from typing import Any, Self

import pytest
from pika.adapters.select_connection import IOLoop

from reliablepub._core.events import Acked, ChannelOpened, Connected, Event
from reliablepub._core.session import Session
from reliablepub.message import Message
from reliablepub.outbox.entry import Entry, Store
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.store import SqliteStore
from reliablepub.policy import RetryPolicy
from reliablepub.receipt import BatchReceipt
from reliablepub.relay.caller import Cutter, cut
from reliablepub.relay.clock import Clock
from reliablepub.relay.handover import Chunk, Inbox
from reliablepub.relay.limits import limits
from reliablepub.relay.relay import Relay
from reliablepub.transport.encoding import encode_batch
from reliablepub.transport.frames import PublishFrames
from reliablepub.transport.pika_hooks import HookedConnection

COUNT = 5_000
WINDOW = 1_000
LIMITS = limits(None, None, window_max=WINDOW, window_bytes_max=16 * 1024 * 1024, is_durable=True)


class Calls:
    """Counts function calls on this thread, Python's and C's, while it is open."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._noted)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _noted(self, _frame: FrameType, event: str, _argument: Any) -> None:
        if event in {"call", "c_call"}:
            self.count += 1

    @property
    def per_message(self) -> float:
        return self.count / COUNT


class Wire:
    """A transport that makes real frames, and confirms each publish at the next listen."""

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
        self.bytes += sum(map(len, self._frames.encode(messages, properties)))
        tags = range(first_tag, first_tag + len(messages))
        self._events += [Acked(epoch, tag, multiple=False) for tag in tags]

    def listen(self, timeout_s: float | None) -> list[Event]:
        events, self._events = self._events, []
        return events


class Stored:
    """Nobody waits for the commit."""

    def stored(self) -> None: ...

    def failed(self, error: BaseException) -> None:
        raise error


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = SqliteStore(tmp_path / "outbox.db") if request.param == "sqlite" else MemoryStore()
    yield store
    store.close()


def test_from_the_inbox_to_the_last_confirm(store: Store) -> None:
    wire: Any = Wire()
    inbox = Inbox(lambda: None)
    session = Session[Entry](
        window_max=WINDOW, window_bytes_max=16 * 1024 * 1024, confirm_timeout_s=30.0
    )
    relay = Relay(
        store=store,
        transport=wire,
        session=session,
        inbox=inbox,
        policy=RetryPolicy(),
        limits=LIMITS,
        clock=Clock(),
        hooks={},
    )
    is_ended: Any = None
    receipt = BatchReceipt(is_ended)
    receipt.accepted(COUNT)
    messages = [Message(b"x" * 1_024, routing_key=f"q{n % 8}") for n in range(COUNT)]
    chunks = [Chunk(chunk, Stored(), receipt) for chunk in cut(messages, Cutter(LIMITS))]
    for _ in range(3):
        relay.turn()
        relay.handle(wire.listen(0))
    with Calls() as calls:
        for chunk in chunks:
            inbox.put(chunk)
            relay.turn()
            relay.handle(wire.listen(0))
        while receipt.confirmed < COUNT:
            relay.turn(is_flushing=True)
            relay.handle(wire.listen(0))
    assert wire.bytes > COUNT * 1_024
    assert calls.per_message < 80, f"{calls.per_message:.1f} calls a message"


def counted(work: Callable[[], object]) -> float:
    with Calls() as calls:
        work()
    return calls.per_message


def test_a_message_and_its_id() -> None:
    messages = counted(lambda: [Message(b"x", routing_key="q") for _ in range(COUNT)])
    assert messages < 31, f"{messages:.1f} calls a message"
    stream = [Message(b"x", routing_key="q") for _ in range(COUNT)]
    chunks = counted(lambda: list(cut(stream, Cutter(LIMITS))))
    assert chunks < 36, f"{chunks:.1f} calls a message"


def test_confirms_off_the_wire() -> None:
    confirm = Struct(">BHIHHQBB")
    data = b"".join(confirm.pack(1, 1, 13, 60, 80, tag, 0, 0xCE) for tag in range(1, COUNT + 1))
    heard: list[tuple[bool, int, bool]] = []
    with closing(IOLoop()) as loop:
        connection = HookedConnection(custom_ioloop=loop, internal_connection_workflow=False)
        connection.confirm_to(1, lambda *one: heard.append(one))
        calls = counted(lambda: connection._on_data_available(data))
    assert len(heard) == COUNT
    assert calls < 3.5, f"{calls:.1f} calls a message"
