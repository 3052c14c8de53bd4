-- Statements that every database runs, by name: standard SQL with named values, for the tables and
-- views of each `schema.sql`. In capitals, BYTES(text), UTC(time) and INFINITY stand for expressions of
-- the database (see `text_of_queries`). Statements that differ are in the `queries.sql` of each
-- database, under one name and with the same values and columns.

-- name: prune_confirmed
DELETE FROM reliablepub_confirmed WHERE id IN (
    SELECT id FROM reliablepub_confirmed WHERE confirmed_at <= :before ORDER BY confirmed_at LIMIT :limit
);

-- name: forget_key
DELETE FROM reliablepub_keys WHERE key = :key;

-- name: ledger
SELECT stored, confirmed, parked, expired, discarded, open_bytes FROM reliablepub_ledger;

-- Make due the message after an open one that is about to be removed: it may be next of its key now.
-- name: next_falls_due
UPDATE reliablepub_messages SET due_at = 0
WHERE due_at IS NULL AND id IN (
    SELECT min(n.id) FROM reliablepub_messages AS n, reliablepub_messages AS m
    WHERE CHOSEN(m.id) AND n.ordering_key = m.ordering_key AND n.id > m.id
    GROUP BY m.id
);

-- name: position
SELECT position FROM reliablepub_sources WHERE name = :name;

-- name: forget_source
DELETE FROM reliablepub_sources WHERE name = :name;

-- name: attempt_numbers
SELECT min(attempt), max(attempt) FROM reliablepub_attempts;

-- Pruning looks at a range of numbers at a time. The newest intervention stays, because the relay
-- finds new ones by its number.
-- name: forget_attempts_between
DELETE FROM reliablepub_attempts WHERE attempt BETWEEN :first AND :last AND at < :before
AND NOT EXISTS (SELECT 1 FROM reliablepub_messages AS m WHERE m.id = reliablepub_attempts.id)
AND NOT EXISTS (SELECT 1 FROM reliablepub_parked AS p WHERE p.id = reliablepub_attempts.id)
AND NOT EXISTS (SELECT 1 FROM reliablepub_interventions AS i WHERE i.id = reliablepub_attempts.id);

-- name: intervention_numbers
SELECT min(intervention), max(intervention) - 1 FROM reliablepub_interventions;

-- name: forget_interventions_between
DELETE FROM reliablepub_interventions WHERE intervention BETWEEN :first AND :last AND at < :before
AND NOT EXISTS (SELECT 1 FROM reliablepub_messages AS m WHERE m.id = reliablepub_interventions.id)
AND NOT EXISTS (SELECT 1 FROM reliablepub_parked AS p WHERE p.id = reliablepub_interventions.id);

-- What a pruning would delete. It first discards given-up messages: each of these then has a newer
-- intervention, and its older ones can go.
-- name: prunable
SELECT
    (SELECT count(*) FROM reliablepub_confirmed WHERE confirmed_at <= :confirmed_before),
    (
        SELECT count(*) FROM reliablepub_attempts AS a WHERE at < :history_before
        AND NOT EXISTS (SELECT 1 FROM reliablepub_messages AS m WHERE m.id = a.id)
        AND NOT EXISTS (SELECT 1 FROM reliablepub_parked AS p WHERE p.id = a.id)
        AND NOT EXISTS (SELECT 1 FROM reliablepub_interventions AS i WHERE i.id = a.id)
    ),
    (
        SELECT count(*) FROM reliablepub_interventions AS i WHERE at < :interventions_before
        AND (:discarded > 0 OR intervention < (SELECT max(intervention) FROM reliablepub_interventions))
        AND NOT EXISTS (SELECT 1 FROM reliablepub_messages AS m WHERE m.id = i.id)
        AND NOT EXISTS (
            SELECT 1 FROM reliablepub_parked AS p WHERE p.id = i.id
            AND (
                state = 'parked' AND parked_at > :parked_before
                OR state <> 'parked' AND parked_at > :expired_before
            )
        )
    ),
    (
        SELECT count(*) FROM reliablepub_keys AS k WHERE kept_until < :now
        AND NOT EXISTS (SELECT 1 FROM reliablepub_messages AS m WHERE m.id = k.id)
        AND NOT EXISTS (SELECT 1 FROM reliablepub_parked AS p WHERE p.id = k.id)
    );

-- The columns of `MessageRow`. Texts are read as bytes: the checksum covers them.
-- name: any_message
SELECT
    id, BYTES(message_id), BYTES(exchange), BYTES(routing_key), BYTES(properties), stored_at, due_at,
    nacked, returned, refused, uncertain, checksum, body, expires_at, BYTES(ordering_key), refused_at, size
FROM reliablepub_messages WHERE CHOSEN(id)
UNION ALL
SELECT
    id, BYTES(message_id), BYTES(exchange), BYTES(routing_key), BYTES(properties), stored_at, NULL,
    nacked, returned, refused, uncertain, checksum, body, expires_at, BYTES(ordering_key), NULL, size
FROM reliablepub_parked WHERE CHOSEN(id);

-- name: confirmed_message
SELECT
    id, BYTES(message_id), BYTES(exchange), BYTES(routing_key), BYTES(properties), stored_at, NULL,
    0, 0, 0, 0, checksum, body, NULL, BYTES(ordering_key), NULL, size
FROM reliablepub_confirmed WHERE CHOSEN(id);

-- name: open_contents
SELECT
    BYTES(message_id), BYTES(exchange), BYTES(routing_key), BYTES(properties), BYTES(ordering_key), body,
    id, stored_at, due_at, expires_at, refused_at, nacked, returned, refused, uncertain, size, checksum
FROM reliablepub_messages WHERE id > :after ORDER BY id LIMIT :limit;

-- name: parked_contents
SELECT
    BYTES(message_id), BYTES(exchange), BYTES(routing_key), BYTES(properties), BYTES(ordering_key), body,
    id, stored_at, parked_at, expires_at, nacked, returned, refused, uncertain, size, checksum,
    outcome, reply_code
FROM reliablepub_parked WHERE id > :after ORDER BY id LIMIT :limit;

-- name: one_message
SELECT
    id, message_id, exchange, routing_key, ordering_key, properties,
    CASE WHEN due_at > CAST(0 AS double precision) THEN 'waiting' ELSE 'ready' END AS state,
    stored_at, nullif(nullif(due_at, INFINITY), CAST(0 AS double precision)) AS due_at,
    CAST(NULL AS double precision) AS parked_at,
    expires_at, nacked, returned, refused, uncertain, NULL AS outcome, CAST(NULL AS integer) AS reply_code,
    NULL AS reply_text, size, length(body) AS body_bytes,
    CASE WHEN due_at = INFINITY THEN 1 ELSE 0 END AS is_held,
    CAST(NULL AS double precision) AS confirmed_at, nacked + uncertain > 0 AS may_have_arrived,
    refused_at
FROM reliablepub_messages WHERE id = :id
UNION ALL
SELECT
    id, message_id, exchange, routing_key, ordering_key, properties, state,
    stored_at, NULL, parked_at, expires_at,
    nacked, returned, refused, uncertain, outcome, reply_code, reply_text,
    size, length(body), 0, NULL, nacked + uncertain > 0, NULL
FROM reliablepub_parked WHERE id = :id
UNION ALL
SELECT
    id, message_id, exchange, routing_key, ordering_key, properties, 'confirmed',
    stored_at, NULL, NULL, NULL, 0, 0, 0, 0, NULL, NULL, NULL,
    size, length(body), 0, confirmed_at, 1 > 0, NULL
FROM reliablepub_confirmed WHERE id = :id;

-- name: export
SELECT
    CASE WHEN due_at > CAST(0 AS double precision) THEN 'waiting' ELSE 'ready' END AS state,
    message_id, exchange, routing_key, ordering_key, properties, stored_at,
    nullif(nullif(due_at, INFINITY), CAST(0 AS double precision)) AS due_at, expires_at, refused_at,
    CAST(NULL AS double precision) AS parked_at, NULL AS outcome, CAST(NULL AS integer) AS reply_code,
    NULL AS reply_text, nacked, returned, refused, uncertain, 0 AS is_skipped, size, checksum, body
FROM reliablepub_messages WHERE id = :id
UNION ALL
SELECT
    state,
    message_id, exchange, routing_key, ordering_key, properties, stored_at, NULL, expires_at,
    NULL, parked_at, outcome, reply_code, reply_text,
    nacked, returned, refused, uncertain, is_skipped, size, checksum, body
FROM reliablepub_parked WHERE id = :id;

-- An expression, because the application may have registered a converter for the type of the column.
-- name: in_flight_ids
SELECT DISTINCT id + 0 FROM reliablepub_in_flight_tags;

-- name: revise
UPDATE reliablepub_messages SET
    exchange = :exchange, routing_key = :routing_key, properties = :properties, size = :size,
    checksum = :checksum, body = :body
WHERE id = :id;

-- name: sealed_otherwise
SELECT 'open' AS place, id FROM reliablepub_messages WHERE properties <> :mark
UNION ALL
SELECT 'parked', id FROM reliablepub_parked WHERE properties <> :mark
UNION ALL
SELECT 'confirmed', id FROM reliablepub_confirmed WHERE properties <> :mark
UNION ALL
SELECT 'original', intervention FROM reliablepub_originals WHERE properties <> :mark
ORDER BY id;

-- Whether a message has one of these properties, of a row that is encrypted with one key.
-- name: needs_key
SELECT 1 FROM reliablepub_messages WHERE properties IN (:mark, :first_mark)
UNION ALL
SELECT 1 FROM reliablepub_parked WHERE properties IN (:mark, :first_mark)
LIMIT 1;

-- name: rekey_open
UPDATE reliablepub_messages SET properties = :properties, checksum = :checksum, body = :body
WHERE id = :id;

-- name: rekey_parked
UPDATE reliablepub_parked SET properties = :properties, checksum = :checksum, body = :body
WHERE id = :id;

-- name: rekey_confirmed
UPDATE reliablepub_confirmed SET properties = :properties, checksum = :checksum, body = :body
WHERE id = :id;

-- name: rekey_original
UPDATE reliablepub_originals SET properties = :properties, checksum = :checksum, body = :body
WHERE intervention = :id;

-- name: waiting_count
SELECT count(*) FROM reliablepub_messages WHERE due_at > CAST(0 AS double precision);

-- name: in_flight_count
SELECT count(*) FROM reliablepub_in_flight_tags;

-- A damaged row may have NULL, a text or bytes there, none of which is less than a number.
-- name: oldest_open_at
SELECT stored_at FROM reliablepub_messages WHERE stored_at < CAST(9e99 AS double precision)
ORDER BY id LIMIT 1;

-- name: last_attempt
SELECT outcome, reply_code, reply_text FROM reliablepub_attempts
WHERE id = :id ORDER BY attempt DESC LIMIT 1;

-- The newest failures among the last 1,000 attempts. Uncertain attempts are left out if their message
-- has left the outbox.
-- name: newest_failures
SELECT
    a.at, a.id, a.message_id,
    coalesce(m.exchange, p.exchange) AS exchange, coalesce(m.routing_key, p.routing_key) AS routing_key,
    a.outcome, a.reply_code, a.reply_text
FROM (SELECT * FROM reliablepub_attempts ORDER BY attempt DESC LIMIT 1000) AS a
LEFT JOIN reliablepub_messages AS m ON m.id = a.id
LEFT JOIN reliablepub_parked AS p ON p.id = a.id
WHERE a.outcome <> 'confirmed'
AND (a.outcome <> 'uncertain' OR m.id IS NOT NULL OR p.id IS NOT NULL)
ORDER BY a.attempt DESC LIMIT :limit;

-- Uncertain attempts come last, because they explain less than refusals do.
-- name: top_reasons
SELECT outcome, reply_code, reply_text, count(*) AS attempts, max(at) AS last_at
FROM (SELECT * FROM reliablepub_attempts ORDER BY attempt DESC LIMIT 1000) AS newest
WHERE outcome <> 'confirmed' GROUP BY outcome, reply_code, reply_text
ORDER BY outcome = 'uncertain', attempts DESC, last_at DESC LIMIT :limit;

-- name: rows_of_message_id
SELECT id FROM reliablepub_messages WHERE message_id = :name
UNION
SELECT id FROM reliablepub_parked WHERE message_id = :name;

-- name: rows_once_of_message_id
SELECT id FROM reliablepub_attempts WHERE message_id = :name
UNION
SELECT id FROM reliablepub_interventions WHERE message_id = :name
UNION
SELECT id FROM reliablepub_confirmed WHERE message_id = :name
UNION
SELECT id FROM reliablepub_keys WHERE message_id = :name;

-- The properties are JSON as `rows.py` writes it; those of encrypted messages match nothing.
-- name: rows_of_correlation_id
SELECT id FROM reliablepub_messages WHERE replace(properties, :written, '') <> properties
UNION
SELECT id FROM reliablepub_parked WHERE replace(properties, :written, '') <> properties
UNION
SELECT id FROM reliablepub_confirmed WHERE replace(properties, :written, '') <> properties;

-- name: rows_of_enqueue_key
SELECT id + 0 FROM reliablepub_keys WHERE key = :name;

-- name: attempts_of
SELECT at, epoch, tag, outcome, reply_code, reply_text, persistence, message_id
FROM reliablepub_attempts WHERE id = :id ORDER BY attempt;

-- name: interventions_of
SELECT at, action, person, note, exchange, routing_key, message_id
FROM reliablepub_interventions WHERE id = :id ORDER BY intervention;

-- name: ready_before
SELECT count(*) FROM (
    SELECT 1 FROM reliablepub_messages WHERE id < :id AND due_at IS NULL LIMIT 100000
) AS earlier;

-- name: key_held_by
SELECT id, message_id FROM reliablepub_parked
WHERE ordering_key = :ordering_key AND state = 'parked' AND is_skipped = 0 AND id < :id
UNION ALL
SELECT id, message_id FROM reliablepub_messages WHERE ordering_key = :ordering_key AND id < :id
ORDER BY id LIMIT 1;

-- name: ambiguous
SELECT
    id, max(message_id) AS message_id,
    sum(CASE persistence WHEN 'possibly persisted' THEN 1 ELSE 0 END) AS unsure,
    max(CASE persistence WHEN 'persisted' THEN 1 ELSE 0 END) AS is_confirmed, min(at) AS first_at, max(at) AS last_at
FROM reliablepub_attempts WHERE persistence <> 'not written' GROUP BY id
HAVING max(CASE persistence WHEN 'possibly persisted' THEN 1 ELSE 0 END) > 0
ORDER BY max(attempt) DESC LIMIT :limit;

-- name: parked
SELECT
    id, message_id, exchange, routing_key, state, outcome, reply_code, reply_text,
    nacked + returned + refused + uncertain AS attempts, stored_at, parked_at, size,
    nacked + uncertain > 0 AS may_have_arrived
FROM reliablepub_parked ORDER BY parked_at, id LIMIT :limit;

-- name: view_open
SELECT * FROM reliablepub_open WHERE id > :after AND id <= :upto
ORDER BY id LIMIT :limit;

-- name: view_parked
SELECT * FROM reliablepub_parked_messages WHERE id > :after AND id <= :upto
ORDER BY id LIMIT :limit;

-- name: view_confirmed
SELECT * FROM reliablepub_confirmed_messages WHERE id > :after AND id <= :upto
ORDER BY id LIMIT :limit;

-- name: view_history
SELECT
    attempt, id, message_id, UTC(at) AS at, outcome, reply_code, reply_text, persistence, epoch, tag
FROM reliablepub_attempts WHERE attempt > :after AND attempt <= :upto
ORDER BY attempt LIMIT :limit;

-- name: view_interventions
SELECT intervention, id, message_id, exchange, routing_key, UTC(at) AS at, action, person, note
FROM reliablepub_interventions WHERE intervention > :after AND intervention <= :upto
ORDER BY intervention LIMIT :limit;

-- name: view_audit
SELECT * FROM reliablepub_audit WHERE :after = 0 LIMIT :limit;

-- The lowest and the highest number of a view. SQLite finds each by the index, and both of one query by
-- reading all rows.
-- name: span_open
SELECT (SELECT min(id) FROM reliablepub_messages), (SELECT max(id) FROM reliablepub_messages);

-- name: span_parked
SELECT (SELECT min(id) FROM reliablepub_parked), (SELECT max(id) FROM reliablepub_parked);

-- name: span_confirmed
SELECT (SELECT min(id) FROM reliablepub_confirmed), (SELECT max(id) FROM reliablepub_confirmed);

-- name: span_history
SELECT (SELECT min(attempt) FROM reliablepub_attempts), (SELECT max(attempt) FROM reliablepub_attempts);

-- name: span_interventions
SELECT
    (SELECT min(intervention) FROM reliablepub_interventions),
    (SELECT max(intervention) FROM reliablepub_interventions);

-- name: held_keys
SELECT
    p.ordering_key, p.id, p.message_id, p.exchange, p.routing_key, p.outcome, p.reply_code,
    p.reply_text, p.parked_at, (
        SELECT count(*) FROM reliablepub_messages AS m
        WHERE m.ordering_key = p.ordering_key AND m.id > p.id
    ) AS held_back, p.nacked + p.uncertain > 0 AS may_have_arrived
FROM reliablepub_parked AS p
WHERE p.ordering_key IS NOT NULL AND p.state = 'parked' AND p.is_skipped = 0
ORDER BY p.ordering_key, p.id LIMIT :limit;

-- name: held_key_count
SELECT count(*) FROM (
    SELECT DISTINCT ordering_key FROM reliablepub_parked
    WHERE ordering_key IS NOT NULL AND state = 'parked' AND is_skipped = 0
) AS held;

-- name: ids_holding_key
SELECT id FROM reliablepub_parked
WHERE ordering_key = :ordering_key AND state = 'parked' AND is_skipped = 0 ORDER BY id;

-- A later or an earlier time to send a message. Refusals before it no longer count.
-- name: due_at
UPDATE reliablepub_messages SET due_at = :due_at, returned = 0, refused = 0, refused_at = NULL
WHERE CHOSEN(id);

-- Only for messages that an operator names: there is no index.
-- name: forget_keys_of
DELETE FROM reliablepub_keys WHERE CHOSEN(id);

-- name: skip
UPDATE reliablepub_parked SET is_skipped = 1 WHERE CHOSEN(id);

-- name: parked_ids
SELECT id FROM reliablepub_parked ORDER BY id;

-- Whether a queue may hold the message because of an earlier attempt.
-- name: possible_among
SELECT id + 0 FROM reliablepub_messages WHERE CHOSEN(id) AND nacked + uncertain > 0
UNION ALL
SELECT id + 0 FROM reliablepub_parked WHERE CHOSEN(id) AND nacked + uncertain > 0;

-- An imported message has counts and no history. Before it is removed, its counts become history.
-- name: remember_counts
INSERT INTO reliablepub_attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
)
SELECT
    id, coalesce(CAST(message_id AS TEXT), ''), :at, '0-0', 0, 'uncertain', 0, :reply_text, 'possibly persisted'
FROM (
    SELECT id, message_id FROM reliablepub_messages WHERE CHOSEN(id)
    UNION ALL
    SELECT id, message_id FROM reliablepub_parked WHERE CHOSEN(id)
) AS gone
WHERE NOT EXISTS (
    SELECT 1 FROM reliablepub_attempts AS a
    WHERE a.id = gone.id AND a.persistence <> 'not written'
);

-- A confirm at the first attempt leaves no history. Before such a message is replayed, its confirm becomes
-- history.
-- name: remember_confirm
INSERT INTO reliablepub_attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
)
SELECT id, message_id, confirmed_at, '0-0', 0, 'confirmed', 0, '', 'persisted'
FROM reliablepub_confirmed AS c WHERE CHOSEN(id) AND NOT EXISTS (
    SELECT 1 FROM reliablepub_attempts AS a WHERE a.id = c.id AND a.outcome = 'confirmed'
);

-- A message as it was before the newest intervention in it.
-- name: keep_originals
INSERT INTO reliablepub_originals (
    intervention, id, message_id, exchange, routing_key, ordering_key, properties, checksum, body
)
SELECT
    (SELECT max(i.intervention) FROM reliablepub_interventions AS i WHERE i.id = found.id),
    id, message_id, exchange, routing_key, ordering_key, properties, checksum, body
FROM (
    SELECT id, message_id, exchange, routing_key, ordering_key, properties, checksum, body
    FROM reliablepub_messages WHERE CHOSEN(id)
    UNION ALL
    SELECT id, message_id, exchange, routing_key, ordering_key, properties, checksum, body
    FROM reliablepub_parked WHERE CHOSEN(id)
) AS found;

-- Of several edits, the original is that of the first one.
-- name: first_original
SELECT min(intervention) FROM reliablepub_originals WHERE id = :id;

-- name: original_message
SELECT
    id, BYTES(message_id), BYTES(exchange), BYTES(routing_key), BYTES(properties), 0 AS stored_at,
    NULL AS due_at, 0 AS nacked, 0 AS returned, 0 AS refused, 0 AS uncertain, checksum, body,
    NULL AS expires_at, BYTES(ordering_key), NULL AS refused_at, 0 AS size
FROM reliablepub_originals WHERE CHOSEN(intervention);

-- name: figures
WITH everything AS (
    SELECT :now - stored_at AS age, nacked + returned + refused + uncertain AS tries, size
    FROM reliablepub_messages
    UNION ALL
    SELECT :now - stored_at, nacked + returned + refused + uncertain, size
    FROM reliablepub_parked WHERE :is_all
)
SELECT
    CASE
        WHEN age < CAST(1 AS double precision) THEN 0
        WHEN age < CAST(10 AS double precision) THEN 1
        WHEN age < CAST(60 AS double precision) THEN 2
        WHEN age < CAST(600 AS double precision) THEN 3
        WHEN age < CAST(3600 AS double precision) THEN 4
        WHEN age < CAST(21600 AS double precision) THEN 5
        WHEN age < CAST(86400 AS double precision) THEN 6
        WHEN age < CAST(604800 AS double precision) THEN 7
        ELSE 8
    END AS age,
    CASE
        WHEN tries < 3 THEN tries WHEN tries < 6 THEN 3 WHEN tries < 11 THEN 4 ELSE 5
    END AS attempts,
    CASE
        WHEN size < 256 THEN 0 WHEN size < 1024 THEN 1 WHEN size < 4096 THEN 2
        WHEN size < 16384 THEN 3 WHEN size < 65536 THEN 4 WHEN size < 262144 THEN 5
        WHEN size < 1048576 THEN 6 ELSE 7
    END AS size,
    count(*) AS messages
FROM everything GROUP BY 1, 2, 3;

-- name: exchanges_named
SELECT exchange FROM reliablepub_messages WHERE exchange <> ''
UNION
SELECT exchange FROM reliablepub_parked WHERE exchange <> ''
LIMIT 100;

-- name: queues_named
SELECT routing_key FROM reliablepub_messages WHERE exchange = ''
UNION
SELECT routing_key FROM reliablepub_parked WHERE exchange = ''
LIMIT 100;

-- name: newest_stored_at
SELECT stored_at FROM reliablepub_messages ORDER BY id DESC LIMIT 1;

-- name: known
SELECT message_id, stored_at, checksum FROM reliablepub_messages
UNION ALL
SELECT message_id, stored_at, checksum FROM reliablepub_parked;

-- Of the relay.

-- name: advance_source
INSERT INTO reliablepub_sources AS s (name, position) VALUES (:name, :count)
ON CONFLICT (name) DO UPDATE SET position = s.position + excluded.position;

-- name: end_run
UPDATE reliablepub_runs SET ended_at = :now WHERE id = :run;

-- The last number of a page of the history, and its earliest time: clocks are set, so numbers and times
-- do not always grow together. The newest intervention stays (see `forget_interventions_between`).
-- name: page_of_attempts
SELECT max(attempt), min(at) FROM (
    SELECT attempt, at FROM reliablepub_attempts WHERE attempt >= :first ORDER BY attempt LIMIT :limit
) AS page;

-- name: page_of_interventions
SELECT max(intervention), min(at) FROM (
    SELECT intervention, at FROM reliablepub_interventions
    WHERE intervention >= :first AND intervention < (SELECT max(intervention) FROM reliablepub_interventions)
    ORDER BY intervention LIMIT :limit
) AS page;
