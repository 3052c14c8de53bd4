"""What a database of an outbox offers to processes other than its relay: `Database`, `Session`.

Knows: which operations there are. Must never know: which database it is, where it is, or what a
statement says.

Statements have names. Those that every database runs are in ``queries.sql`` beside this module.
Those that differ are in a ``queries.sql`` of each database, where a statement has one name, the
same values and the same columns everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar

from reliablepub.errors import ConfigurationError, OutboxError
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Entry, OpenLimits, Store
from reliablepub.outbox.patience import Patience
from reliablepub.outbox.shown import is_status

T = TypeVar("T")
Cursor: TypeAlias = Any
"""A cursor of Python's DB-API, such as `sqlite3.Cursor`: libraries share no type for it."""
Values: TypeAlias = Mapping[str, object]
"""Values of a statement by name."""

_ASYNC: Final = (
    "an asynchronous connection is joined through SQLAlchemy: "
    "reliablepub.integrations.sqlalchemy.SessionOutbox.enqueue_async"
)
_OF_LIBRARIES: Final = {
    "aiosqlite": _ASYNC,
    "asyncpg": _ASYNC,
    "sqlalchemy": "reliablepub.integrations.sqlalchemy.SessionOutbox takes sessions and "
    "connections of SQLAlchemy, enqueue_async its asynchronous ones",
    "django": "reliablepub.integrations.django.DjangoOutbox takes part in Django's transactions",
}


def unfit_connection(connection: object, needed: str) -> ConfigurationError:
    """The error for a ``connection`` of a type that an outbox cannot join.

    Args:
        connection: what the caller gave.
        needed: what the outbox takes.
    """
    kind = type(connection)
    library = kind.__module__.partition(".")[0]
    named = kind.__name__ if library == "builtins" else f"{library}.{kind.__name__}"
    hint = _OF_LIBRARIES.get(library, "")
    if not hint and hasattr(kind, "__aenter__"):
        hint = _ASYNC
    return ConfigurationError(
        f"connection is of type {named}, and {needed}{'; ' if hint else ''}{hint}"
    )


NO_CHANGE: Final = dict.fromkeys(
    ("ids", "stored", "confirmed", "parked", "expired", "discarded", "open_bytes"), 0
)
"""Values of the statement ``change_ledger`` that change nothing. ``ids`` is the number of ids that
are assigned: the ledger of a file does that; PostgreSQL has a sequence."""
NO_VALUES: Final[Values] = {}
PASSED_OVER_MAX: Final = 1_000
"""Most messages that `Database.passed_over` returns of a shard."""
IS_LAST: Final = "is_last"
"""A key that marks the last status of a relay that failed."""
KEYS_KEPT_S: Final = 7 * 86_400.0
"""Retention of a deduplication key: 7 days, and as long as its message is open or parked."""


@dataclass(slots=True)
class Space:
    """Space that an outbox takes.

    Attributes:
        bytes_on_disk: size of the database, its log included.
        log_bytes: size of the write-ahead log, if the outbox is in a file; else 0.
        bytes_unused: bytes within the database that hold nothing.
        is_disk_full: whether the disk is too full for even the smallest new message.
    """

    bytes_on_disk: int
    log_bytes: int
    bytes_unused: int
    is_disk_full: bool


@dataclass(frozen=True, slots=True)
class LostCommits:
    """A fail-over after which commits of a relay were gone, and it began another run.

    Attributes:
        run: number of the run that began.
        at: when it began (seconds since 1970).
        reason: what the relay has found.
    """

    run: int
    at: float
    reason: str


@dataclass(slots=True)
class Relaying:
    """The relay of one shard, if one runs. An outbox without shards counts as one shard.

    Attributes:
        shard: number of the shard.
        pid: id of the process that relays it now, or None.
        status: status of that relay, or the last status of a relay that failed; else empty.
        host: name of its host; empty if no relay runs, or if it runs on this one.
        silent_pid: id of a process that owns the shard, is connected, and gives no sign of life,
            so that another may take over. In PostgreSQL; then `pid` is None.
        silent_s: for how many seconds that process has been silent.
    """

    shard: int
    pid: int | None
    status: Mapping[str, Any]
    host: str = ""
    silent_pid: int | None = None
    silent_s: float | None = None

    @classmethod
    def of(cls, shard: int, pid: int | None, shown: object, host: str = "") -> Self:
        """Make one; drop a status that an earlier relay has left behind, or that none has written.

        Args:
            shard: number of the shard.
            pid: id of the process that relays it now, or None.
            shown: the status that was found, of any type.
            host: name of its host.
        """
        status: Mapping[str, Any] = shown if is_status(shown) else {}  # type: ignore[assignment]
        is_last = IS_LAST in status
        is_its_own = is_last if pid is None else status.get("pid") == pid and not is_last
        return cls(shard, pid, status if is_its_own else {}, host)

    @classmethod
    def first(cls, relays: Sequence[Self]) -> Self:
        """Choose the first that runs, else the first that has failed, else any."""
        return min(relays, key=lambda relay: (relay.pid is None, not relay.status))


@dataclass(frozen=True, slots=True)
class Standby:
    """A relay that waits for the end of another one.

    Attributes:
        host: name of its host.
        age_s: for how many seconds it has waited; None if this user may not know.
    """

    host: str
    age_s: float | None


class Session(Protocol):
    """One transaction."""

    @property
    def glob(self) -> str:
        """SQL condition that ``{column}`` matches a `pattern`, which is bound under its name."""

    def pattern(self, glob: str) -> str:
        """Return the pattern that stands for a GLOB pattern of SQLite in the condition `glob`."""

    def run(self, name: str, values: Values = NO_VALUES) -> Cursor:
        """Run the statement of this name."""

    def run_each(self, name: str, rows: Sequence[Values]) -> None:
        """Run the statement of this name for each of these values."""

    def rows(self, name: str, values: Values = NO_VALUES) -> Iterator[dict[str, Any]]:
        """Run the query of this name, and yield its rows as dictionaries by column."""

    def select(self, query: str, values: Values) -> Iterator[dict[str, Any]]:
        """Run a query that was put together; its tables and values are named as in the files."""

    def relays(self) -> list[Relaying]:
        """Return the relay of each shard, in the order of the shards' numbers.

        Raises:
            NotAnOutbox: another program has emptied the tables of the outbox.
        """

    def shard(self, id_: int) -> int:
        """Return the shard of a message; 0 if the message has left the outbox."""

    def settle_left_in_flight(self, now: float, ids: Sequence[int]) -> None:
        """Record messages that an ended relay left in flight as uncertain: a queue may have them.

        Only while no relay runs, in a transaction that may write.

        Args:
            now: wall clock, seconds since 1970.
            ids: the messages that are about to be changed. If none of them was left in flight, the
                others need not be recorded.
        """

    def is_own(self, id_: int) -> bool:
        """Whether this transaction itself has stored a message, and the ledger does not count it.

        In an outbox whose ledger counts each message at once, it is always False.
        """

    def attempt(self) -> AbstractContextManager[None]:
        """Make changes to one row that are undone together, if the row cannot be changed.

        Raises:
            Unreadable: the database refuses to change the row, because it is damaged.
        """

    def check_room(self, size: int) -> None:
        """Raise `OutboxDiskFull` if messages of this size cannot be stored."""

    def space(self) -> Space:
        """Measure the space that the outbox takes."""

    def damage(self) -> list[str]:
        """Return the database's complaints about its own pages; empty if there are none."""


class Database(Protocol):
    """An outbox for processes that enqueue, inspect and step in. Any thread may use it."""

    @property
    def name(self) -> str:
        """Where the outbox is: its path as it was given, or its URL without the password."""

    @property
    def file(self) -> Path | None:
        """Path of the file that holds the outbox; None if it is on a server."""

    def exists(self) -> bool:
        """Whether there is an outbox.

        Raises:
            NotAnOutbox: it is of another version.
            OutboxError: this user may not look for it.
        """

    def create(self, connection: Any) -> None:  # noqa: ANN401 - the application's, or None
        """Create the outbox, if there is none; see `Outbox.create`."""

    def upgrade(self) -> list[str]:
        """Bring the outbox to this version; return what was done, in words.

        Raises:
            NotAnOutbox: there is no outbox, or it is of a later version, or too old.
            OutboxInUse: a relay runs on the file.
            OutboxError: nothing was changed.
        """

    def open_store(
        self, *, keep_confirmed_s: float, keys: OutboxKeys | None, patience: Patience | None = None
    ) -> Store:
        """Open the outbox as its relay; see `PublisherOptions` for the options.

        Args:
            keep_confirmed_s: how long confirmed messages are kept.
            keys: of an encrypted outbox.
            patience: for each wait of the database, from the first; None for one without an end.

        Raises:
            OutboxInUse: another process relays the outbox.
            OutboxError: the outbox cannot be opened.
        """

    def standbys(self) -> list[Standby]:
        """Return the relays that stand by, the oldest first; none of a file."""

    def stand_by(self) -> None:
        """Be listed among the standbys until `close`, if the database is one that hosts share.

        Raises:
            OutboxError: the database cannot be reached.
        """

    def enqueue(
        self,
        new: Sequence[Entry],
        *,
        keys: OutboxKeys | None,
        limits: OpenLimits,
        connection: Any,  # noqa: ANN401 - the application's, or None
    ) -> None:
        """Store entries, all or none; see `Outbox.enqueue`."""

    def enqueue_once(
        self,
        entry: Entry,
        key: str,
        *,
        keys: OutboxKeys | None,
        limits: OpenLimits,
        connection: Any,  # noqa: ANN401 - the application's, or None
    ) -> str:
        """Store an entry unless its key is known; return the ``message_id`` that has the key."""

    def reading(self) -> AbstractContextManager[Session]:
        """Open the outbox read-only, in one transaction.

        Raises:
            NotAnOutbox: there is no outbox, or it is of another version.
        """

    def write(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in one transaction, and return its result once it is on disk.

        If the commit fails, ``work`` may be called again. A missing file is created.

        Raises:
            OutboxUnsure: it is unknown whether the changes are stored.
            OutboxError: nothing was changed.
        """

    def within(self, connection: Any, work: Callable[[Session], T]) -> T:  # noqa: ANN401 - any library's
        """Run ``work`` in the application's transaction, and return its result.

        No relay commits until that transaction ends.

        Raises:
            ConfigurationError: the connection is to another SQLite file, or its transaction cannot
                be joined.
            NotAnOutbox: there is no outbox.
            OutboxError: nothing was changed.
        """

    def check_texts(self, values: Values) -> None:
        """Check that the database can store the texts among the values.

        Raises:
            InvalidMessage: it cannot store one; the error names the value.
        """

    def exposure(self) -> str:
        """Say who else can read or harm messages, and what to do; empty if nobody can."""

    def lost_commits(self) -> list[LostCommits]:
        """Return the fail-overs that have lost commits, the newest first; none of a file."""

    def passed_over(self) -> list[int]:
        """Return ids of messages that are due and that a relay, although at work, does not send.

        At most `PASSED_OVER_MAX` of a shard. None of a file: `outbox check` compares its indexes.
        """

    def shrink(self) -> Iterator[Callable[[Session], int]]:
        """Yield steps that return free space to the disk; each returns the bytes that it freed."""

    def close(self) -> None:
        """Close what is open. The next use opens it again."""


def file_of(database: Database) -> Path:
    """Return the file of an outbox; raise `ConfigurationError` if it is on a server."""
    if database.file is None:
        raise ConfigurationError(f"outbox {database.name} is on a server; this works on files only")
    return database.file


def lost_ledger(database: Database) -> OutboxError:
    """The error for an outbox whose ledger has no row."""
    remedy = "copy its messages into a new outbox with `reliablepub outbox salvage`"
    if database.file is None:
        remedy = "another program has emptied the table that holds it; restore the table"
    return OutboxError(f"outbox {database.name} is damaged: its ledger has no row; {remedy}")


def forget_keys(run: Callable[[str, Values], Cursor], now: float, limit: int) -> tuple[int, int]:
    """Forget overdue deduplication keys. Those of open or parked messages are kept for longer.

    Returns:
        how many keys were checked, at most ``limit``, and how many of them were forgotten.
    """
    overdue = run("overdue_keys", {"now": now, "limit": limit}).fetchall()
    for old, is_there in overdue:
        if is_there:
            run("prolong_key", {"until": now + KEYS_KEPT_S, "key": old})
        else:
            run("forget_overdue_key", {"key": old, "now": now})
    return len(overdue), sum(not is_there for _, is_there in overdue)
