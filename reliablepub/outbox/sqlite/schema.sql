-- The tables of an outbox, version 11 (see `VERSION` in connections.py).
--
-- The database may belong to an application, so every name begins with `reliablepub_`. Indexes, triggers
-- and rows name the database, `main`: otherwise they would become those of a temporary table of the
-- application, if it has one of that name.
--
-- An open message is in `reliablepub_messages`, and a parked or expired one in `reliablepub_parked`.
-- A confirmed message is in neither, and is only counted in `reliablepub_ledger`. A row moves in one
-- transaction, under the same id and together with its count, so that at every commit
--   stored = confirmed + parked + expired + discarded + (rows in reliablepub_messages).

-- The version of these tables, and when they were created; the highest one counts. `user_version` is
-- not used, because it belongs to the application.
CREATE TABLE reliablepub_schema (
    version INTEGER PRIMARY KEY,
    applied_at REAL NOT NULL
) STRICT;

-- Open messages. A row leaves in the transaction that records its final outcome. Messages in flight
-- are not marked here. The ledger assigns the ids: AUTOINCREMENT would write one more page in each
-- commit, for its own table.
-- The columns before `body` can be read without it; the columns after it are found by their indexes.
CREATE TABLE reliablepub_messages (
    id INTEGER PRIMARY KEY,
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
    body BLOB NOT NULL,
    expires_at REAL,
    ordering_key TEXT,
    refused_at REAL
) STRICT;

CREATE INDEX main.reliablepub_messages_waiting ON reliablepub_messages (due_at)
WHERE due_at IS NOT NULL;

CREATE INDEX main.reliablepub_messages_expiring ON reliablepub_messages (expires_at)
WHERE expires_at IS NOT NULL;

-- Messages whose destination is paused have an infinite due time.
CREATE INDEX main.reliablepub_messages_held ON reliablepub_messages (exchange, routing_key)
WHERE due_at = 9e999;

CREATE INDEX main.reliablepub_messages_held_of_exchange ON reliablepub_messages (exchange)
WHERE due_at = 9e999;

-- In the order of the ids, which is that of the commits: every index ends with the id.
CREATE INDEX main.reliablepub_messages_of_key ON reliablepub_messages (ordering_key)
WHERE ordering_key IS NOT NULL;

-- Parked and expired messages, with their last outcome. An operator can retry them.
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
    body BLOB NOT NULL,
    expires_at REAL,
    ordering_key TEXT,
    is_skipped INTEGER NOT NULL DEFAULT 0
) STRICT;

-- A parked message holds its ordering key: later messages of the key wait until an operator decides.
CREATE INDEX main.reliablepub_parked_holding ON reliablepub_parked (ordering_key)
WHERE ordering_key IS NOT NULL AND state = 'parked' AND is_skipped = 0;

-- When a key is no longer held, its next message becomes due, so that the relay finds it. A due time of
-- 0 is due whatever the clock says.
CREATE TRIGGER main.reliablepub_key_skipped AFTER UPDATE OF is_skipped ON reliablepub_parked
WHEN NEW.ordering_key IS NOT NULL AND NEW.is_skipped <> 0
BEGIN
    UPDATE reliablepub_messages SET due_at = 0
    WHERE due_at IS NULL AND id = (
        SELECT min(id) FROM reliablepub_messages WHERE ordering_key = NEW.ordering_key
    );
END;

CREATE TRIGGER main.reliablepub_key_released AFTER DELETE ON reliablepub_parked
WHEN OLD.ordering_key IS NOT NULL
BEGIN
    UPDATE reliablepub_messages SET due_at = 0
    WHERE due_at IS NULL AND id = (
        SELECT min(id) FROM reliablepub_messages WHERE ordering_key = OLD.ordering_key
    );
END;

-- The history of messages that were not confirmed at once: each attempt that ended without a confirm,
-- and the confirm after it, if there was one. To be looked up by the `id` of the message.
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

CREATE INDEX main.reliablepub_attempts_of_message ON reliablepub_attempts (id, epoch, tag);

-- Delivery tags in flight, one row a batch; a message that its caller has stored has a row of its own, with
-- its id as the tag of epoch 0. Operators see them, and a relay that starts records the
-- messages in them as uncertain; no message is sent or settled because of them. `ids` is JSON,
-- [[first id, count], ...] in the order of the tags, because ids are mostly consecutive.
CREATE TABLE reliablepub_in_flight (
    epoch TEXT NOT NULL,
    first_tag INTEGER NOT NULL,
    count INTEGER NOT NULL CHECK (count > 0),
    ids TEXT NOT NULL,
    sent_at REAL NOT NULL,
    PRIMARY KEY (epoch, first_tag)
) STRICT, WITHOUT ROWID;

-- One row, changed in the transactions that move messages, by the number of rows really changed.
-- `last_id` is the highest id of a message ever assigned: no id is assigned twice, though most rows
-- are soon deleted.
CREATE TABLE reliablepub_ledger (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    last_id INTEGER NOT NULL CHECK (last_id >= 0),
    stored INTEGER NOT NULL CHECK (stored >= 0),
    confirmed INTEGER NOT NULL CHECK (confirmed >= 0),
    parked INTEGER NOT NULL CHECK (parked >= 0),
    expired INTEGER NOT NULL CHECK (expired >= 0),
    discarded INTEGER NOT NULL CHECK (discarded >= 0),
    open_bytes INTEGER NOT NULL CHECK (open_bytes >= 0),
    CHECK (stored >= confirmed + parked + expired + discarded)
) STRICT;

INSERT INTO main.reliablepub_ledger VALUES (1, 0, 0, 0, 0, 0, 0, 0);

-- The last 1,000 runs of relays on this outbox. The newest one owns it; its number is part of the names
-- of its channel epochs.
CREATE TABLE reliablepub_runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    started_at REAL NOT NULL,
    ended_at REAL
) STRICT;

-- Number of messages ever stored from a replayable source, so that it can continue after them.
CREATE TABLE reliablepub_sources (
    name TEXT PRIMARY KEY,
    position INTEGER NOT NULL CHECK (position >= 0)
) STRICT, WITHOUT ROWID;

-- Confirmed messages that the relay keeps for the retention time. The ledger counts them as
-- confirmed. `confirmed_at` comes before the texts, so that a salvage of a damaged file cannot take
-- such a row for an open message.
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

CREATE INDEX main.reliablepub_confirmed_by_time ON reliablepub_confirmed (confirmed_at);

-- Deduplication keys of callers: a second message with a known key is not stored.
CREATE TABLE reliablepub_keys (
    key TEXT PRIMARY KEY,
    id INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    kept_until REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX main.reliablepub_keys_by_time ON reliablepub_keys (kept_until);

-- Interventions of operators in single messages, with the address that the message had before. The
-- relay looks for new ones in each commit, and drops these messages from memory. AUTOINCREMENT: a
-- number that the relay has seen must not be assigned again.
CREATE TABLE reliablepub_interventions (
    intervention INTEGER PRIMARY KEY AUTOINCREMENT,
    id INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    exchange TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    at REAL NOT NULL,
    action TEXT NOT NULL,
    person TEXT NOT NULL,
    note TEXT NOT NULL
) STRICT;

CREATE INDEX main.reliablepub_interventions_of_message ON reliablepub_interventions (id);

-- Messages as they were before an operator edited them. They go with the history of the intervention.
CREATE TABLE reliablepub_originals (
    intervention INTEGER PRIMARY KEY,
    id INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    exchange TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    ordering_key TEXT,
    properties TEXT NOT NULL,
    checksum INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;

CREATE INDEX main.reliablepub_originals_of_message ON reliablepub_originals (id);

CREATE TRIGGER main.reliablepub_intervention_forgotten AFTER DELETE ON reliablepub_interventions
BEGIN
    DELETE FROM reliablepub_originals WHERE intervention = OLD.intervention;
END;

-- Views for operators. ---------------------------------------------------------------------------

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
    ordering_key,
    datetime(stored_at, 'unixepoch') AS stored_at,
    datetime(nullif(due_at, 0), 'unixepoch') AS due_at,
    datetime(expires_at, 'unixepoch') AS expires_at,
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
    ordering_key,
    state,
    outcome,
    reply_code,
    reply_text,
    nacked + returned + refused + uncertain AS attempts,
    datetime(stored_at, 'unixepoch') AS stored_at,
    datetime(parked_at, 'unixepoch') AS parked_at,
    datetime(expires_at, 'unixepoch') AS expires_at,
    size
FROM reliablepub_parked;

CREATE VIEW reliablepub_held_keys AS
SELECT
    p.ordering_key,
    p.id,
    p.message_id,
    p.outcome,
    p.reply_code,
    p.reply_text,
    datetime(p.parked_at, 'unixepoch') AS parked_at,
    (
        SELECT count(*) FROM reliablepub_messages AS m
        WHERE m.ordering_key = p.ordering_key AND m.id > p.id
    ) AS held_back
FROM reliablepub_parked AS p
WHERE p.ordering_key IS NOT NULL AND p.state = 'parked' AND p.is_skipped = 0;

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

-- Every difference is 0, unless another program has changed the tables.
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
