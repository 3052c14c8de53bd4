"""The outbox in PostgreSQL for processes other than its relay: `PostgresDatabase`.

Knows: which module of this package does what, how a transaction of an operator blocks the relays,
how an outbox is created. Must never know: what a statement of an operator means.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, TypeVar
from zlib import crc32

import psycopg
from psycopg.rows import dict_row, tuple_row
from psycopg.sql import Literal
from psycopg.types.numeric import FloatDumper

from reliablepub.errors import (
    ConfigurationError,
    InvalidMessage,
    NotAnOutbox,
    OutboxLocked,
    OutboxUnsure,
)
from reliablepub.outbox.database import (
    NO_VALUES,
    PASSED_OVER_MAX,
    Cursor,
    LostCommits,
    Relaying,
    Session,
    Space,
    Standby,
)
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import new_id
from reliablepub.outbox.patience import Patience
from reliablepub.outbox.postgres.enqueue import Enqueuing, execute, execute_text
from reliablepub.outbox.postgres.ownership import EXPIRY_S
from reliablepub.outbox.postgres.server import (
    Pool,
    Server,
    check_texts,
    emptied,
    is_cut_off,
    outbox_error,
    reported,
)
from reliablepub.outbox.postgres.sql import creation, for_dbapi, named, with_values, within
from reliablepub.outbox.postgres.store import PostgresStore
from reliablepub.outbox.postgres.upgrade import upgrade
from reliablepub.outbox.rows import LEFT_IN_FLIGHT, Unreadable

T = TypeVar("T")

_TAKING_S: Final = 1.0
"""How long an operator's transaction blocks relays while it waits for the turns of others."""
_RELAY_S: Final = 0.05
"""How long an operator's transaction lets relays take the turns after those of another operator."""
_LOOK_S: Final = 0.005
DUE_S: Final = 60.0
"""How long a message is due, and its relay connected, before it counts as passed over."""
_STATUS_S: Final = 1.2
"""Time in which a relay shows what it has read."""
_WRITE_S: Final = 10.0
"""How long an operator's transaction is retried because relays took their turns first."""


class _Double(float):
    """A number whose literal names its type, because a bare one is a ``numeric``.

    An operator in `public` for the types of both sides would then be preferred to the built-in one
    (see the top of ``queries.sql``).
    """


class _DoubleDumper(FloatDumper):
    def quote(self, obj: float) -> bytes:
        return b"'%r'::float8" % float(obj)


psycopg.adapters.register_dumper(_Double, _DoubleDumper)


def create_outbox(
    server: Server,
    *,
    shards: int = 1,  # relays that can share the work
    allows_loss: bool = False,  # obey a ``synchronous_commit`` that is off
    connection: Any = None,  # noqa: ANN401 - of a library that the application chose
) -> None:
    """Create an outbox, in one transaction: its own, or that of `connection`."""
    text = creation(server.schema, shards=shards, allows_loss=allows_loss)
    if connection is not None:
        execute(connection, text)
        return
    with reported(server), server.connect() as own, own.transaction():
        own.execute(text)  # without values: any number of statements


_PART_OF_GLOB: Final = re.compile(r"\[\^?+.[^\]]*\]|.", re.DOTALL)
"""A set in brackets, whose first character may be ``]``; or one character."""
_RANGE: Final = re.compile(r"(.)-(.)|(.)", re.DOTALL)
_SPECIAL: Final = re.compile(r"\W")


def _as_regex(part: re.Match[str]) -> str:
    """Return the regular expression for a part of a GLOB pattern."""
    found = part[0]
    if len(found) == 1:
        known = {"*": ".*", "?": ".", "[": "$."}  # a set without an end matches nothing
        return known.get(found) or _escaped(found)
    head = "[^" if found[1] == "^" else "["
    return f"{head}{''.join(_ranges(found[len(head) : -1]))}]"


def _ranges(chars: str) -> Iterator[str]:
    """Yield the characters and ranges of a set; of one that is the wrong way round, the first."""
    for first, last, alone in _RANGE.findall(chars):
        yield f"{_escaped(first)}-{_escaped(last)}" if first < last else _escaped(first or alone)


def _escaped(char: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", char)


def _standby_name(schema: str) -> str:
    """How the name of a standby's connection begins; PostgreSQL keeps 63 bytes of a name."""
    return f"reliablepub standby {crc32(schema.encode()):08x} "


class PostgresSession:
    """One transaction of a connection; `Session` documents the contract of each method."""

    glob: Final = "{column} ~ :{column}"
    _first_turn_s = _TAKING_S
    """How long to wait for the first shard's turn, before this transaction blocks a relay."""

    def __init__(
        self, connection: psycopg.Connection[Any], server: Server, *, allows_loss: bool
    ) -> None:
        self._connection = connection
        self._server = server
        self._schema = server.schema
        self._allows_loss = allows_loss
        self._turns: dict[int, int] = {}  # by shard

    def pattern(self, glob: str) -> str:
        """Return the regular expression that matches what the GLOB pattern matches in SQLite."""
        return f"^{_PART_OF_GLOB.sub(_as_regex, glob)}$"

    def run(self, name: str, values: Mapping[str, object] = NO_VALUES) -> Cursor:
        """Run the statement of this name."""
        return self._run(named(self._schema)[name], values)

    def run_each(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Run the statement of this name for each of these values, in few round trips."""
        statement = for_dbapi(named(self._schema)[name]).encode()
        psycopg.Cursor(self._connection).executemany(statement, list(map(self._bound, rows)))

    def rows(self, name: str, values: Mapping[str, object] = NO_VALUES) -> Iterator[dict[str, Any]]:
        """Run the query of this name, and yield its rows as dictionaries."""
        return iter(self._run(named(self._schema)[name], values, dict_row))

    def select(self, query: str, values: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """Run a composed query, and yield its rows as dictionaries."""
        return iter(self._run(within(self._schema, query), values, dict_row))

    def take_turns(self) -> None:
        """Block the relay of each shard until this transaction ends; count new messages."""
        self.run("settle_in", {"allows_loss": self._allows_loss})
        self._take_each_turn()
        self._each("count_new")

    def _take_each_turn(self) -> None:
        token, until = new_id(), time.monotonic() + self._first_turn_s
        while (turn := self._take_turn(len(self._turns), token, until)) is not None:
            until = until if self._turns else time.monotonic() + _TAKING_S
            self._turns[len(self._turns)] = turn
        if not self._turns:
            raise emptied(self._server)

    def _take_turn(self, shard: int, token: str, until: float) -> int | None:
        """Take the next turn of a shard; None if there is no such shard.

        The relay is often faster. Retrying here keeps the turns of the shards before this one.
        """
        values = {"shard": shard, "token": token}
        while True:
            if not self._turns:
                self._let_relays_go_first()
            taken = self.run("take_operators_turn", values).fetchone()
            if taken is not None:
                turn, transaction = taken
                self._check_transaction(transaction)
                return int(turn)
            if self.run("newest_turn", values).fetchone() is None:
                return None
            if time.monotonic() > until:
                raise OutboxLocked(
                    "relays and operators keep the outbox busy; nothing was changed, try again"
                )

    def _let_relays_go_first(self) -> None:
        """Wait until no turn of another operator is a shard's newest, for at most `_RELAY_S`.

        A relay needs more round trips than an operator, and would be the last each time. This
        comes before the first turn, because a transaction that has a turn blocks a relay.
        """
        until = time.monotonic() + _RELAY_S
        while self.run("relays_to_wait_for", {"expiry_s": EXPIRY_S}).fetchone() is not None:
            if time.monotonic() > until:
                break
            # The server waits, because this may be the thread of the application's event loop.
            self.run("pause", {"seconds": _LOOK_S})

    def _check_transaction(self, number: str) -> None:
        """Check that the transaction of this number is still open; this class has begun it."""

    def end_turns(self) -> None:
        """Record the number of the newest intervention for the relays."""
        self._each("note_interventions")

    def relays(self) -> list[Relaying]:
        """Return the owner of each shard, unless it is silent, and its status."""
        found = self.run("relays", {"expiry_s": EXPIRY_S}).fetchall()
        if not found:
            raise emptied(self._server)
        return [
            replace(
                Relaying.of(shard, pid, None if text is None else json.loads(text), _text(host)),
                silent_pid=silent_pid,
                silent_s=None if silent_pid is None else silent_s,
            )
            for shard, pid, text, host, silent_pid, silent_s in found
        ]

    def shard(self, id_: int) -> int:
        """Return the shard of a message; 0 of one that has left the outbox."""
        found = self.run("shard", {"id": id_}).fetchone()
        return 0 if found is None else int(found[0])

    def settle_left_in_flight(self, now: float, ids: Sequence[int]) -> None:
        """Dismiss silent relays that have these messages in flight; record those as uncertain."""
        left = {"at": now, "reply_text": LEFT_IN_FLIGHT}
        for shard in self._turns:
            at = {"shard": shard}
            if self.run("dismiss_relay", {**at, "ids": list(ids)}).fetchone() is not None:
                self.run("count_left_in_flight", at)
                self.run("remember_left_in_flight", {**at, **left})
                self.run("clear_in_flight", at)

    def is_own(self, id_: int) -> bool:
        """Whether this transaction has stored a message: the ledger counts it later."""
        return self.run("is_own", {"id": id_}).fetchone() is not None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Make changes that are undone together if a message cannot be changed."""
        self._run("SAVEPOINT reliablepub_attempt", {})
        try:
            yield
        except (Unreadable, InvalidMessage):
            self._run("ROLLBACK TO SAVEPOINT reliablepub_attempt", {})
            raise
        self._run("RELEASE SAVEPOINT reliablepub_attempt", {})

    def check_room(self, size: int) -> None:
        """Do nothing: only the server can measure its disk."""

    def space(self) -> Space:
        """Measure the tables and their indexes."""
        (size,) = self.run("bytes_on_disk", {"schema": self._schema}).fetchone()
        return Space(bytes_on_disk=size, log_bytes=0, bytes_unused=0, is_disk_full=False)

    def damage(self) -> list[str]:
        """Return nothing: the server checks its pages."""
        return []

    def _run(
        self,
        statement: str,
        values: Mapping[str, object],
        row_factory: Any = tuple_row,  # noqa: ANN401
    ) -> Cursor:
        # A client cursor puts the values into the statement: the server need not infer their types.
        # Bodies are sent apart, because other users see the statement in pg_stat_activity.
        has_body = any(isinstance(value, bytes) for value in values.values())
        kind = psycopg.Cursor if has_body else psycopg.ClientCursor
        cursor = kind(self._connection, row_factory=row_factory)
        return cursor.execute(for_dbapi(statement).encode(), self._bound(values))

    def _bound(self, values: Mapping[str, object]) -> dict[str, object]:
        shard = values.get("shard", 0)
        assert isinstance(shard, int)
        bound = {**values, "shard": shard, "turn": self._turns.get(shard)}
        check_texts(bound)
        return {name: _Double(v) if isinstance(v, float) else v for name, v in bound.items()}

    def _each(self, name: str) -> None:
        for shard in self._turns:
            self.run(name, {"shard": shard})


def _text(value: str | bytes) -> str:
    """A text, which some connections return as bytes."""
    return value if isinstance(value, str) else value.decode()


class Rows:
    """The rows of a statement, with the methods of a DB-API cursor that return rows."""

    def __init__(self, rows: list[tuple[Any, ...]]) -> None:
        self._rows = iter(rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows that are left."""
        return self._rows

    def fetchone(self) -> tuple[Any, ...] | None:
        """Return the next row, or None."""
        return next(self._rows, None)

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return the rows that are left."""
        return list(self._rows)


class JoinedSession(PostgresSession):
    """A transaction of the application, on its connection.

    Relays wait until the application ends the transaction. Values are literals, because each
    library binds values in its own way.
    """

    _first_turn_s = _WRITE_S  # nothing retries the application's transaction

    def take_turns(self) -> None:
        """Block the relay of each shard until the transaction ends; count new messages."""
        (isolation,) = self.run("isolation").fetchone()
        if isolation != "read committed":
            raise ConfigurationError(
                f"the transaction is {isolation}, and a message is cancelled or rescheduled in one "
                "that is read committed; nothing was changed"
            )
        self._take_each_turn()
        self._each("count_new_of_others")

    def _check_transaction(self, number: str) -> None:
        (is_same,) = self.run("is_transaction", {"xid": number}).fetchone()
        if not is_same:
            raise ConfigurationError(
                "the connection is in autocommit mode, and a message is cancelled or rescheduled "
                "in a transaction: begin one, or leave out the connection; nothing was changed"
            )

    def _run(
        self,
        statement: str,
        values: Mapping[str, object],
        row_factory: Any = tuple_row,  # noqa: ANN401
    ) -> Cursor:
        assert row_factory is tuple_row, "rows as dictionaries are not needed here"
        bound = self._bound(values)
        text = with_values(statement, lambda name: Literal(bound[name]).as_string(None))
        return Rows(execute_text(self._connection, text))


class PostgresDatabase:
    """The outbox in a database; `Database` documents the contract of each method."""

    file: Final = None

    def __init__(self, url: str) -> None:
        self.server: Final = Server.of(url)
        self.name: Final = str(self.server)
        self._pool = Pool(self.server)
        self._standby: psycopg.Connection[Any] | None = None
        enqueuing = Enqueuing(self.server, self._pool)
        self.enqueue: Final = enqueuing.enqueue
        self.enqueue_once: Final = enqueuing.enqueue_once

    def exists(self) -> bool:
        """Whether the schema holds an outbox of this version."""
        with self._pool.link() as link:
            try:
                link.open()
            except NotAnOutbox:
                with self.server.connect() as connection:
                    query = named(self.server.schema)["is_there"]
                    values = {"schema": self.server.schema}
                    if not connection.execute(for_dbapi(query), values).fetchone():
                        return False
                # It is of another version, or another process has created it since.
                with self._pool.link() as again:
                    again.open()
        return True

    def made_with(self) -> tuple[int, bool]:
        """The options of `create_outbox` that this outbox was created with."""
        with self._pool.link() as link:
            [(_, shards, allows_loss)] = link.rows("outbox")
        return shards, allows_loss

    def create(self, connection: Any) -> None:  # noqa: ANN401 - of any library
        """Create the outbox in its schema, if there is none."""
        if self.exists():
            return
        if connection is not None:
            self._create(connection)
            return
        with reported(self.server), self.server.connect() as own:
            # Under REPEATABLE READ, which may be the default here, a process that has waited would
            # not see the tables that the other one has created.
            own.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            with own.transaction():
                self._create(own)

    def _create(self, connection: Any) -> None:  # noqa: ANN401 - of any library
        schema, texts = {"schema": self.server.schema}, named(self.server.schema)
        execute(connection, texts["wait_for_creators"], schema)
        if not execute(connection, texts["is_there"], schema):
            create_outbox(self.server, connection=connection)

    def upgrade(self) -> list[str]:
        """Give the outbox the tables, functions and views of this version."""
        return upgrade(self.server)

    def open_store(
        self, *, keep_confirmed_s: float, keys: OutboxKeys | None, patience: Patience | None = None
    ) -> PostgresStore:
        """Take over a shard of the outbox."""
        return PostgresStore(
            self.server, keep_confirmed_s=keep_confirmed_s, keys=keys, patience=patience
        )

    def standbys(self) -> list[Standby]:
        """Return the relays whose connections say that they stand by, if this user sees them."""
        with self.reading() as session:
            if not session.run("may_see_activity").fetchone():
                return []
            rows = session.rows("standbys", {"name": _standby_name(self.server.schema)})
            return [Standby(**row) for row in rows]

    def stand_by(self) -> None:
        """Keep an idle connection, by whose name others see the standby."""
        if self._standby is not None:
            with suppress(psycopg.Error):  # the server has ended it
                self._standby.pgconn.consume_input()
                return
            self._standby.close()
        name = _standby_name(self.server.schema) + socket.gethostname()
        url = psycopg.conninfo.make_conninfo(self.server.url, application_name=name)
        self._standby = replace(self.server, url=url).connect()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open the outbox read-only, in one transaction."""
        with self._transaction("REPEATABLE READ READ ONLY") as session:
            yield session

    def write(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` in one transaction, which is an operator's turn."""
        until = time.monotonic() + _WRITE_S
        while True:
            try:
                with self._transaction("READ COMMITTED READ WRITE") as session:
                    session.take_turns()
                    result = work(session)
                    session.end_turns()
            except OutboxLocked:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
            else:
                return result

    @contextmanager
    def _transaction(self, mode: str) -> Iterator[PostgresSession]:
        is_committing = False
        with self._pool.link() as link:
            if link.is_open:  # the server may have closed the connection since its last use
                link.rows("alive")
            connection = link.open()
            try:
                # To compile what an operator asks takes longer than to run it.
                connection.execute(f"BEGIN ISOLATION LEVEL {mode}; SET LOCAL jit = off")
                yield PostgresSession(connection, self.server, allows_loss=link.allows_loss)
                is_committing = True
                connection.execute("COMMIT")
                link.check_replicated()
            except BaseException as error:
                with suppress(psycopg.Error):
                    connection.rollback()
                if not isinstance(error, psycopg.Error):
                    raise
                link.drop_if_lost(error)
                if is_committing and is_cut_off(error):
                    raise OutboxUnsure(
                        f"outbox {self.name}: the connection was lost during the commit, so it is "
                        f"unknown whether the changes were made; look at the messages ({error})"
                    ) from error
                raise outbox_error(self.server, error) from error

    def within(
        self,
        connection: Any,  # noqa: ANN401 - psycopg's, psycopg2's, Django's or SQLAlchemy's
        work: Callable[[Session], T],
    ) -> T:
        """Run ``work`` in the application's transaction, which becomes an operator's turn.

        Errors of the database are raised as the application's library raises them.
        """
        session = JoinedSession(connection, self.server, allows_loss=True)
        session.take_turns()
        result = work(session)
        session.end_turns()
        return result

    def check_texts(self, values: Mapping[str, object]) -> None:
        """Check that no text has the character U+0000."""
        check_texts(values)

    def exposure(self) -> str:
        """Say that messages may go over a network unencrypted. The grants control other access."""
        return self.server.exposure()

    def lost_commits(self) -> list[LostCommits]:
        """Return the fail-overs that have lost commits."""
        with self.reading() as session:
            rows = session.rows("lost_commits")
            return [LostCommits(row["id"], row["at"], row["reason"]) for row in rows]

    def passed_over(self) -> list[int]:
        """Look twice: a transaction of old messages may just have ended, and a status lags."""
        found = self._passed_over()
        if found:
            time.sleep(_STATUS_S)
            found &= self._passed_over()
        return sorted(found)

    def _passed_over(self) -> set[int]:
        now, found = time.time(), set()
        with self.reading() as session:
            for relay in session.relays():
                shown = relay.status
                is_at_work = relay.pid is not None and shown.get("link") == "connected"
                # A relay that was away may still read what has come meanwhile.
                if not is_at_work or now - shown.get("since", now) < DUE_S or shown.get("aside"):
                    continue
                is_idle = not (shown.get("in_flight") or shown.get("buffered"))
                values = {"shard": relay.shard, "at": now - DUE_S, "is_idle": is_idle}
                rows = session.rows("passed_over", values | {"limit": PASSED_OVER_MAX})
                found |= {row["id"] for row in rows}
        return found

    def shrink(self) -> Iterator[Callable[[Session], int]]:
        """Yield nothing: autovacuum keeps free space for the next messages."""
        return iter(())

    def close(self) -> None:
        """Close the connections that are not in use, and that of a standby."""
        self._pool.close()
        if self._standby is not None:
            self._standby.close()
