-- Statements on an outbox in PostgreSQL, by name (see sql.py); those that every database runs are in
-- `../queries.sql`. The statements of a relay's turn come first.
--
-- An application that may create functions in a schema of the user's `search_path`, such as `public`, must
-- not get the user's rights. A function or operator there is preferred to a built-in one only if it fits the
-- types of the arguments better. So functions of any type (`unnest`, `array_agg`) and those that convert
-- an argument are written with `pg_catalog`, the type of a constant is named unless it is text, and
-- constants beside a column of another type than integer are in quotes. Values that are written as
-- literals name their type too (`Double` in sql.py). `unnest` of several arrays is a form of its own, and
-- always the built-in one.

-- An enqueuer's message, in one statement, because the connection may be the application's. If it is the
-- library's own, this also has the commit wait until the message is on disk, here and in `enqueue_once`, and the
-- server warn if it has not waited for a synchronous replica (see `settle_in`).
-- name: enqueue
SELECT
    reliablepub_store(
        :id, :message_id, :exchange, :routing_key, :properties, :stored_at, :size, :checksum, :body,
        :due_at, :expires_at, :ordering_key
    ),
    CASE WHEN :is_own AND current_setting('client_min_messages') = 'error'
        THEN set_config('client_min_messages', 'warning', true) END,
    CASE WHEN :is_own AND current_setting('synchronous_commit') = 'off' AND NOT :allows_loss
        THEN set_config('synchronous_commit', 'on', true) END;

-- Several messages, in the order of the arrays.
-- name: enqueue_many
SELECT
    (
        SELECT pg_catalog.count(reliablepub_store(
            m.id, m.message_id, m.exchange, m.routing_key, m.properties, m.stored_at, m.size, m.checksum,
            m.body, m.due_at, m.expires_at, m.ordering_key
        ))
        FROM unnest(
            CAST(:ids AS bigint[]), CAST(:message_ids AS text[]), CAST(:exchanges AS text[]),
            CAST(:routing_keys AS text[]), CAST(:properties AS text[]),
            CAST(:stored_ats AS double precision[]), CAST(:sizes AS integer[]),
            CAST(:checksums AS bigint[]), CAST(:bodies AS bytea[]), CAST(:due_ats AS double precision[]),
            CAST(:expires_ats AS double precision[]), CAST(:ordering_keys AS text[])
        ) AS m (
            id, message_id, exchange, routing_key, properties, stored_at, size, checksum, body, due_at,
            expires_at, ordering_key
        )
    ),
    CASE WHEN :is_own AND current_setting('client_min_messages') = 'error'
        THEN set_config('client_min_messages', 'warning', true) END,
    CASE WHEN :is_own AND current_setting('synchronous_commit') = 'off' AND NOT :allows_loss
        THEN set_config('synchronous_commit', 'on', true) END;

-- name: message_id_of
SELECT message_id FROM reliablepub_messages WHERE id = :id;

-- Stores the first message of a deduplication key, with the key. The key of a message that is open or
-- parked does not expire.
-- name: enqueue_once
WITH fresh AS (
    INSERT INTO reliablepub_keys AS k (key, id, message_id, kept_until)
    VALUES (:key, coalesce(:id, nextval('reliablepub_message_ids'::regclass)), :message_id, :kept_until)
    ON CONFLICT (key) DO UPDATE
    SET id = excluded.id, message_id = excluded.message_id, kept_until = excluded.kept_until
    WHERE k.kept_until < CAST(:stored_at AS double precision)
    AND NOT EXISTS (SELECT 1 FROM reliablepub_messages AS m WHERE m.id = k.id)
    AND NOT EXISTS (SELECT 1 FROM reliablepub_parked AS p WHERE p.id = k.id)
    RETURNING id
)
SELECT
    reliablepub_store(
        id, :message_id, :exchange, :routing_key, :properties, :stored_at, :size, :checksum, :body,
        :due_at, :expires_at, :ordering_key
    ),
    CASE WHEN :is_own AND current_setting('client_min_messages') = 'error'
        THEN set_config('client_min_messages', 'warning', true) END,
    CASE WHEN :is_own AND current_setting('synchronous_commit') = 'off' AND NOT :allows_loss
        THEN set_config('synchronous_commit', 'on', true) END
FROM fresh;

-- name: first_with_key
SELECT message_id FROM reliablepub_keys WHERE key = :key;

-- Of any version.
-- name: outbox
SELECT version, shards, allows_loss FROM reliablepub_outbox;

-- name: alive
SELECT 1;

-- Of several processes that create an outbox, one does, and the others wait for its commit.
-- name: wait_for_creators
SELECT 1 FROM pg_advisory_xact_lock(hashtext('reliablepub'), hashtext(:schema));

-- name: is_there
SELECT 1 FROM pg_tables WHERE schemaname = :schema AND tablename = 'outbox';

-- name: newest_turns
SELECT
    shard, turn, run, is_free, alive_at::text,
    extract(epoch FROM clock_timestamp() - alive_at)::double precision, NOT is_linked,
    CASE WHEN is_linked THEN extract(epoch FROM clock_timestamp() - active_at) < :active_s END
FROM reliablepub_owners ORDER BY shard;

-- An owner that was stopped in the middle of a turn: its client is awaited, which no timeout of the server ends.
-- name: end_stopped
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE pid = (SELECT backend FROM reliablepub_turns WHERE shard = :shard AND turn = :turn)
AND usename = current_user AND state = 'active' AND wait_event = 'ClientRead'
AND state_change < clock_timestamp() - make_interval(secs => :expiry_s);

-- name: newest_turn
SELECT turn, run, token, intervention, stored, confirmed, parked, expired, discarded, open_bytes
FROM reliablepub_turns WHERE shard = :shard ORDER BY turn DESC LIMIT 1;

-- name: turns_since
SELECT turn, run, token, intervention, stored, confirmed, parked, expired, discarded, open_bytes
FROM reliablepub_turns WHERE shard = :shard AND turn >= :turn ORDER BY turn;

-- Settings of the transaction only: behind PgBouncer, a session belongs to no client. A transaction
-- whose client was cut off must not keep its locks. Compiling (JIT) a statement of a turn takes longer
-- than running it, up to seconds, in which another relay would take over. That a commit has not waited for a
-- synchronous replica, only a warning says.
-- name: settle_in
SELECT
    set_config('jit', 'off', true),
    set_config('idle_in_transaction_session_timeout', '5000', true),
    set_config('lock_timeout', '5000', true),
    CASE WHEN current_setting('client_min_messages') = 'error'
        THEN set_config('client_min_messages', 'warning', true) END,
    CASE WHEN current_setting('synchronous_commit') = 'off' AND NOT :allows_loss
        THEN set_config('synchronous_commit', 'on', true) END;

-- Each statement of a relay finds its rows by an index. When a backlog has just grown, statistics are
-- missing or old, and the planner would read the whole table for each page. A timeout of the user may
-- be shorter than the count of all messages that came while no relay ran. Rows that a policy hides from
-- the user would stay in the outbox: with `row_security` off, reading them is an error. A read must not
-- wait for as long as a `VACUUM FULL` takes: callers of the relay wait for its thread, and an owner that
-- waits takes no turn (see ownership.py). An array without a value is sent as a text, `{NULL}`, which
-- `array_nulls = off` would read as a word.
-- Once for the session if the connection is direct; behind a pooler, `:backend` is not the number of the server
-- process, and the settings are the transaction's.
-- name: by_index
SELECT
    set_config('statement_timeout', '0', is_local),
    set_config('array_nulls', 'on', is_local),
    set_config('lock_timeout', '1000', is_local),
    set_config('row_security', 'off', is_local),
    set_config('enable_seqscan', 'off', is_local),
    set_config('enable_bitmapscan', 'off', is_local),
    set_config('enable_sort', 'off', is_local),
    set_config('jit', 'off', is_local)
FROM (SELECT pg_backend_pid() <> :backend::integer AS is_local) AS session;

-- Whether the connection is direct; whether other sessions see that it is active; whether an enqueuer may
-- notify: a transaction that has notified cannot be prepared for a commit in two phases.
-- name: standing
SELECT
    pg_backend_pid() = :backend::integer,
    pg_backend_pid() = :backend::integer AND reliablepub_active_at(pg_backend_pid(), 'infinity') IS NOT NULL,
    pg_backend_pid() = :backend::integer AND current_setting('max_prepared_transactions') = '0';

-- A relay rests while it alone holds this lock. An enqueuer holds a share of it until its transaction ends, or
-- notifies the relay if it cannot get one. So nothing is stored that neither is seen by the relay before it
-- rests nor wakes it.
-- name: rest
SELECT
    pg_try_advisory_lock(hashtext('reliablepub_' || '.rest'), :shard::integer),
    reliablepub_channel(:shard::integer);

-- name: rise
SELECT pg_advisory_unlock(hashtext('reliablepub_' || '.rest'), :shard::integer);

-- The next turn. It fails if the turn before it is not the newest (primary key), has been deleted, or is
-- not the one that the relay knows, or if this is not the server that the relay knows (`run` is null). It
-- may wait for the turn of an operator, whose transaction lets nobody else take one. What follows waits less.
-- name: take_turn
INSERT INTO reliablepub_turns
SELECT
    :shard::integer, :turn::bigint,
    CASE
        WHEN t.run = :run AND t.token = :known
        AND (SELECT s::text FROM reliablepub_server() AS s) = :server THEN t.run
    END,
    :token, clock_timestamp(), false, t.stored, t.confirmed, t.parked, t.expired, t.discarded, t.open_bytes, t.intervention, t.seen, t.cluster,
    CASE WHEN pg_backend_pid() = :backend THEN pg_backend_pid() ELSE 0 END
FROM (VALUES (1)) AS one (n)
LEFT JOIN reliablepub_turns AS t ON t.shard = :shard AND t.turn = :turn - 1
RETURNING set_config('lock_timeout', '1000', true);

-- name: take_over
INSERT INTO reliablepub_turns
SELECT
    :shard::integer, :turn::bigint, CASE WHEN t.run >= 0 THEN :run::integer END, :token, clock_timestamp(),
    false, t.stored, t.confirmed, t.parked, t.expired, t.discarded, t.open_bytes, t.intervention, t.seen, t.cluster,
    CASE WHEN pg_backend_pid() = :backend THEN pg_backend_pid() ELSE 0 END
FROM (VALUES (1)) AS one (n)
LEFT JOIN reliablepub_turns AS t ON t.shard = :shard AND t.turn = :turn - 1;

-- The first turn of a run may take long; its age counts from here, near its commit.
-- name: beat
UPDATE reliablepub_turns SET at = clock_timestamp() WHERE shard = :shard AND turn = :turn;

-- name: free_turn
UPDATE reliablepub_turns SET is_free = true WHERE shard = :shard AND turn = :turn;

-- name: forget_turns
DELETE FROM reliablepub_turns WHERE shard = :shard AND turn > :from AND turn <= :upto;

-- Count the messages of enqueuers that were not visible at the last count. This does not search from
-- the oldest transaction that was running then, because that transaction may run for hours.
-- name: count_new
WITH t AS (SELECT seen FROM reliablepub_turns WHERE shard = :shard AND turn = :turn),
new AS (
    SELECT count(*) AS n, coalesce(sum(size), 0) AS size FROM (
        SELECT size FROM reliablepub_messages
        WHERE shard = :shard AND run IS NULL AND xid >= (SELECT pg_snapshot_xmax(seen) FROM t)
        UNION ALL
        SELECT m.size FROM (SELECT pg_snapshot_xip(seen) AS xid FROM t) AS x CROSS JOIN LATERAL (
            SELECT size FROM reliablepub_messages
            WHERE shard = :shard AND run IS NULL AND xid = x.xid OFFSET 0
        ) AS m
    ) AS fresh
)
UPDATE reliablepub_turns AS u SET
    stored = u.stored + new.n, open_bytes = u.open_bytes + new.size, seen = pg_current_snapshot()
FROM new WHERE u.shard = :shard AND u.turn = :turn;

-- Whether `seen` and the numbers of transactions are those of another cluster or database; whether they may be,
-- because the server does not tell its cluster; and whether this is the first run of the shard.
-- name: is_moved
SELECT
    t.cluster <> s.cluster, s.cluster LIKE '/%',
    NOT EXISTS (SELECT 1 FROM reliablepub_runs AS r WHERE r.shard = t.shard AND r.id < t.run)
FROM reliablepub_turns AS t, reliablepub_server() AS s WHERE t.shard = :shard AND t.turn = :turn;

-- Rows whose transactions seem to be running in this cluster, or not to have begun, although they are visible.
-- name: forget_foreign_xids
UPDATE reliablepub_messages SET xid = '3'
WHERE shard = :shard AND run IS NULL AND xid >= pg_snapshot_xmin(pg_current_snapshot());

-- name: recount
UPDATE reliablepub_turns AS u SET
    stored = u.confirmed + u.parked + u.expired + u.discarded + m.n, open_bytes = m.size,
    seen = pg_current_snapshot(), cluster = (SELECT cluster FROM reliablepub_server())
FROM (
    SELECT count(*) AS n, coalesce(sum(size), 0) AS size FROM reliablepub_messages WHERE shard = :shard
) AS m
WHERE u.shard = :shard AND u.turn = :turn;

-- name: sequences_behind
SELECT name, most FROM reliablepub_sequences WHERE last_value < most;

-- name: raise_sequence
SELECT setval(:name::text::regclass, :most::bigint);

-- Rows that have become visible since a snapshot (`xmax`, `xip`): those of transactions that had not
-- begun then, and of those that were running. Each of the latter is a search of its own (`OFFSET 0`),
-- because the planner could apply `= ANY` to all rows of the shard. `late`: visible ids up to `last_id`.
-- A sequence shows no row to a reader whom `ALTER SEQUENCE` overtakes, because that changes the file.
-- name: look
WITH fresh AS (
    SELECT id, size, xid FROM reliablepub_messages
    WHERE shard = :shard AND run IS NULL AND xid >= :xmax::text::xid8
    UNION ALL
    SELECT m.* FROM pg_catalog.unnest(:xip::text[]::xid8[]) AS x (xid) CROSS JOIN LATERAL (
        SELECT id, size, xid FROM reliablepub_messages
        WHERE shard = :shard AND run IS NULL AND xid = x.xid OFFSET 0
    ) AS m
),
counts AS (
    SELECT
        count(*) AS n, coalesce(sum(size), 0)::bigint AS size, max(id) AS last_id,
        pg_catalog.array_agg(id ORDER BY id) FILTER (WHERE id <= :last_id) AS late,
        max(xid::text::bigint) AS last_xid
    FROM fresh
)
SELECT
    t.turn, t.run, t.token, t.intervention, pg_current_snapshot()::text, counts.*,
    coalesce((SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM reliablepub_message_ids), 0),
    (SELECT s::text FROM reliablepub_server() AS s),
    extract(epoch FROM clock_timestamp())::double precision
FROM counts, (
    SELECT turn, run, token, intervention FROM reliablepub_turns
    WHERE shard = :shard ORDER BY turn DESC LIMIT 1
) AS t;

-- The commit of a transaction that has written to the server's log brings all of the log to disk. In an
-- outbox that allows loss, it waits for the server's own disk only, and not for a replica.
-- name: flush
SELECT
    reliablepub_write()::text,
    CASE WHEN current_setting('synchronous_commit') = 'off'
        THEN set_config('synchronous_commit', 'local', true) END;

-- name: server
SELECT s::text, extract(epoch FROM clock_timestamp())::double precision FROM reliablepub_server() AS s;

-- name: counted
SELECT seen::text FROM reliablepub_turns WHERE shard = :shard AND turn = :turn;

-- name: any_kept
SELECT 1 FROM reliablepub_confirmed LIMIT 1;

-- `since`, here and in the next one, skips rows that were deleted: while a long transaction keeps them,
-- each look from the beginning would read them all.
-- name: oldest_kept
SELECT min(confirmed_at) FROM reliablepub_confirmed WHERE confirmed_at >= :since;

-- Rows that the relay of another shard is deleting are skipped, so no relay waits for another.
-- name: prune_kept
WITH gone AS (
    DELETE FROM reliablepub_confirmed WHERE id = ANY (ARRAY(
        SELECT id FROM reliablepub_confirmed WHERE confirmed_at BETWEEN :since AND :before
        ORDER BY confirmed_at LIMIT :limit FOR UPDATE SKIP LOCKED
    ))
    RETURNING 1
)
SELECT count(*) FROM gone;

-- name: oldest_key
SELECT min(kept_until) FROM reliablepub_keys WHERE kept_until >= :since;

-- name: overdue_keys
SELECT
    key,
    EXISTS (SELECT 1 FROM reliablepub_messages AS m WHERE m.id = k.id)
    OR EXISTS (SELECT 1 FROM reliablepub_parked AS p WHERE p.id = k.id)
FROM reliablepub_keys AS k WHERE kept_until < :now ORDER BY kept_until LIMIT :limit;

-- name: prolong_key
UPDATE reliablepub_keys SET kept_until = :until WHERE key = :key;

-- An enqueuer may have used it again since it was found.
-- name: forget_overdue_key
DELETE FROM reliablepub_keys WHERE key = :key AND kept_until < :now;

-- Forgets overdue keys, and keeps those of open or parked messages for longer. Enqueuers and the relays
-- of other shards may hold some of them. Returns how many were overdue.
-- name: forget_overdue_keys
WITH overdue AS (
    SELECT key, id FROM reliablepub_keys WHERE kept_until >= :since AND kept_until < :now
    ORDER BY kept_until LIMIT :limit FOR UPDATE SKIP LOCKED
),
prolonged AS (
    UPDATE reliablepub_keys AS k SET kept_until = :until FROM overdue AS o
    WHERE k.key = o.key AND (
        EXISTS (SELECT 1 FROM reliablepub_messages AS m WHERE m.id = o.id)
        OR EXISTS (SELECT 1 FROM reliablepub_parked AS p WHERE p.id = o.id)
    )
),
forgotten AS (
    DELETE FROM reliablepub_keys AS k USING overdue AS o
    WHERE k.key = o.key
    AND NOT EXISTS (SELECT 1 FROM reliablepub_messages AS m WHERE m.id = o.id)
    AND NOT EXISTS (SELECT 1 FROM reliablepub_parked AS p WHERE p.id = o.id)
)
SELECT count(*) FROM overdue;

-- Old rows can wait if another process has locked them, as the relay of another shard that deletes them. So
-- can the status if its table is locked.
-- name: wait_briefly
SELECT set_config('lock_timeout', '20', true);

-- name: draw_ids
SELECT ARRAY(SELECT nextval('reliablepub_message_ids'::regclass) FROM pg_catalog.generate_series(1, :count));

-- name: insert_plain_messages
WITH new AS (
    INSERT INTO reliablepub_messages (
        id, message_id, exchange, routing_key, properties, stored_at, size, checksum, body, run, shard
    )
    SELECT *, :run::integer, :shard::integer FROM unnest(
        :ids::bigint[], :message_ids::text[], :exchanges::text[], :routing_keys::text[],
        :properties::text[], :stored_ats::double precision[], :sizes::integer[], :checksums::bigint[],
        :bodies::bytea[]
    )
    RETURNING size
)
UPDATE reliablepub_turns SET stored = stored + n, open_bytes = open_bytes + new_size
FROM (SELECT count(*) AS n, sum(size) AS new_size FROM new) AS sums WHERE shard = :shard AND turn = :turn;

-- name: insert_messages
WITH new AS (
    INSERT INTO reliablepub_messages (
        id, message_id, exchange, routing_key, properties, stored_at, size, checksum, body,
        due_at, nacked, returned, refused, uncertain, expires_at, ordering_key, refused_at, run, shard
    )
    SELECT *, :run::integer, :shard::integer FROM unnest(
        :ids::bigint[], :message_ids::text[], :exchanges::text[], :routing_keys::text[],
        :properties::text[], :stored_ats::double precision[], :sizes::integer[], :checksums::bigint[],
        :bodies::bytea[], :due_ats::double precision[], :nackeds::integer[], :returneds::integer[],
        :refuseds::integer[], :uncertains::integer[], :expires_ats::double precision[],
        :ordering_keys::text[], :refused_ats::double precision[]
    )
    RETURNING size
)
UPDATE reliablepub_turns SET stored = stored + n, open_bytes = open_bytes + new_size
FROM (SELECT count(*) AS n, sum(size) AS new_size FROM new) AS sums WHERE shard = :shard AND turn = :turn;

-- By the id and the time, here and below: after a crash or a fail-over that has lost a message, another may
-- have its id.
-- name: confirm
WITH gone AS (
    DELETE FROM reliablepub_messages AS m
    USING unnest(:ids::bigint[], :stored_ats::double precision[]) AS c (id, stored_at)
    WHERE m.id = c.id AND m.stored_at = c.stored_at RETURNING m.size
)
UPDATE reliablepub_turns SET confirmed = confirmed + n, open_bytes = open_bytes - gone_size
FROM (SELECT count(*) AS n, coalesce(sum(size), 0) AS gone_size FROM gone) AS sums
WHERE shard = :shard AND turn = :turn;

-- name: confirm_and_keep
WITH gone AS (
    DELETE FROM reliablepub_messages AS m
    USING unnest(:ids::bigint[], :stored_ats::double precision[]) AS c (id, stored_at)
    WHERE m.id = c.id AND m.stored_at = c.stored_at RETURNING m.*
),
kept AS (
    INSERT INTO reliablepub_confirmed
    SELECT
        id, :now::double precision, message_id, exchange, routing_key, ordering_key, properties, stored_at,
        size, checksum, body
    FROM gone ON CONFLICT DO NOTHING
)
UPDATE reliablepub_turns SET confirmed = confirmed + n, open_bytes = open_bytes - gone_size
FROM (SELECT count(*) AS n, coalesce(sum(size), 0) AS gone_size FROM gone) AS sums
WHERE shard = :shard AND turn = :turn;

-- name: discard
WITH gone AS (
    DELETE FROM reliablepub_messages AS m
    USING unnest(:ids::bigint[], :stored_ats::double precision[]) AS c (id, stored_at)
    WHERE m.id = c.id AND m.stored_at = c.stored_at RETURNING m.size
)
UPDATE reliablepub_turns SET discarded = discarded + n, open_bytes = open_bytes - gone_size
FROM (SELECT count(*) AS n, coalesce(sum(size), 0) AS gone_size FROM gone) AS sums
WHERE shard = :shard AND turn = :turn;

-- name: park_messages
WITH given_up AS (
    SELECT * FROM unnest(
        :ids::bigint[], :ats::double precision[], :states::text[], :outcomes::text[],
        :reply_codes::integer[], :reply_texts::text[], :nackeds::integer[], :returneds::integer[],
        :refuseds::integer[], :uncertains::integer[], :stored_ats::double precision[]
    ) AS g (id, at, state, outcome, reply_code, reply_text, nacked, returned, refused, uncertain, stored_at)
),
gone AS (
    DELETE FROM reliablepub_messages AS m USING given_up AS g WHERE m.id = g.id AND m.stored_at = g.stored_at
    RETURNING
        m.id, m.shard, m.message_id, m.exchange, m.routing_key, m.properties, m.stored_at, g.at, g.state,
        g.outcome, g.reply_code, g.reply_text, g.nacked, g.returned, g.refused, g.uncertain, m.size,
        m.checksum, m.body, m.expires_at, m.ordering_key
),
put AS (INSERT INTO reliablepub_parked SELECT * FROM gone)
UPDATE reliablepub_turns SET
    parked = parked + n - late, expired = expired + late, open_bytes = open_bytes - gone_size
FROM (
    SELECT
        count(*) AS n, count(*) FILTER (WHERE state = 'expired') AS late,
        coalesce(sum(size), 0) AS gone_size
    FROM gone
) AS sums
WHERE shard = :shard AND turn = :turn;

-- name: park_damaged
WITH given_up AS (SELECT * FROM unnest(:ids::bigint[], :reasons::text[]) AS g (id, reason)),
gone AS (
    DELETE FROM reliablepub_messages AS m USING given_up AS g WHERE m.id = g.id
    RETURNING
        m.id, m.shard, m.message_id, m.exchange, m.routing_key, m.properties, m.stored_at,
        :at::double precision, 'parked', 'refused', 0, g.reason, m.nacked, m.returned, m.refused,
        m.uncertain, m.size, m.checksum, m.body, m.expires_at, m.ordering_key
),
put AS (INSERT INTO reliablepub_parked SELECT * FROM gone)
UPDATE reliablepub_turns SET parked = parked + n, open_bytes = open_bytes - gone_size
FROM (SELECT count(*) AS n, coalesce(sum(size), 0) AS gone_size FROM gone) AS sums
WHERE shard = :shard AND turn = :turn;

-- name: damaged
SELECT id, message_id, exchange, routing_key, reply_text, nacked + uncertain > 0 FROM reliablepub_parked
WHERE id = ANY (:ids::bigint[]) ORDER BY id;

-- name: reschedule
UPDATE reliablepub_messages AS m SET
    due_at = r.due_at, nacked = r.nacked, returned = r.returned, refused = r.refused,
    uncertain = r.uncertain, refused_at = r.refused_at
FROM unnest(
    :due_ats::double precision[], :nackeds::integer[], :returneds::integer[], :refuseds::integer[],
    :uncertains::integer[], :refused_ats::double precision[], :ids::bigint[]
) AS r (due_at, nacked, returned, refused, uncertain, refused_at, id)
WHERE m.id = r.id;

-- name: insert_attempts
INSERT INTO reliablepub_attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
)
SELECT * FROM unnest(
    :ids::bigint[], :message_ids::text[], :ats::double precision[], :epochs::text[], :tags::bigint[],
    :outcomes::text[], :reply_codes::integer[], :reply_texts::text[], :persistences::text[]
)
ON CONFLICT (id, epoch, tag, at) DO NOTHING;

-- name: delete_in_flight
DELETE FROM reliablepub_in_flight AS f USING unnest(:epochs::text[], :first_tags::bigint[]) AS d (epoch, first_tag)
WHERE f.epoch = d.epoch AND f.first_tag = d.first_tag;

-- name: insert_in_flight
INSERT INTO reliablepub_in_flight (shard, epoch, first_tag, count, ids, sent_at)
SELECT :shard, epoch, first_tag, count, ids, :now::double precision
FROM unnest(:epochs::text[], :first_tags::bigint[], :counts::integer[], :ids::text[]) AS s (epoch, first_tag, count, ids)
ON CONFLICT (epoch, first_tag) DO UPDATE
SET count = excluded.count, ids = excluded.ids, sent_at = excluded.sent_at;

-- name: rebase
UPDATE reliablepub_messages
SET due_at = CASE WHEN due_at > '0' THEN greatest(0.0, due_at + :by) ELSE 0 END, refused_at = greatest(0.0, refused_at + :by)
WHERE shard = :shard AND due_at IS NOT NULL AND (refused_at IS NOT NULL OR nacked + returned + refused > 0);

-- name: rebase_retries
UPDATE reliablepub_messages AS m SET
    due_at = :now::double precision + greatest(0.0, m.due_at - a.at), refused_at = least(m.refused_at, :now)
FROM (SELECT id, max(at) AS at FROM reliablepub_attempts WHERE at > :now GROUP BY id) AS a
WHERE m.id = a.id AND m.shard = :shard AND m.due_at > :now AND m.due_at < 'infinity'
AND m.nacked + m.returned + m.refused > 0;

-- Of one part only, by what is null. Each part is sorted by its index, of whose columns `=` names the
-- shard alone: by `=`, other indexes are in this order, too, and old statistics let the planner take one.
-- name: release
WITH chosen AS (
    (
        SELECT id FROM reliablepub_messages
        WHERE :exchange::text IS NULL AND shard = :shard
        AND due_at IS NOT NULL AND (due_at, id) > ('infinity', :after)
        ORDER BY due_at, id LIMIT :limit
    )
    UNION ALL
    (
        SELECT id FROM reliablepub_messages
        WHERE :routing_key::text IS NULL AND shard = :shard AND due_at = 'infinity'
        AND (exchange, id) > (:exchange, :after) AND exchange <= :exchange
        ORDER BY exchange, id LIMIT :limit
    )
    UNION ALL
    (
        SELECT id FROM reliablepub_messages
        WHERE :routing_key IS NOT NULL AND shard = :shard AND due_at = 'infinity'
        AND (exchange, routing_key, id) > (:exchange, :routing_key, :after)
        AND (exchange, routing_key) <= (:exchange, :routing_key)
        ORDER BY exchange, routing_key, id LIMIT :limit
    )
),
released AS (
    UPDATE reliablepub_messages AS m SET due_at = 0 FROM chosen AS c WHERE m.id = c.id
    RETURNING c.id
)
SELECT count(*), coalesce(max(id), 0) FROM released;

-- name: count_held
SELECT count(*) FROM reliablepub_messages
WHERE shard = :shard AND due_at = 'infinity' AND (:exchange::text IS NULL OR exchange = :exchange)
AND (:routing_key::text IS NULL OR routing_key = :routing_key);

-- Reading. A page has a limit in messages and bytes, and at least one message if there is any.

-- name: next_id_stored
SELECT min(id) FROM reliablepub_messages WHERE id BETWEEN :first_id AND :last_id;

-- A message is next of its ordering key if no earlier message of the key is open, or is parked and holds
-- the key. Rows that are not visible in the relay's snapshot are left out until its next look.
-- name: ready
SELECT
    id, message_id, exchange, routing_key, properties, stored_at, due_at, nacked, returned, refused,
    uncertain, checksum, CASE WHEN is_first THEN body END, expires_at, ordering_key, refused_at, size, is_first
FROM (
    SELECT p.*,
        -- Never decreases, so that the page ends at one row: the rows after it are read with the next.
        sum(CASE WHEN is_first THEN size ELSE 0 END) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING)
            - CASE WHEN is_first THEN size ELSE 0 END AS before
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
        WHERE m.shard = :shard AND m.id BETWEEN :first_id AND :last_id AND m.due_at IS NULL
        AND (m.run IS NOT NULL OR pg_visible_in_snapshot(m.xid, :seen::text::pg_snapshot))
        ORDER BY m.id LIMIT :limit
    ) AS p
) AS q
WHERE before <= :bytes_max
ORDER BY id;

-- name: messages
SELECT
    id, message_id, exchange, routing_key, properties, stored_at, due_at, nacked, returned, refused,
    uncertain, checksum, body, expires_at, ordering_key, refused_at, size,
    m.ordering_key IS NULL OR (NOT EXISTS (
        SELECT 1 FROM reliablepub_messages AS e
        WHERE e.ordering_key = m.ordering_key AND e.id < m.id
    ) AND NOT EXISTS (
        SELECT 1 FROM reliablepub_parked AS p
        WHERE p.ordering_key = m.ordering_key AND p.state = 'parked' AND p.is_skipped = 0
        AND p.id < m.id
    )) AS is_first
FROM reliablepub_messages AS m WHERE m.id = ANY (:ids::bigint[]);

-- Only rows that are visible in the relay's snapshot, here and in the next two: others are not counted.
-- name: waiting
SELECT id, due_at, size FROM reliablepub_messages
WHERE shard = :shard AND due_at IS NOT NULL AND (due_at, id) > (:after_at, :after_id)
AND (run IS NOT NULL OR pg_visible_in_snapshot(xid, :seen::text::pg_snapshot))
ORDER BY due_at, id LIMIT :limit;

-- name: expiring
SELECT id, expires_at, size FROM reliablepub_messages
WHERE shard = :shard AND expires_at IS NOT NULL AND (expires_at, id) > (:after_at, :after_id)
AND (run IS NOT NULL OR pg_visible_in_snapshot(xid, :seen::text::pg_snapshot))
ORDER BY expires_at, id LIMIT :limit;

-- Operators' changes name keys of all shards. At most one row exceeds the limit in
-- bytes, the last one.
-- name: firsts_of_keys
SELECT
    id, message_id, exchange, routing_key, properties, stored_at, due_at, nacked, returned, refused,
    uncertain, checksum, body, expires_at, ordering_key, refused_at, size, n - 1
FROM (
    SELECT m.*, k.n, sum(m.size) OVER (ORDER BY k.n ROWS UNBOUNDED PRECEDING) - m.size AS before
    FROM pg_catalog.unnest(:keys::text[]) WITH ORDINALITY AS k (key, n)
    CROSS JOIN LATERAL (
        SELECT * FROM reliablepub_messages AS f WHERE f.ordering_key = k.key ORDER BY f.id LIMIT 1
    ) AS m
    WHERE m.shard = :shard AND (m.due_at IS NULL OR m.due_at <= :now)
    AND (m.run IS NOT NULL OR pg_visible_in_snapshot(m.xid, :seen::text::pg_snapshot))
    AND NOT EXISTS (
        SELECT 1 FROM reliablepub_parked AS p
        WHERE p.ordering_key = k.key AND p.state = 'parked' AND p.is_skipped = 0 AND p.id < m.id
    )
) AS q
WHERE before <= :bytes_max
ORDER BY n LIMIT :limit;

-- The time in which a refused message is retried begins anew when it is next of its key.
-- name: wait_for_key
UPDATE reliablepub_messages AS m SET due_at = NULL, refused_at = NULL WHERE m.id = ANY (:ids::bigint[]) AND (EXISTS (
    SELECT 1 FROM reliablepub_messages AS e
    WHERE e.ordering_key = m.ordering_key AND e.id < m.id
) OR EXISTS (
    SELECT 1 FROM reliablepub_parked AS p
    WHERE p.ordering_key = m.ordering_key AND p.state = 'parked' AND p.is_skipped = 0
    AND p.id < m.id
));

-- name: lowest_awaited
SELECT m.id FROM reliablepub_messages AS m
WHERE m.shard = :shard AND m.id BETWEEN :first_id AND :last_id
AND (
    m.due_at IS NULL OR m.due_at <= :at OR m.due_at = 'infinity'
    OR m.nacked + m.returned + m.refused > 0 OR m.refused_at IS NOT NULL
)
AND (m.ordering_key IS NULL OR NOT EXISTS (
    SELECT 1 FROM reliablepub_parked AS p
    WHERE p.ordering_key = m.ordering_key AND p.state = 'parked' AND p.is_skipped = 0
    AND p.id < m.id
) AND NOT EXISTS ( -- nor behind a first one that waits for its time
    SELECT 1 FROM reliablepub_messages AS f
    WHERE f.id = (SELECT min(e.id) FROM reliablepub_messages AS e WHERE e.ordering_key = m.ordering_key)
    AND f.id < m.id AND f.due_at > :at AND f.due_at < 'infinity'
    AND f.nacked + f.returned + f.refused = 0 AND f.refused_at IS NULL
))
ORDER BY m.id LIMIT 1;

-- name: held_exchanges
SELECT h.exchange, h.n, m.refused_at
FROM (
    SELECT exchange, count(*) AS n, min(id) AS first FROM reliablepub_messages
    WHERE shard = :shard AND due_at = 'infinity' GROUP BY exchange LIMIT :limit
) AS h
JOIN reliablepub_messages AS m ON m.id = h.first;

-- name: show
INSERT INTO reliablepub_status AS s (shard, run, at, content) VALUES (:shard, :run, clock_timestamp(), :content)
ON CONFLICT (shard) DO UPDATE SET run = excluded.run, at = excluded.at, content = excluded.content
WHERE s.run <= excluded.run;

-- name: unshow
DELETE FROM reliablepub_status WHERE shard = :shard AND run = :run;

-- Start and end of a relay.

-- The sequence may be behind the rows.
-- name: begin_run
INSERT INTO reliablepub_runs (id, shard, pid, host, started_at, began_anew) OVERRIDING SYSTEM VALUE
SELECT
    greatest(nextval('reliablepub_runs_id_seq'::regclass), (SELECT max(id) + 1 FROM reliablepub_runs)),
    :shard::integer, :pid::integer, :host::text, :now::double precision, :began_anew::text
RETURNING id;

-- Programs that run for a moment, once a second, would add 30 million rows a year. Other shards keep
-- theirs: the newest row of a shard may be the oldest of all.
-- name: forget_old_runs
DELETE FROM reliablepub_runs WHERE id = ANY (ARRAY(
    SELECT id FROM reliablepub_runs WHERE shard = :shard AND id <= :run - 1000 ORDER BY id LIMIT 10000
));

-- name: owner
SELECT r.id, r.pid, r.host FROM reliablepub_runs AS r WHERE r.id = :run;

-- An array, because the planner cannot estimate how few messages the ranges of tags contain: with `IN`
-- it joined them with all stored messages, which took 51 s with 5 million.
-- name: count_left_in_flight
UPDATE reliablepub_messages SET uncertain = uncertain + 1
WHERE shard = :shard AND id = ANY (ARRAY(SELECT id FROM reliablepub_in_flight_tags));

-- name: remember_left_in_flight
INSERT INTO reliablepub_attempts (
    id, message_id, at, epoch, tag, outcome, reply_code, reply_text, persistence
)
SELECT
    t.id, t.message_id, :at, t.epoch, t.tag, 'uncertain', 0, :reply_text, 'possibly persisted'
FROM reliablepub_in_flight_tags AS t JOIN reliablepub_in_flight AS f
ON f.shard = :shard AND f.epoch = t.epoch AND t.tag >= f.first_tag AND t.tag < f.first_tag + f.count
ORDER BY t.epoch, t.tag
ON CONFLICT (id, epoch, tag, at) DO NOTHING;

-- name: clear_in_flight
DELETE FROM reliablepub_in_flight WHERE shard = :shard;

-- Operators. Statements with the same name and values are in the `queries.sql` of SQLite's outbox.

-- An operator's turn blocks the relay of the shard until it ends. If the relay was faster, no row is
-- returned, and the statement is run again: an error would abort the transaction. The token tells the
-- turns of operators from those of relays, and those of this transaction from others.
-- name: take_operators_turn
INSERT INTO reliablepub_turns
SELECT
    t.shard, t.turn + 1, t.run, 'operator ' || pg_current_xact_id()::text || ' ' || :token, t.at, t.is_free,
    t.stored, t.confirmed, t.parked, t.expired, t.discarded, t.open_bytes, t.intervention, t.seen, t.cluster, t.backend
FROM reliablepub_turns AS t WHERE t.shard = :shard ORDER BY t.turn DESC LIMIT 1
ON CONFLICT (shard, turn) DO NOTHING
RETURNING turn, pg_current_xact_id()::text;

-- Shards whose newest turn is another operator's, and whose owner lives. An operator may have held its turn
-- for longer than an owner is silent.
-- name: relays_to_wait_for
SELECT shard FROM reliablepub_owners
WHERE NOT is_free AND starts_with(token, 'operator ')
AND NOT starts_with(token, 'operator ' || coalesce(pg_current_xact_id_if_assigned()::text, '') || ' ')
AND (clock_timestamp() - alive_at < make_interval(secs => :expiry_s) OR is_linked);

-- name: pause
SELECT pg_sleep(:seconds);

-- name: isolation
SELECT current_setting('transaction_isolation');

-- name: is_transaction
SELECT coalesce(pg_current_xact_id_if_assigned()::text = :xid, false);

-- `count_new` without the messages that this transaction has stored. Other processes see and count them
-- after its commit, so the snapshot must list it as running.
-- name: count_new_of_others
WITH t AS (SELECT seen FROM reliablepub_turns WHERE shard = :shard AND turn = :turn),
new AS (
    SELECT count(*) AS n, coalesce(sum(size), 0) AS size FROM (
        SELECT size FROM reliablepub_messages
        WHERE shard = :shard AND run IS NULL AND xid >= (SELECT pg_snapshot_xmax(seen) FROM t)
        AND xid <> pg_current_xact_id()
        UNION ALL
        SELECT m.size FROM (
            SELECT x.xid FROM t, pg_snapshot_xip(t.seen) AS x (xid) WHERE x.xid <> pg_current_xact_id()
        ) AS x CROSS JOIN LATERAL (
            SELECT size FROM reliablepub_messages
            WHERE shard = :shard AND run IS NULL AND xid = x.xid OFFSET 0
        ) AS m
    ) AS fresh
),
own AS (
    SELECT least(pg_snapshot_xmin(s), pg_current_xact_id())::text || ':' || pg_snapshot_xmax(s)::text
        || ':' || coalesce((
            SELECT string_agg(r.xid::text, ',' ORDER BY r.xid) FROM (
                SELECT pg_snapshot_xip(s) AS xid
                UNION SELECT pg_current_xact_id()
            ) AS r WHERE r.xid < pg_snapshot_xmax(s)
        ), '') AS seen
    FROM pg_current_snapshot() AS s
)
UPDATE reliablepub_turns AS u SET
    stored = u.stored + new.n, open_bytes = u.open_bytes + new.size, seen = own.seen::pg_snapshot
FROM new, own WHERE u.shard = :shard AND u.turn = :turn;

-- name: is_own
SELECT 1 FROM reliablepub_messages
WHERE id = :id AND run IS NULL AND xid = pg_current_xact_id_if_assigned();

-- The state of a message, its shard, and whether a statement can change the row: here, always. A message
-- that became visible after the count of the operator's turn is left out: it could not be subtracted
-- from the counts.
-- name: states
SELECT m.id, CASE WHEN m.due_at > '0' THEN 'waiting' ELSE 'ready' END, m.shard, true, m.size
FROM reliablepub_messages AS m WHERE CHOSEN(m.id)
AND (m.run IS NOT NULL OR pg_visible_in_snapshot(m.xid, (
    SELECT t.seen FROM reliablepub_turns AS t WHERE t.shard = m.shard ORDER BY t.turn DESC LIMIT 1
)))
UNION ALL
SELECT p.id, p.state, p.shard, true, p.size FROM reliablepub_parked AS p WHERE CHOSEN(p.id)
UNION ALL
SELECT c.id, 'confirmed', reliablepub_shard_of(c.ordering_key, c.exchange, c.routing_key), true, c.size
FROM reliablepub_confirmed AS c WHERE CHOSEN(c.id);

-- name: insert_intervention
INSERT INTO reliablepub_interventions (
    id, message_id, exchange, routing_key, ordering_key, at, action, person, note
)
SELECT id, message_id, exchange, routing_key, ordering_key, :at, :action, :person, :note
FROM (
    SELECT id, message_id, exchange, routing_key, ordering_key FROM reliablepub_messages WHERE CHOSEN(id)
    UNION ALL
    SELECT id, message_id, exchange, routing_key, ordering_key FROM reliablepub_parked WHERE CHOSEN(id)
    UNION ALL
    SELECT id, message_id, exchange, routing_key, ordering_key FROM reliablepub_confirmed WHERE CHOSEN(id)
) AS found;

-- With the ordering key: the transaction may have removed the first message of the key, and not seen the
-- next one, which another has stored meanwhile.
-- name: touched
SELECT
    i.intervention, i.id, i.message_id, i.exchange, i.routing_key, i.action, i.person, i.note,
    EXISTS (SELECT 1 FROM reliablepub_messages AS m WHERE m.id = i.id),
    EXISTS (SELECT 1 FROM reliablepub_parked AS p WHERE p.id = i.id),
    EXISTS (
        SELECT 1 FROM reliablepub_attempts AS a WHERE a.id = i.id AND a.persistence <> 'not written'
    ),
    i.ordering_key
FROM reliablepub_interventions AS i WHERE i.intervention > :after ORDER BY i.intervention;

-- name: shard
SELECT shard FROM reliablepub_messages WHERE id = :id
UNION ALL
SELECT shard FROM reliablepub_parked WHERE id = :id;

-- name: note_interventions
UPDATE reliablepub_turns AS t SET intervention = greatest(t.intervention, i.newest)
FROM (SELECT coalesce(max(intervention), 0) AS newest FROM reliablepub_interventions) AS i
WHERE t.shard = :shard AND t.turn = :turn;

-- A relay that was silent must not continue as the owner of messages in flight that are changed. Without
-- any of these it keeps its shard: it may live, and the server may have stood still.
-- name: dismiss_relay
UPDATE reliablepub_turns SET run = 0, is_free = true WHERE shard = :shard AND turn = :turn
AND EXISTS (
    SELECT 1 FROM reliablepub_in_flight_tags AS t JOIN reliablepub_in_flight AS f
    ON f.shard = :shard AND f.epoch = t.epoch AND t.tag >= f.first_tag AND t.tag < f.first_tag + f.count
    WHERE t.id = ANY (:ids::bigint[])
)
RETURNING 1;

-- The status of a relay that was killed is not that of its successor, which may have the same process
-- id in another container. The age of an owner is taken at the start of this transaction, because its turn
-- keeps the owner from taking one.
-- Of an owner that is silent and still connected, the process and for how long: it hangs, or its host is cut off.
-- name: relays
SELECT
    o.shard, CASE WHEN o.is_alive THEN r.pid END AS pid, u.content, coalesce(r.host, '') AS host,
    CASE WHEN NOT o.is_alive THEN r.pid END AS silent_pid, o.silent_s
FROM (
    SELECT
        shard, run, is_free, is_linked, now() - alive_at < make_interval(secs => :expiry_s) AS is_alive,
        extract(epoch FROM now() - alive_at)::double precision AS silent_s
    FROM reliablepub_owners
) AS o
LEFT JOIN reliablepub_runs AS r ON r.id = o.run AND NOT o.is_free AND (o.is_alive OR o.is_linked)
LEFT JOIN reliablepub_status AS u
    ON u.shard = o.shard AND u.run = coalesce(CASE WHEN o.is_alive THEN r.id END, u.run)
ORDER BY o.shard;

-- name: may_see_activity
SELECT true WHERE has_function_privilege('pg_catalog.pg_stat_get_activity(integer)', 'EXECUTE');

-- Each user sees the names of all connections. Only members of its role and of pg_read_all_stats see
-- when a connection began.
-- name: standbys
SELECT
    substr(application_name, length(:name) + 1) AS host,
    extract(epoch FROM clock_timestamp() - backend_start)::double precision AS age_s
FROM pg_stat_activity
WHERE datname = current_database() AND starts_with(application_name, :name)
ORDER BY backend_start, pid;

-- name: bytes_on_disk
SELECT sum(pg_catalog.pg_total_relation_size(c.oid))::bigint
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = :schema AND c.relkind = 'r';

-- name: change_ledger
UPDATE reliablepub_turns SET
    stored = stored + :stored, confirmed = confirmed + :confirmed, parked = parked + :parked,
    expired = expired + :expired, discarded = discarded + :discarded,
    open_bytes = open_bytes + :open_bytes
WHERE shard = :shard AND turn = :turn;

-- The sequence may be behind the rows after a move.
-- name: last_id
SELECT greatest(
    (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM reliablepub_message_ids),
    (SELECT max(id) FROM reliablepub_messages)
) AS last_id;

-- name: next_id
SELECT nextval('reliablepub_message_ids'::regclass) AS next_id;

-- name: park_as_it_is
INSERT INTO reliablepub_parked
SELECT
    id, shard, message_id, exchange, routing_key, properties, stored_at, :at, 'parked', :outcome, 0,
    :reply_text, nacked, returned, refused, uncertain, size, checksum, body, expires_at, ordering_key
FROM reliablepub_messages WHERE CHOSEN(id);

-- name: delete_open
DELETE FROM reliablepub_messages WHERE CHOSEN(id) RETURNING size;

-- name: delete_parked
DELETE FROM reliablepub_parked WHERE CHOSEN(id) RETURNING size;

-- name: delete_confirmed
DELETE FROM reliablepub_confirmed WHERE CHOSEN(id) RETURNING size;

-- Names of Celery tasks, which are a header. Encrypted properties have none.
-- name: tasks
SELECT id, properties::json -> 'headers' ->> 'task' AS task FROM (
    SELECT id, properties FROM reliablepub_messages WHERE CHOSEN(id)
    UNION ALL
    SELECT id, properties FROM reliablepub_parked WHERE CHOSEN(id)
    UNION ALL
    SELECT id, properties FROM reliablepub_confirmed WHERE CHOSEN(id)
) AS found;

-- name: open_again
INSERT INTO reliablepub_messages (
    id, run, shard, message_id, exchange, routing_key, properties, stored_at, due_at,
    uncertain, size, checksum, body, ordering_key
)
SELECT
    id, 0, reliablepub_shard_of(ordering_key, exchange, routing_key), message_id, exchange, routing_key,
    properties, stored_at, 0, 1, size, checksum, body, ordering_key
FROM reliablepub_confirmed WHERE CHOSEN(id);

-- The deadline is dropped: an operator who retries a message wants it to be sent.
-- name: unpark
INSERT INTO reliablepub_messages (
    id, run, shard, message_id, exchange, routing_key, properties, stored_at, due_at,
    uncertain, size, checksum, body, ordering_key
)
SELECT
    id, 0, shard, message_id, exchange, routing_key, properties, stored_at, 0,
    least(uncertain::bigint + nacked, 2147483647), size, checksum, body, ordering_key
FROM reliablepub_parked WHERE CHOSEN(id);

-- name: due_now
UPDATE reliablepub_messages SET
    due_at = 0, uncertain = least(uncertain::bigint + nacked, 2147483647), nacked = 0, returned = 0,
    refused = 0, refused_at = NULL, expires_at = NULL
WHERE CHOSEN(id);

-- name: in_flight
SELECT
    epoch, tag, id, message_id, exchange, routing_key,
    extract(epoch FROM (sent_at || ' UTC')::timestamptz)::double precision AS sent_at
FROM reliablepub_in_flight_tags WHERE :id IS NULL OR id = :id ORDER BY epoch, tag LIMIT :limit;

-- Without turns there is no ledger: its sums are null.
-- name: audit
SELECT open_difference, parked_difference, expired_difference, bytes_difference FROM reliablepub_audit
WHERE stored IS NOT NULL;

-- Without a due time, it is due now: the relay reads on while the import lasts, and may be beyond its
-- id by the time of the commit.
-- name: import_open
INSERT INTO reliablepub_messages (
    id, run, shard, message_id, exchange, routing_key, properties, stored_at, due_at,
    nacked, returned, refused, uncertain, size, checksum, body, expires_at, ordering_key, refused_at
) VALUES (
    :id, 0, reliablepub_shard_of(:ordering_key, :exchange, :routing_key), :message_id, :exchange,
    :routing_key, :properties, :stored_at, coalesce(:due_at, 0),
    :nacked, :returned, :refused, :uncertain, :size, :checksum, :body, :expires_at, :ordering_key,
    :refused_at
)
RETURNING shard;

-- name: import_given_up
INSERT INTO reliablepub_parked (
    id, shard, message_id, exchange, routing_key, properties, stored_at,
    parked_at, state, outcome, reply_code, reply_text, nacked, returned, refused, uncertain,
    size, checksum, body, expires_at, ordering_key, is_skipped
) VALUES (
    :id, reliablepub_shard_of(:ordering_key, :exchange, :routing_key), :message_id, :exchange,
    :routing_key, :properties, :stored_at,
    :parked_at, :state, :outcome, :reply_code, :reply_text, :nacked, :returned, :refused, :uncertain,
    :size, :checksum, :body, :expires_at, :ordering_key,
    :is_skipped
);

-- Facts about the server that any reader may query.
-- name: surroundings
SELECT
    current_setting('server_version') AS version,
    pg_is_in_recovery() AS is_replica,
    current_setting('fsync') AS fsync,
    current_setting('full_page_writes') AS full_page_writes,
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('synchronous_standby_names') AS synchronous_standbys,
    current_setting('autovacuum') AS autovacuum,
    current_setting('max_connections')::integer AS connections_max,
    (SELECT allows_loss FROM reliablepub_outbox) AS allows_loss,
    (
        SELECT max(extract(epoch FROM clock_timestamp() - prepared))::double precision
        FROM pg_prepared_xacts
    ) AS prepared_s,
    (SELECT max(greatest(age(xmin), age(catalog_xmin))) FROM pg_replication_slots) AS slot_age,
    t.dead, t.live,
    (
        SELECT string_agg(oid::regclass::text, ', ' ORDER BY relname) FROM pg_class
        WHERE relnamespace = 'reliablepub_'::regnamespace AND relkind IN ('r', 'S') AND relpersistence = 'u'
    ) AS unlogged,
    extract(epoch FROM clock_timestamp())::double precision AS now
FROM (
    SELECT coalesce(sum(n_dead_tup), 0)::bigint AS dead, coalesce(sum(n_live_tup), 0)::bigint AS live
    FROM pg_stat_user_tables WHERE schemaname = 'reliablepub_'
) AS t;

-- What this role may: the sequences that it may not set, if it is to relay, and whether it sees the server's
-- processes, which administrators of managed servers may refuse.
-- name: privileges
SELECT
    current_user::text AS role,
    has_function_privilege('pg_catalog.pg_stat_get_activity(integer)', 'EXECUTE') AS sees_activity,
    (
        SELECT string_agg(c.oid::regclass::text, ', ' ORDER BY c.relname) FROM pg_class AS c
        WHERE c.relnamespace = 'reliablepub_'::regnamespace AND has_table_privilege('reliablepub_turns', 'INSERT')
        AND NOT CASE WHEN c.relkind = 'S' THEN has_sequence_privilege(c.oid, 'UPDATE') ELSE true END
    ) AS sequences_kept;

-- Only members of pg_monitor see the age of other users' sessions; for others it is null.
-- name: activity
SELECT
    count(*) FILTER (WHERE backend_type = 'client backend') AS connections,
    max(greatest(age(backend_xmin), age(backend_xid))) FILTER (WHERE holds) AS oldest_age,
    max(extract(epoch FROM clock_timestamp() - xact_start)) FILTER (WHERE holds)
        ::double precision AS oldest_s,
    max(extract(epoch FROM clock_timestamp() - state_change)) FILTER (WHERE wait_event = 'SyncRep')
        ::double precision AS replica_wait_s,
    (SELECT count(*) FROM pg_stat_replication) AS replicas
FROM (
    SELECT *, pid <> pg_backend_pid() AND backend_type <> 'autovacuum worker'
        AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AS holds
    FROM pg_stat_activity
) AS s;

-- name: lost_commits
SELECT id, started_at AS at, began_anew AS reason FROM reliablepub_runs
WHERE began_anew LIKE '%lost commits%' ORDER BY id DESC LIMIT 100;

-- What was due at a time and waits for nothing. Of a relay at rest, any message that is first of its key;
-- of one at work, only those below its lowest one in flight that were never tried and have no key: others
-- may just have been read. Only the first 10,000 are compared with their keys.
-- name: passed_over
SELECT id FROM (
    SELECT id, ordering_key FROM reliablepub_messages
    WHERE shard = :shard AND stored_at < :at AND (due_at IS NULL OR :is_idle AND due_at <= :at)
    AND id < CASE WHEN :is_idle THEN '9223372036854775807' ELSE (
        SELECT min((r.value ->> 0)::bigint)
        FROM reliablepub_in_flight AS f, json_array_elements(f.ids::json) AS r WHERE f.shard = :shard
    ) END
    ORDER BY id LIMIT 10000
) AS m
WHERE m.ordering_key IS NULL OR :is_idle AND NOT EXISTS (
    SELECT 1 FROM reliablepub_messages AS e WHERE e.ordering_key = m.ordering_key AND e.id < m.id
) AND NOT EXISTS (
    SELECT 1 FROM reliablepub_parked AS p
    WHERE p.ordering_key = m.ordering_key AND p.state = 'parked' AND p.is_skipped = 0 AND p.id < m.id
)
ORDER BY id LIMIT :limit;

-- name: functions
SELECT n.nspname::text AS schema, p.proname::text AS name, p.prosrc AS body
FROM pg_namespace AS n JOIN pg_proc AS p ON p.pronamespace = n.oid
WHERE n.nspname = 'reliablepub_';

-- name: owners
SELECT
    o.shard, r.pid, r.host, o.is_free OR r.id IS NULL AS is_free,
    extract(epoch FROM clock_timestamp() - o.alive_at)::double precision AS silent_s,
    coalesce(o.is_linked, false) AS is_linked
FROM reliablepub_owners AS o
LEFT JOIN reliablepub_runs AS r ON r.id = o.run
ORDER BY o.shard;
