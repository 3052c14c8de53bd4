"""A relay between a store that is watched and a transport that only writes down what it is told.

No threads, sockets or sleeps: the test says what the broker answers, and what time it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tenacity import stop_after_attempt

from reliablepub._core.events import Acked, ChannelOpened, Connected, ConnectionLost, Event, Nacked
from reliablepub._core.session import Session
from reliablepub.errors import Damaged, OutboxDiskFull, ReliablePubError, Withdrawn
from reliablepub.message import Message
from reliablepub.outbox.entry import Bell, Changes, Entry, Snapshot, Store, size_of
from reliablepub.outcome import CONFIRMED, Outcome, OutcomeKind
from reliablepub.policy import Retries, RetryPolicy
from reliablepub.relay.callbacks import calls_of
from reliablepub.relay.clock import Clock
from reliablepub.relay.handover import Chunk, Inbox, Limits
from reliablepub.relay.pauses import exchange_of
from reliablepub.relay.relay import Relay
from reliablepub.transport.base import CannotEncode

ONCE = Retries(stop_after_attempt(1), lambda _: 0.0)
PARK_AT_ONCE = RetryPolicy(ONCE, ONCE, ONCE, breaker=None)
"""Every budget is one refusal."""


def patient(attempts_max: int, wait_s: float) -> RetryPolicy:
    """The same budget, and the same wait, for every kind of refusal."""
    retries = Retries(stop_after_attempt(attempts_max), lambda _: wait_s)
    return RetryPolicy(retries, retries, retries, breaker=None)


@dataclass
class Time:
    """Both clocks, moved by hand; they differ, so that nothing can mix them up.

    Attributes:
        now: the monotonic one.
        asleep: seconds for which the host was suspended.
    """

    now: float = 50.0
    asleep: float = 0.0

    @property
    def wall(self) -> float:
        return self.now + self.asleep + 1_000_000.0


@dataclass
class Sending:
    """One `send`, as the transport saw it."""

    epoch: int
    first_tag: int
    ids: list[str]


class ScriptedTransport:
    """Writes down what it is told to do, in a log that it shares with the store."""

    hooks_off = ""
    trying = ""
    certificate_ends_at = None

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.sendings: list[Sending] = []
        self.routing_keys: list[str] = []
        self.unencodable: set[str] = set()

    @property
    def sent(self) -> list[str]:
        """The ``message_id`` of every publish, in order."""
        return [id_ for sending in self.sendings for id_ in sending.ids]

    def connect(self) -> None:
        self.log.append("connect")

    def disconnect(self, reason: str) -> None:
        self.log.append("disconnect")

    def open_channel(self, epoch: int) -> None:
        self.log.append(f"open {epoch}")

    def close_channel(self, epoch: int) -> None:
        self.log.append(f"close {epoch}")

    def send(self, epoch: int, first_tag: int, messages: Sequence[Message]) -> None:
        ids = [message.message_id or "" for message in messages]
        for index, id_ in enumerate(ids):
            if id_ in self.unencodable:
                raise CannotEncode(index, f"{id_} does not fit")
        self.log.append(f"send {' '.join(ids)}")
        self.routing_keys += [message.routing_key for message in messages]
        self.sendings.append(Sending(epoch, first_tag, ids))

    def listen(self, timeout_s: float | None) -> list[Event]:
        raise AssertionError("the test is what listens")

    def watch(self, fd: int) -> bool:
        return False

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class WatchedStore:
    """A store whose commits are written down, and fail when the test wants them to."""

    def __init__(self, store: Store, log: list[str]) -> None:
        self._store = store
        self._log = log
        self.fails: Callable[[Changes], ReliablePubError | None] = lambda _turn: None
        self.turns: list[Changes] = []
        self.relieve: Callable[[], str] = store.relieve

    def commit(self, turn: Changes) -> Snapshot:
        error = self.fails(turn)
        if error is not None:
            self._log.append("failed")
            raise error
        snapshot = self._store.commit(turn)
        self._log.append(f"commit {' '.join(e.message.message_id or '' for e in turn.new)}".strip())
        self.turns.append(turn)
        return snapshot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@dataclass(eq=False)
class Told:
    """The caller that handed a chunk over, and what it was told, in order."""

    log: list[str] = field(default_factory=list)
    is_stored: bool = False
    error: BaseException | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    withdrawals: dict[str, Withdrawn | Damaged] = field(default_factory=dict)
    chunk: "Chunk[Told] | None" = None

    def chunk_of(self, messages: Sequence[Message], source: str | None = None) -> "Chunk[Told]":
        """A chunk whose caller this is."""
        self.chunk = Chunk(messages, self, self, source=source)
        return self.chunk

    def set(self) -> None:
        """The flag of the chunk."""
        assert not self.is_stored, "told twice"
        assert self.error is None, "told twice"
        assert self.chunk is not None
        self.error = self.chunk.error
        self.is_stored = self.error is None
        self.log.append("stored" if self.is_stored else "refused")

    def all_confirmed(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.given_up(entry, CONFIRMED)

    def given_up(self, entry: Entry, outcome: Outcome) -> None:
        id_ = entry.message.message_id or ""
        assert id_ not in self.outcomes, f"{id_} is told twice"
        self.outcomes[id_] = outcome
        self.log.append(f"told {id_} {outcome.kind}")

    def withdrawn(self, error: Withdrawn | Damaged) -> None:
        assert error.message_id not in self.outcomes
        assert error.message_id not in self.gone, f"{error.message_id} is told twice"
        self.gone[error.message_id] = str(error)
        self.withdrawals[error.message_id] = error

    @property
    def kinds(self) -> dict[str, OutcomeKind]:
        return {id_: outcome.kind for id_, outcome in self.outcomes.items()}


class World:
    """One relay and everything around it."""

    def __init__(
        self,
        store: Store,
        *,
        time: Time | None = None,
        policy: RetryPolicy = PARK_AT_ONCE,
        window_max: int = 100,
        confirm_timeout_s: float = 30.0,
        messages_max: int = 10_000,
        loaded_max: int = 1_000,
        loaded_bytes_max: int = 1_000_000,
        hooks: Sequence[object] = (),
        bell: Bell | None = None,
    ) -> None:
        self.log: list[str] = []
        self.time = time or Time()
        self.store = WatchedStore(store, self.log)
        self.transport = ScriptedTransport(self.log)
        self.inbox = Inbox(lambda: None)
        self.session: Session[Entry] = Session(
            size_of,
            window_max=window_max,
            window_bytes_max=10_000_000,
            confirm_timeout_s=confirm_timeout_s,
            place_of=exchange_of,
            is_weighed=policy.breaker is not None,
        )
        self.relay = Relay(
            store=self.store,
            transport=self.transport,
            session=self.session,
            inbox=self.inbox,
            policy=policy,
            limits=Limits(messages_max, 10_000_000, loaded_max, loaded_bytes_max),
            clock=Clock(lambda: self.time.now, lambda: self.time.wall),
            hooks=calls_of(hooks),
            bell=bell,
        )
        self.epoch = 0

    # ------------------------------------------------------------------ the caller's side

    def hand_over(
        self, *ids: str, source: str | None = None, body: bytes = b"x", **fields: Any
    ) -> Told:
        """A chunk of messages of these ids, in the inbox."""
        told = Told(self.log)
        messages = [Message(body, routing_key="q", message_id=id_, **fields) for id_ in ids]
        self.inbox.put(told.chunk_of(messages, source=source))
        return told

    def turn(self, *, after_s: float = 0.0, is_flushing: bool = False) -> float | None:
        """Some time passes, then the relay takes a turn."""
        self.time.now += after_s
        return self.relay.turn(is_flushing=is_flushing)

    def turned(self, *, after_s: float = 0.0, is_flushing: bool = False) -> Self:
        """The same, for a look at what has come of it."""
        self.turn(after_s=after_s, is_flushing=is_flushing)
        return self

    def turns(self, count: int, *, after_s: float = 0.0, is_flushing: bool = False) -> Self:
        """As many turns, each after this time."""
        for _ in range(count):
            self.turn(after_s=after_s, is_flushing=is_flushing)
        return self

    def sends(self, *ids: str, **fields: Any) -> Told:
        """Hand over a chunk, and let the relay take a turn."""
        told = self.hand_over(*ids, **fields)
        self.turn()
        return told

    # ------------------------------------------------------------------ the broker's side

    def connect(self) -> None:
        """From nothing to an open channel."""
        self.turn()
        assert "connect" in self.log
        self.relay.handle([Connected()])
        self.open_channel()

    def open_channel(self) -> None:
        """Open the channel that the relay asks for last."""
        self.turn()
        self.epoch = self.asked_epochs[-1]
        self.relay.handle([ChannelOpened(self.epoch)])

    @property
    def asked_epochs(self) -> list[int]:
        """Every channel the relay has asked for."""
        return [int(line.split()[1]) for line in self.log if line.startswith("open ")]

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        self.relay.handle([Acked(self.epoch, tag, multiple)])

    def ack_all(self) -> None:
        """Confirm whatever was sent on this channel."""
        ends = [s.first_tag + len(s.ids) for s in self.transport.sendings if s.epoch == self.epoch]
        if ends:
            self.ack(max(ends) - 1, multiple=True)

    def nack(self, tag: int, *, multiple: bool = False) -> None:
        self.relay.handle([Nacked(self.epoch, tag, multiple)])

    def lose_connection(self, reason: str = "gone") -> None:
        self.relay.handle([ConnectionLost(reason)])

    def hears_ack(self, tag: int, *, multiple: bool = False, is_flushing: bool = False) -> Self:
        """An ack, and a turn of the relay."""
        self.ack(tag, multiple=multiple)
        self.turn(is_flushing=is_flushing)
        return self

    def hears_nack(self, tag: int, *, multiple: bool = False, is_flushing: bool = False) -> Self:
        """A nack, and a turn of the relay."""
        self.nack(tag, multiple=multiple)
        self.turn(is_flushing=is_flushing)
        return self

    def hears_loss(self, reason: str = "gone") -> Self:
        """The loss of the connection, and a turn of the relay."""
        self.lose_connection(reason)
        self.turn()
        return self

    def reconnect(self) -> None:
        """Wait until it tries again, and let it succeed."""
        attempts = self.log.count("connect")
        self.turn(after_s=100.0)
        assert self.log.count("connect") == attempts + 1
        self.relay.handle([Connected()])
        self.open_channel()

    # ------------------------------------------------------------------ looking inside

    @property
    def in_memory(self) -> tuple[int, int]:
        """Messages and bytes that the relay believes to hold."""
        loaded = self.relay._loaded
        return loaded._messages, loaded._bytes

    @property
    def sent(self) -> list[str]:
        return self.transport.sent


def connected(store: Store, *ids: str, **options: Any) -> World:
    """A relay on this store with an open channel.

    Args:
        store: of the relay.
        ids: of messages that are handed over, and a turn is taken.
        options: those of `World`.
    """
    world = World(store, **options)
    world.connect()
    if ids:
        world.sends(*ids)
    return world


def disk_full(_turn: Changes) -> ReliablePubError:
    """For `WatchedStore.fails`: there is no space, whatever is committed."""
    return OutboxDiskFull("the disk is full")
