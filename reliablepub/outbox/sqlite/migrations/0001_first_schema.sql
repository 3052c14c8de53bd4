-- The first schema. A migration that was released is never changed; see schema.sql for the whole.

-- Which migrations this database has been through: its highest version is what the tables are. Not
-- `user_version`, which belongs to the application whose database this may be.
CREATE TABLE reliablepub_schema (
    version INTEGER PRIMARY KEY,
    applied_at REAL NOT NULL
) STRICT;

-- Open messages. A row leaves only in the transaction of its verdict; what is in flight is not marked
-- here. AUTOINCREMENT: ids must not be given out twice, though most rows are soon deleted. The body
-- is the last column, so that the others can be read without it.
CREATE TABLE reliablepub_messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    message_id TEXT NOT NULL,
    exchange TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    properties TEXT NOT NULL DEFAULT '{}',
    stored_at REAL NOT NULL,
    due_at REAL,
    nacked INTEGER NOT NULL DEFAULT 0,
    returned INTEGER NOT NULL DEFAULT 0,
    refused INTEGER NOT NULL DEFAULT 0,
    uncertain INTEGER NOT NULL DEFAULT 0,
    size INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;

CREATE INDEX reliablepub_messages_waiting ON reliablepub_messages (due_at)
WHERE due_at IS NOT NULL;

-- Messages that were given up, with the last thing that was said about them. They can be retried.
CREATE TABLE reliablepub_parked (
    id INTEGER PRIMARY KEY,
    message_id TEXT NOT NULL,
    exchange TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    properties TEXT NOT NULL,
    stored_at REAL NOT NULL,
    parked_at REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('parked', 'expired')),
    outcome TEXT NOT NULL,
    reply_code INTEGER NOT NULL,
    reply_text TEXT NOT NULL,
    nacked INTEGER NOT NULL,
    returned INTEGER NOT NULL,
    refused INTEGER NOT NULL,
    uncertain INTEGER NOT NULL,
    size INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;

-- Every attempt that did not end in a confirm: the story of one message is read by `id`.
CREATE TABLE reliablepub_attempts (
    attempt INTEGER PRIMARY KEY,
    id INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    at REAL NOT NULL,
    epoch TEXT NOT NULL,
    tag INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    reply_code INTEGER NOT NULL,
    reply_text TEXT NOT NULL,
    persistence TEXT NOT NULL
        CHECK (persistence IN ('not written', 'possibly persisted', 'persisted'))
) STRICT;

CREATE INDEX reliablepub_attempts_of_message ON reliablepub_attempts (id, epoch, tag);

-- Delivery tags in flight, one row a batch: written for people, never read to decide. `ids` is JSON,
-- [[first id, how many], ...] in the order of the tags, because ids mostly follow each other.
CREATE TABLE reliablepub_in_flight (
    epoch TEXT NOT NULL,
    first_tag INTEGER NOT NULL,
    count INTEGER NOT NULL CHECK (count > 0),
    ids TEXT NOT NULL,
    sent_at REAL NOT NULL,
    PRIMARY KEY (epoch, first_tag)
) STRICT, WITHOUT ROWID;

-- One row. Changed in the transactions that move the messages, by what these really changed.
CREATE TABLE reliablepub_ledger (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    stored INTEGER NOT NULL CHECK (stored >= 0),
    confirmed INTEGER NOT NULL CHECK (confirmed >= 0),
    parked INTEGER NOT NULL CHECK (parked >= 0),
    expired INTEGER NOT NULL CHECK (expired >= 0),
    discarded INTEGER NOT NULL CHECK (discarded >= 0),
    open_bytes INTEGER NOT NULL CHECK (open_bytes >= 0),
    CHECK (stored >= confirmed + parked + expired + discarded)
) STRICT;

INSERT INTO reliablepub_ledger VALUES (1, 0, 0, 0, 0, 0, 0);

-- Each relay that opened this outbox. The newest one owns it; its number names its channel epochs.
CREATE TABLE reliablepub_runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    started_at REAL NOT NULL,
    ended_at REAL
) STRICT;

-- How many messages of a replayable source were ever stored, so that it can go on where it stopped.
CREATE TABLE reliablepub_sources (
    name TEXT PRIMARY KEY,
    position INTEGER NOT NULL CHECK (position >= 0)
) STRICT, WITHOUT ROWID;

-- For people. ----------------------------------------------------------------------------------

CREATE VIEW reliablepub_in_flight_tags AS
WITH id_runs AS (
    SELECT
        f.epoch,
        f.sent_at,
        json_extract(r.value, '$[0]') AS first_id,
        json_extract(r.value, '$[1]') AS length,
        f.first_tag + coalesce(
            sum(json_extract(r.value, '$[1]')) OVER (
                PARTITION BY f.epoch, f.first_tag ORDER BY r.key
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ), 0
        ) AS first_tag
    FROM reliablepub_in_flight AS f, json_each(f.ids) AS r
)
SELECT
    r.epoch,
    r.first_tag + m.id - r.first_id AS tag,
    m.id,
    m.message_id,
    m.exchange,
    m.routing_key,
    datetime(r.sent_at, 'unixepoch') AS sent_at
FROM id_runs AS r
JOIN reliablepub_messages AS m ON m.id BETWEEN r.first_id AND r.first_id + r.length - 1
-- An attempt that ended well took its message away; one that ended badly is in the history.
WHERE NOT EXISTS (
    SELECT 1 FROM reliablepub_attempts AS a
    WHERE a.id = m.id AND a.epoch = r.epoch AND a.tag = r.first_tag + m.id - r.first_id
);

CREATE VIEW reliablepub_open AS
SELECT
    id,
    message_id,
    exchange,
    routing_key,
    datetime(stored_at, 'unixepoch') AS stored_at,
    datetime(due_at, 'unixepoch') AS due_at,
    nacked,
    returned,
    refused,
    uncertain,
    size
FROM reliablepub_messages;

CREATE VIEW reliablepub_parked_messages AS
SELECT
    id,
    message_id,
    exchange,
    routing_key,
    state,
    outcome,
    reply_code,
    reply_text,
    nacked + returned + refused + uncertain AS attempts,
    datetime(stored_at, 'unixepoch') AS stored_at,
    datetime(parked_at, 'unixepoch') AS parked_at,
    size
FROM reliablepub_parked;

CREATE VIEW reliablepub_history AS
SELECT
    id,
    message_id,
    datetime(at, 'unixepoch') AS at,
    outcome,
    reply_code,
    reply_text,
    persistence,
    epoch,
    tag
FROM reliablepub_attempts
ORDER BY attempt;

-- Every difference is 0, or something outside of this library has changed the tables.
CREATE VIEW reliablepub_audit AS
SELECT
    stored,
    confirmed,
    parked,
    expired,
    discarded,
    stored - confirmed - parked - expired - discarded AS open,
    stored - confirmed - parked - expired - discarded
        - (SELECT count(*) FROM reliablepub_messages) AS open_difference,
    parked
        - (SELECT count(*) FROM reliablepub_parked WHERE state = 'parked') AS parked_difference,
    expired
        - (SELECT count(*) FROM reliablepub_parked WHERE state = 'expired') AS expired_difference,
    open_bytes
        - (SELECT coalesce(sum(size), 0) FROM reliablepub_messages) AS bytes_difference
FROM reliablepub_ledger;
