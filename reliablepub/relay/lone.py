"""The short path of a message that comes alone: its caller stores it, and the relay learns of it.

Knows: callers, entries, and that a signal handler may interrupt a caller at any instruction. Must
never know: SQL, AMQP, what the relay does with an entry.

Through the inbox, a caller waits for two changes of thread and a turn of the relay, which take
longer than the commit. So while no other caller waits, `publish()` stores its message itself, and
then hands the entry over. Under load the inbox is faster: there, one commit serves all who wait.

The short path only ever succeeds. Whatever else happens, the message takes the long path, and the
relay's commit decides and explains: at worst a message is stored twice, under one ``message_id``.

- One caller at a time has the store's writer; others find none, and take the long path. Nobody
  waits for a caller, which a handler may have interrupted, but the end of the relay, for a moment.
- A look of the relay may find the row before the caller hands the entry over. So the caller first
  announces it under the id that it will get, for `recognize`.
- The statement that stores the message also notes it as in flight (epoch `ALONE`), so the relay may
  send it without another commit. If it cannot be sent in the first turn that sends anything, the
  relay removes that note, and commits the tag of a later attempt as for any message.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Final

from reliablepub.errors import OutboxError, OutboxUnsure
from reliablepub.message import Message
from reliablepub.outbox.entry import Entry, LoneWriter, OpenLimits, Waiter

_TRIES: Final = 2
"""Tries to store a message: another process may have taken the id."""
_HANDED_OVER_MAX: Final = 32
"""Entries that the relay has not taken yet: callers wait for a relay that does not come to it."""
_SHARED_S: Final = 0.005
"""Threads that publish within this time of each other share the commits of the relay."""
_LOOK_S: Final = 0.000_2
_LOOKS: Final = 10
"""So often a caller looks whether a commit of the relay, about half a millisecond, has ended."""
_END_S: Final = 0.5
"""How long the end of the relay waits for a caller that is about to store a message. A handler that
has interrupted one may have closed the publisher: then it waits in vain."""


@dataclass(slots=True, eq=False)
class Stored:
    """An entry that its caller has stored."""

    entry: Entry
    is_noted: bool  # the store has it as in flight
    is_taken: bool = False  # the relay takes it, or has done so


class LoneMessages:
    """Lends the store's writer to one caller at a time, and takes over what they have stored."""

    def __init__(self, wake: Callable[[], None], wall: Callable[[], float] = time.time) -> None:
        self._wake = wake
        self._wall = wall
        self._users: dict[object, None] = {}
        self._announced: dict[int, Entry] = {}
        self._caller, self._called_at, self._shared_until = 0, -inf, -inf
        self._lent: tuple[LoneWriter, bool] | None = None
        self._writer: LoneWriter | None = None
        self.stored: deque[Stored] = deque()  # the relay has not taken them yet
        # They may be stored and noted, and nobody hands them over. The relay finds those that are,
        # and removes their notes with its next commit.
        self.doubtful: deque[Entry] = deque()
        self.is_wanted = self.is_reserved = self._is_over = False

    # ------------------------------------------------------------------ called by callers

    def store(self, message: Message, waiter: Waiter | None) -> bool:
        """Store a message and hand it over, if possible now; if False, this call never stores it.

        After `OutboxUnsure`, it may be stored.
        """
        if self._is_shared() or not message.is_plain or message.ordering_key is not None:
            return False
        me = object()
        try:
            if not self._has_claimed(me):
                return False
            lent = self._lent
            if lent is None:
                self.is_wanted = True  # so opening a writer is worth it
                return False
            writer, is_noted = lent
            is_behind = len(self.stored) >= _HANDED_OVER_MAX
            if is_behind or self._is_over or not (writer.is_prepared and self._is_free()):
                return False
            entry = Entry.accepted(message, self._wall())
            entry.waiter = waiter
            if not self._store(writer, entry, is_noted=is_noted):
                return False
            if len(self.stored) == 1:  # otherwise it was woken, and has not come to it
                self._wake()
            return True
        finally:
            self._users.pop(me, None)
            if self._is_over:
                self._close()

    def _has_claimed(self, me: object) -> bool:
        """Claim the writer, or find it claimed; either way, remove ``me`` from `_users` later."""
        # The first in the dictionary has it. Each step is atomic, and needs no lock; and nothing is
        # taken out that a signal handler could keep from being given back.
        self._users[me] = None
        return list(self._users)[0] is me  # noqa: RUF015 - `next` of an iterator is two steps

    def _is_shared(self) -> bool:
        """Whether several threads publish: one commit of the relay then serves all who wait."""
        now, caller = time.monotonic(), threading.get_ident()
        if caller != self._caller and now - self._called_at < _SHARED_S:
            self._shared_until = now + _SHARED_S
        self._caller, self._called_at = caller, now
        return now < self._shared_until

    def _is_free(self) -> bool:
        """Whether the relay does not commit: it would wait for one caller after the other."""
        for _ in range(_LOOKS):
            if not self.is_reserved:
                return True
            time.sleep(_LOOK_S)
        return False

    def _store(self, writer: LoneWriter, entry: Entry, *, is_noted: bool) -> bool:
        for _ in range(_TRIES):
            entry.id = writer.next_id()
            self._announced[entry.id] = entry
            stored = Stored(entry, is_noted)
            is_stored = False
            try:
                is_stored = writer.store(entry)
                if is_stored:
                    self.stored.append(stored)
                    return True
            except BaseException as error:  # also what a signal handler raises
                if isinstance(error, OutboxError) and not isinstance(error, OutboxUnsure):
                    return False
                if is_noted and not self._is_handed_over(stored):
                    self.doubtful.append(entry)
                raise
            finally:
                if not is_stored:
                    self._announced.pop(entry.id, None)
            if writer.next_id() == entry.id:
                return False  # not for its id
        return False

    def _is_handed_over(self, stored: Stored) -> bool:
        """Whether the relay gets this entry, or has it, although its caller was interrupted."""
        return stored in self.stored or stored.is_taken  # in this order, see `take`

    # ------------------------------------------------------------------ called by the relay

    def recognize(self, entry: Entry) -> Waiter | None:
        """The waiter of an entry that was read from the store, if a caller has just stored it."""
        mine = self._announced.get(entry.id)
        if (
            mine is None
            or mine.stored_at != entry.stored_at  # the id may have gone to another process
            or mine.message.message_id != entry.message.message_id
        ):
            return None
        self._announced.pop(entry.id, None)
        return mine.waiter

    def withdrawn(self, id_: int, message_id: str) -> Waiter | None:
        """The waiter of an entry that is gone before the relay took it, if it is of a caller."""
        mine = self._announced.get(id_)
        if mine is None or mine.message.message_id != message_id:
            return None
        self._announced.pop(id_, None)
        return mine.waiter

    def take(self) -> list[tuple[Stored, bool]]:
        """Entries that callers have stored since the last call, in order, and whether each is new.

        One that is not new was read from the store before (`recognize`), or is `withdrawn`.
        """
        taken = []
        while self.stored:
            one = self.stored[0]
            one.is_taken = True  # before it leaves the queue, see `_is_handed_over`
            self.stored.popleft()
            is_new = self._announced.pop(one.entry.id, None) is not None
            taken.append((one, is_new))
        return taken

    def lend(self, writer: LoneWriter | None, limits: OpenLimits, *, is_sent: bool) -> None:
        """Let callers store messages; ``is_sent`` if one that comes now can be sent at once."""
        if writer is None or (self._lent == (writer, is_sent) and writer.is_prepared):
            return
        if not self.recall():
            return
        self._writer = writer
        with suppress(OutboxError):  # the relay's own commits report it
            writer.prepare(limits, is_sent=is_sent)
            self._lent = (writer, is_sent)

    def recall(self) -> bool:
        """Have callers take the long path; False if a caller is storing a message."""
        if self._lent is None:
            return True
        me = object()
        try:
            if not self._has_claimed(me):
                return False
            self._lent = None
            return True
        finally:
            self._users.pop(me, None)

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Commit without waiting for one caller after the other."""
        self.is_reserved = True
        try:
            yield
        finally:
            self.is_reserved = False

    def end(self) -> None:
        """Have callers take the long path from now on, and close the writer, once."""
        if self._is_over:
            return
        self._is_over = True
        until = time.monotonic() + _END_S
        while not self._close() and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def _close(self) -> bool:
        """Close the writer, unless a caller has it, who closes it then."""
        if not self.recall():
            return False
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        return True
