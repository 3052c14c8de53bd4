"""Messages that the store has taken from the relay: changed by an operator, or damaged.

Knows: the store's reports of them, and the entries in memory. Must never know: SQL, AMQP.

The relay drops messages that an operator has changed from memory. It reads those that are still
open again, and tells callers that wait for the others. An operator cannot change a message in
flight (`reliablepub.outbox.admin.interventions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from reliablepub._core.session import Session
from reliablepub.errors import Damaged, Withdrawn
from reliablepub.outbox.entry import Entry, Intervened, Store, Touched, Waiter
from reliablepub.relay.callbacks import Notices
from reliablepub.relay.loaded import Loaded
from reliablepub.relay.settling import Settling

_DONE: Final = {"park": "parked", "discard": "discarded"}


@dataclass(slots=True)
class Withdrawals:
    """Drops such messages from memory, and tells the callers that wait for them."""

    store: Store
    session: Session[Entry]
    loaded: Loaded
    settling: Settling  # may hold changes to them for the next commit
    notices: Notices
    has_parked: bool = False  # by the store, unknown to the relay's ledger

    def reading(self, read: Callable[[float], Sequence[Entry]], wall: float) -> Sequence[Entry]:
        """Read entries from the store, as soon as nothing in memory is older than what it holds."""
        while True:
            try:
                entries = read(wall)
            except Intervened:
                tell_withdrawn(self.unload())
            else:
                self.tell_damaged()
                return entries

    def unload(self) -> list[tuple[Waiter, Withdrawn]]:
        """Drop entries that operators have changed; return the waiters to `tell_withdrawn`."""
        touched = self.store.touched()
        if not touched:
            return []
        self.settling.pauses.recount()  # some of them may wait for a paused destination
        ids = {change.id for change in touched}
        buffered = {entry for entry in self.session.buffered_keys() if entry.id in ids}
        self.session.withdraw(buffered)
        # Those postponed or given up unsent in this turn are neither in flight nor in the session.
        held = {entry.id: entry for entry in (*buffered, *self.settling.take_back(ids))}
        for entry in held.values():
            self.loaded.unload(entry)
        withdrawn = []
        for change in touched:
            waiter = self.loaded.changed_on_disk(
                change.id,
                is_open=change.is_open,
                ordering_key=change.ordering_key,
            )
            if waiter is not None:
                withdrawn.append((waiter, _error(change, held.get(change.id))))
        return withdrawn

    def tell_damaged(self) -> None:
        """Tell waiters and hooks of messages that the store parked: their rows are damaged."""
        rows = self.store.damaged()
        if not rows:
            return
        self.has_parked = True
        self.notices.damaged(rows)
        for row in rows:
            waiter = self.loaded.changed_on_disk(row.id, is_open=False)
            if waiter is not None:
                waiter.withdrawn(
                    Damaged(
                        message_id=row.message_id,
                        exchange=row.exchange,
                        routing_key=row.routing_key,
                        reply_text=row.reason,
                        may_have_arrived=row.may_have_arrived,
                    )
                )


def tell_withdrawn(withdrawn: Iterable[tuple[Waiter, Withdrawn]]) -> None:
    """Tell waiters that operators have taken their messages."""
    # This may call an application's callback, which may wait for a thread that waits for this
    # turn's commit: such a thread gets `RelayHeldUp` only while its messages are not taken in.
    for waiter, error in withdrawn:
        waiter.withdrawn(error)


def _error(change: Touched, entry: Entry | None) -> Withdrawn:
    # The attempts of this turn are known to the entry in memory only.
    may_have_arrived = entry is not None and entry.may_have_arrived
    # Of several interventions, the newest (reported here) is not always the one that closed the
    # message, so any other action is described as "taken".
    said = f"{_DONE.get(change.action, 'taken')} by {change.person}"
    return Withdrawn(
        message_id=change.message_id,
        exchange=change.exchange,
        routing_key=change.routing_key,
        reply_text=f"{said}: {change.note}" if change.note else said,
        may_have_arrived=change.may_have_arrived or may_have_arrived,
        is_kept=change.is_kept,
    )
