-- Every statement on messages and their counts, by name (see sql.py). Hot ones first.

-- name: has_schema
SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'reliablepub_schema';

-- name: schema_version
SELECT coalesce(max(version), 0) FROM reliablepub_schema;

-- name: record_migration
INSERT INTO reliablepub_schema (version, applied_at) VALUES (?, ?);

-- name: owner
SELECT id, pid FROM reliablepub_runs ORDER BY id DESC LIMIT 1;

-- name: last_id
SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'reliablepub_messages';

-- name: insert_message
INSERT INTO reliablepub_messages (
    id, message_id, exchange, routing_key, properties, stored_at, due_at,
    nacked, returned, refused, uncertain, size, checksum, body
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: delete_run
DELETE FROM reliablepub_messages WHERE id BETWEEN ? AND ? RETURNING size;

-- name: reschedule
UPDATE reliablepub_messages
SET due_at = ?, nacked = ?, returned = ?, refused = ?, uncertain = ? WHERE id = ?;

-- name: park
INSERT INTO reliablepub_parked
SELECT
    id, message_id, exchange, routing_key, properties, stored_at,
    :at, :state, :outcome, :reply_code, :reply_text, :nacked, :returned, :refused, :uncertain,
    size, checksum, body
FROM reliablepub_messages WHERE id = :id;

-- name: insert_attempt
INSERT INTO reliablepub_attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_in_flight
INSERT OR REPLACE INTO reliablepub_in_flight (epoch, first_tag, count, ids, sent_at)
VALUES (?, ?, ?, ?, ?);

-- name: delete_in_flight
DELETE FROM reliablepub_in_flight WHERE epoch = ? AND first_tag = ?;

-- name: advance_source
INSERT INTO reliablepub_sources (name, position) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET position = position + excluded.position;

-- name: change_ledger
UPDATE reliablepub_ledger SET
    stored = stored + :stored,
    confirmed = confirmed + :confirmed,
    parked = parked + :parked,
    expired = expired + :expired,
    open_bytes = open_bytes + :open_bytes
RETURNING stored, confirmed, parked, expired, discarded, open_bytes;

-- name: ledger
SELECT stored, confirmed, parked, expired, discarded, open_bytes FROM reliablepub_ledger;

-- Reading. Text is read as bytes, so that a flipped bit in it is found by the checksum and not by the
-- decoder; messages are read lazily, up to a limit in messages and bytes.

-- name: ready
SELECT
    id, CAST(message_id AS BLOB), CAST(exchange AS BLOB), CAST(routing_key AS BLOB),
    CAST(properties AS BLOB), stored_at, due_at, nacked, returned, refused, uncertain, checksum, body
FROM reliablepub_messages WHERE id BETWEEN ? AND ? AND due_at IS NULL ORDER BY id;

-- name: message
SELECT
    id, CAST(message_id AS BLOB), CAST(exchange AS BLOB), CAST(routing_key AS BLOB),
    CAST(properties AS BLOB), stored_at, due_at, nacked, returned, refused, uncertain, checksum, body
FROM reliablepub_messages WHERE id = ?;

-- name: waiting
SELECT id, due_at FROM reliablepub_messages WHERE due_at IS NOT NULL ORDER BY due_at, id;

-- name: lowest_open
SELECT min(id) FROM reliablepub_messages;

-- name: position
SELECT position FROM reliablepub_sources WHERE name = ?;

-- name: forget_source
DELETE FROM reliablepub_sources WHERE name = ?;

-- name: park_unreadable
INSERT INTO reliablepub_parked
SELECT
    id, message_id, exchange, routing_key, properties, stored_at,
    :at, 'parked', 'refused', 0, :reply_text, nacked, returned, refused, uncertain,
    size, checksum, body
FROM reliablepub_messages WHERE id = :id;

-- The row cannot be trusted, so neither can its size: count the others afresh.
-- name: recount_open_bytes
UPDATE reliablepub_ledger
SET open_bytes = (SELECT coalesce(sum(size), 0) FROM reliablepub_messages);

-- A relay begins and ends.

-- name: begin_run
INSERT INTO reliablepub_runs (pid, host, started_at) VALUES (?, ?, ?) RETURNING id;

-- name: end_run
UPDATE reliablepub_runs SET ended_at = ? WHERE id = ?;

-- name: count_left_in_flight
UPDATE reliablepub_messages SET uncertain = uncertain + 1
WHERE id IN (SELECT id FROM reliablepub_in_flight_tags);

-- name: remember_left_in_flight
INSERT INTO reliablepub_attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
)
SELECT id, message_id, :at, epoch, tag, 'uncertain', 0, :reply_text, 'possibly persisted'
FROM reliablepub_in_flight_tags ORDER BY epoch, tag;

-- name: clear_in_flight
DELETE FROM reliablepub_in_flight;

-- name: forget_old_attempts
DELETE FROM reliablepub_attempts WHERE at < ?
AND id NOT IN (SELECT id FROM reliablepub_messages)
AND id NOT IN (SELECT id FROM reliablepub_parked);

-- People ask, and change their mind.

-- name: waiting_count
SELECT count(*) FROM reliablepub_messages WHERE due_at IS NOT NULL;

-- name: in_flight_count
SELECT count(*) FROM reliablepub_in_flight_tags;

-- name: oldest_open_at
SELECT stored_at FROM reliablepub_messages ORDER BY id LIMIT 1;

-- name: parked
SELECT
    id, message_id, exchange, routing_key, state, outcome, reply_code, reply_text,
    nacked + returned + refused + uncertain AS attempts, stored_at, parked_at, size
FROM reliablepub_parked ORDER BY parked_at, id LIMIT ?;

-- name: parked_ids
SELECT id FROM reliablepub_parked ORDER BY id;

-- name: unpark
INSERT INTO reliablepub_messages (
    id, message_id, exchange, routing_key, properties, stored_at, due_at,
    nacked, returned, refused, uncertain, size, checksum, body
)
SELECT
    id, message_id, exchange, routing_key, properties, stored_at, ?,
    0, 0, 0, uncertain, size, checksum, body
FROM reliablepub_parked WHERE id = ?;

-- name: delete_parked
DELETE FROM reliablepub_parked WHERE id = ? RETURNING state, size;
