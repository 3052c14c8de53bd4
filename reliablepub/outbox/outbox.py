"""`Outbox`: enqueues messages, inspects them and intervenes. A relay publishes them.

Knows: the file, a connection of its own, and which module does what. Must never know: the relay.

`reliablepub.outbox.admin` is imported on demand: a program that only enqueues never loads it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
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
    ``reliablepub relay``) publishes. The file is opened when it is first used.

    Args:
        path: path of the SQLite file, which may be the application's own database. The first
            message creates the file, or adds the outbox to it.
        keys: keys to encrypt enqueued messages; the relay needs them too, inspection does not.
        open_messages_max: `enqueue` raises `OutboxFull` when so many messages are open, whichever
            process stored them. None: no limit but the disk.
        open_bytes_max: `enqueue` raises `OutboxFull` if open messages would have more bytes
            (`Message.size`). None: no limit but the disk.
        hooks: objects that add to each message, such as headers (`reliablepub.hooks.Stamps`).
            Other hooks belong to the relay's publisher.

    Raises:
        ConfigurationError: a limit is below 1, or a hook has no method ``stamp``.

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
            message: the message. It gets a ``message_id`` if it has none.
            key: deduplication key, such as ``"order 17 created"``. A second message with this key
                is not stored, whichever process enqueues it. Keys are kept for 7 days, and as long
                as their message is open or parked.
            connection: the application's connection to the same database file. The message becomes
                part of its open transaction, or of a new one that the application commits. In
                autocommit mode the message is stored at once. The first message adds the outbox
                to the database.

        Returns:
            The ``message_id``, or that of the first message with this key. If no ``connection`` is
            given, the message is on disk.

        Raises:
            OutboxFull: a limit of this outbox is reached; the message was not stored. An open
                transaction of the application stays open, and blocks the relay until it ends.
            OutboxDiskFull: the disk is full; the message was not stored.
            OutboxUnsure: the disk failed during the commit; check whether the message was stored.
            OutboxMoved: the path no longer leads to the open files; the message was not stored.
            OutboxForked: the file was open when this process was forked; the message was not
                stored.
            ConfigurationError: the connection is to another file.
            NotAnOutbox: the file is no SQLite database, or its outbox is of another version.
            OutboxError: the message was not stored.
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

    def create(self, *, connection: sqlite3.Connection | None = None) -> None:
        """Add the outbox to the database, if it is not there yet, as the first message would.

        Args:
            connection: the application's connection to the same database file, such as that of a
                migration. The tables become part of its open transaction, or of a new one that the
                application commits.

        Raises:
            ConfigurationError: the connection is to another file.
            NotAnOutbox: the file is no SQLite database, or its outbox is of another version.
            OutboxError: the outbox was not added.
        """
        if connection is not None:
            self._enqueuing.create_within(connection)
        else:
            self._write(lambda _: None)

    def status(self) -> OutboxStatus:
        """Return counts and the state of the relay. Neither writers nor the relay wait for it.

        Raises:
            NotAnOutbox: there is no outbox at this path.
        """
        from reliablepub.outbox.admin.inspection import read_status

        return read_status(self.path)

    def parked(self, limit: int = 100) -> list[ParkedMessage]:
        """Return parked messages, oldest first.

        Args:
            limit: at most so many messages.

        Raises:
            NotAnOutbox: there is no outbox at this path.
        """
        from reliablepub.outbox.admin.inspection import read_parked

        return read_parked(self.path, limit=limit)

    def rows(self, view: str) -> Iterator[dict[str, object]]:
        """Iterate over the rows of a view, as dictionaries by column, without loading all of them.

        Bodies and headers are not among the columns. Times are text, in UTC.

        Args:
            view: ``open``, ``parked``, ``confirmed`` (messages kept for the retention time),
                ``history`` (attempts of messages that were not confirmed at once, kept for 7 days
                after the message has left), ``interventions`` (of operators, kept for 7 days after
                the message has left) or ``audit`` (the ledger, recounted).

        Raises:
            ConfigurationError: there is no such view.
            NotAnOutbox: there is no outbox at this path.
        """
        from reliablepub.outbox.admin.inspection import read_view

        return read_view(self.path, view)

    def audit(self) -> Audit:
        """Recount the ledger, and compare each row with its checksum. Read-only.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: the file cannot be read.
        """
        from reliablepub.outbox.admin.integrity import audit

        return audit(self.path)

    def salvage(self, damaged: str | os.PathLike[str]) -> Salvaged:
        """Copy every intact message of a damaged outbox into this one, which must not exist yet.

        The damaged file is not changed. Messages keep their ids; the history of attempts is not
        copied. If the damage hides that a message was confirmed, the message is sent again.

        Args:
            damaged: path of the damaged outbox. No process may use it, and this one must not have
                opened it before: the file is read without SQLite, and closing it would drop the
                locks of an open connection.

        Raises:
            OutboxInUse: a relay still uses the damaged outbox.
            OutboxError: the damaged file cannot be read, or this one exists or cannot be written.
        """
        from reliablepub.outbox.admin.salvage import salvage

        return salvage(absolute(damaged), self.path)

    def position(self, source: str) -> int:
        """Return how many messages of a named source were stored (see `Publisher.publish_many`).

        Returns:
            The number; 0 if there is no outbox yet.

        Raises:
            NotAnOutbox: the file is no SQLite database.
        """
        from reliablepub.outbox.admin.inspection import read_position

        return read_position(self.path, source)

    def forget(self, source: str) -> None:
        """Set the position of a named source to 0. Its messages stay.

        Raises:
            OutboxError: the file cannot be written; the position is unchanged.
        """
        if not self.position(source):
            return
        self._write(lambda own: own.execute(QUERIES["forget_source"], (source,)))

    def retry(self, ids: Iterable[int] | None = None) -> int:
        """Put parked messages back: they are due now, and their refusals no longer count.

        Args:
            ids: ids of the messages (`ParkedMessage.id`); None for all parked ones. An open message
                that waits for a retry becomes due too. Other ids are ignored.

        Returns:
            How many messages are due now.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: nothing was changed.
        """
        from reliablepub.outbox.admin.interventions import Action, Intervention, change

        with reading(self.path):
            pass  # raises if there is none: a retry must not add an outbox to a database
        wanted = None if ids is None else list(dict.fromkeys(ids))
        what = Intervention(Action.RETRY)

        def put_back(own: sqlite3.Connection) -> int:
            chosen = wanted
            if chosen is None:
                chosen = [id_ for (id_,) in own.execute(QUERIES["parked_ids"])]
            return change(own, self.path, chosen, what, time.time()).changed

        return self._write(put_back)

    def held_keys(self, limit: int = 100) -> list[HeldKey]:
        """Return parked messages that hold their ordering keys, and how many wait behind each.

        `resume_key` retries them; `skip_key` lets the later messages go first.

        Args:
            limit: at most so many messages.

        Raises:
            NotAnOutbox: there is no outbox at this path.
        """
        from reliablepub.outbox.admin.inspection import read_held_keys

        return read_held_keys(self.path, limit=limit)

    def resume_key(self, ordering_key: str) -> int:
        """Retry the parked messages that hold an ordering key; the later ones follow after them.

        Returns:
            How many messages were put back; 0 if nothing holds the key.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: nothing was put back.
        """
        return self.retry(self._holding(ordering_key))

    def skip_key(self, ordering_key: str) -> int:
        """Let the later messages of an ordering key go first; those that hold it stay parked.

        If one of them is retried afterwards, messages that were sent before it stay ahead of it.

        Returns:
            How many messages no longer hold the key; 0 if none did.

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
        """Encrypt every message under the first of ``keys``. A relay with these keys may run.

        Afterwards, and once every process has this key as its first, the other keys can be removed.

        Raises:
            ConfigurationError: this `Outbox` has no ``keys``.
            NotAnOutbox: there is no outbox at this path.
            OutboxSealed: a message is encrypted with a key that was not given.
            OutboxError: the file cannot be written; messages encrypted until then stay so.
        """
        if self._keys is None:
            raise ConfigurationError("rekey needs the keys of the outbox: Outbox(path, keys=...)")
        from reliablepub.outbox.admin.rekeying import rekey

        return rekey(self.path, self._keys)

    def close(self) -> None:
        """Close the file if it is open. The next use opens it again."""
        with GATE.use(), self._lock:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        if os.getpid() != self._pid:  # another thread of the parent may have held the lock
            self._pid, self._lock, self._is_writing = os.getpid(), threading.RLock(), False
        with GATE.use(), self._lock:  # gate first: then no fork happens while a thread has the lock
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
                    self._writer.close()  # the next use may find another file at the path
                raise
            finally:
                self._is_writing = False


def _stamp_of(hook: Stamps) -> Callable[[Message], Message]:
    if not hasattr(hook, "stamp"):
        name = type(hook).__name__
        msg = f"the hook {name} has no method stamp; hooks for events belong to the relay"
        raise ConfigurationError(msg)
    return hook.stamp
