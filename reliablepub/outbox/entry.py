"""What passes between the relay and a store: entries, and everything one turn changes at once.

Knows: messages and outcomes. Must never know: SQL (the store's), what a tag means (the core's).

A store is durable (`reliablepub.outbox.store`) or not (`reliablepub.outbox.memory`); the relay
cannot tell them apart. Taking is only a read: an entry leaves the store in the transaction of its
verdict.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from reliablepub.message import Message
from reliablepub.outcome import Outcome


class Waiter(Protocol):
    """Somebody who wants to know what becomes of an entry."""

    def settled(self, entry: Entry, outcome: Outcome) -> None:
        """Take the final outcome. Called once for each entry, from the relay's thread."""


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
    waiter: Waiter | None = None


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


@dataclass(slots=True)
class Turn:
    """Everything that one turn of the relay changes, committed in one transaction.

    Attributes:
        new: entries to store; the commit fills in their ids, in order.
        sources: how many of the new entries came from which named source (see `Store.position`).
        confirmed: entries to remove: the broker has taken responsibility.
        parked: last attempts of entries that are given up, with the reason.
        rescheduled: entries whose counts and ``due_at`` changed.
        attempts: ended attempts to keep as history (parked ones included).
        sent: tags about to be written to the wire.
        finished: earlier ``sent`` ranges of which no tag is outstanding any more.
    """

    new: list[Entry] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    confirmed: list[Entry] = field(default_factory=list)
    parked: list[Attempt] = field(default_factory=list)
    rescheduled: list[Entry] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    finished: list[Sent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Counters:
    """The ledger: ``stored = confirmed + parked + expired + discarded + open``, always.

    Attributes:
        stored: messages ever accepted.
        confirmed: of those, confirmed.
        parked: of those, parked now.
        expired: of those, parked as expired now.
        discarded: of those, thrown away by a person.
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


class Store(Protocol):
    """Where entries are until their verdict. One thread uses it: the one that opened it."""

    @property
    def run(self) -> int:
        """Number of this relay's run on this store: each one is higher than all before it."""

    def snapshot(self) -> Snapshot:
        """Read the ledger and the highest id, as they are now (other processes may add)."""

    def commit(self, turn: Turn) -> Snapshot:
        """Make one turn durable, wholly or not at all.

        Raises:
            OutboxDiskFull: nothing of the turn was stored; the same turn may be tried again.
            OutboxError: the store cannot go on.
        """

    def read_ready(self, first_id: int, last_id: int, *, limit: int, bytes_max: int) -> list[Entry]:
        """Entries with ``first_id <= id <= last_id`` that wait for nothing, lowest ids first.

        At least one, where there is any, even if it is larger than ``bytes_max``.
        """

    def read_due(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Entries whose ``due_at`` has come and whose id is not in ``loaded``, earliest first.

        At least one, where there is any, even if it is larger than ``bytes_max``.

        Returns:
            the entries, and when the next one falls due (None: none is waiting).
        """

    def lowest_open(self) -> int | None:
        """Lowest id that is still open, or None."""

    def changed_elsewhere(self) -> bool:
        """Whether another process has written to the store since the last call."""

    def position(self, source: str) -> int:
        """How many entries of a named source have ever been stored, in the same transactions."""

    def close(self) -> None:
        """Give everything back; committed entries stay."""
