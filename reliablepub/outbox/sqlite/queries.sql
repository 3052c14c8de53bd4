-- Statements for a SQLite file, by name (see sql.py); those for every database are in `../queries.sql`.

-- name: has_schema
SELECT count(*) FROM main.sqlite_schema WHERE type = 'table' AND name = 'reliablepub_schema';

-- name: schema_version
SELECT coalesce(max(version), 0) FROM main.reliablepub_schema;

-- name: record_version
INSERT INTO main.reliablepub_schema (version, applied_at) VALUES (?, ?);

-- name: owner
SELECT id, pid, (SELECT coalesce(max(intervention), 0) FROM reliablepub_interventions)
FROM reliablepub_runs ORDER BY id DESC LIMIT 1;

-- Statements that run on the connection of an application name the database, `main`. Otherwise SQLite
-- would look first among its temporary tables, and last in the databases that the application has
-- attached, where the tables of another outbox may be.

-- name: stand_in
SELECT name FROM temp.sqlite_schema WHERE name GLOB 'reliablepub_*' LIMIT 1;

-- Each id is counted as stored: a damaged last_id, which no checksum covers, assigns none again.
-- name: last_id
SELECT CAST(coalesce(max(max(last_id, stored)), 0) AS INTEGER) FROM main.reliablepub_ledger;

-- Expressions, because the application may have registered converters for the columns' types.
-- name: snapshot
SELECT
    max(last_id, stored), stored + 0, confirmed + 0, parked + 0, expired + 0, discarded + 0, open_bytes + 0
FROM main.reliablepub_ledger;

-- name: insert_message
INSERT INTO main.reliablepub_messages (
    id, message_id, exchange, routing_key, properties, stored_at, size, checksum, body,
    due_at, nacked, returned, refused, uncertain, expires_at, ordering_key, refused_at
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- Most messages have only these columns, and many are stored by one statement. OR FAIL: if a row is
-- refused, the rows before it stay until the turn is rolled back. By default SQLite would undo the
-- statement alone, for which it first copies each page to a temporary file.
-- name: insert_plain_message
INSERT OR FAIL INTO main.reliablepub_messages (
    id, message_id, exchange, routing_key, properties, stored_at, size, checksum, body
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- `total` within bounds instead of `sum`, which fails if a size was edited to 2^63-1.
-- name: size_of_run
SELECT CAST(min(max(total(size), 0), 1e12) AS INTEGER) FROM reliablepub_messages WHERE id BETWEEN ? AND ?;

-- `size_of_run` and this statement together cost half as much as one DELETE with RETURNING.
-- name: delete_run
DELETE FROM reliablepub_messages WHERE id BETWEEN ? AND ?;

-- name: keep_confirmed
INSERT OR IGNORE INTO reliablepub_confirmed (
    id, confirmed_at, message_id, exchange, routing_key, ordering_key,
    properties, stored_at, size, checksum, body
)
SELECT
    id, ?, message_id, exchange, routing_key, ordering_key,
    properties, stored_at, size, checksum, body
FROM reliablepub_messages WHERE id BETWEEN ? AND ?;

-- name: has_confirmed
SELECT 1 FROM reliablepub_confirmed WHERE confirmed_at <= :before LIMIT 1;

-- A key is known until `kept_until`, and as long as its message is open or parked. The cast keeps the
-- application's converters away (`sqlite3.register_converter`).
-- name: key
SELECT CAST(message_id AS TEXT) FROM main.reliablepub_keys AS k WHERE key = :key AND (
    kept_until >= :now
    OR EXISTS (SELECT 1 FROM main.reliablepub_messages AS m WHERE m.id = k.id)
    OR EXISTS (SELECT 1 FROM main.reliablepub_parked AS p WHERE p.id = k.id)
);

-- name: remember_key
INSERT OR REPLACE INTO main.reliablepub_keys (key, id, message_id, kept_until) VALUES (?, ?, ?, ?);

-- name: overdue_keys
SELECT
    CAST(key AS TEXT),
    EXISTS (SELECT 1 FROM main.reliablepub_messages AS m WHERE m.id = k.id)
    OR EXISTS (SELECT 1 FROM main.reliablepub_parked AS p WHERE p.id = k.id)
FROM main.reliablepub_keys AS k WHERE kept_until < :now ORDER BY kept_until LIMIT :limit;

-- name: prolong_key
UPDATE main.reliablepub_keys SET kept_until = :until WHERE key = :key;

-- An enqueuer may have used it again since it was found.
-- name: forget_overdue_key
DELETE FROM main.reliablepub_keys WHERE key = :key AND kept_until < :now;

-- name: reschedule
UPDATE reliablepub_messages
SET due_at = ?, nacked = ?, returned = ?, refused = ?, uncertain = ?, refused_at = ? WHERE id = ?;

-- The wall clock was set: waits for a retry or for a paused destination stay as long as they were.
-- name: rebase
UPDATE reliablepub_messages INDEXED BY reliablepub_messages_waiting SET
    due_at = iif(due_at = 0, 0.0, max(0.0, due_at + :by)), refused_at = max(0.0, refused_at + :by)
WHERE due_at IS NOT NULL AND (refused_at IS NOT NULL OR nacked + returned + refused > 0);

-- Retries scheduled by an earlier run when the clock was ahead of now: their waits stay as long. A time
-- that a flipped bit has made text comes after every number, and is left out.
-- name: rebase_retries
UPDATE reliablepub_messages AS m SET
    due_at = :now + max(0.0, m.due_at - (
        SELECT max(a.at) FROM reliablepub_attempts AS a WHERE a.id = m.id AND a.at < 9e999
    )),
    refused_at = min(m.refused_at, :now)
WHERE m.id IN (SELECT id FROM reliablepub_attempts WHERE at > :now AND at < 9e999)
AND m.due_at > :now AND m.due_at < 9e999 AND m.nacked + m.returned + m.refused > 0;

-- name: park
INSERT INTO reliablepub_parked (
    id, message_id, exchange, routing_key, properties, stored_at,
    parked_at, state, outcome, reply_code, reply_text, nacked, returned, refused, uncertain,
    size, checksum, body, expires_at, ordering_key
)
SELECT
    id, message_id, exchange, routing_key, properties, stored_at,
    ?, ?, ?, ?, ?, ?, ?, ?, ?,
    size, checksum, body, expires_at, ordering_key
FROM reliablepub_messages WHERE id = ?;

-- Messages whose destination is paused have an infinite due time. A page of them has ids above that of
-- the preceding page.
-- name: held
SELECT id FROM reliablepub_messages INDEXED BY reliablepub_messages_waiting
WHERE due_at = 9e999 AND id > :id ORDER BY id LIMIT :limit;

-- name: held_of_exchange
SELECT id FROM reliablepub_messages INDEXED BY reliablepub_messages_held_of_exchange
WHERE due_at = 9e999 AND exchange = :exchange AND id > :id ORDER BY id LIMIT :limit;

-- name: held_of_address
SELECT id FROM reliablepub_messages INDEXED BY reliablepub_messages_held
WHERE due_at = 9e999 AND exchange = :exchange AND routing_key = :routing_key AND id > :id
ORDER BY id LIMIT :limit;

-- name: release
UPDATE reliablepub_messages SET due_at = 0 WHERE id = ?;

-- name: count_held_of_exchange
SELECT count(*) FROM reliablepub_messages INDEXED BY reliablepub_messages_held WHERE due_at = 9e999 AND exchange = :exchange;

-- name: count_held_of_address
SELECT count(*) FROM reliablepub_messages INDEXED BY reliablepub_messages_held
WHERE due_at = 9e999 AND exchange = :exchange AND routing_key = :routing_key;

-- name: held_exchanges
SELECT CAST(exchange AS BLOB), count(*), min(id) FROM reliablepub_messages INDEXED BY reliablepub_messages_held
WHERE due_at = 9e999 GROUP BY exchange LIMIT ?;

-- name: refused_at
SELECT refused_at FROM reliablepub_messages WHERE id = ?;

-- name: parked_address
SELECT CAST(message_id AS BLOB), CAST(exchange AS BLOB), CAST(routing_key AS BLOB), nacked + uncertain > 0
FROM reliablepub_parked WHERE id = ?;

-- name: insert_attempt
INSERT INTO reliablepub_attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_in_flight
INSERT OR REPLACE INTO reliablepub_in_flight (epoch, first_tag, count, ids, sent_at)
VALUES (?, ?, ?, ?, ?);

-- name: delete_in_flight
DELETE FROM reliablepub_in_flight WHERE epoch = ? AND first_tag = ?;

-- The bytes stay at least 0 even if a size was edited in the file, which an audit reports. To read the
-- ledger afterwards costs half as much as RETURNING.
-- name: change_ledger
UPDATE reliablepub_ledger SET
    last_id = max(last_id, stored) + :ids,
    stored = stored + :stored,
    confirmed = confirmed + :confirmed,
    parked = parked + :parked,
    expired = expired + :expired,
    discarded = discarded + :discarded,
    open_bytes = CAST(max(0, open_bytes + :open_bytes) AS INTEGER);

-- Takes the write lock by a write. Finds a row only in an outbox of this version.
-- name: lock
UPDATE main.reliablepub_ledger SET stored = stored
WHERE (SELECT max(version) FROM main.reliablepub_schema) = ?;

-- Writes its page also where the sum of several is 0.
-- name: count_up
UPDATE main.reliablepub_ledger SET stored = stored + :by;

-- name: count_stored
UPDATE main.reliablepub_ledger SET
    last_id = max(last_id, stored) + :count,
    stored = stored + :count,
    open_bytes = CAST(max(0, open_bytes + :size) AS INTEGER);

-- Reading. Text is read as bytes, so that a flipped bit is found by the checksum and not by the
-- decoder. Messages are read one by one, up to a limit in messages and bytes.
--
-- A flipped bit in the head of a row also changes the type of a value. Such a row can be read, but no
-- statement can change or copy it, because the tables are STRICT. So the body is read as NULL, which
-- makes the row a damaged one, unless the texts are text and the body is a blob: HAS_CONTENT, which
-- sql.py fills in, as HAS_NUMBERS.

-- name: next_id_stored
SELECT min(id) FROM reliablepub_messages WHERE id BETWEEN :first_id AND :last_id;

-- A message is next of its ordering key if no earlier one of the key is open, or is parked and holds
-- the key.
-- name: ready
SELECT
    id, CAST(message_id AS BLOB), CAST(exchange AS BLOB), CAST(routing_key AS BLOB),
    CAST(properties AS BLOB), stored_at, due_at, nacked, returned, refused, uncertain, checksum,
    iif(is_first AND HAS_CONTENT, body, NULL),
    expires_at, CAST(ordering_key AS BLOB),
    refused_at, size, is_first
FROM (
    SELECT m.*, m.ordering_key IS NULL OR (NOT EXISTS (
        SELECT 1 FROM reliablepub_messages AS e
        WHERE e.ordering_key = m.ordering_key AND e.id < m.id
    ) AND NOT EXISTS (
        SELECT 1 FROM reliablepub_parked AS p
        WHERE p.ordering_key = m.ordering_key AND p.state = 'parked' AND p.is_skipped = 0
        AND p.id < m.id
    )) AS is_first
    FROM reliablepub_messages AS m
    WHERE m.id BETWEEN ? AND ? AND m.due_at IS NULL ORDER BY m.id
);

-- name: is_first_of_key
SELECT 1 FROM reliablepub_messages AS m WHERE m.id = ? AND NOT EXISTS (
    SELECT 1 FROM reliablepub_messages AS e
    WHERE e.ordering_key = m.ordering_key AND e.id < m.id
) AND NOT EXISTS (
    SELECT 1 FROM reliablepub_parked AS p
    WHERE p.ordering_key = m.ordering_key AND p.state = 'parked' AND p.is_skipped = 0
    AND p.id < m.id
);

-- name: first_of_key
SELECT
    id, CAST(message_id AS BLOB), CAST(exchange AS BLOB), CAST(routing_key AS BLOB),
    CAST(properties AS BLOB), stored_at, due_at, nacked, returned, refused, uncertain, checksum,
    iif(HAS_CONTENT, body, NULL),
    expires_at, CAST(ordering_key AS BLOB), refused_at, size
FROM reliablepub_messages AS m
WHERE m.id = (SELECT min(id) FROM reliablepub_messages WHERE ordering_key = :key)
AND NOT EXISTS (
    SELECT 1 FROM reliablepub_parked AS p
    WHERE p.ordering_key = :key AND p.state = 'parked' AND p.is_skipped = 0 AND p.id < m.id
);

-- The time in which a refused message is retried begins anew when it is next of its key: a row without
-- due_at is not found when the clock is set, and its refused_at would stay one of the old clock.
-- name: wait_for_key
UPDATE reliablepub_messages AS m SET due_at = NULL, refused_at = NULL WHERE m.id = ? AND (EXISTS (
    SELECT 1 FROM reliablepub_messages AS e
    WHERE e.ordering_key = m.ordering_key AND e.id < m.id
) OR EXISTS (
    SELECT 1 FROM reliablepub_parked AS p
    WHERE p.ordering_key = m.ordering_key AND p.state = 'parked' AND p.is_skipped = 0
    AND p.id < m.id
));

-- Ids and times that this library never writes, and that no other statement would ever reach. The
-- statement reads ranges of indexes, so it costs nothing if there are none.
-- name: never_read
SELECT id FROM reliablepub_messages WHERE id < 1
UNION SELECT id FROM reliablepub_messages WHERE id > :id_max
UNION SELECT id FROM reliablepub_messages WHERE due_at > :time_max AND due_at < 9e999
UNION SELECT id FROM reliablepub_messages WHERE expires_at > :time_max;

-- Rows that no statement can change or copy. Reads the whole table.
-- name: mistyped
SELECT id FROM reliablepub_messages WHERE coalesce(HAS_NUMBERS AND HAS_CONTENT, 0) = 0;

-- name: message
SELECT
    id, CAST(message_id AS BLOB), CAST(exchange AS BLOB), CAST(routing_key AS BLOB),
    CAST(properties AS BLOB), stored_at, due_at, nacked, returned, refused, uncertain, checksum,
    iif(HAS_CONTENT, body, NULL),
    expires_at, CAST(ordering_key AS BLOB), refused_at, size
FROM reliablepub_messages WHERE id = ?;

-- Times that became text or bytes come after 9e999, and are left out.
-- name: waiting
SELECT id, due_at FROM reliablepub_messages WHERE due_at <= 9e999 ORDER BY due_at, id;

-- name: expiring
SELECT id, expires_at FROM reliablepub_messages WHERE expires_at <= 9e999 ORDER BY expires_at, id;

-- name: lowest_awaited
SELECT m.id FROM reliablepub_messages AS m
WHERE m.id BETWEEN :first_id AND :last_id
AND (
    m.due_at IS NULL OR m.due_at <= :at OR m.due_at = 9e999
    OR m.nacked + m.returned + m.refused > 0 OR m.refused_at IS NOT NULL
)
AND (m.ordering_key IS NULL OR NOT EXISTS (
    SELECT 1 FROM reliablepub_parked AS p
    WHERE p.ordering_key = m.ordering_key AND p.state = 'parked' AND p.is_skipped = 0
    AND p.id < m.id
) AND NOT EXISTS ( -- nor behind a first one that waits for its time
    SELECT 1 FROM reliablepub_messages AS f
    WHERE f.id = (SELECT min(id) FROM reliablepub_messages WHERE ordering_key = m.ordering_key)
    AND f.id < m.id AND f.due_at > :at AND f.due_at < 9e999
    AND f.nacked + f.returned + f.refused = 0 AND f.refused_at IS NULL
))
ORDER BY m.id LIMIT 1;

-- name: park_as_it_is
INSERT INTO reliablepub_parked (
    id, message_id, exchange, routing_key, properties, stored_at,
    parked_at, state, outcome, reply_code, reply_text, nacked, returned, refused, uncertain,
    size, checksum, body, expires_at, ordering_key
)
SELECT
    id, coalesce(CAST(message_id AS TEXT), ''), coalesce(CAST(exchange AS TEXT), ''),
    coalesce(CAST(routing_key AS TEXT), ''), coalesce(CAST(properties AS TEXT), ''),
    coalesce(CAST(stored_at AS REAL), 0),
    :at, 'parked', :outcome, 0, :reply_text, coalesce(CAST(nacked AS INTEGER), 0),
    coalesce(CAST(returned AS INTEGER), 0), coalesce(CAST(refused AS INTEGER), 0),
    coalesce(CAST(uncertain AS INTEGER), 0), coalesce(CAST(size AS INTEGER), 0),
    coalesce(CAST(checksum AS INTEGER), 0), coalesce(CAST(body AS BLOB), x''),
    CAST(expires_at AS REAL), CAST(ordering_key AS TEXT)
FROM reliablepub_messages WHERE CHOSEN(id);

-- The size of a damaged row cannot be trusted, so the sizes of all others are summed.
-- name: recount_open_bytes
UPDATE reliablepub_ledger
SET open_bytes = (SELECT CAST(max(0, total(size)) AS INTEGER) FROM reliablepub_messages);

-- Start and end of a relay.

-- Rows that were salvaged keep their ids. When a relay starts, a damaged ledger may tell a lower number.
-- name: raise_last_id
UPDATE reliablepub_ledger SET last_id = max(
    last_id,
    stored,
    coalesce((SELECT max(id) FROM reliablepub_messages WHERE id <= :id_max), 0),
    coalesce((SELECT max(id) FROM reliablepub_parked WHERE id <= :id_max), 0),
    coalesce((SELECT max(id) FROM reliablepub_confirmed WHERE id <= :id_max), 0)
);

-- name: begin_run
INSERT INTO reliablepub_runs (pid, host, started_at) VALUES (?, ?, ?) RETURNING id;

-- Programs that run for a moment, once a second, would add 30 million rows a year.
-- name: forget_old_runs
DELETE FROM reliablepub_runs WHERE id <= (SELECT max(id) FROM reliablepub_runs) - 1000;

-- The view fails for ids that are not JSON. They are for operators only, so they are dropped.
-- name: forget_unreadable_tags
DELETE FROM reliablepub_in_flight WHERE CASE WHEN json_valid(ids)
    THEN json_type(ids) <> 'array' OR EXISTS (SELECT 1 FROM json_each(ids) WHERE type <> 'array')
    ELSE 1 END;

-- A row with a value of another type cannot be changed; it is parked when it is read.
-- name: count_left_in_flight
UPDATE reliablepub_messages SET uncertain = uncertain + 1
WHERE id IN (SELECT id FROM reliablepub_in_flight_tags)
AND HAS_NUMBERS AND HAS_CONTENT;

-- name: remember_left_in_flight
INSERT INTO reliablepub_attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
)
SELECT id, coalesce(CAST(message_id AS TEXT), ''), :at, epoch, tag, 'uncertain', 0, :reply_text, 'possibly persisted'
FROM reliablepub_in_flight_tags ORDER BY epoch, tag;

-- name: clear_in_flight
DELETE FROM reliablepub_in_flight;

-- Interventions of operators.

-- The casts let a damaged row be discarded, in which a flipped bit has changed the type of a text.
-- name: insert_intervention
INSERT INTO reliablepub_interventions (
    id, message_id, exchange, routing_key, at, action, person, note
)
SELECT
    id, coalesce(CAST(message_id AS TEXT), ''), coalesce(CAST(exchange AS TEXT), ''),
    coalesce(CAST(routing_key AS TEXT), ''), :at, :action, :person, :note
FROM (
    SELECT id, message_id, exchange, routing_key FROM reliablepub_messages WHERE CHOSEN(id)
    UNION ALL
    SELECT id, message_id, exchange, routing_key FROM reliablepub_parked WHERE CHOSEN(id)
    UNION ALL
    SELECT id, message_id, exchange, routing_key FROM reliablepub_confirmed WHERE CHOSEN(id)
) AS found;

-- Without the ordering key: there is one write lock, so the removal of a message sees each later one of
-- its key that a relay can have read.
-- name: touched
SELECT
    i.intervention, i.id, i.message_id, i.exchange, i.routing_key, i.action, i.person, i.note,
    EXISTS (SELECT 1 FROM reliablepub_messages AS m WHERE m.id = i.id),
    EXISTS (SELECT 1 FROM reliablepub_parked AS p WHERE p.id = i.id),
    EXISTS (
        SELECT 1 FROM reliablepub_attempts AS a WHERE a.id = i.id AND a.persistence <> 'not written'
    )
FROM reliablepub_interventions AS i WHERE i.intervention > :seen ORDER BY i.intervention;

-- name: due_now
UPDATE reliablepub_messages SET due_at = 0, uncertain = min(uncertain + nacked, 2147483647),
    nacked = 0, returned = 0, refused = 0, refused_at = NULL, expires_at = NULL
WHERE CHOSEN(id);

-- name: keys_in_use
SELECT
    CASE WHEN properties GLOB '{"$key":*' AND json_valid(properties)
        THEN json_extract(properties, '$."$key"') END AS name,
    count(*)
FROM (
    SELECT properties FROM reliablepub_messages
    UNION ALL
    SELECT properties FROM reliablepub_parked
    UNION ALL
    SELECT properties FROM reliablepub_confirmed
    UNION ALL
    SELECT properties FROM reliablepub_originals
)
GROUP BY name ORDER BY name;

-- Inspection by operators.

-- name: in_flight
SELECT
    epoch, tag, id, message_id, exchange, routing_key, CAST(strftime('%s', sent_at) AS REAL) AS sent_at
FROM reliablepub_in_flight_tags WHERE :id IS NULL OR id = :id ORDER BY epoch, tag LIMIT :limit;

-- name: audit
SELECT
    open_difference, parked_difference, expired_difference,
    (SELECT open_bytes FROM reliablepub_ledger)
        - (SELECT CAST(total(size) AS INTEGER) FROM reliablepub_messages)
FROM reliablepub_audit;

-- What schema.sql created, without white space. Indexes that SQLite creates itself have no text.
-- name: made
SELECT type || ' ' || name, replace(replace(replace(sql, char(10), ' '), ' ', ''), '"', '')
FROM sqlite_schema WHERE name GLOB 'reliablepub_*' AND sql IS NOT NULL;

-- name: open_columns
SELECT name, dflt_value FROM pragma_table_info('reliablepub_messages') ORDER BY cid;

-- name: parked_columns
SELECT name, dflt_value FROM pragma_table_info('reliablepub_parked') ORDER BY cid;

-- At least one uncertain attempt: tags in flight are not salvaged, so a relay may have sent it.
-- name: salvage_open
INSERT OR IGNORE INTO reliablepub_messages (
    id, message_id, exchange, routing_key, properties, stored_at, due_at,
    nacked, returned, refused, uncertain, size, checksum, body, expires_at, ordering_key, refused_at
) VALUES (
    :id, :message_id, :exchange, :routing_key, :properties, :stored_at, :due_at,
    :nacked, :returned, :refused, max(:uncertain, 1), :size, :checksum, :body, :expires_at, :ordering_key,
    :refused_at
);

-- name: salvage_parked
INSERT OR IGNORE INTO reliablepub_parked (
    id, message_id, exchange, routing_key, properties, stored_at,
    parked_at, state, outcome, reply_code, reply_text, nacked, returned, refused, uncertain,
    size, checksum, body, expires_at, ordering_key, is_skipped
) VALUES (
    :id, :message_id, :exchange, :routing_key, :properties, :stored_at,
    :parked_at, :state, :outcome, :reply_code, :reply_text,
    :nacked, :returned, :refused, :uncertain,
    :size, :checksum, :body, :expires_at, :ordering_key, :is_skipped
);

-- name: sources
SELECT name, position AS count FROM reliablepub_sources;

-- name: keys
SELECT key, id, message_id, kept_until FROM reliablepub_keys WHERE key > ? ORDER BY key LIMIT ?;

-- name: tables_of_others
SELECT 1 FROM sqlite_schema
WHERE tbl_name NOT GLOB 'reliablepub_*' AND tbl_name NOT GLOB 'sqlite_*' LIMIT 1;

-- Without the deadline: an operator who retries a message wants it to be sent.
-- name: unpark
INSERT INTO reliablepub_messages (
    id, message_id, exchange, routing_key, properties, stored_at, due_at,
    nacked, returned, refused, uncertain, size, checksum, body, expires_at, ordering_key
)
SELECT
    id, message_id, exchange, routing_key, properties, stored_at, 0,
    0, 0, 0, min(uncertain + nacked, 2147483647), size, checksum, body, NULL, ordering_key
FROM reliablepub_parked WHERE CHOSEN(id);

-- Names of Celery tasks, which are a header. Encrypted properties have none.
-- name: tasks
SELECT id, json_extract(properties, '$.headers.task') AS task FROM (
    SELECT id, properties FROM reliablepub_messages WHERE CHOSEN(id)
    UNION ALL
    SELECT id, properties FROM reliablepub_parked WHERE CHOSEN(id)
    UNION ALL
    SELECT id, properties FROM reliablepub_confirmed WHERE CHOSEN(id)
) AS found WHERE json_valid(properties);

-- name: open_again
INSERT INTO reliablepub_messages (
    id, message_id, exchange, routing_key, properties, stored_at, due_at,
    uncertain, size, checksum, body, ordering_key
)
SELECT
    id, message_id, exchange, routing_key, properties, stored_at, 0, 1, size, checksum, body, ordering_key
FROM reliablepub_confirmed WHERE CHOSEN(id);

-- name: delete_open
DELETE FROM reliablepub_messages WHERE CHOSEN(id) RETURNING min(max(size, 0), 1000000000000);

-- name: delete_parked
DELETE FROM reliablepub_parked WHERE CHOSEN(id) RETURNING min(max(size, 0), 1000000000000);

-- name: delete_confirmed
DELETE FROM reliablepub_confirmed WHERE CHOSEN(id) RETURNING min(max(size, 0), 1000000000000);

-- Export and import.

-- name: next_id
UPDATE reliablepub_ledger SET last_id = max(last_id, stored) + 1 RETURNING last_id AS next_id;

-- The state of a message, its shard (a file has one), and whether a statement can change or copy the
-- row. No statement can if a flipped bit has changed the type of a value.
-- `+ 0`: the application's connection may convert columns.
-- name: states
SELECT id + 0, CASE WHEN due_at > 0 THEN 'waiting' ELSE 'ready' END, 0, coalesce(HAS_NUMBERS AND HAS_CONTENT, 0), size + 0
FROM reliablepub_messages WHERE CHOSEN(id)
UNION ALL
SELECT id + 0, state, 0, coalesce(
    max(stored_at, parked_at, reply_code, size, checksum, coalesce(expires_at, 0), is_skipped) < ''
    AND max(outcome, reply_text) < x'' AND HAS_CONTENT, 0
), size + 0
FROM reliablepub_parked WHERE CHOSEN(id)
UNION ALL
SELECT id + 0, 'confirmed', 0, coalesce(max(stored_at, confirmed_at, size, checksum) < '' AND HAS_CONTENT, 0), size + 0
FROM reliablepub_confirmed WHERE CHOSEN(id);

-- name: import_open
INSERT INTO reliablepub_messages (
    id, message_id, exchange, routing_key, properties, stored_at, due_at,
    nacked, returned, refused, uncertain, size, checksum, body, expires_at, ordering_key, refused_at
) VALUES (
    :id, :message_id, :exchange, :routing_key, :properties, :stored_at, :due_at,
    :nacked, :returned, :refused, :uncertain, :size, :checksum, :body, :expires_at, :ordering_key,
    :refused_at
)
RETURNING 0;

-- name: import_given_up
INSERT INTO reliablepub_parked (
    id, message_id, exchange, routing_key, properties, stored_at,
    parked_at, state, outcome, reply_code, reply_text, nacked, returned, refused, uncertain,
    size, checksum, body, expires_at, ordering_key, is_skipped
) VALUES (
    :id, :message_id, :exchange, :routing_key, :properties, :stored_at,
    :parked_at, :state, :outcome, :reply_code, :reply_text, :nacked, :returned, :refused, :uncertain,
    :size, :checksum, :body, :expires_at, :ordering_key,
    :is_skipped
);

-- name: is_shared
SELECT EXISTS (
    SELECT 1 FROM sqlite_schema
    WHERE type = 'table' AND name NOT GLOB 'reliablepub_*' AND name NOT GLOB 'sqlite_*'
);
