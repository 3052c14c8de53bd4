"""An outbox of a million messages with every kind of trouble in it.

``python -m tests.cli.million PATH`` makes one, to try commands on: 1.7 GB. What is in it:

=========  =========================================================================================
open       a million: a fifth was nacked and waits, a twentieth has an ordering key, and one key in
           a thousand of those is held; 1 000 are in flight while a relay is at work
parked     100 000: returned, refused or withdrawn, with two attempts each
expired    20 000
confirmed  50 000 that are kept, and 100 000 lines of history of others that are gone
keys       100 000 that messages were enqueued under
=========  =========================================================================================
"""

import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

from reliablepub import Message, Outbox
from reliablepub.outbox.rows import checksum_of

MESSAGES = 1_000_000
PARKED = 100_000
EXPIRED = 20_000
KEPT = 50_000
GONE = 100_000
KEYS = 100_000
IN_FLIGHT = 1_000

NUMBERS = (
    "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count) "
)
OPEN = """
INSERT INTO reliablepub_messages (
    id, message_id, exchange, routing_key, ordering_key, stored_at, due_at, nacked, size,
    body, checksum
)
SELECT *, zeroblob(1024), made(message_id, exchange, routing_key, ordering_key) FROM (
    SELECT
        n + 1 AS id, printf('m-%d', n + 1) AS message_id,
        iif(n % 3, 'orders', 'invoices') AS exchange, 'key.' || (n % 100) AS routing_key,
        iif(n % 20, NULL, 'k' || (n % 5000)) AS ordering_key,
        :now - 86400 + n / 20.0, iif(n % 5, NULL, :now + 86400 + n), n % 5 = 0, 1200
    FROM numbers
)
"""
GIVEN_UP = """
INSERT INTO reliablepub_parked (
    id, message_id, exchange, routing_key, ordering_key, properties, stored_at, parked_at, state,
    outcome, reply_code, reply_text, nacked, returned, refused, uncertain, size, body, checksum
)
SELECT *, zeroblob(1024), made(message_id, exchange, routing_key, ordering_key) FROM (
    SELECT
        n + :first AS id, printf('m-%d', n + :first) AS message_id,
        iif(n % 3, 'orders', 'missing') AS exchange, 'key.' || (n % 100) AS routing_key,
        iif(n % 20000, NULL, 'k' || (n % 5000)) AS ordering_key,
        '{}', :now - 9e5 + n, :now - 8e5 + n, :state,
        iif(:state = 'expired', 'expired', iif(n % 3, 'returned', 'refused')),
        iif(:state = 'expired', 0, iif(n % 3, 312, 404)),
        iif(:state = 'expired', 'not sent', iif(n % 3, 'NO_ROUTE', 'NOT_FOUND - no exchange')),
        0, n % 3 > 0, n % 3 = 0, 0, 1200
    FROM numbers
)
"""
ATTEMPTS = """
INSERT INTO reliablepub_attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
)
SELECT
    m.id, m.message_id, :now - 1e4 + tries.n, '1-' || tries.n, m.id,
    iif(tries.n = 1, 'uncertain', m.outcome), iif(tries.n = 1, 0, m.reply_code),
    iif(tries.n = 1, 'connection lost', m.reply_text),
    iif(tries.n = 1, 'possibly persisted', 'not written')
FROM numbers AS tries, (
    SELECT id, message_id, outcome, reply_code, reply_text FROM reliablepub_parked
    UNION ALL
    SELECT id, message_id, 'nacked', 0, 'basic.nack' FROM reliablepub_messages WHERE nacked
) AS m
"""
OF_THE_GONE = """
INSERT INTO reliablepub_attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
)
SELECT
    n + :first, printf('m-%d', n + :first), :now - 1e6, '1-1', n,
    'confirmed', 0, '', 'persisted'
FROM numbers
"""
CONFIRMED = """
INSERT INTO reliablepub_confirmed (
    id, confirmed_at, message_id, exchange, routing_key, properties, stored_at, size, checksum, body
)
SELECT
    n + :first, :now - n, printf('m-%d', n + :first), 'orders', 'key', '{}', :now - 2 * n, 1200, 0,
    zeroblob(1024)
FROM numbers
"""
ENQUEUED = """
INSERT INTO reliablepub_keys (key, id, message_id, kept_until)
SELECT 'order ' || n, n, printf('m-%d', n), :now + n FROM numbers
"""
SENT = """
INSERT INTO reliablepub_in_flight (epoch, first_tag, count, ids, sent_at)
SELECT '1-1', n * 100, 100, printf('[[%d, 100]]', n * 100), :now FROM numbers
"""
LEDGER = """
UPDATE reliablepub_ledger SET
    stored = (SELECT count(*) FROM reliablepub_messages)
        + (SELECT count(*) FROM reliablepub_parked) + :confirmed,
    parked = (SELECT count(*) FROM reliablepub_parked WHERE state = 'parked'),
    expired = (SELECT count(*) FROM reliablepub_parked WHERE state = 'expired'),
    confirmed = :confirmed,
    open_bytes = (SELECT sum(size) FROM reliablepub_messages),
    last_id = :last_id
"""


BODY = bytes(1024)


def _checksum(message_id: str, exchange: str, routing_key: str, ordering_key: str | None) -> int:
    key = None if ordering_key is None else ordering_key.encode()
    texts = (message_id.encode(), exchange.encode(), routing_key.encode(), b"{}", key)
    return checksum_of(texts, BODY)


def make_million(path: Path, messages: int = MESSAGES) -> None:
    """The outbox, or one that is smaller by a factor in everything."""
    share = messages / MESSAGES
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"first"))
    now = time.time()

    def many(count: int) -> int:
        return max(1, int(count * share))

    first = messages + 2
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.create_function("made", 4, _checksum)

        def fill(statement: str, count: int, **values: object) -> None:
            connection.execute(NUMBERS + statement, {"count": count, "now": now, **values})

        fill(OPEN, messages - 1)
        for state, count in (("parked", PARKED), ("expired", EXPIRED)):
            fill(GIVEN_UP, many(count), first=first, state=state)
            first += many(count)
        fill(ATTEMPTS, 2)
        fill(OF_THE_GONE, many(GONE), first=first)
        fill(CONFIRMED, many(KEPT), first=first + many(GONE))
        fill(ENQUEUED, many(KEYS))
        fill(SENT, many(IN_FLIGHT) // 100 or 1)
        gone = many(GONE) + many(KEPT)
        connection.execute(LEDGER, {"confirmed": gone, "last_id": first + gone})


if __name__ == "__main__":
    make_million(Path(sys.argv[1]))
