"""What the relay does when people have parked, discarded, rerouted or retried messages beside it.

Knows: that what the store says of a message holds, once it has left memory. Must never know: SQL,
how people do it.

It lets go of every message they have touched: of the ones that are buffered, of those that wait to
be read, and of those that were given up unsent and are still to be stored so. What is open then is
read again when it is due, which is now; of the others, whoever waits for them is told. What is in
flight cannot have been touched (the store's business).
"""

from __future__ import annotations

from typing import Final

from reliablepub._core.session import Session
from reliablepub.errors import Damaged, Withdrawn
from reliablepub.outbox.entry import Entry, Store, Touched
from reliablepub.relay.loaded import Loaded
from reliablepub.relay.notices import Notices
from reliablepub.relay.verdicts import Verdicts

_DONE: Final = {"park": "parked", "discard": "discarded"}


def let_go(store: Store, session: Session[Entry], loaded: Loaded, verdicts: Verdicts) -> None:
    """Let go of all that people have touched since the last call."""
    touched = store.touched()
    if not touched:
        return
    ids = {change.id for change in touched}
    buffered = {entry for entry in session.waiting() if entry.id in ids}
    session.withdraw(buffered)
    # What was put off or given up unsent in this turn is neither in flight nor in the session.
    for entry in (*buffered, *verdicts.take_back(ids)):
        loaded.let_go(entry)
    for change in touched:
        waiter = loaded.take_out(change.id, is_open=change.is_open)
        if waiter is not None:
            waiter.withdrawn(_error(change))


def tell_damaged(store: Store, loaded: Loaded, notices: Notices) -> None:
    """Whoever waits for a message whose row the store could not read is told; hooks are, too."""
    rows = store.damaged()
    notices.damaged(rows)
    for row in rows:
        waiter = loaded.take_out(row.id, is_open=False)
        if waiter is not None:
            waiter.withdrawn(
                Damaged(
                    message_id=row.message_id,
                    exchange=row.exchange,
                    routing_key=row.routing_key,
                    reply_text=row.reason,
                )
            )


def _error(change: Touched) -> Withdrawn:
    # The newest of several things that were done to it is not always the one that ended it.
    said = f"{_DONE.get(change.action, 'taken')} by {change.person}"
    return Withdrawn(
        message_id=change.message_id,
        exchange=change.exchange,
        routing_key=change.routing_key,
        reply_text=f"{said}: {change.note}" if change.note else said,
    )
