"""What passes between the relay and a store: entries, and everything one turn changes at once.

Knows: messages, outcomes, and how message ids are made. Must never know: SQL, what a delivery tag
means.

`Store` is the contract that every store keeps: in memory (`reliablepub.outbox.memory`) or in a
SQLite file (`reliablepub.outbox.sqlite.store`). The relay does not know which one it has. Reading
an entry marks nothing: an entry leaves the store in the transaction that records its final outcome.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final, Protocol

from reliablepub.errors import ConfigurationError, Damaged, OutboxFull, Withdrawn
from reliablepub.message import Message
from reliablepub.outcome import Outcome, Persistence


class Mint:
    """Makes ids that nobody else has: UUIDs of version 4, as far as anybody can see.

    They begin with 72 random bits, and end with a counter that started at 47 random bits. The
    kernel is asked once a process: `uuid.uuid4` asks it for each id, and each such call releases
    the interpreter to another thread, for up to 5 ms.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Make others from now on: a forked process must not repeat its parent's."""
        digits = os.urandom(9).hex()
        self._head = f"{digits[:8]}-{digits[8:12]}-4{digits[12:15]}-a{digits[15:]}-"
        self._numbers = count(int.from_bytes(os.urandom(6)) >> 1)

    def new_id(self) -> str:
        """A ``message_id``; from any thread."""
        return f"{self._head}{next(self._numbers):012x}"


_mint: Final = Mint()
new_id: Final = _mint.new_id
os.register_at_fork(after_in_child=_mint.begin)


HELD: Final = float("inf")
"""The ``due_at`` of an entry that waits until its destination is well."""


class Waiter(Protocol):
    """Somebody who wants to know what becomes of entries: each of them ends in one of these.

    On the relay's thread.
    """

    def all_confirmed(self, entries: Sequence[Entry]) -> None:
        """Learn that these are confirmed: the broker has taken responsibility."""

    def given_up(self, entry: Entry, outcome: Outcome) -> None:
        """Learn that an entry was parked or discarded, because of this outcome."""

    def withdrawn(self, error: Withdrawn | Damaged) -> None:
        """Learn that an entry was parked or discarded, and not by the relay's verdict."""


@dataclass(slots=True, eq=False)
class Entry:
    """An accepted message on its way, with what it has been through.

    Attributes:
        message: always with a ``message_id``.
        stored_at: wall clock, seconds since 1970.
        id: given by the store when the entry is committed; ids only ever grow.
        due_at: wall clock time before which it is not sent again, or None.
        nacked: how often a queue refused it.
        returned: how often it was unroutable.
        refused: how often the broker closed a channel because of it.
        uncertain: how often its fate was unknowable.
        expires_at: wall clock time after which nobody wants it any more, or None.
        refused_at: wall clock time when it was nacked, returned or refused first, or had to wait
            for a paused destination; or None.
        is_plain: there is nothing to know of it but its message: no due time, no deadline, no
            ordering key, no earlier attempt. False also where that was not looked at.
        is_discarded: in memory only: it is given up, and not parked.
        waiter: in memory only.
    """

    message: Message
    stored_at: float
    id: int = 0
    due_at: float | None = None
    nacked: int = 0
    returned: int = 0
    refused: int = 0
    uncertain: int = 0
    expires_at: float | None = None
    refused_at: float | None = None
    is_plain: bool = False
    is_discarded: bool = False
    waiter: Waiter | None = None

    @property
    def is_for_now(self) -> bool:
        """Whether it waits for nothing and can go from memory; others are found on disk."""
        return self.due_at is None and self.message.ordering_key is None

    def is_late(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.expires_at is not None and self.expires_at <= now

    @property
    def attempts(self) -> int:
        """How many attempts ended without a confirm."""
        return self.nacked + self.returned + self.refused + self.uncertain

    @property
    def persistence(self) -> Persistence:
        """Whether a queue may hold it after all these attempts."""
        if self.nacked or self.uncertain:
            return Persistence.POSSIBLY_PERSISTED
        return Persistence.NOT_WRITTEN

    def step(self, by: float) -> None:
        """The wall clock was set: what ends a wait is as far away as before.

        Not the time that its sender chose (``not_before``), which is one of the wall clock.
        """
        if self.refused_at is not None:
            self.refused_at += by
            if self.due_at is not None:
                self.due_at += by
        if self.expires_at is not None:
            self.expires_at += by

    @classmethod
    def accepted(cls, message: Message, now: float) -> Entry:
        """A message that is accepted now: from here on its times are those of the wall clock."""
        entry = cls(message, now)
        if message.is_plain:
            entry.is_plain = message.ordering_key is None
            return entry
        if message.not_before is not None:
            due_at = message.not_before.timestamp()
            entry.due_at = due_at if due_at > now else None
        if message.expires_in_s is not None:
            entry.expires_at = now + message.expires_in_s
        return entry


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that ended, for the history of an entry that was not confirmed at once.

    Attributes:
        entry: whose attempt.
        epoch: name of the channel epoch (``"7-3"``: run 7, its third channel).
        tag: delivery tag within the epoch.
        outcome: how it ended.
        at: wall clock, seconds.
    """

    entry: Entry
    epoch: str
    tag: int
    outcome: Outcome
    at: float


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Consecutive delivery tags of one epoch: entry ``entries[i]`` has tag ``first_tag + i``."""

    epoch: str
    first_tag: int
    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Touched:
    """What a person did to one message, beside the relay.

    Attributes:
        id: of the entry.
        message_id: of the message.
        exchange: where it was to go until then.
        routing_key: with which routing key.
        action: ``retry``, ``park``, ``discard``, ``reroute`` or ``skip``.
        person: who it was.
        note: why, in their words.
        is_open: whether it is to be published still.
    """

    id: int
    message_id: str
    exchange: str
    routing_key: str
    action: str
    person: str
    note: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """A row that is not what was stored.

    Attributes:
        id: of the entry.
        message_id: as far as it can be read, like the two that follow.
        exchange: where the message was to go.
        routing_key: with which routing key.
        reason: what is wrong with it.
    """

    id: int
    message_id: str
    exchange: str
    routing_key: str
    reason: str


class Intervened(Exception):
    """People have changed messages that the relay may hold; `Store.touched` tells which."""


@dataclass(slots=True)
class Release:
    """Entries that wait until their destination is well, and need wait no longer.

    Attributes:
        exchange: of the destination; None for every one.
        routing_key: likewise; None for all of the exchange.
        limit: how many may go, lowest ids of a routing key first.
        at: their due time from now on.
        after: the `last` one that went before; None for none.
        is_counted: whether to count those that still wait.
        count: how many there were; the commit fills it in, like the two that follow.
        last: exchange, routing key and id of the last of them.
        left: how many still wait there, if they were to be counted.
    """

    exchange: str | None
    routing_key: str | None
    limit: int
    at: float
    after: tuple[bytes, bytes, int] | None = None
    is_counted: bool = False
    count: int = 0
    last: tuple[bytes, bytes, int] | None = None
    left: int = 0


@dataclass(frozen=True, slots=True)
class HeldExchange:
    """An exchange for which entries wait until it, or one of its routing keys, is well.

    Attributes:
        exchange: its name; None where it is no text: the row is damaged.
        count: how many.
        since: wall clock time since which the first of them has waited, or None.
    """

    exchange: str | None
    count: int
    since: float | None


@dataclass(slots=True)
class Step:
    """The wall clock was set, while messages have times of it that are ends of waits.

    Attributes:
        by: seconds, forward or back (below 0).
        since: wall clock time, as it is now, of the last look at the clock before it was set.
        last_id: highest id then. What another process has stored since is by the new clock.
        moved: ids of entries in memory: their times are by the new clock already.
    """

    by: float
    since: float
    last_id: int
    moved: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Changes:
    """Everything that one turn of the relay changes, committed in one transaction.

    Attributes:
        new: entries to store; the commit fills in their ids, in order.
        sources: how many of the new entries came from which named source (see `Store.position`).
        confirmed: entries to remove: the broker has taken responsibility.
        parked: last attempts of entries that are given up, with the reason.
        discarded: last attempts of entries that are given up and not kept.
        rescheduled: entries whose counts and ``due_at`` changed.
        attempts: ended attempts to keep as history (parked ones included).
        sent: tags about to be written to the wire.
        finished: earlier ``sent`` ranges of which no tag is outstanding any more.
        released: which of those that are `HELD` are due now.
        stepped: the wall clock was set: the times of retries, and the deadlines, of what is in the
            store already are set with it.
    """

    new: list[Entry] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    confirmed: list[Entry] = field(default_factory=list)
    parked: list[Attempt] = field(default_factory=list)
    discarded: list[Attempt] = field(default_factory=list)
    rescheduled: list[Entry] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    finished: list[Sent] = field(default_factory=list)
    released: list[Release] = field(default_factory=list)
    stepped: Step | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return not any(getattr(self, name) for name in self.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Counters:
    """The ledger: ``stored = confirmed + parked + expired + discarded + open``, always.

    Attributes:
        stored: messages ever accepted.
        confirmed: of those, confirmed.
        parked: of those, parked now.
        expired: of those, parked as expired now.
        discarded: of those, thrown away by a person or the policy.
        open_bytes: `Message.size` of the open ones, summed.
    """

    stored: int = 0
    confirmed: int = 0
    parked: int = 0
    expired: int = 0
    discarded: int = 0
    open_bytes: int = 0

    @property
    def open(self) -> int:
        """Messages accepted and not yet settled."""
        return self.stored - self.confirmed - self.parked - self.expired - self.discarded


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a store knows after opening, and after each commit.

    Attributes:
        last_id: highest id ever given, to anybody.
        counters: the ledger.
    """

    last_id: int
    counters: Counters


@dataclass(frozen=True, slots=True)
class OpenLimits:
    """What may be open when one more message comes.

    Attributes:
        messages_max: open messages, that one included; None for no limit.
        bytes_max: their bytes, likewise.

    Raises:
        ConfigurationError: nothing would ever fit.
    """

    messages_max: int | None
    bytes_max: int | None

    def __post_init__(self) -> None:
        """Refuse what can only be a mistake."""
        if any(limit is not None and limit < 1 for limit in (self.messages_max, self.bytes_max)):
            msg = "open_messages_max and open_bytes_max must be at least 1"
            raise ConfigurationError(msg)

    @property
    def are_none(self) -> bool:
        """Whether anything fits."""
        return self.messages_max is None and self.bytes_max is None

    def check(self, counters: Counters, message: Message, path: Path) -> None:
        """Let the message in, or not.

        Raises:
            OutboxFull: there is no room for it.
        """
        if self.messages_max is not None and counters.open >= self.messages_max:
            held = f"holds {counters.open} open messages, and open_messages_max is"
            raise _full(path, message, f"{held} {self.messages_max}")
        if self.bytes_max is None:
            return
        if message.size > self.bytes_max:
            never = f"never takes {message.size} bytes at once: open_bytes_max is"
            raise _full(path, message, f"{never} {self.bytes_max}")
        if counters.open_bytes + message.size > self.bytes_max:
            held = f"holds {counters.open_bytes} bytes of open messages, this one has"
            most = f"{message.size}, and open_bytes_max is {self.bytes_max}"
            raise _full(path, message, f"{held} {most}")


def _full(path: Path, message: Message, why: str) -> OutboxFull:
    what = f"message {message.message_id} was not stored: outbox {path} {why}"
    return OutboxFull(f"{what}; see that a relay runs and what keeps it (`reliablepub doctor`)")


class Store(Protocol):
    """Where entries are until their verdict. One thread uses it: the one that opened it."""

    @property
    def run(self) -> int:
        """Number of this relay's run on this store: each one is higher than all before it."""

    def snapshot(self) -> Snapshot:
        """Read the ledger and the highest id, as they are now (other processes may add)."""

    def commit(self, changes: Changes) -> Snapshot:
        """Make one turn durable, wholly or not at all.

        Raises:
            Intervened: a person has changed messages since the last `touched`, so nothing of the
                turn was stored: let go of them first.
            OutboxDiskFull: nothing of the turn was stored; the same turn may be tried again.
            OutboxError: the store cannot go on.
        """

    def read_ready(
        self, first_id: int, last_id: int, *, limit: int, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """Entries with ``first_id <= id <= last_id`` that wait for nothing, lowest ids first.

        Of those that share an ordering key, only one whose turn it is. At least one, even if it is
        larger than ``bytes_max``, unless a page of others had to be passed over.

        Returns:
            the entries, and up to which id all have been read or passed over.
        """

    def read_first(
        self, keys: Sequence[str], now: float, *, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """The first open entry of each key, if it waits for nothing and its key is not held.

        Returns:
            the entries, and how many of the keys were looked at.
        """

    def read_due(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Entries whose ``due_at`` has come and whose id is not in ``loaded``, earliest first.

        At least one, where there is any, even if it is larger than ``bytes_max``. One with an
        ordering key is left out unless its turn has come; from now on it waits for that alone.

        Returns:
            the entries, and when the next one falls due (None: none is waiting).

        Raises:
            Intervened: a person has changed messages since the last `touched`: let go of them
                first, or one of these may be in memory twice.
        """

    def read_expired(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Entries whose ``expires_at`` has come and whose id is not in ``loaded``, likewise.

        Returns:
            the entries, and when the next one expires (None: none does).
        """

    def lowest_awaited(self, first_id: int, at: float) -> int | None:
        """Lowest open id from ``first_id`` on that was to be sent by ``at``, or None.

        A message that its sender put off until later than ``at`` is not awaited, nor one that a
        parked message of its key holds back; a retry is, or one that waits for its destination.
        """

    def held_exchanges(self, limit: int) -> Sequence[HeldExchange]:
        """Exchanges of entries that are `HELD`, as many as that."""

    def changed_elsewhere(self) -> bool:
        """Whether another process has written to the store since the last call."""

    def relieve(self) -> str:
        """Have what may give way do so if there is no space; called now and then.

        Returns:
            why no new entry is stored for now; empty if any can be.
        """

    def show(self, status: Mapping[str, object]) -> None:
        """Let those who look at the store see how its relay is doing. Nothing depends on it."""

    def touched(self) -> Sequence[Touched]:
        """What people did to single messages since the last call, or since the store was opened."""

    def damaged(self) -> Sequence[DamagedRow]:
        """Rows that were parked since the last call, because they are not what was stored."""

    def position(self, source: str) -> int:
        """How many entries of a named source have ever been stored, in the same transactions."""

    def close(self, last: Mapping[str, object] | None = None) -> None:
        """Give everything back; committed entries stay.

        Args:
            last: what those who look at the store are left to see, instead of nothing.
        """
