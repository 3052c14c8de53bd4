"""`Outbox`: enqueue messages, look at them, and step in; a relay in another place publishes them.

Knows: the file, a connection of its own, and which module carries out what. Must never know: the
relay.

What operators ask for is in `reliablepub.outbox.admin`, and imported when they ask: a program that
only enqueues never loads it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from reliablepub.errors import ConfigurationError, OutboxError, OutboxMoved, OutboxUnsure
from reliablepub.hooks import Stamps
from reliablepub.message import Message
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Entry, OpenLimits, new_id
from reliablepub.outbox.sqlite.ballast import Ballast
from reliablepub.outbox.sqlite.checkpoints import behind_commit_if_long
from reliablepub.outbox.sqlite.database import Writer, absolute, reading
from reliablepub.outbox.sqlite.enqueue import Enqueuing, is_stored
from reliablepub.outbox.sqlite.forks import GATE
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.transactions import commit_with_retry

if TYPE_CHECKING:
    from reliablepub.outbox.admin.inspection import HeldKey, OutboxStatus, ParkedMessage
    from reliablepub.outbox.admin.integrity import Audit
    from reliablepub.outbox.admin.rekeying import Rekeyed
    from reliablepub.outbox.admin.salvage import Salvaged

T = TypeVar("T")


class Outbox:
    """A durable table of messages to publish, in its own file or in the application's database.

    Any number of processes and threads may enqueue; one relay (a `Publisher` with this outbox, or
    ``reliablepub relay``) publishes. Nothing is opened before it is needed.

    Args:
        path: the SQLite file, your application's own or another; the first message creates it, or
            adds the outbox to it.
        keys: encrypt what is enqueued; whoever relays needs them too. Looking needs none.
        open_messages_max: `enqueue` refuses a message when so many are open, whoever stored them.
            None: as many as the disk takes.
        open_bytes_max: likewise, the bytes of open messages (`Message.size`).
        hooks: objects that add to each message what its caller knows (`reliablepub.hooks.Stamps`);
            what happens to it is told to the hooks of whoever relays.

    Raises:
        ConfigurationError: with such a limit no message would ever fit, or a hook stamps nothing.

    Example:
        The message exists if, and only if, the order does::

            with sqlite3.connect("app.db") as db:
                db.execute("INSERT INTO orders VALUES (?)", (order_id,))
                Outbox("app.db").enqueue(Message(b"...", exchange="orders"), connection=db)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keys: OutboxKeys | None = None,
        open_messages_max: int | None = None,
        open_bytes_max: int | None = None,
        hooks: Sequence[Stamps] = (),
    ) -> None:
        self.path: Final[Path] = absolute(path)
        limits = OpenLimits(open_messages_max, open_bytes_max)
        self._keys = keys
        self._enqueuing = Enqueuing(self.path, keys, limits, Ballast(self.path))
        self._stamps = [_stamp_of(hook) for hook in hooks]
        self._writer = Writer(self.path, is_relay=False)
        self._pid = 0
        self._lock = threading.RLock()
        self._is_writing = False

    def enqueue(
        self,
        message: Message,
        *,
        key: str | None = None,
        connection: sqlite3.Connection | None = None,
    ) -> str:
        """Store one message; the relay publishes it.

        Args:
            message: gets a ``message_id`` if it has none.
            key: yours for this message, such as ``"order 17 created"``. A second message with the
                same key is not stored, whichever process enqueues it; keys are remembered for 7
                days, and as long as their message is open or parked.
            connection: yours, to the same database file. The message becomes part of its open
                transaction, or of the one that it opens now and you commit. In autocommit mode the
                message is stored at once. The first message adds the outbox to your database.

        Returns:
            The ``message_id``; that of the first message, if the key was there already. Without
            ``connection``, the message is on disk.

        Raises:
            OutboxFull: a limit of this outbox is reached; it was not stored. A transaction of yours
                stays open with what else is in it, and keeps the relay from making room.
            OutboxDiskFull: the disk is full; it was not stored.
            OutboxUnsure: the disk failed during the commit; look whether it was stored.
            OutboxMoved: the path leads to other files than those that are open; it was not stored.
            OutboxForked: the file was open when this process was forked; it was not stored.
            ConfigurationError: the connection is to another file.
            NotAnOutbox: the file is no SQLite database, or its outbox is of a newer version.
            OutboxError: it was not stored.
        """
        for stamp in self._stamps:
            message = stamp(message)
        if message.message_id is None:
            message = message.with_message_id(new_id())
        assert message.message_id is not None
        entry = Entry.accepted(message, time.time())
        if connection is not None:
            return self._enqueuing.within(connection, entry, key)
        return self._write(
            lambda own: self._enqueuing.insert(own.cursor(), entry, key),
            lambda own: is_stored(own, entry),
        )

    def status(self) -> OutboxStatus:
        """Look at the outbox, without disturbing anybody.

        Raises:
            NotAnOutbox: there is no outbox at this path.
        """
        from reliablepub.outbox.admin.inspection import read_status

        return read_status(self.path)

    def parked(self, limit: int = 100) -> list[ParkedMessage]:
        """Messages that were given up and are kept for a person, oldest first.

        Raises:
            NotAnOutbox: there is no outbox at this path.
        """
        from reliablepub.outbox.admin.inspection import read_parked

        return read_parked(self.path, limit=limit)

    def rows(self, view: str) -> Iterator[dict[str, object]]:
        """Rows of a view, by column; taken a piece at a time, however many there are.

        Bodies and headers are not among the columns; times are text, in UTC.

        Args:
            view: ``open``, ``parked``, ``confirmed`` (as long as they are kept), ``history`` (the
                attempts of every message that was not confirmed at once, kept for a week after it
                has left), ``interventions`` (what people did to messages, kept as long) or
                ``audit`` (the ledger, recounted).

        Raises:
            ConfigurationError: there is no such view.
            NotAnOutbox: there is no outbox at this path.
        """
        from reliablepub.outbox.admin.inspection import read_view

        return read_view(self.path, view)

    def audit(self) -> Audit:
        """Recount the ledger, and compare each row with its checksum; disturbs nobody.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: it cannot be read.
        """
        from reliablepub.outbox.admin.integrity import audit

        return audit(self.path)

    def salvage(self, damaged: str | os.PathLike[str]) -> Salvaged:
        """Copy every intact message of a damaged outbox into this one, which must not exist yet.

        The damaged file stays as it is. Its messages keep their ids; the history of attempts stays
        behind. A message that was confirmed already may come back, where the damage hides that.

        Args:
            damaged: no process uses it, and this one has not since it began: the file is read
                without SQLite, which would cost an open connection its locks.

        Raises:
            OutboxInUse: a relay still uses the damaged outbox.
            OutboxError: it cannot be read, or this one exists already or cannot be written.
        """
        from reliablepub.outbox.admin.salvage import salvage

        return salvage(absolute(damaged), self.path)

    def position(self, source: str) -> int:
        """How many messages of a named source are stored (see `Publisher.publish_many`).

        Returns:
            0 also where there is no outbox yet.

        Raises:
            NotAnOutbox: the file is something else.
        """
        from reliablepub.outbox.admin.inspection import read_position

        return read_position(self.path, source)

    def forget(self, source: str) -> None:
        """Count a named source from 0 again; its messages stay.

        Raises:
            OutboxError: the file cannot be written; it is not forgotten.
        """
        if not self.position(source):
            return
        self._write(lambda own: own.execute(QUERIES["forget_source"], (source,)))

    def retry(self, ids: Iterable[int] | None = None) -> int:
        """Put parked messages back: they are due now, and their refusals are forgotten.

        Args:
            ids: of `ParkedMessage`; None for all. One that is open and waits to be sent again is
                due now too; any other is left alone.

        Returns:
            How many were put back.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: nothing was put back.
        """
        from reliablepub.outbox.admin.interventions import Action, Intervention, change

        with reading(self.path):
            pass  # there is one: a retry must not add an outbox to a database
        wanted = None if ids is None else list(dict.fromkeys(ids))
        what = Intervention(Action.RETRY)

        def put_back(own: sqlite3.Connection) -> int:
            chosen = wanted
            if chosen is None:
                chosen = [row[0] for row in own.execute(QUERIES["parked_ids"])]
            return change(own, self.path, chosen, what, time.time()).changed

        return self._write(put_back)

    def held_keys(self, limit: int = 100) -> list[HeldKey]:
        """Parked messages that hold their ordering keys, with what waits behind each of them.

        `resume_key` tries them again, `skip_key` lets the others go first.

        Raises:
            NotAnOutbox: there is no outbox at this path.
        """
        from reliablepub.outbox.admin.inspection import read_held_keys

        return read_held_keys(self.path, limit=limit)

    def resume_key(self, ordering_key: str) -> int:
        """Put back what holds a key: it is due now, and what waits behind it goes after it.

        Returns:
            How many messages were put back; 0 if nothing holds the key.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: nothing was put back.
        """
        return self.retry(self._holding(ordering_key))

    def skip_key(self, ordering_key: str) -> int:
        """Let a key go on without what holds it, which stays parked.

        Should it be retried later, it is sent after what has gone before it meanwhile.

        Returns:
            How many messages hold the key no more; 0 if nothing did.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: the file cannot be written; the key is still held.
        """
        from reliablepub.outbox.admin.interventions import Action, Intervention, change

        ids = self._holding(ordering_key)
        what = Intervention(Action.SKIP)
        return self._write(lambda own: change(own, self.path, ids, what, time.time()).changed)

    def _holding(self, ordering_key: str) -> list[int]:
        with reading(self.path) as connection:
            rows = connection.execute(QUERIES["ids_holding_key"], (ordering_key,)).fetchall()
        return [id_ for (id_,) in rows]

    def rekey(self) -> Rekeyed:
        """Encrypt every message under the first of ``keys``, also beside a relay that has them.

        After it, and once no process has another key as its first, the other keys can be dropped.

        Raises:
            ConfigurationError: this outbox was made without ``keys``.
            NotAnOutbox: there is no outbox at this path.
            OutboxSealed: a message is encrypted with a key that was not given.
            OutboxError: the file cannot be written; what was done before stays done.
        """
        if self._keys is None:
            raise ConfigurationError("to encrypt anew, give this Outbox its keys")
        from reliablepub.outbox.admin.rekeying import rekey

        return rekey(self.path, self._keys)

    def close(self) -> None:
        """Close the file, if it was opened; the outbox may be used again."""
        with GATE.use(), self._lock:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """Name the file."""
        return f"Outbox({str(self.path)!r})"

    def _write(
        self,
        work: Callable[[sqlite3.Connection], T],
        is_there: Callable[[sqlite3.Connection], bool] = lambda _: False,
    ) -> T:
        """Run `commit_with_retry` on this object's own connection, one thread at a time."""
        if os.getpid() != self._pid:  # a thread of the parent's may have had the lock
            self._pid, self._lock, self._is_writing = os.getpid(), threading.RLock(), False
        with GATE.use(), self._lock:  # the gate first: no fork happens while a thread has the lock
            if self._is_writing:
                raise OutboxError(
                    f"outbox {self.path} was called by a signal handler that has interrupted a "
                    "call on it in the same thread; nothing was stored: call it when the handler "
                    "has returned"
                )
            self._is_writing = True
            try:
                self._writer.renew()
                with (
                    self._writer.use() as connection,
                    behind_commit_if_long(connection, self.path),
                ):
                    return commit_with_retry(
                        connection,
                        self.path,
                        lambda: work(connection),
                        lambda: is_there(connection),
                    )
            except OutboxMoved:
                self._writer.leave()
                raise
            except OutboxError as error:
                if not error.retryable and not isinstance(error, OutboxUnsure):
                    self._writer.close()  # look afresh next time: the file may be another one
                raise
            finally:
                self._is_writing = False


def _stamp_of(hook: Stamps) -> Callable[[Message], Message]:
    if not hasattr(hook, "stamp"):
        name = type(hook).__name__
        msg = f"the hook {name} has no method stamp, and whoever relays is told of events"
        raise ConfigurationError(msg)
    return hook.stamp
