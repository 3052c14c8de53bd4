"""`Outbox`: enqueues messages, inspects them and intervenes. A relay publishes them.

Knows: its database, and which module does what. Must never know: the relay, or which database it
is; only `Outbox.salvage` is for files alone.

`reliablepub.outbox.admin` is imported on demand: a program that only enqueues never loads it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

from reliablepub.errors import ConfigurationError, InvalidMessage, ReliablePubError
from reliablepub.headers import utf8
from reliablepub.hooks import MessagesRejected, Rejections, Stamps, tell_rejected
from reliablepub.message import Message, MessageFields
from reliablepub.outbox.chunks import Cutter, cut
from reliablepub.outbox.database import file_of
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Entry, OpenLimits, identified, stamped
from reliablepub.outbox.opening import Where, outbox_at

if TYPE_CHECKING:
    from datetime import datetime

    from reliablepub.outbox.admin.inspection import HeldKey, OutboxStatus, ParkedMessage
    from reliablepub.outbox.admin.integrity import Audit
    from reliablepub.outbox.admin.interventions import Intervention
    from reliablepub.outbox.admin.rekeying import Rekeyed
    from reliablepub.outbox.admin.scheduling import ScheduleChange
    from reliablepub.outbox.sqlite.salvage import Salvaged


class Outbox:
    """A durable table of messages to publish, in its own file or in the application's database.

    Any number of processes and threads may enqueue; one relay (a `Publisher` with this outbox, or
    ``reliablepub relay``) publishes. The database is opened when it is first used.

    Args:
        path: path of the SQLite file, which may be the application's own database: the first
            message creates the file, or adds the outbox to it. Or URL of a PostgreSQL database in
            which `create` has made the outbox.
        keys: keys that encrypt enqueued messages. The relay needs them too; inspection does not.
        open_messages_max: `enqueue` raises `OutboxFull` when this many messages are open, whichever
            process stored them. None: no limit but the disk.
        open_bytes_max: `enqueue` raises `OutboxFull` if open messages would exceed this total size
            in bytes (`Message.size`). None: no limit but the disk.
        hooks: objects that add to each message, such as headers (`reliablepub.hooks.Stamps`), or
            are notified of messages that are not accepted (`reliablepub.hooks.Rejections`). Other
            hooks belong to the relay's publisher.

    Raises:
        ConfigurationError: the path or URL cannot be that of an outbox, a limit is below 1, a hook
            has neither ``stamp`` nor ``rejected``, or an argument has the wrong type.

    Example:
        The message exists if, and only if, the order does::

            with sqlite3.connect("app.db") as db:
                db.execute("INSERT INTO orders VALUES (?)", (order_id,))
                Outbox("app.db").enqueue(Message(b"...", exchange="orders"), connection=db)
    """

    def __init__(
        self,
        path: Where,
        *,
        keys: OutboxKeys | None = None,
        open_messages_max: int | None = None,
        open_bytes_max: int | None = None,
        hooks: Sequence[Stamps | Rejections] = (),
    ) -> None:
        if keys is not None and not isinstance(keys, OutboxKeys):
            raise ConfigurationError(f"keys is of type {type(keys).__name__}, not OutboxKeys")
        if not isinstance(hooks, Sequence):
            msg = f"hooks is of type {type(hooks).__name__}; it takes a list of hooks"
            raise ConfigurationError(msg)
        self._database = outbox_at(path)
        self._where = self._database.file or path  # absolute: pickles travel
        self._hooks = tuple(hooks)
        self._limits = limits = OpenLimits(open_messages_max, open_bytes_max)
        self._keys = keys
        self._enqueue = partial(self._database.enqueue, keys=keys, limits=limits)
        self._enqueue_once = partial(self._database.enqueue_once, keys=keys, limits=limits)
        self._stamps, self._rejections = _methods_of(hooks)

    @property
    def name(self) -> str:
        """Its location: the absolute path of its file, or its URL without user and password."""
        return str(self._database.file or self._database.name)

    @property
    def path(self) -> Path:
        """Path of the file.

        Raises:
            ConfigurationError: the outbox is on a server.
        """
        return file_of(self._database)

    def enqueue(
        self,
        message: bytes | Message,
        *,
        key: str | None = None,
        connection: Any = None,  # noqa: ANN401 - of the library that the application uses
        **fields: Unpack[MessageFields],
    ) -> str:
        """Store one message; the relay publishes it.

        Args:
            message: the body as bytes, or a `Message`. It gets a ``message_id`` if it has none.
            key: deduplication key, such as ``"order 17 created"``. A second message with this key
                is not stored, whichever process enqueues it. Keys are kept for 7 days from the
                time at which their message was stored, and as long as it is open or parked.
            connection: the application's connection to the same database. The message becomes
                part of its open transaction, or of a new one that the application commits. In
                autocommit mode the message is stored at once. The first message adds the outbox
                to a SQLite database.
            fields: the other fields of the `Message`, if ``message`` is a body.

        Returns:
            The ``message_id``, or that of the first message with this key. If no ``connection`` is
            given, the message is on disk.

        Raises:
            InvalidMessage: the broker would refuse the message, the database cannot store a string
                in it, or the key is empty; nothing was stored.
            TypeError: a field is unknown.
            OutboxFull: a limit of this outbox is reached; the message was not stored. An open
                transaction of the application stays open, and blocks the relay until it ends.
            OutboxDiskFull: the disk is full; the message was not stored.
            OutboxUnsure: the disk or the network failed during the commit; check whether the
                message was stored.
            OutboxUnreachable: the database server cannot be reached; the message was not stored.
            OutboxMoved: the path no longer leads to the open files; the message was not stored.
            OutboxForked: the file was open when this process was forked; the message was not
                stored.
            ConfigurationError: the connection is to another SQLite file.
            NotAnOutbox: there is no outbox and the first message cannot create one, or the outbox
                has another version.
            OutboxError: the message was not stored.
        """
        if key is not None and not utf8("key", key):
            raise InvalidMessage("key", "is empty, which every message without a key would share")
        entry = Entry.accepted(stamped(identified(message, fields), self._stamps), time.time())
        try:
            if key is not None:
                return self._enqueue_once(entry, key, connection=connection)
            self._enqueue([entry], connection=connection)
        except ReliablePubError as error:
            tell_rejected(self._rejections, 1, error)
            raise
        return _id_of(entry)

    def enqueue_many(
        self,
        messages: Iterable[Message],
        *,
        connection: Any = None,  # noqa: ANN401 - of the library that the application uses
    ) -> list[str]:
        """Store many messages, in chunks of at most 1 000; a relay publishes them.

        An exception carries a note that says how many of the messages were stored before it.

        Args:
            messages: an iterable, read and stored chunk by chunk so that memory use stays bounded.
                To deduplicate, call `enqueue` with a key.
            connection: the application's connection to the same database, as in `enqueue`. All
                messages become part of its transaction; after an error, roll it back. In autocommit
                mode, or without ``connection``, each chunk is stored at once.

        Returns:
            The ``message_id`` of each message, in order. If no ``connection`` is given, all
            messages are on disk.

        Raises:
            InvalidMessage: an item is not a `Message`, or the database cannot store a string in it.
            OutboxFull: a limit of this outbox is reached.
            OutboxUnsure: the disk or the network failed during a commit. The messages of that chunk
                may or may not be stored.
            ConfigurationError: the connection is to another SQLite file.
            OutboxError: a message was not stored.
        """
        cutter = Cutter(
            min(_CHUNK_MESSAGES, self._limits.messages_max or _CHUNK_MESSAGES),
            min(_CHUNK_BYTES, self._limits.bytes_max or _CHUNK_BYTES),
            self._stamps,
        )
        ids: list[str] = []
        new: list[Entry] = []
        try:
            for chunk in cut(messages, cutter):
                now = time.time()
                new = [Entry.accepted(message, now) for message in chunk]
                self._enqueue(new, connection=connection)
                ids += map(_id_of, new)
                new = []
        except BaseException as error:
            if new and isinstance(error, ReliablePubError):
                tell_rejected(self._rejections, len(new), error)
            error.add_note(f"{len(ids)} messages before it are stored")
            raise
        return ids

    def cancel(
        self,
        key: str,
        *,
        note: str = "",
        connection: Any = None,  # noqa: ANN401 - of the library that the application uses
    ) -> ScheduleChange:
        """Remove the message with a deduplication key, unless it was sent. A relay may be running.

        The message is cancelled or sent, never both. A cancelled message counts as discarded, and
        its key is forgotten: a later message with this key is stored. Any message with a key can be
        cancelled, even without ``not_before``.

        Args:
            key: the key that was given to `enqueue`.
            note: the reason, for ``reliablepub outbox explain``.
            connection: the application's connection to the same database. The commit of its
                transaction cancels the message; a rollback keeps it. No relay of this outbox sends
                anything until the transaction has ended, so keep it short. On PostgreSQL, the
                transaction must be open and ``READ COMMITTED``.

        Returns:
            Whether the message was cancelled, it was already too late, or the key is unknown.

        Raises:
            InvalidMessage: the key is not a string, or cannot be encoded as UTF-8.
            ConfigurationError: the connection is to another SQLite file, or in a transaction that
                cannot be joined.
            NotAnOutbox: there is no outbox.
            OutboxUnsure: the disk or the network failed during the commit; it is unknown whether
                the message is cancelled.
            OutboxError: nothing was changed.
        """
        from reliablepub.outbox.admin.scheduling import cancelling

        words = f"cancelled by key {key}"
        return self._by_key(key, cancelling(f"{words}: {note}" if note else words), connection)

    def reschedule(
        self,
        key: str,
        not_before: datetime,
        *,
        note: str = "",
        connection: Any = None,  # noqa: ANN401 - of the library that the application uses
    ) -> ScheduleChange:
        """Change the ``not_before`` of the message with a deduplication key, unless it was sent.

        A relay may be running. The deadline of the message (``expires_in_s``) stays the same.

        Args:
            key: the key that was given to `enqueue`.
            not_before: the new time, with a time zone; a time in the past sends the message now.
            note: the reason, for ``reliablepub outbox explain``.
            connection: the application's connection to the same database. The commit of its
                transaction reschedules the message. No relay of this outbox sends anything until
                the transaction has ended, so keep it short. On PostgreSQL, the transaction must be
                open and ``READ COMMITTED``.

        Returns:
            Whether the message was rescheduled, it was already too late, or the key is unknown.

        Raises:
            InvalidMessage: the time is not a datetime with a time zone, or is before 1970; or the
                key is not a string, or cannot be encoded as UTF-8.
            ConfigurationError: the connection is to another SQLite file, or in a transaction that
                cannot be joined.
            NotAnOutbox: there is no outbox.
            OutboxUnsure: the disk or the network failed during the commit; it is unknown whether
                the message has its new time.
            OutboxError: nothing was changed.
        """
        from reliablepub.outbox.admin.scheduling import rescheduling

        return self._by_key(key, rescheduling(not_before, note), connection)

    def _by_key(
        self,
        key: str,
        what: Intervention,
        connection: Any,  # noqa: ANN401 - of the library that the application uses
    ) -> ScheduleChange:
        from reliablepub.outbox.admin.scheduling import by_key

        utf8("key", key)
        if connection is not None:
            return self._database.within(connection, lambda session: by_key(session, key, what))
        with self._database.reading():
            pass  # raises if there is none: this must not add an outbox to a database
        return self._database.write(lambda session: by_key(session, key, what))

    def create(self, *, connection: Any = None) -> None:  # noqa: ANN401 - of any library
        """Add the outbox to the database, if it is not there yet, as the first message would.

        Args:
            connection: the application's connection to the same database, such as that of a
                migration. The tables become part of its open transaction, or of a new one that the
                application commits.

        Raises:
            ConfigurationError: the connection is to another SQLite file.
            NotAnOutbox: the file is not a SQLite database, or the outbox is of another version.
            OutboxUnsure: the disk failed during the commit; the outbox may have been added.
            OutboxError: the outbox was not added.
        """
        self._database.create(connection)

    def upgrade(self) -> list[str]:
        """Upgrade an outbox that an earlier version created to this version.

        First stop all processes that use a file: one with the earlier version would go on storing.
        In PostgreSQL, `enqueue` with a ``connection`` works with either version.

        Returns:
            what was done, in words; empty if the outbox already has this version.

        Raises:
            NotAnOutbox: there is no outbox, its version is later than this one, or it is too old.
            OutboxInUse: a relay runs on the file.
            OutboxError: nothing was changed.
        """
        return self._database.upgrade()

    def status(self) -> OutboxStatus:
        """Return counts and the state of the relay. Neither writers nor the relay wait for it.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: the outbox cannot be read.
        """
        from reliablepub.outbox.admin.inspection import read_status

        return read_status(self._database)

    def parked(self, limit: int = 100) -> list[ParkedMessage]:
        """Return parked messages, oldest first.

        Args:
            limit: maximum number of messages.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: the outbox cannot be read.
        """
        from reliablepub.outbox.admin.inspection import read_parked

        return read_parked(self._database, limit=limit)

    def rows(
        self, view: str, first: int = 1, last: int | None = None
    ) -> Iterator[dict[str, object]]:
        """Iterate over the rows of a view, as dictionaries by column, without loading all of them.

        Bodies and headers are not among the columns. Times are text, in UTC. Rows are read in
        pieces of 2 000, each in its own transaction. A row that stays in the view throughout is
        returned once; one that appears or disappears meanwhile may be left out.

        Args:
            view: ``open``, ``parked``, ``confirmed`` (messages kept for the retention time),
                ``history`` (attempts of messages that were not confirmed at once, kept for 7 days
                after the message has left), ``interventions`` (by operators, kept for 7 days after
                the message has left) or ``audit`` (the ledger, recounted).
            first: lowest number in the view's first column.
            last: highest number in the view's first column; None for no limit. ``audit`` takes no
                range: its only row has no number.

        Raises:
            ConfigurationError: there is no such view.
            NotAnOutbox: there is no outbox at this path.
            OutboxError: the outbox cannot be read.
        """
        from reliablepub.outbox.admin.inspection import read_view

        return read_view(self._database, view, first, last)

    def span(self, view: str) -> tuple[int, int] | None:
        """Return the lowest and the highest number in the first column of a view of `rows`.

        Programs that share the work of reading a view can divide this range between them.

        Returns:
            The two numbers; None for ``audit``, and if the view is empty.

        Raises:
            ConfigurationError: there is no such view.
            NotAnOutbox: there is no outbox at this path.
            OutboxError: the outbox cannot be read.
        """
        from reliablepub.outbox.admin.inspection import read_span

        return read_span(self._database, view)

    def audit(self) -> Audit:
        """Recount the ledger, and compare each row with its checksum. Read-only.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: the outbox cannot be read.
        """
        from reliablepub.outbox.admin.integrity import audit

        return audit(self._database)

    def salvage(self, damaged: str | os.PathLike[str]) -> Salvaged:
        """Copy every intact message of a damaged outbox into this one, which must not exist yet.

        The damaged file is not changed. Messages keep their ids; the history of attempts is not
        copied. If the damage hides that a message was confirmed, the message is sent again.

        Args:
            damaged: path of the damaged outbox. No process may be using it, and this one must not
                have opened it before: the file is read without SQLite, and closing it would drop
                the locks of an open SQLite connection.

        Raises:
            ConfigurationError: this outbox is on a server.
            OutboxInUse: a relay still uses the damaged outbox.
            NotAnOutbox: the damaged file holds neither an outbox nor a message of one.
            OutboxError: the damaged file cannot be read, or this one exists or cannot be written.
        """
        from reliablepub.outbox.sqlite.salvage import salvage

        return salvage(damaged, self.path)

    def position(self, source: str) -> int:
        """Return how many messages of a named source were stored (see `Publisher.publish_many`).

        Returns:
            The number; 0 if there is no outbox yet.

        Raises:
            InvalidMessage: the name is not a str that can be encoded as UTF-8.
            NotAnOutbox: the file is not a SQLite database, or its outbox is of another version.
            OutboxError: the outbox cannot be read.
        """
        from reliablepub.outbox.admin.inspection import read_position

        utf8("source", source)
        return read_position(self._database, source)

    def forget(self, source: str) -> None:
        """Set the position of a named source to 0. Its messages stay.

        Raises:
            InvalidMessage: the name is not a str that can be encoded as UTF-8.
            NotAnOutbox: the file is not a SQLite database, or its outbox is of another version.
            OutboxUnsure: the disk or the network failed during the commit; it is unknown whether
                the position is 0.
            OutboxError: the outbox cannot be written; the position is unchanged.
        """
        if not self.position(source):
            return
        self._database.write(lambda session: session.run("forget_source", {"name": source}))

    def retry(self, ids: Iterable[int] | None = None) -> int:
        """Put parked messages back: they are due now, and their refusals no longer count.

        Args:
            ids: ids of the messages (`ParkedMessage.id`), put back in one transaction. None puts
                back all parked and expired messages, 500 per transaction, so that relays can commit
                in between. Expired messages lose their deadlines. An open message that waits for a
                retry becomes due too. Other ids are ignored.

        Returns:
            How many messages are due now.

        Raises:
            ConfigurationError: an id is not a number, such as a ``message_id``.
            NotAnOutbox: there is no outbox at this path.
            OutboxUnsure: the disk or the network failed during a commit; it is unknown whether its
                messages are due.
            OutboxError: nothing was changed; without ``ids``, transactions already committed
                remain.
        """
        from reliablepub.outbox.admin.interventions import Action, Intervention, change, intervene

        what = Intervention(Action.RETRY)
        if ids is None:
            with self._database.reading() as session:
                parked = [id_ for (id_,) in session.run("parked_ids")]
            return intervene(self._database, parked, what).changed
        wanted = _row_ids(ids)
        with self._database.reading():
            pass  # raises if there is none: a retry must not add an outbox to a database
        return self._database.write(lambda own: change(own, wanted, what, time.time()).changed)

    def clear(self) -> None:
        """Delete all messages and all deduplication keys, for use between tests.

        Messages that a running relay has in flight are kept. Deleted messages count as discarded.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: some messages may have been deleted.
        """
        from reliablepub.outbox.admin.pruning import clear

        clear(self._database)

    def held_keys(self, limit: int = 100) -> list[HeldKey]:
        """Return parked messages that hold their ordering keys, and how many wait behind each.

        `resume_key` retries them; `skip_key` lets the later messages go first.

        Args:
            limit: maximum number of messages.

        Raises:
            NotAnOutbox: there is no outbox at this path.
            OutboxError: the outbox cannot be read.
        """
        from reliablepub.outbox.admin.inspection import read_held_keys

        return read_held_keys(self._database, limit=limit)

    def resume_key(self, ordering_key: str) -> int:
        """Retry the parked messages that hold an ordering key; the later messages follow them.

        Returns:
            How many messages were put back; 0 if nothing holds the key.

        Raises:
            InvalidMessage: the key is not a str that can be encoded as UTF-8.
            NotAnOutbox: there is no outbox at this path.
            OutboxUnsure: the disk or the network failed during the commit; it is unknown whether
                the messages were put back.
            OutboxError: nothing was put back.
        """
        return self.retry(self._holding(ordering_key))

    def skip_key(self, ordering_key: str) -> int:
        """Let the later messages of an ordering key go first; those that hold the key stay parked.

        If a parked message is retried afterwards, messages sent in the meantime stay ahead of it.

        Returns:
            How many messages no longer hold the key; 0 if none did.

        Raises:
            InvalidMessage: the key is not a str that can be encoded as UTF-8.
            NotAnOutbox: there is no outbox at this path.
            OutboxUnsure: the disk or the network failed during the commit; it is unknown whether
                the key is still held.
            OutboxError: the outbox cannot be written; the key is still held.
        """
        from reliablepub.outbox.admin.interventions import Action, Intervention, change

        ids = self._holding(ordering_key)
        what = Intervention(Action.SKIP)
        return self._database.write(lambda own: change(own, ids, what, time.time()).changed)

    def _holding(self, ordering_key: str) -> list[int]:
        utf8("ordering_key", ordering_key)
        with self._database.reading() as session:
            values = {"ordering_key": ordering_key}
            return [id_ for (id_,) in session.run("ids_holding_key", values)]

    def rekey(self) -> Rekeyed:
        """Encrypt every message with the first of ``keys``. A relay with these keys may be running.

        The other keys can be removed afterwards, once every process has this key as its first.

        Raises:
            ConfigurationError: this `Outbox` has no ``keys``.
            NotAnOutbox: there is no outbox at this path.
            OutboxSealed: a message is encrypted with a key that was not given.
            OutboxError: a running relay does not have the first key, or the outbox cannot be
                written; messages already encrypted with it stay so.
        """
        if self._keys is None:
            raise ConfigurationError("rekey needs the keys of the outbox: Outbox(path, keys=...)")
        from reliablepub.outbox.admin.rekeying import rekey

        return rekey(self._database, self._keys)

    def close(self) -> None:
        """Close the database if it is open. The next use opens it again."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle place, limits and hooks; connections are opened anew. A URL holds its password."""
        if self._keys is not None:
            raise TypeError("an Outbox with keys is not pickled: the pickle would hold the keys")
        given = {f"open_{name}": limit for name, limit in asdict(self._limits).items()}
        return partial(type(self), self._where, **given, hooks=self._hooks), ()

    def __repr__(self) -> str:
        """Name the file or the server."""
        return f"Outbox({self.name!r})"


_CHUNK_MESSAGES: Final = 1_000
_CHUNK_BYTES: Final = 4 * 1024 * 1024
"""Of one chunk of `Outbox.enqueue_many`, unless a single message is larger."""
_ID_BITS: Final = 63
"""Bits of a row's number in SQLite and PostgreSQL, besides the sign."""


def _row_ids(ids: Iterable[int]) -> list[int]:
    """The ids, each once, without numbers that no row can have.

    Raises:
        ConfigurationError: one is not a number.
    """
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ConfigurationError(f"ids is of type {type(ids).__name__}; it takes a list of numbers")
    wanted = list(ids)
    for id_ in wanted:
        if type(id_) is not int:
            raise ConfigurationError(
                f"id {id_!r:.80} is not a number; it takes ids of rows, such as ParkedMessage.id "
                "(`reliablepub outbox retry` takes message ids and keys too)"
            )
    return [id_ for id_ in dict.fromkeys(wanted) if id_.bit_length() <= _ID_BITS]


def _id_of(entry: Entry) -> str:
    assert entry.message.message_id is not None
    return entry.message.message_id


def _methods_of(
    hooks: Sequence[Stamps | Rejections],
) -> tuple[list[Callable[[Message], Message]], list[Callable[[MessagesRejected], None]]]:
    """The methods ``stamp`` and ``rejected`` of hooks."""
    stamps, rejections = [], []
    for hook in hooks:
        stamp, rejected = getattr(hook, "stamp", None), getattr(hook, "rejected", None)
        if stamp is None and rejected is None:
            name = type(hook).__name__
            msg = (
                f"the hook {name} has no method stamp or rejected; hooks for events belong to the "
                "relay"
            )
            raise ConfigurationError(msg)
        stamps += [] if stamp is None else [stamp]
        rejections += [] if rejected is None else [rejected]
    return stamps, rejections
