"""An outbox with every kind of trouble in it, made without a broker.

====  ===================================================================
row   message
====  ===================================================================
1     confirmed at the first attempt
2     confirmed after an uncertain attempt
3     parked: refused with 404
4     parked: returned three times
5     waits: nacked, to be sent again in an hour
6     in flight, as long as the relay is at work
7     ready; of ordering key ``k``
8     ready; waits for 7
9     ready; its body was damaged on the disk
10    expired
====  ===================================================================
"""

import time
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

from reliablepub._core.events import Batch
from reliablepub.message import Message
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import CONFIRMED, NACKED, Outcome, OutcomeKind
from tests.sqlite import sql

NOT_FOUND = Outcome(OutcomeKind.REFUSED, 404, "NOT_FOUND - no exchange 'missing' in vhost '/'")
NO_ROUTE = Outcome(OutcomeKind.RETURNED, 312, "NO_ROUTE")
CUT = Outcome(OutcomeKind.UNCERTAIN, 0, "connection lost: reset by peer")
LATE = Outcome(OutcomeKind.EXPIRED, 0, "its deadline passed")
JSON = Message(
    '{"n": "ü"}'.encode(),
    "orders",
    "order.created",
    {"price": Decimal("1.50"), "raw": b"\x00\xff", "at": datetime(2026, 1, 1, tzinfo=UTC)},
    message_id="m-4",
    content_type="application/json",
    priority=3,
)


def make_trouble(path: Path) -> SqliteStore:
    """The outbox, with a relay at work on it that is not asked for anything more."""
    now = time.time()
    store = SqliteStore(path)
    messages = {
        n: Message(b"body %d" % n, "orders", f"key.{n}", message_id=f"m-{n}") for n in range(11)
    }
    messages[3] = Message(b"\x00\x01" * 9, "missing", "key.3", message_id="m-3")
    messages[4] = JSON
    for n in (7, 8):
        messages[n] = Message(b"x", "orders", "key", message_id=f"m-{n}", ordering_key="k")
    entries = [Entry(messages[n], now - 1_000 * (11 - n)) for n in range(1, 11)]
    one, two, three, four, five, six, *_, ten = entries
    store.commit(Changes(new=entries))
    store.commit(Changes(confirmed=[one]))
    two.uncertain, five.nacked, three.refused, four.returned = 1, 1, 1, 3
    store.commit(Changes(rescheduled=[two], attempts=[Attempt(two, "1-1", 2, CUT, now - 90)]))
    store.commit(Changes(confirmed=[two], attempts=[Attempt(two, "1-2", 1, CONFIRMED, now - 80)]))
    refused, late = Attempt(three, "1-2", 2, NOT_FOUND, now - 70), Attempt(ten, "1-2", 9, LATE, now)
    returned = [Attempt(four, "1-2", n, NO_ROUTE, now - 60 + n) for n in (3, 4, 5)]
    store.commit(Changes(parked=[refused, returned[-1], late], attempts=[refused, *returned, late]))
    five.due_at = now + 3600
    nacked = Attempt(five, "1-2", 6, NACKED, now - 50)
    store.commit(Changes(rescheduled=[five], attempts=[nacked], sent=[Batch(2, 7, [six])]))
    sql(path, "UPDATE reliablepub_messages SET body = x'00' WHERE id = 9")
    return store
