"""The contract between the relay and a store: `Store`, its entries, and the changes of one turn.

Knows: messages, outcomes, the limits on open messages, and how message ids are made. Must never
know: SQL, what a delivery tag means.

The relay does not know which store it has. Reading an entry marks nothing: an entry leaves the
store in the transaction that records its final outcome.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Final, Protocol

from reliablepub.errors import (
    ConfigurationError,
    Damaged,
    InvalidMessage,
    OutboxDiskFailed,
    OutboxDiskFull,
    OutboxFull,
    OutboxLocked,
    OutboxUnreachable,
    OutboxUnsure,
    Withdrawn,
)
from reliablepub.message import Message, MessageFields, check_fields
from reliablepub.outcome import Outcome, Persistence
from reliablepub.printable import named


class Mint:
    """Generator of unique message ids in the form of version 4 UUIDs.

    An id is 72 random bits followed by a counter that starts at 47 random bits.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Choose a new prefix and counter, so that a forked child repeats no id of its parent."""
        # Random bits once a process: `uuid.uuid4` makes a system call for each id, and each call
        # releases the interpreter lock to another thread, for up to 5 ms.
        digits = os.urandom(9).hex()
        self._head = f"{digits[:8]}-{digits[8:12]}-4{digits[12:15]}-a{digits[15:]}-"
        self._numbers = count(int.from_bytes(os.urandom(6)) >> 1)

    def new_id(self) -> str:
        """Return a new ``message_id``. Safe to call from any thread."""
        return f"{self._head}{next(self._numbers):012x}"


_mint: Final = Mint()
new_id: Final = _mint.new_id
os.register_at_fork(after_in_child=_mint.begin)


def identified(given: bytes | Message, fields: MessageFields) -> Message:
    """Return the message that a caller gave whole, or as a body and fields; always with an id.

    Raises:
        InvalidMessage: the broker would refuse the message; or fields were given beside a whole
            one.
        TypeError: there is no such field.
    """
    if isinstance(given, Message):
        if given.__class__ is not type(given):  # a lazy proxy, evaluated on the relay's thread
            problem = f"is {type(given).__name__}, not bytes or a reliablepub.Message"
            raise InvalidMessage("body", problem)
        if fields:
            check_fields(fields)
            problem = "was given beside a Message, which has its own; use dataclasses.replace"
            raise InvalidMessage(next(iter(fields)), problem)
        return given if given.message_id is not None else given.with_message_id(new_id())
    if fields.get("message_id") is None:
        fields["message_id"] = new_id()  # before the message is made, which spares a copy
    try:
        return Message(given, **fields)
    except TypeError:
        check_fields(fields)
        raise


def stamped(message: Message, stamps: Iterable[Callable[[Message], Message]]) -> Message:
    """Apply the stamps of hooks to a message. An id that it has stays: its receipt bears it.

    Raises:
        TypeError: a stamp returned something else than a message.
    """
    for stamp in stamps:
        given, message = message, stamp(message)
        if not issubclass(type(message), Message):  # `isinstance` would let a lazy proxy pass
            raise TypeError(f"{named(stamp)} returned {type(message).__name__}, not a Message")
        if given.message_id not in {None, message.message_id}:
            message = message.with_message_id(given.message_id)
    return message


HELD: Final = float("inf")
"""``due_at`` of an entry whose destination is paused: it is due when the pause ends."""
AT_ONCE: Final = 0.0
"""``due_at`` of an entry that is due whatever the wall clock says."""


class Waiter(Protocol):
    """Listener for the final outcome of entries.

    The relay makes the calls on its own thread. Each entry is in one of them, or in none if the
    relay ends first.
    """

    def all_confirmed(self, entries: Sequence[Entry]) -> None:
        """The broker confirmed these entries: it has taken responsibility for them."""

    def given_up(self, entry: Entry, outcome: Outcome) -> None:
        """The relay parked or discarded an entry because of this outcome."""

    def withdrawn(self, error: Withdrawn | Damaged) -> None:
        """An entry was parked or discarded by an operator, or because it is damaged."""


@dataclass(slots=True, eq=False)
class Entry:
    """An accepted message and the state of its delivery.

    All times are wall clock, in seconds since 1970.

    Attributes:
        message: the message; it always has a ``message_id``.
        stored_at: when it was accepted.
        id: assigned by the store at the commit; those of one commit grow. 0 until then.
        due_at: earliest time of the next attempt, or None for now.
        nacked: number of attempts that a queue refused.
        returned: number of attempts that were unroutable.
        refused: number of attempts after which the broker closed a channel or the connection
            because of it, or in which it could not be encoded.
        uncertain: number of attempts whose outcome is unknown.
        expires_at: deadline after which it is not sent any more, or None.
        refused_at: when it was first nacked, returned or refused, or first waited for a paused
            destination; or None.
        is_plain: True if it is known to have no due time, no deadline, no ordering key and no
            earlier attempt. False also if that was not checked.
        is_discarded: it was given up without being parked. Not stored.
        waiter: listener for its final outcome. Not stored.
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
        """Whether it can be sent from memory; other entries are read from the store when due."""
        return self.due_at is None and self.message.ordering_key is None

    def is_late(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.expires_at is not None and self.expires_at <= now

    @property
    def attempts(self) -> int:
        """How many attempts ended without a confirm."""
        return self.nacked + self.returned + self.refused + self.uncertain

    @property
    def may_have_arrived(self) -> bool:
        """Whether a queue may hold the message because of an attempt that has ended."""
        return bool(self.nacked or self.uncertain)

    @property
    def persistence(self) -> Persistence:
        """Whether a queue may hold the message, as a `Persistence`."""
        is_possible = self.may_have_arrived
        return Persistence.POSSIBLY_PERSISTED if is_possible else Persistence.NOT_WRITTEN

    def note_refusal(self, wall: float) -> None:
        """Note that it was refused, or waits for a paused destination. The first time counts.

        It may lie in the future, if the clock was set back while no relay ran. A budget that is
        counted from it would not end before the clock has caught up.
        """
        self.refused_at = wall if self.refused_at is None else min(self.refused_at, wall)

    def refused_for_s(self, wall: float) -> float:
        """Seconds since it was first refused, or first had to wait; 0 if it never was or had to."""
        return 0.0 if self.refused_at is None else max(0.0, wall - self.refused_at)

    def rebase(self, by: float) -> None:
        """Move the times of a retry by as much as the wall clock was set.

        A deadline, and a ``due_at`` that the sender chose (``not_before``), stay: they are times by
        the wall clock.
        """
        if self.refused_at is not None:
            self.refused_at += by
            if self.due_at is not None:
                self.due_at = max(AT_ONCE, self.due_at + by)

    @classmethod
    def accepted(cls, message: Message, now: float) -> Entry:
        """Make the entry of a message accepted at ``now``; its delays become wall clock times."""
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


# For `map` and `filter`, which pass over thousands of entries per second.
id_of: Final[Callable[[Entry], int]] = attrgetter("id")
is_plain: Final[Callable[[Entry], bool]] = attrgetter("is_plain")
size_of: Final[Callable[[Entry], int]] = attrgetter("message.size")


@dataclass(frozen=True, slots=True)  # in sets
class Attempt:
    """An ended attempt, kept as history of an entry that was not confirmed at once."""

    entry: Entry
    epoch: str  # name of the channel epoch (``"7-3"``: run 7, its third channel)
    tag: int  # delivery tag within the epoch
    outcome: Outcome
    at: float  # when it ended: wall clock, seconds since 1970


class Sent(Protocol):
    """Entries written together on one channel, as far as a store records them."""

    epoch: int  # number of the channel epoch in this run
    first_tag: int  # delivery tag of the first entry; ``keys[i]`` has tag ``first_tag + i``
    keys: Sequence[Entry]


def epoch_name(run: int, epoch: int) -> str:
    """The name of a channel epoch in the outbox, such as ``"7-3"``: run 7, its third channel."""
    return f"{run}-{epoch}"


@dataclass(slots=True)
class Touched:
    """An operator's intervention in one message, made beside the relay."""

    id: int  # of the entry
    message_id: str
    exchange: str  # before the intervention, as the routing key
    routing_key: str
    action: str  # ``retry``, ``park``, ``discard``, ``reroute`` or ``skip``
    person: str
    note: str
    is_open: bool  # whether the message is still to be published
    is_kept: bool  # whether it is parked
    may_have_arrived: bool  # whether an earlier attempt may have brought it into a queue
    # The relay must look for the next message of this key, which may have been stored while the
    # change was made. None in stores that exclude this.
    ordering_key: str | None = field(default=None, kw_only=True)


@dataclass(slots=True)
class DamagedRow:
    """A stored entry that no longer is what was written, and what can still be read of it."""

    id: int
    message_id: str
    exchange: str
    routing_key: str
    reason: str  # what is wrong
    may_have_arrived: bool  # whether a queue may have the message, as far as its row tells


class Intervened(Exception):
    """An operator changed messages that the relay may hold in memory; see `Store.touched`."""


class RunEnded(Exception):
    """The store has begun another run: what the relay has read, it must read again.

    Args:
        why: why the run before has ended.
        has_lost: whether the store has lost messages that it had accepted, so that their ids may
            be those of others.
    """

    def __init__(self, why: str, *, has_lost: bool) -> None:
        super().__init__(why)
        self.has_lost = has_lost


@dataclass(slots=True)
class Release:
    """A request to make `HELD` entries due, oldest first: their destination is not paused now."""

    exchange: str | None  # None for all
    routing_key: str | None  # None for all of the exchange
    limit: int  # how many entries to release, lowest ids first
    after: int = 0  # release only entries with a higher id
    is_counted: bool = False  # whether to count the entries that stay held
    # Set by the commit: how many entries were released; the id of the last one, or 0; how many stay
    # held, if `is_counted` and they could be counted.
    count: int = 0
    last: int = 0
    left: int | None = None


@dataclass(slots=True)
class HeldExchange:
    """An exchange that has `HELD` entries."""

    exchange: str | None  # None if the stored name is damaged
    count: int  # of held entries
    since: float | None  # wall clock time since which the first of them waits


@dataclass(slots=True)
class Rebase:
    """The wall clock was set: retries that wait in the store are to wait as long as before."""

    by: float  # seconds the clock was set forward, or back (below 0)
    moved: set[int]  # ids of entries in memory, whose times the relay has moved itself


@dataclass(slots=True)
class Changes:
    """Everything that one turn of the relay changes, committed in one transaction.

    Attributes:
        new: entries to store; the commit sets their ids, in order.
        sources: number of new entries by named source (see `Store.position`).
        confirmed: confirmed entries, to be removed.
        parked: last attempts of entries to be parked, with the reason.
        discarded: last attempts of entries to be removed without being parked.
        rescheduled: entries whose counts and ``due_at`` changed.
        attempts: ended attempts to keep as history, those of parked entries included.
        sent: entries that are about to be written to the wire, with their delivery tags.
        finished: earlier ``sent`` without outstanding tags.
        released: `HELD` entries to make due.
        rebase: how far the times of retries that were stored before must move, or None.
    """

    new: list[Entry] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    confirmed: list[Entry] = field(default_factory=list)
    parked: list[Attempt] = field(default_factory=list)
    discarded: list[Attempt] = field(default_factory=list)
    rescheduled: list[Entry] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    sent: Sequence[Sent] = ()
    finished: list[Sent] = field(default_factory=list)
    released: list[Release] = field(default_factory=list)
    rebase: Rebase | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return not (
            (self.new or self.sources or self.confirmed or self.parked or self.discarded)
            or (self.rescheduled or self.attempts or self.sent or self.finished)
            or (self.released or self.rebase)
        )


@dataclass(frozen=True, slots=True)
class Counters:
    """The ledger: ``stored = confirmed + parked + expired + discarded + open``, always.

    Attributes:
        stored: messages ever accepted.
        confirmed: of those, confirmed.
        parked: of those, currently parked.
        expired: of those, currently parked as expired.
        discarded: of those, discarded by an operator or the retry policy.
        open_bytes: sum of `Message.size` over the open messages.
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


@dataclass(slots=True)
class Snapshot:
    """State of a store at one moment.

    Attributes:
        last_id: highest id ever assigned, whichever process stored the entry.
        counters: the ledger.
        late: ranges of ids (first, last) up to an earlier ``last_id`` whose entries have become
            visible since, because their transactions took longer.
    """

    last_id: int
    counters: Counters
    late: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class OpenLimits:
    """Limits on the open messages of an outbox, including the one to be stored.

    Attributes:
        messages_max: number of open messages; None for no limit.
        bytes_max: bytes of open messages (`Message.size`); None for no limit.

    Raises:
        ConfigurationError: a limit is below 1, so no message would ever fit.
    """

    messages_max: int | None
    bytes_max: int | None

    def __post_init__(self) -> None:
        """Refuse limits below 1."""
        limits = (self.messages_max, self.bytes_max)
        if any(type(one) is not int or one < 1 for one in limits if one is not None):
            msg = "open_messages_max and open_bytes_max must be whole numbers, at least 1"
            raise ConfigurationError(msg)

    @property
    def are_none(self) -> bool:
        """Whether there is no limit."""
        return self.messages_max is None and self.bytes_max is None

    def check(self, counters: Counters, new: Sequence[Entry], outbox: object) -> None:
        """Check that new messages fit within the limits.

        Args:
            counters: the ledger.
            new: entries of the messages to be stored.
            outbox: what the error calls the outbox.

        Raises:
            OutboxFull: they do not fit.
        """
        if self.messages_max is not None and counters.open + len(new) > self.messages_max:
            held = f"holds {counters.open} open messages, and open_messages_max is"
            raise _full(outbox, new, f"{held} {self.messages_max}")
        if self.bytes_max is None:
            return
        size = sum(map(size_of, new))
        if size > self.bytes_max:
            never = f"cannot take a message of {size} bytes: open_bytes_max is"
            raise never_fits(_full(outbox, new, f"{never} {self.bytes_max}"))
        if counters.open_bytes + size > self.bytes_max:
            held = f"holds {counters.open_bytes} bytes of open messages, the new ones have"
            raise _full(outbox, new, f"{held} {size}, and open_bytes_max is {self.bytes_max}")


def never_fits(error: OutboxFull) -> OutboxFull:
    """Mark the error of a message that is larger than the outbox may ever be."""
    error.retryable = False
    return error


def _full(outbox: object, new: Sequence[Entry], why: str) -> OutboxFull:
    what = f"{named_of(new)} {'was' if len(new) == 1 else 'were'} not stored: outbox {outbox} {why}"
    return OutboxFull(f"{what}; check that a relay runs and publishes (`reliablepub doctor`)")


def named_of(new: Sequence[Entry]) -> str:
    """Name new entries, for an error."""
    first = new[0].message.message_id
    return f"message {first}" if len(new) == 1 else f"{len(new)} messages from {first} on"


class Bell(Protocol):
    """Hints that another process writes to a store. A hint may be missed, or mean nothing."""

    @property
    def rings_early(self) -> bool:
        """Whether it rings when a transaction begins to write, before that is visible."""

    @property
    def is_armed(self) -> bool:
        """Whether the next write will ring."""

    def fileno(self) -> int:
        """The descriptor that is readable when the bell has rung; -1 if there is no bell."""

    def arm(self) -> None:
        """Ring at the next write, once."""

    def has_rung(self) -> bool:
        """Whether it has rung since the last call. It is silent then until it is armed again."""


TRANSIENT: Final = (
    OutboxDiskFull,
    OutboxDiskFailed,
    OutboxLocked,
    OutboxUnreachable,
    OutboxUnsure,
)
"""Errors of a store that may work again later."""


class Store(Protocol):
    """Storage of entries until their final outcome.

    Only the thread that opened it may use it.

    Every read may raise `TRANSIENT` errors: nothing was read then. It may be tried again.
    """

    @property
    def run(self) -> int:
        """Number of this relay's run on this store, higher than that of every earlier run."""

    @property
    def check(self) -> Callable[[Message], None] | None:
        """Check of a new message, or None: any message can be stored.

        Callers run it, on their threads, before they hand a message over. It raises
        `InvalidMessage`, so that a message that cannot be stored does not fail the others of its
        turn.
        """

    @property
    def bell(self) -> Bell | None:
        """Rings when another process writes to the store; None if only asking tells."""

    def wall(self) -> float:
        """The time by the clock that measures its deadlines, seconds since 1970."""

    @property
    def rest_s(self) -> float:
        """The most seconds between two looks of an idle relay that no bell wakes."""

    def snapshot(self) -> Snapshot:
        """Read the current ledger and highest id. Other processes may have stored entries."""

    def commit(self, changes: Changes) -> Snapshot:
        """Store the changes of one turn in one transaction, and set the ids of new entries.

        Raises:
            Intervened: an operator changed messages since the last `touched`; nothing was stored.
                Drop these messages from memory before the next try.
            OutboxDiskFull: the disk is full; nothing was stored. The turn may be tried again.
            OutboxDiskFailed: the disk failed; nothing was stored. The turn may be tried again.
            OutboxLocked: the database was locked; nothing was stored. The turn may be tried again.
            OutboxUnreachable: the database cannot be reached; nothing was stored. The turn may be
                tried again.
            OutboxUnsure: it is unknown whether the changes are stored. The turn may be tried again.
            OutboxError: the store cannot be used any more.
        """

    def read_ready(
        self, first_id: int, last_id: int, *, limit: int, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """Read entries with ``first_id <= id <= last_id`` that are due now, lowest ids first.

        An entry with an ordering key is read only if it is next of its key. At least one entry is
        read, even if it is larger than ``bytes_max``, unless too many others had to be skipped.

        Returns:
            the entries, and the id up to which all have been read or skipped.
        """

    def read_first(
        self, keys: Sequence[str], now: float, *, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """Read the first open entry of each ordering key, if it is due and its key is not held.

        Returns:
            the entries, and how many of the keys were looked at.
        """

    def read_due(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Read entries whose ``due_at`` has passed and whose id is not in ``loaded``.

        The earliest come first. If there is any, at least one is read, even if it is larger than
        ``bytes_max``. An entry that is not next of its ordering key is left out, and its ``due_at``
        is cleared: from now on it waits only for the entries before it.

        Returns:
            the entries, and when the next one falls due (None: none is waiting).

        Raises:
            Intervened: an operator changed messages since the last `touched`. Drop these messages
                from memory first, or an entry could be in memory twice.
        """

    def read_expired(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Read entries whose ``expires_at`` has passed and whose id is not in ``loaded``.

        The earliest come first. If there is any, at least one is read, even if it is larger than
        ``bytes_max``.

        Returns:
            the entries, and when the next one expires (None: none does).

        Raises:
            Intervened: an operator changed messages since the last `touched`. Drop these messages
                from memory first, or an entry could be in memory twice.
        """

    def lowest_awaited(self, first_id: int, at: float) -> int | None:
        """Return the lowest open id, from ``first_id`` on, that was to be sent by ``at``, or None.

        Retries and `HELD` entries count. A message with a ``not_before`` after ``at`` does not
        count, nor does one behind it with its ordering key, or one whose key is held by a parked
        message. After many messages that do not count, it is the id of the next one, to go on
        from.
        """

    def missed(self, id_: int) -> None:
        """Note that a message is open and due, and that no read finds it."""

    def held_exchanges(self, limit: int) -> Sequence[HeldExchange]:
        """Return at most ``limit`` exchanges that have `HELD` entries."""

    def changed_elsewhere(self) -> bool:
        """Whether another process has written to the store since the last call.

        Raises:
            RunEnded: the store has begun another run. Make a new relay for it.
        """

    def may_have_changed(self) -> bool:
        """Whether another process may have written since `changed_elsewhere` was last asked.

        A cheap look for an idle relay. It may miss a write; `changed_elsewhere` does not.
        """

    def relieve(self) -> str:
        """Free space if the store needs it. The relay calls this now and then.

        Returns:
            why new entries cannot be stored at present; empty if they can.
        """

    def show(self, status: Mapping[str, object]) -> None:
        """Publish the relay's status to other processes. No decision depends on it."""

    def touched(self) -> Sequence[Touched]:
        """Interventions in single messages since the last call, or since the store was opened."""

    def damaged(self) -> Sequence[DamagedRow]:
        """Entries that were found damaged and parked since the last call."""

    def position(self, source: str) -> int:
        """Number of entries of a named source ever stored, counted in their own transactions."""

    def close(self, last: Mapping[str, object] | None = None) -> None:
        """Release the store. Committed entries remain.

        Args:
            last: final status to leave for other processes; None leaves none.
        """
