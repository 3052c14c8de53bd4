-- What is kept of messages that are gone.

-- Messages that the broker has confirmed, where the relay was asked to keep them for a while; not a
-- part of the ledger's sum. `confirmed_at` comes before the texts, so that no such row can be taken
-- for an open message when a damaged file is salvaged.
CREATE TABLE reliablepub_confirmed (
    id INTEGER PRIMARY KEY,
    confirmed_at REAL NOT NULL,
    message_id TEXT NOT NULL,
    exchange TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    ordering_key TEXT,
    properties TEXT NOT NULL,
    stored_at REAL NOT NULL,
    size INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;

CREATE INDEX reliablepub_confirmed_by_time ON reliablepub_confirmed (confirmed_at);

-- Which message was enqueued under which key of the caller's: a second one is not stored.
CREATE TABLE reliablepub_keys (
    key TEXT PRIMARY KEY,
    id INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    kept_until REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX reliablepub_keys_by_time ON reliablepub_keys (kept_until);

CREATE VIEW reliablepub_confirmed_messages AS
SELECT
    id,
    message_id,
    exchange,
    routing_key,
    ordering_key,
    datetime(stored_at, 'unixepoch') AS stored_at,
    datetime(confirmed_at, 'unixepoch') AS confirmed_at,
    size
FROM reliablepub_confirmed;
