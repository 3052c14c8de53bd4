"""Connections to the PostgreSQL server of an outbox, which are reopened after a loss.

Knows: libpq's connection strings, psycopg, the meaning of the server's errors. Must never know:
what a statement of the outbox means.

Nothing that is needed belongs to a session: no named prepared statement, no advisory lock, no
``SET`` or ``LISTEN``. So a PgBouncer in transaction mode may stand in between. On a direct
connection, which is told by the number of the server process, a relay has the settings of its reads
made once, and can rest (`reliablepub.outbox.postgres.bell`).
"""

from __future__ import annotations

import os
import re
import select
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

import psycopg
from psycopg import errors as pg
from psycopg import sql
from psycopg.types.string import ByteaBinaryLoader

from reliablepub.errors import (
    ConfigurationError,
    InvalidMessage,
    NotAnOutbox,
    OutboxDiskFailed,
    OutboxDiskFull,
    OutboxError,
    OutboxLocked,
    OutboxUnreachable,
    OutboxUnsure,
)
from reliablepub.outbox.patience import Patience
from reliablepub.outbox.postgres.sql import DEFAULT_SCHEMA, VERSION, check_schema, queries

T = TypeVar("T")
_PATIENCE: Final = {
    "connect_timeout": "3",
    "keepalives_idle": "2",
    "keepalives_interval": "1",
    "keepalives_count": "3",
    "tcp_user_timeout": "5000",
    "application_name": "reliablepub",
}
"""Detects a broken connection within 5 s. Parameters in the URL have priority."""
_TEXTS: Final = {"client_encoding": "UTF8"}
"""Checksums cover UTF-8. The default is the encoding of the database, or of PGCLIENTENCODING."""

_UNENCRYPTED: Final = ("disable", "allow", "prefer")
"""Values of ``sslmode`` with which a connection may be unencrypted; the last one is the default."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where an outbox is: a database, and the schema of the outbox in it."""

    url: str = field(repr=False)  # libpq's, with the password if it has one
    schema: str = DEFAULT_SCHEMA

    @classmethod
    def of(cls, url: str) -> Server:
        """Parse a URL: the parameter ``schema`` is the outbox's, all others are libpq's."""
        try:
            scheme, user, place, query = _parts(url.strip())
            _check_place(place)
            query = query.replace("+", "%2B")  # which is no space in libpq's URLs
            given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
            schema = given.pop("schema", DEFAULT_SCHEMA)
            _check_place(f"/{schema}")
            check_schema(schema)
            patience = dict(_PATIENCE)
            if "," in place.partition("/")[0] or "," in given.get("host", ""):
                patience["target_session_attrs"] = "read-write"  # of several hosts, the primary
            query = urlencode(patience | given | _TEXTS, quote_via=quote)
            conninfo = f"{scheme}://{user}{place}?{query}"
            psycopg.conninfo.conninfo_to_dict(conninfo)
        except (ValueError, psycopg.Error) as error:
            if isinstance(error, ConfigurationError):
                raise
            msg = "PostgreSQL's libpq cannot parse the URL of the outbox"
            raise ConfigurationError(msg) from None
        return cls(conninfo, schema)

    def __str__(self) -> str:
        """The address without user and password."""
        _, _, place, _ = _parts(self.url)
        hosts, slash, database = place.partition("/")
        place = f"postgresql://{hosts.rpartition('@')[2]}{slash}{database}"
        return place if self.schema == DEFAULT_SCHEMA else f"{place}?schema={self.schema}"

    def exposure(self) -> str:
        """Say that messages may cross a network unencrypted, and what to do; empty if they do not.

        A service (``pg_service.conf``) may set what matters here, so nothing is said about one.
        """
        given = psycopg.conninfo.conninfo_to_dict(self.url)
        if given.get("service") or "PGSERVICE" in os.environ:
            return ""
        mode = given.get("sslmode") or os.environ.get("PGSSLMODE") or _UNENCRYPTED[-1]
        named = given.get("hostaddr") or os.environ.get("PGHOSTADDR") or given.get("host")
        hosts = named or os.environ.get("PGHOST", "")
        if mode not in _UNENCRYPTED or all(map(_is_local, str(hosts).split(","))):
            return ""
        return (
            f"messages may go to {self} unencrypted (sslmode={mode}); add sslmode=verify-full to "
            "the URL, or set PGSSLMODE"
        )

    def connect(self) -> Connection:
        """Open a connection."""
        try:
            connection = Connection.connect(self.url, autocommit=True, prepare_threshold=None)
        except psycopg.Error as error:
            # A process that was connected keeps trying: its password is being changed, or its
            # database restored. The relay then goes on by itself, and needs nobody to start it.
            remedy = "" if self.url in _REACHED else _remedy(str(error))
            if not remedy:
                raise outbox_error(self, error) from error
            msg = f"outbox {self} cannot be used: {_primary(error)}; {remedy}"
            raise OutboxError(msg) from error
        _REACHED.add(self.url)
        connection.patience = Patience(str(self))
        # Text as bytes: the checksum covers them, and a message is decoded once.
        connection.adapters.register_loader("text", ByteaBinaryLoader)
        return connection


class Connection(psycopg.Connection[Any]):
    """A connection whose waits are told, and end with the patience."""

    patience: Patience

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:  # noqa: ANN401
        """Wait for the server; psycopg calls this for each exchange."""
        try:
            return super().wait(_watched(gen, self.patience), *args, **kwargs)
        except _Abandoned:
            self.pgconn.finish()
            raise


class _Abandoned(psycopg.OperationalError):
    """No answer came until the relay had to end."""


def _watched(gen: Generator[Any, Any, T], patience: Patience) -> Generator[Any, Any, T]:
    """Pass on an exchange with the server, which psycopg resumes every 100 ms."""
    patience.begin()
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not patience.goes_on():
                raise _Abandoned("the server did not answer before the relay had to end")
            state = gen.send(ready)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        patience.end()


_REACHED: Final[set[str]] = set()
"""URLs with which this process was connected."""
_NO_WAIT_HEALS: Final = {
    r'database ".*" does not exist': "correct the database in its URL, or create the database",
    r"permission denied for database": "grant its user CONNECT on the database",
    r'role ".*" does not exist|not permitted to log in|no password supplied|pg_hba\.conf'
    r"|(password|[Pp]eer|certificate) authentication failed": "correct user and password in its "
    "URL, PGPASSWORD or the password file, or the server's pg_hba.conf",
    r"server does not support SSL|certificate verify failed|[Ss]erver certificate for"
    r"|certificate file|private key file|channel binding required": "correct sslmode, "
    "sslrootcert, sslcert and channel_binding in its URL, or the server's certificate",
    r"unsupported startup parameter|unrecognized configuration parameter"
    r'|invalid value for parameter|parameter ".*" cannot be (set|changed)'
    r"|invalid command-line argument": "correct the parameter, or `options`, in its URL or "
    "PGOPTIONS; PgBouncer takes no options unless its ignore_startup_parameters names them",
    r"invalid \w+ value|definition of service": "correct it in its URL, the PG variables of the "
    "environment, or pg_service.conf",
}
"""Texts of refused connections, each with the remedy: libpq does not tell their SQLSTATE. A server
that speaks another language than English is tried again."""


def _remedy(text: str) -> str:
    """What must be changed before a server admits this process; empty if waiting may do.

    One address of a host is enough, as `localhost` has two; of several hosts, all must refuse.
    """
    remedies: dict[str, str] = {}
    for failure in text.split("\n- host: ")[1:] or [text]:
        host = failure.partition(", hostaddr: ")[0]
        found = (remedy for said, remedy in _NO_WAIT_HEALS.items() if re.search(said, failure))
        remedies[host] = next(found, "") or remedies.get(host, "")
    return next(iter(remedies.values())) if all(remedies.values()) else ""


def _is_local(host: str) -> bool:
    """Whether traffic to a host stays on this one: a socket's directory, or a loopback address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host in ("", "localhost") or host.startswith(("/", "@"))


def _check_place(place: str) -> None:
    """Refuse a place that may hold a part of the password: errors name the place."""
    hosts = place.partition("/")[0].split(",")
    ports = [host.rpartition("]")[2].partition(":")[2] for host in hosts]
    if "@" in place or "=" in place or not all(port.isdigit() for port in ports if port):
        raise ConfigurationError(
            "the URL of the outbox cannot be understood: write postgresql://user:password@host/"
            "database?parameter=value&parameter=value, and in a user or password %40 for @, %2F "
            "for / and %3A for :"
        )


def _parts(url: str) -> tuple[str, str, str, str]:
    """Divide a URL as libpq does: scheme, user with ``@``, hosts with the database, parameters.

    A password may have ``#`` and ``?``, which end a part of other URLs.
    """
    scheme, _, rest = url.partition("://")
    user, at, place = rest.partition("@")
    if not at or "/" in user:
        user, at, place = "", "", rest
    place, _, query = place.partition("?")
    return scheme, user + at, place, query


IDLE_MAX: Final = 8
"""Maximum number of idle connections in a `Pool`."""
_POLL_MS: Final = 100
_RECONNECT_S: Final = 0.2
"""Minimum time between two failed attempts to connect."""
_CUT: Final = ("08", "57P")
"""The connection was lost, or the server ended it."""
_REFUSED: Final = ("53300", "28", "3D000")
"""A PgBouncer could not connect: too many connections, failed authentication, no such database."""
_READ_ONLY: Final = ("25006", "0A000")
"""A write on a replica, and the start of a transaction that may write there."""
_AGAIN: Final = ("40001", "40P01")
"""Serialization failure and deadlock: the server has rolled back; try again."""
_SEQUENCES: Final = {
    "messages_pkey": "message_ids",
    "runs_pkey": "runs_id_seq",
    "attempts_pkey": "attempts_attempt_seq",
    "interventions_pkey": "interventions_intervention_seq",
}
"""By the primary key that a value of it violates."""
_LOCKED: Final = ("40", "53", "55P03", "57014", "25P0")
"""Rolled back for a temporary reason: a limit of memory or time, a lock."""


@contextmanager
def reported(server: Server) -> Iterator[None]:
    """Raise errors of psycopg as errors of the outbox."""
    try:
        yield
    except psycopg.Error as error:
        raise outbox_error(server, error) from error


def is_cut_off(error: psycopg.Error) -> bool:
    """Whether the connection was lost, so that a commit may have been executed."""
    state = error.sqlstate or ""
    is_lost = not state and not isinstance(error, psycopg.DataError | psycopg.ProgrammingError)
    return is_lost or state.startswith(_CUT)


class NotReplicated(psycopg.OperationalError):
    """A commit is on the server's disk, and perhaps not on the synchronous replica.

    An administrator has cancelled its wait for the replica. The server then warns, and reports that
    the commit was executed.
    """


def _primary(error: psycopg.Error) -> str:
    """The server's message, without its details and context: they may show rows and bound values.

    The error itself is shortened too: a traceback shows it as the cause.
    """
    text = " ".join((error.diag.message_primary or str(error)).split())
    error.args = (text,)
    return text


def outbox_error(server: Server, error: psycopg.Error) -> OutboxError:
    """Convert an error of psycopg to an error of the outbox."""
    state = error.sqlstate or ""
    text = _primary(error)
    if isinstance(error, pg.DiskFull):
        return OutboxDiskFull(
            f"outbox {server}: the disk of the database is full, so nothing was stored: free some "
            f"space ({text})"
        )
    if isinstance(error, pg.IoError):
        return OutboxDiskFailed(
            f"outbox {server}: the database cannot read or write its disk, so nothing was stored: "
            f"look at the logs of the server and its host ({text})"
        )
    if isinstance(error, pg.UndefinedTable | pg.InvalidSchemaName | pg.UndefinedFunction):
        return NotAnOutbox(
            f"there is no outbox in schema {server.schema} of {server}; create it: `reliablepub "
            f"outbox create` ({text})"
        )
    if is_cut_off(error) or state.startswith((*_REFUSED, *_READ_ONLY)):
        remedy = ""
        if state in _READ_ONLY:
            remedy = (
                "; is it a replica? name the primary, or all hosts; otherwise, set "
                "default_transaction_read_only = off for the user"
            )
        return OutboxUnreachable(f"outbox {server} cannot be reached: {text}{remedy}")
    kind, advice = (OutboxLocked, ", try again") if state.startswith(_LOCKED) else (OutboxError, "")
    if isinstance(error, pg.InsufficientPrivilege):
        advice = "; see `reliablepub outbox create --roles`"
    if sequence := _SEQUENCES.get(error.diag.constraint_name or ""):
        kind, advice = (
            OutboxLocked,
            (
                f": the sequence {server.schema}.{sequence} is behind its rows, as after a move by "
                "logical replication. Start a relay, which raises it, or use setval; then try again"
            ),
        )
    return kind(f"outbox {server}: nothing was changed{advice} ({text})")


class Reaction(NamedTuple):
    """What a failed transaction leaves to do."""

    failure: OutboxError
    may_be_stored: bool  # the connection was lost, perhaps behind the commit
    is_passing: bool  # trying again at once, perhaps on another connection, may help


def reaction_to(server: Server, error: psycopg.Error | OutboxError) -> Reaction:
    """Return what to do after a transaction has failed."""
    if isinstance(error, OutboxError):  # no connection, or a look ended the run
        return Reaction(error, may_be_stored=False, is_passing=False)
    failure = outbox_error(server, error)
    failure.__cause__ = error
    is_passing = isinstance(failure, OutboxUnreachable) or error.sqlstate in _AGAIN
    return Reaction(failure, is_cut_off(error), is_passing)


def emptied(server: Server) -> NotAnOutbox:
    """The error for an outbox whose tables do not have the rows that it was created with."""
    return NotAnOutbox(
        f"outbox {server}: a row that every outbox has is missing from the table turns or outbox: "
        "another program has emptied the table, or a row-level policy hides the row; restore the "
        f"table, or drop the schema {server.schema} and create the outbox again"
    )


def refuse_version(server: Server, version: int) -> NotAnOutbox:
    """The error for an outbox of another version than this library knows."""
    is_later = version > VERSION
    remedy = "upgrade reliablepub" if is_later else "run `reliablepub outbox upgrade`"
    known = f"this reliablepub knows version {VERSION}"
    return NotAnOutbox(f"outbox {server} is of version {version}, and {known}; {remedy}")


Row = tuple[Any, ...]
Values = Mapping[str, object]


def check_texts(values: Values) -> None:
    """Check that PostgreSQL can store the texts among the values of a statement."""
    for name, value in values.items():
        if isinstance(value, str) and "\0" in value:
            raise InvalidMessage(name, "has the character U+0000, which PostgreSQL cannot store")


Step = tuple[str, Values]
"""Name of a statement, and its values."""
_BY_INDEX: Final[Step] = ("by_index", {"backend": 0})
"""Settings of a relay's transaction, so that no plan depends on the statistics of a table."""


class Link:
    """One connection for one thread, opened on first use.

    ============  ===================  ======================  ===============================
    statements    in a transaction     settings                on an idle connection that
                                                               was lost
    ============  ===================  ======================  ===============================
    `rows`        of its own           the user's              run again on a new one
    `read`        of its own           a relay's               run again on a new one
    `batch`       one for all          those of its steps      fail
    `transact`    one for all          a relay's, and durable  fail: perhaps committed
    `store`       of its own           durable                 fail: perhaps committed
    ============  ===================  ======================  ===============================
    """

    def __init__(
        self, server: Server, *, is_relays: bool = False, patience: Patience | None = None
    ) -> None:
        self.server = server
        self._is_relays = is_relays  # if so, waits for no lock of a table for long
        self.connections: int = 0  # opened so far
        self.queries: Final = queries(server.schema)
        self._connection: Connection | None = None
        self._refusal: OutboxError | None = None
        self._connect_at = 0.0
        self._cancelled_waits: list[str] = []  # warnings since `open`
        # Whether a commit may be acknowledged before it is on disk, whether other sessions see that
        # a relay's connection is active, and whether a relay may wait for notifications here.
        self.allows_loss: bool = False
        self.is_visible: bool = False
        self.may_rest: bool = False
        self._is_direct = False
        self.on_notify: Callable[[object], None] = lambda _: None  # given each notification
        self.patience: Final = patience or Patience(str(server))
        self._pid = os.getpid()

    def rows(self, name: str, values: Values | None = None) -> list[Row]:
        """Run an idempotent statement in a transaction of its own; return its rows.

        The settings of the user apply, so it may wait for the lock of a table for ever. A relay
        uses this only for statements that need no table.

        If an idle connection turns out to be lost, the statement is run again on a new one.
        """
        return self._twice(lambda: self._run(name, values or {}))

    def read(self, name: str, values: Values) -> list[Row]:
        """Run an idempotent statement with the settings of a relay; return its rows.

        If an idle connection turns out to be lost, the statement is run again on a new one.
        """
        return self._twice(lambda: self._read(name, values))

    def _read(self, name: str, values: Values) -> list[Row]:
        self.open()
        # Settings with each read would make a look 1.3 times as slow, and a relay at rest run twice
        # as many statements as its users are told.
        if self._is_direct:
            return self._run(name, values)
        return self.batch([_BY_INDEX, (name, values)])[1]

    def _twice(self, run: Callable[[], list[Row]]) -> list[Row]:
        with reported(self.server):
            was_open = self.is_open
            try:
                return run()
            except psycopg.Error:
                if not was_open or self.is_open:
                    raise
            return run()

    def _run(self, name: str, values: Values) -> list[Row]:
        connection = self.open()
        try:
            cursor = connection.cursor(binary=True)
            cursor.execute(self.queries[name], values)
            rows = cursor.fetchall() if cursor.rownumber is not None else []
        except psycopg.Error as error:
            self.drop_if_lost(error)
            raise
        self.check_replicated()
        return rows

    def batch(self, steps: Sequence[Step]) -> list[list[Row]]:
        """Run statements in one round trip and one transaction; return the rows of each.

        If one fails, those after it are not run.
        """
        connection = self.open()
        cursors = []
        failure: psycopg.Error | None = None
        try:
            with connection.pipeline() as pipeline:
                try:
                    for name, values in steps:
                        cursor = connection.cursor(binary=True)
                        cursor.execute(self.queries.get(name, name), values or None)
                        cursors.append(cursor)
                        _flush(connection, self.patience)
                    pipeline.sync()
                except psycopg.Error as error:  # or psycopg would log the error of the block's end
                    failure = error
                    with suppress(psycopg.Error):
                        _flush(connection, self.patience)
            if failure is not None:
                raise failure
            self.check_replicated()
            return [cursor.fetchall() if cursor.rownumber is not None else [] for cursor in cursors]
        except psycopg.Error as error:
            self.drop_if_lost(failure or error)
            raise failure or error from None

    def transact(self, steps: Sequence[Step]) -> list[list[Row]]:
        """Run statements that may write, as `batch`, with the settings of a transaction.

        When this raises, nothing was changed; after a lost connection, that is unknown.
        """
        self.open()  # which tells the settings
        begin: Step = ("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", {})
        settle: Step = ("settle_in", {"allows_loss": self.allows_loss})
        is_settled = self._is_direct or not self._is_relays
        head = [begin, settle] if is_settled else [begin, _BY_INDEX, settle]
        try:
            return self.batch([*head, *steps, ("COMMIT", {})])[len(head) : -1]
        except psycopg.Error as error:
            with suppress(psycopg.Error):
                if self._connection is not None:
                    self._connection.rollback()
            self.drop_if_lost(error)
            raise

    def store(self, step: Step) -> list[Row]:
        """Run a statement that stores a message; return its rows once the message is on disk.

        After `OutboxUnsure` it is stored, and perhaps not on a synchronous replica. After an error
        of psycopg nothing was stored; if the connection was lost, that is unknown.
        """
        self.open()  # which tells whether a loss is allowed
        name, values = step
        try:
            return self._run(name, {**values, "is_own": True, "allows_loss": self.allows_loss})
        except NotReplicated as error:
            raise OutboxUnsure(
                f"outbox {self.server}: {error}; enqueuing it again under its id costs a duplicate "
                "at most"
            ) from error

    def flush(self) -> None:
        """Bring all commits so far to disk, and to a synchronous replica.

        A commit that is visible may not be there: the server has ended its connection while it
        waited, or was started again.
        """
        self.transact([("flush", {})])

    def check_replicated(self) -> None:
        """Check that no commit since `open` was cancelled while it waited for a replica."""
        if self._cancelled_waits:
            raise NotReplicated(
                f"committed, and perhaps not on a synchronous replica: {self._cancelled_waits[0]}"
            )

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that was not lost."""
        return self._connection is not None

    @property
    def is_idle(self) -> bool:
        """Whether the connection can run the next statement.

        It cannot after an exception of a signal handler, such as Celery's `SoftTimeLimitExceeded`,
        has interrupted a statement: its result would still come.
        """
        connection = self._connection
        return (
            connection is not None
            and connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE
        )

    @property
    def backend(self) -> int:
        """The server process of the connection, or a number that PgBouncer has made up."""
        return self.open().info.backend_pid

    def open(self) -> Connection:
        """Return the connection; open one if there is none."""
        if self._connection is None:
            if self._refusal is not None and time.monotonic() < self._connect_at:
                raise self._refusal
            if self.patience.is_over:
                raise OutboxUnreachable(f"outbox {self.server}: no time is left to connect")
            try:
                self._connection = self.server.connect()
                self._connection.patience = self.patience
                self._connection.add_notice_handler(partial(_note_wait, self._cancelled_waits))
                self._connection.add_notify_handler(self.on_notify)
                self.connections += 1
                self._check_version()
            except OutboxError as error:
                self._refusal, self._connect_at = error, time.monotonic() + _RECONNECT_S
                self.close()
                raise
            self._refusal = None
        self._cancelled_waits.clear()
        return self._connection

    def _check_version(self) -> None:
        # Not again if it fails: behind a PgBouncer, a server that is down lets no statement pass.
        with reported(self.server):
            if self._is_relays:
                _, found = self.batch([("by_index", {"backend": self.backend}), ("outbox", {})])
            else:
                found = self._run("outbox", {})
        if not found:
            raise emptied(self.server)
        [(version, _, self.allows_loss)] = found
        if version != VERSION:
            raise refuse_version(self.server, version)
        if self._is_relays:
            with reported(self.server):
                [standing] = self._run("standing", {"backend": self.backend})
            self._is_direct, self.is_visible, self.may_rest = standing

    def rest(self, shard: int) -> bool:
        """Have enqueuers notify this connection (see queries.sql); return whether they will."""
        with reported(self.server):
            [(is_alone, channel)] = self._run("rest", {"shard": shard})
            if is_alone:
                named = sql.Identifier(channel.decode())
                self.open().execute(sql.SQL("LISTEN {}").format(named))
        return bool(is_alone)  # False: a transaction that enqueues is open, and will not notify

    def rise(self, shard: int) -> None:
        """Have enqueuers notify no more. If that fails, the connection is lost, and the lock."""
        with suppress(psycopg.Error):
            self._run("rise", {"shard": shard})

    def hear(self) -> None:
        """Take what has come between statements: a notification, or the end of the connection."""
        if self._connection is not None:
            try:
                self._connection.pgconn.consume_input()
                while self._connection.pgconn.notifies() is not None:
                    pass
            except psycopg.Error:
                self.close()

    def close(self) -> None:
        """Close the connection, unless it belongs to the parent of this forked process."""
        if self._connection is not None and os.getpid() == self._pid:
            self._connection.close()
        self._connection = None

    def drop_if_lost(self, error: psycopg.Error) -> None:
        """After an error, forget a connection that can no longer be used."""
        connection = self._connection
        if connection is not None and (connection.closed or connection.broken):
            self._connection = None
        elif error.sqlstate in _READ_ONLY:  # another host may be the primary now
            self.close()


def _note_wait(cancelled: list[str], notice: psycopg.errors.Diagnostic) -> None:
    """Note that a commit no longer waits for a replica. The warning has no code of its own."""
    if notice.source_function == "SyncRepWaitForLSN":
        cancelled.append(notice.message_primary or "")


def _flush(connection: psycopg.Connection[Any], patience: Patience) -> None:
    """Send all that a pipeline has queued; wait until the socket takes it.

    psycopg 3.3 tries once for each statement of a pipeline, and then waits for the answer. Of a
    large statement, the rest would stay in libpq's buffer, and the server would wait for it.
    """
    server = connection.pgconn
    if not server.flush():
        return
    poll = select.poll()
    poll.register(server.socket, select.POLLIN | select.POLLOUT)
    patience.begin()
    try:
        while server.flush():
            ready = poll.poll(_POLL_MS)
            if not patience.goes_on():
                server.finish()
                raise _Abandoned("the server did not read before the relay had to end")
            if any(event & ~select.POLLOUT for _, event in ready):
                server.consume_input()  # the server stops reading if its answers are not read
    finally:
        patience.end()


class Pool:
    """Idle connections, for calls from any thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle: list[Link] = []
        self._pid = os.getpid()
        # For an `Outbox` that was not closed. A `__del__` may come when modules are torn down.
        weakref.finalize(self, _close, self._idle)

    @contextmanager
    def link(self) -> Iterator[Link]:
        """Lend a connection for the block."""
        if os.getpid() != self._pid:  # the connections are the parent's
            self._pid = os.getpid()
            self._idle.clear()
        try:
            link = self._idle.pop()  # atomic: a signal handler gets another connection
        except IndexError:
            link = Link(self._server)
        try:
            yield link
        finally:
            if link.is_idle and len(self._idle) < IDLE_MAX:
                self._idle.append(link)
            else:
                link.close()

    def close(self) -> None:
        """Close the connections that are not in use."""
        _close(self._idle)


def _close(links: list[Link]) -> None:
    with suppress(IndexError):  # another thread may have taken the last one meanwhile
        while True:
            links.pop().close()
