-- Every statement on messages and their counts, by name (see sql.py). Hot ones first.

-- name: owner
SELECT id, pid FROM runs ORDER BY id DESC LIMIT 1;

-- name: last_id
SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'messages';

-- name: insert_message
INSERT INTO messages (
    id, message_id, exchange, routing_key, properties, stored_at, due_at,
    nacked, returned, refused, uncertain, size, checksum, body
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: delete_run
DELETE FROM messages WHERE id BETWEEN ? AND ? RETURNING size;

-- name: reschedule
UPDATE messages SET due_at = ?, nacked = ?, returned = ?, refused = ?, uncertain = ? WHERE id = ?;

-- name: park
INSERT INTO parked
SELECT
    id, message_id, exchange, routing_key, properties, stored_at,
    :at, :state, :outcome, :reply_code, :reply_text, :nacked, :returned, :refused, :uncertain,
    size, checksum, body
FROM messages WHERE id = :id;

-- name: insert_attempt
INSERT INTO attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_in_flight
INSERT OR REPLACE INTO in_flight (epoch, first_tag, count, ids, sent_at) VALUES (?, ?, ?, ?, ?);

-- name: delete_in_flight
DELETE FROM in_flight WHERE epoch = ? AND first_tag = ?;

-- name: advance_source
INSERT INTO sources (name, position) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET position = position + excluded.position;

-- name: change_ledger
UPDATE ledger SET
    stored = stored + :stored,
    confirmed = confirmed + :confirmed,
    parked = parked + :parked,
    expired = expired + :expired,
    open_bytes = open_bytes + :open_bytes
RETURNING stored, confirmed, parked, expired, discarded, open_bytes;

-- name: ledger
SELECT stored, confirmed, parked, expired, discarded, open_bytes FROM ledger;

-- Reading. Text is read as bytes, so that a flipped bit in it is found by the checksum and not by the
-- decoder; `FROM messages` is read lazily, up to a limit in messages and bytes.

-- name: ready
SELECT
    id, CAST(message_id AS BLOB), CAST(exchange AS BLOB), CAST(routing_key AS BLOB),
    CAST(properties AS BLOB), stored_at, due_at, nacked, returned, refused, uncertain, checksum, body
FROM messages WHERE id BETWEEN ? AND ? AND due_at IS NULL ORDER BY id;

-- name: message
SELECT
    id, CAST(message_id AS BLOB), CAST(exchange AS BLOB), CAST(routing_key AS BLOB),
    CAST(properties AS BLOB), stored_at, due_at, nacked, returned, refused, uncertain, checksum, body
FROM messages WHERE id = ?;

-- name: waiting
SELECT id, due_at FROM messages WHERE due_at IS NOT NULL ORDER BY due_at, id;

-- name: lowest_open
SELECT min(id) FROM messages;

-- name: position
SELECT position FROM sources WHERE name = ?;

-- name: forget_source
DELETE FROM sources WHERE name = ?;

-- name: park_unreadable
INSERT INTO parked
SELECT
    id, message_id, exchange, routing_key, properties, stored_at,
    :at, 'parked', 'refused', 0, :reply_text, nacked, returned, refused, uncertain,
    size, checksum, body
FROM messages WHERE id = :id;

-- The row cannot be trusted, so neither can its size: count the others afresh.
-- name: recount_open_bytes
UPDATE ledger SET open_bytes = (SELECT coalesce(sum(size), 0) FROM messages);

-- A relay begins and ends.

-- name: begin_run
INSERT INTO runs (pid, host, started_at) VALUES (?, ?, ?) RETURNING id;

-- name: end_run
UPDATE runs SET ended_at = ? WHERE id = ?;

-- name: count_left_in_flight
UPDATE messages SET uncertain = uncertain + 1 WHERE id IN (SELECT id FROM in_flight_tags);

-- name: remember_left_in_flight
INSERT INTO attempts (id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence)
SELECT id, message_id, :at, epoch, tag, 'uncertain', 0, :reply_text, 'possibly persisted'
FROM in_flight_tags ORDER BY epoch, tag;

-- name: clear_in_flight
DELETE FROM in_flight;

-- name: forget_old_attempts
DELETE FROM attempts WHERE at < ?
AND id NOT IN (SELECT id FROM messages) AND id NOT IN (SELECT id FROM parked);

-- People ask, and change their mind.

-- name: waiting_count
SELECT count(*) FROM messages WHERE due_at IS NOT NULL;

-- name: in_flight_count
SELECT count(*) FROM in_flight_tags;

-- name: oldest_open_at
SELECT stored_at FROM messages ORDER BY id LIMIT 1;

-- name: parked
SELECT
    id, message_id, exchange, routing_key, state, outcome, reply_code, reply_text,
    nacked + returned + refused + uncertain AS attempts, stored_at, parked_at, size
FROM parked ORDER BY parked_at, id LIMIT ?;

-- name: parked_ids
SELECT id FROM parked ORDER BY id;

-- name: unpark
INSERT INTO messages (
    id, message_id, exchange, routing_key, properties, stored_at, due_at,
    nacked, returned, refused, uncertain, size, checksum, body
)
SELECT
    id, message_id, exchange, routing_key, properties, stored_at, ?,
    0, 0, 0, uncertain, size, checksum, body
FROM parked WHERE id = ?;

-- name: delete_parked
DELETE FROM parked WHERE id = ? RETURNING state, size;
