-- The tables of an outbox in PostgreSQL 13 or later, version 4 (see `VERSION` in sql.py).
--
-- The outbox has a schema of its own. A name such as `reliablepub_messages` stands for the table
-- `messages` in that schema, here and in queries.sql; see sql.py.
--
-- An open message is in `messages`, a parked or expired one in `parked`. A confirmed message is in
-- neither, and is only counted. A row moves in one transaction, with its id and its count.
--
-- Names of messages have the collation "C", which sorts by bytes. Other collations change with the
-- operating system, and an index that an earlier version has sorted no longer finds some rows.
--
-- No row is updated repeatedly: while a long transaction anywhere in the cluster keeps old row
-- versions alive, each update of such a row would cost more than the previous one.

-- Names and headers of messages may have any character. SQL_ASCII stores the bytes of UTF-8 as well.
DO $$
BEGIN
    IF current_setting('server_encoding') NOT IN ('UTF8', 'SQL_ASCII') THEN
        RAISE EXCEPTION 'an outbox needs a database with encoding UTF8, and % has %',
            current_database(), current_setting('server_encoding');
    END IF;
END
$$;

CREATE SCHEMA reliablepub_;

-- One row: properties of the outbox. `allows_loss`: the operator accepts `synchronous_commit = off`.
CREATE TABLE reliablepub_outbox (
    id integer PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    version integer NOT NULL,
    shards integer NOT NULL CHECK (shards BETWEEN 1 AND 64),
    allows_loss boolean NOT NULL,
    created_at double precision NOT NULL DEFAULT extract(epoch FROM clock_timestamp())
);

CREATE SEQUENCE reliablepub_message_ids;

-- The cluster and database that answer, and when the server was started. Administrators of managed
-- servers refuse some functions; then a text is empty, or comes from the next best function.
CREATE FUNCTION reliablepub_server(OUT cluster text, OUT started text) LANGUAGE plpgsql STABLE AS $$
BEGIN
    BEGIN
        cluster := (SELECT system_identifier::text FROM pg_control_system());
    EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR object_not_in_prerequisite_state THEN
        cluster := '';
    END;
    cluster := cluster || '/' || (SELECT oid::text FROM pg_database WHERE datname = current_database());
    BEGIN
        started := extract(epoch FROM pg_postmaster_start_time())::text;
    EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR object_not_in_prerequisite_state THEN
        BEGIN
            started := extract(epoch FROM pg_conf_load_time())::text;
        EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR object_not_in_prerequisite_state THEN
            started := '';
        END;
    END;
END
$$;

-- The shard of a message. All messages of an ordering key are in one shard; without a key, all
-- messages of a destination.
CREATE FUNCTION reliablepub_shard_of(ordering_key text, exchange text, routing_key text)
RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT (hashtext(coalesce(ordering_key, exchange || ' ' || routing_key)) & 2147483647) % {shards}
$$;

-- Where the relay of a shard is notified. The name of a schema may be as long as that of a channel.
CREATE FUNCTION reliablepub_channel(shard integer) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT 'reliablepub ' || hashtext('reliablepub_')::text || '.' || shard::text
$$;

-- Open messages. A row is deleted in the transaction that records its final outcome. Messages in
-- flight are not marked.
--
-- Ids become visible in the order of the commits, not in numerical order. So each row of an enqueuer
-- has the number of its transaction, and a relay finds new rows by comparing that number with its
-- last snapshot. `run` is null in these rows: the relay counts them when it finds them. In other rows
-- it is the run of the relay that has stored and counted them, or 0 for an operator.
-- `checksum` is -1 in rows that `reliablepub_enqueue` below has stored.
CREATE TABLE reliablepub_messages (
    id bigint PRIMARY KEY DEFAULT nextval('reliablepub_message_ids'),
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    stored_at double precision NOT NULL,
    due_at double precision,
    expires_at double precision,
    refused_at double precision,
    checksum bigint NOT NULL DEFAULT -1,
    run integer,
    shard integer NOT NULL DEFAULT 0,
    size integer NOT NULL,
    nacked integer NOT NULL DEFAULT 0,
    returned integer NOT NULL DEFAULT 0,
    refused integer NOT NULL DEFAULT 0,
    uncertain integer NOT NULL DEFAULT 0,
    message_id text COLLATE "C" NOT NULL,
    exchange text COLLATE "C" NOT NULL,
    routing_key text COLLATE "C" NOT NULL,
    properties text NOT NULL DEFAULT '{{}}',
    body bytea NOT NULL,
    ordering_key text COLLATE "C"
) WITH (
    -- Most rows exist for a moment. Only a vacuum makes their space available to the next ones.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 200000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 200000,
    toast.autovacuum_vacuum_scale_factor = 0,
    toast.autovacuum_vacuum_threshold = 20000,
    toast.autovacuum_vacuum_cost_delay = 0
);

-- A row that was copied from another cluster, by logical replication or from a dump, has the number of
-- a transaction there. Here it is new.
CREATE FUNCTION reliablepub_arrive() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.xid := pg_current_xact_id();
    NEW.run := NULL;
    RETURN NEW;
END
$$;
CREATE TRIGGER arrives BEFORE INSERT ON reliablepub_messages FOR EACH ROW
WHEN (NEW.xid <> pg_current_xact_id())
EXECUTE FUNCTION reliablepub_arrive();
ALTER TABLE reliablepub_messages ENABLE ALWAYS TRIGGER arrives;

CREATE INDEX messages_fresh ON reliablepub_messages (shard, xid) WHERE run IS NULL;
CREATE INDEX messages_waiting ON reliablepub_messages (shard, due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX messages_expiring ON reliablepub_messages (shard, expires_at, id)
WHERE expires_at IS NOT NULL;

-- Messages of a paused destination have an infinite due time.
CREATE INDEX messages_held ON reliablepub_messages (shard, exchange, routing_key, id)
WHERE due_at = 'infinity';
CREATE INDEX messages_held_of_exchange ON reliablepub_messages (shard, exchange, id)
WHERE due_at = 'infinity';
CREATE INDEX messages_of_key ON reliablepub_messages (ordering_key, id)
WHERE ordering_key IS NOT NULL;

-- Parked and expired messages, with their last outcome. An operator can retry them.
CREATE TABLE reliablepub_parked (
    id bigint PRIMARY KEY,
    shard integer NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    exchange text COLLATE "C" NOT NULL,
    routing_key text COLLATE "C" NOT NULL,
    properties text NOT NULL,
    stored_at double precision NOT NULL,
    parked_at double precision NOT NULL,
    state text NOT NULL CHECK (state IN ('parked', 'expired')),
    outcome text NOT NULL,
    reply_code integer NOT NULL,
    reply_text text NOT NULL,
    nacked integer NOT NULL,
    returned integer NOT NULL,
    refused integer NOT NULL,
    uncertain integer NOT NULL,
    size integer NOT NULL,
    checksum bigint NOT NULL,
    body bytea NOT NULL,
    expires_at double precision,
    ordering_key text COLLATE "C",
    is_skipped integer NOT NULL DEFAULT 0
);

-- A parked message holds its ordering key: later messages of the key wait until an operator decides.
CREATE INDEX parked_holding ON reliablepub_parked (ordering_key, id)
WHERE ordering_key IS NOT NULL AND state = 'parked' AND is_skipped = 0;

-- When a key is released, its next message becomes due, so that the relay finds it. A due time of 0
-- is due by any clock.
CREATE FUNCTION reliablepub_release_key() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE reliablepub_messages SET due_at = 0
    WHERE due_at IS NULL AND id = (
        SELECT min(id) FROM reliablepub_messages WHERE ordering_key = OLD.ordering_key
    );
    RETURN NULL;
END
$$;
CREATE TRIGGER key_skipped AFTER UPDATE OF is_skipped ON reliablepub_parked FOR EACH ROW
WHEN (NEW.ordering_key IS NOT NULL AND NEW.is_skipped <> 0)
EXECUTE FUNCTION reliablepub_release_key();
CREATE TRIGGER key_released AFTER DELETE ON reliablepub_parked FOR EACH ROW
WHEN (OLD.ordering_key IS NOT NULL)
EXECUTE FUNCTION reliablepub_release_key();

-- Every attempt that did not end in a confirm. A relay whose commit was cut off may insert an attempt
-- again; the unique index leaves the second one out.
CREATE TABLE reliablepub_attempts (
    attempt bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id bigint NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    at double precision NOT NULL,
    epoch text COLLATE "C" NOT NULL,
    tag bigint NOT NULL,
    outcome text NOT NULL,
    reply_code integer NOT NULL,
    reply_text text NOT NULL,
    persistence text NOT NULL
        CHECK (persistence IN ('not written', 'possibly persisted', 'persisted'))
);
CREATE UNIQUE INDEX attempts_of_message ON reliablepub_attempts (id, epoch, tag, at);

-- Delivery tags in flight, one row a batch, for operators and for a relay that starts. `ids` is JSON:
-- [[first id, count], ...] in the order of the tags.
CREATE TABLE reliablepub_in_flight (
    shard integer NOT NULL,
    epoch text COLLATE "C" NOT NULL,
    first_tag bigint NOT NULL,
    count integer NOT NULL CHECK (count > 0),
    ids text NOT NULL,
    sent_at double precision NOT NULL,
    PRIMARY KEY (epoch, first_tag)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

-- Each commit of a relay or an operator is a turn of its shard. The newest turn records the owner of
-- the shard (`run`), the time of its last turn (`at`), and the ledger:
--   stored = confirmed + parked + expired + discarded + (open messages that are counted).
-- Messages of relays and operators are counted, and those of enqueuers that are visible in the
-- snapshot `seen`. The turn of an operator does not change the owner or the time. The primary key is
-- the fence: of two transactions that follow the same turn, only one can commit. `token` distinguishes
-- a transaction whose COMMIT was cut off from one of another process, and a turn from one of the same
-- number that was lost in a fail-over. `cluster` is where `seen`, and the `xid` of the counted messages,
-- have a meaning (see `server` above). `backend` is the server process
-- of the owner's connection: when it has ended, the owner has probably died. It is 0 behind PgBouncer,
-- which opens and closes connections to the server as it likes.
CREATE TABLE reliablepub_turns (
    shard integer NOT NULL,
    turn bigint NOT NULL,
    run integer NOT NULL,
    token text NOT NULL,
    at timestamptz NOT NULL,
    is_free boolean NOT NULL,
    stored bigint NOT NULL,
    confirmed bigint NOT NULL,
    parked bigint NOT NULL,
    expired bigint NOT NULL,
    discarded bigint NOT NULL,
    open_bytes bigint NOT NULL,
    intervention bigint NOT NULL,
    seen pg_snapshot NOT NULL,
    cluster text NOT NULL,
    backend integer NOT NULL DEFAULT pg_backend_pid(),
    PRIMARY KEY (shard, turn)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

-- When the server process of a connection was last active: now if it is at work, or if this user may not see
-- it; -infinity if it has ended. Null if that cannot be told: a managed server refuses, or does not track it.
CREATE FUNCTION reliablepub_active_at(backend integer, since timestamptz)
RETURNS timestamptz LANGUAGE plpgsql AS $$
DECLARE
    process record;
BEGIN
    SELECT a.backend_start, a.state, a.wait_event, a.state_change INTO process FROM pg_stat_get_activity(backend) AS a;
    IF NOT FOUND OR process.backend_start > since THEN
        RETURN '-infinity';
    END IF;
    -- In the middle of a batch, a client that was stopped is awaited for ever, and its connection stays active.
    IF process.backend_start IS NULL OR (process.state = 'active' AND process.wait_event IS DISTINCT FROM 'ClientRead') THEN
        RETURN clock_timestamp();
    END IF;
    RETURN process.state_change;
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR object_not_in_prerequisite_state THEN
    RETURN NULL;
END
$$;

-- The owner of each shard, by its newest turn, and since when it may be silent (`alive_at`): a relay at rest
-- takes no turns, but its connection is active. A restart of the server ends every connection, so it says
-- nothing about the owner: while the server was down, the owner could take no turn. `is_linked`: whether its
-- connection is open; null if that cannot be told.
CREATE VIEW reliablepub_owners AS
SELECT
    t.shard, t.turn, t.run, t.token, t.is_free, greatest(t.at, v.started_at, a.active_at) AS alive_at,
    a.active_at > '-infinity' AS is_linked, a.active_at
FROM (
    SELECT coalesce(to_timestamp(nullif(started, '')::double precision), '-infinity') AS started_at
    FROM reliablepub_server()
) AS v
CROSS JOIN generate_series(0, (SELECT shards FROM reliablepub_outbox) - 1) AS s (shard)
CROSS JOIN LATERAL (
    SELECT * FROM reliablepub_turns WHERE shard = s.shard ORDER BY turn DESC LIMIT 1
) AS t
CROSS JOIN LATERAL (
    SELECT CASE WHEN t.backend <> 0 AND t.at > v.started_at THEN reliablepub_active_at(t.backend, t.at) END
        AS active_at
) AS a;

-- Writes something to the server's log, for any user.
CREATE FUNCTION reliablepub_write() RETURNS void LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_logical_emit_message(true, 'reliablepub', '');
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR object_not_in_prerequisite_state THEN
    UPDATE reliablepub_outbox SET created_at = created_at;
END
$$;

-- Once a relay has taken a turn here, those of the server before, which still replicates, count no more. They
-- would stop the replication, and the messages behind them would not come.
CREATE FUNCTION reliablepub_follow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM reliablepub_turns AS t
        WHERE t.shard = NEW.shard AND t.cluster = (SELECT s.cluster FROM reliablepub_server() AS s)
    ) THEN
        RETURN NULL;
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER follows BEFORE INSERT ON reliablepub_turns FOR EACH ROW EXECUTE FUNCTION reliablepub_follow();
ALTER TABLE reliablepub_turns ENABLE REPLICA TRIGGER follows;

-- The status that the relay of a shard shows. No decision depends on it.
CREATE TABLE reliablepub_status (
    shard integer PRIMARY KEY,
    run integer NOT NULL,
    at timestamptz NOT NULL,
    content text NOT NULL
) WITH (fillfactor = 10);

-- Each run of a relay. Its number is part of the names of its channel epochs. `began_anew`: why a relay
-- that was running has begun another run; empty for a relay that was started.
CREATE TABLE reliablepub_runs (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    shard integer NOT NULL,
    pid integer NOT NULL,
    host text NOT NULL,
    started_at double precision NOT NULL,
    ended_at double precision,
    began_anew text NOT NULL DEFAULT ''
);

-- Number of messages ever stored from a replayable source, which continues after them.
CREATE TABLE reliablepub_sources (
    name text COLLATE "C" PRIMARY KEY,
    position bigint NOT NULL CHECK (position >= 0)
);

-- Confirmed messages that the relay keeps for the retention time; the ledger counts them as confirmed.
CREATE TABLE reliablepub_confirmed (
    id bigint PRIMARY KEY,
    confirmed_at double precision NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    exchange text COLLATE "C" NOT NULL,
    routing_key text COLLATE "C" NOT NULL,
    ordering_key text COLLATE "C",
    properties text NOT NULL,
    stored_at double precision NOT NULL,
    size integer NOT NULL,
    checksum bigint NOT NULL,
    body bytea NOT NULL
);
CREATE INDEX confirmed_by_time ON reliablepub_confirmed (confirmed_at);

-- Deduplication keys of callers: a second message with a known key is not stored.
CREATE TABLE reliablepub_keys (
    key text COLLATE "C" PRIMARY KEY,
    id bigint NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    kept_until double precision NOT NULL
);
CREATE INDEX keys_by_time ON reliablepub_keys (kept_until);

-- Interventions of operators in single messages, with the address of the message before the change,
-- and its ordering key, whose next message the relay looks for.
-- Operators take turns, so the numbers become visible in numerical order.
CREATE TABLE reliablepub_interventions (
    intervention bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id bigint NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    exchange text COLLATE "C" NOT NULL,
    routing_key text COLLATE "C" NOT NULL,
    ordering_key text COLLATE "C",
    at double precision NOT NULL,
    action text NOT NULL,
    person text NOT NULL,
    note text NOT NULL
);
CREATE INDEX interventions_of_message ON reliablepub_interventions (id);

-- Messages as they were before an operator edited them. They go with the history of the intervention.
CREATE TABLE reliablepub_originals (
    intervention bigint PRIMARY KEY REFERENCES reliablepub_interventions ON DELETE CASCADE,
    id bigint NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    exchange text COLLATE "C" NOT NULL,
    routing_key text COLLATE "C" NOT NULL,
    ordering_key text COLLATE "C",
    properties text NOT NULL,
    checksum bigint NOT NULL,
    body bytea NOT NULL
);
CREATE INDEX originals_of_message ON reliablepub_originals (id);

INSERT INTO reliablepub_outbox (version, shards, allows_loss) VALUES ({version}, {shards}, {allows_loss});
INSERT INTO reliablepub_turns
SELECT shard, 0, 0, '', now(), true, 0, 0, 0, 0, 0, 0, 0, pg_current_snapshot(), s.cluster
FROM generate_series(0, {shards} - 1) AS shard, reliablepub_server() AS s;

-- Stores a message for the enqueuers of this library. It is a function because the server then keeps
-- the plan of its INSERT for the session: planning takes as long as running it, and a prepared
-- statement would be lost behind a PgBouncer that pools transactions.
CREATE FUNCTION reliablepub_store(
    id bigint,
    message_id text,
    exchange text,
    routing_key text,
    properties text,
    stored_at double precision,
    size integer,
    checksum bigint,
    body bytea,
    due_at double precision,
    expires_at double precision,
    ordering_key text
) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    wall double precision := extract(epoch FROM clock_timestamp());
    shard integer := reliablepub_shard_of(ordering_key, exchange, routing_key);
BEGIN
    INSERT INTO reliablepub_messages (
        id, message_id, exchange, routing_key, properties, stored_at, size, checksum, body, due_at,
        expires_at, ordering_key, shard
    ) VALUES (
        -- A deadline counts from now by this clock: that of the enqueuer may be wrong.
        coalesce(id, nextval('reliablepub_message_ids'::regclass)), message_id, exchange, routing_key, properties,
        wall, size, checksum, body, due_at, wall + (expires_at - stored_at), ordering_key, shard
    );
    IF NOT FOUND THEN
        RAISE EXCEPTION 'a trigger or rule of the table messages has left the message out';
    END IF;
    -- See `rest` in queries.sql.
    IF NOT pg_try_advisory_xact_lock_shared(hashtext('reliablepub_' || '.rest'), shard) THEN
        PERFORM pg_notify(reliablepub_channel(shard), '');
    END IF;
    RETURN 1;
END
$$;

-- Stores a message from plain SQL, in any transaction, and returns its message id. Properties are JSON,
-- such as '{{"content_type": "application/json", "headers": {{"n": 1}}}}'.
CREATE FUNCTION reliablepub_enqueue(
    exchange text,
    routing_key text,
    body bytea,
    properties text DEFAULT '{{}}',
    message_id text DEFAULT NULL,
    ordering_key text DEFAULT NULL,
    not_before timestamptz DEFAULT NULL,
    expires_in_s double precision DEFAULT NULL
) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    wall double precision := extract(epoch FROM clock_timestamp());
    id_ text := coalesce(message_id, gen_random_uuid()::text);
BEGIN
    -- What `Message` refuses would be parked, or never be due.
    IF json_typeof(properties::json) <> 'object' THEN
        RAISE EXCEPTION 'properties must be a JSON object';
    END IF;
    IF EXISTS (
        SELECT 1 FROM json_object_keys(properties::json) AS k (name) WHERE k.name <> ALL (ARRAY[
            'headers', 'persistent', 'priority', 'expiration', 'timestamp', 'content_type',
            'content_encoding', 'correlation_id', 'reply_to', 'type', 'user_id', 'app_id'
        ])
    ) THEN
        RAISE EXCEPTION 'properties may have: headers, persistent, priority, expiration, timestamp, content_type, content_encoding, correlation_id, reply_to, type, user_id, app_id';
    END IF;
    IF NOT extract(epoch FROM not_before) BETWEEN '0' AND '3e11' THEN
        RAISE EXCEPTION 'not_before must be after 1970 and finite';
    END IF;
    IF NOT (expires_in_s > '0' AND expires_in_s <= '1e9') THEN
        RAISE EXCEPTION 'expires_in_s must be more than 0 and at most 1e9';
    END IF;
    IF NOT octet_length(ordering_key) BETWEEN 1 AND 255 THEN
        RAISE EXCEPTION 'ordering_key may have 1 to 255 bytes';
    END IF;
    IF octet_length(exchange) > 255 OR octet_length(routing_key) > 255 OR octet_length(id_) > 255 THEN
        RAISE EXCEPTION 'exchange, routing key and message id may have at most 255 bytes';
    END IF;
    PERFORM reliablepub_store(
        NULL, id_, exchange, routing_key, properties, wall,
        octet_length(body) + octet_length(properties) + 200, -1, body, extract(epoch FROM not_before),
        wall + expires_in_s, ordering_key
    );
    RETURN id_;
END
$$;

-- Views for operators. ---------------------------------------------------------------------------

CREATE FUNCTION reliablepub_utc(at double precision) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN at < 'infinity' THEN
        to_char(to_timestamp(at) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')
    END
$$;

-- Messages of enqueuers that no turn has counted yet.
CREATE VIEW reliablepub_uncounted AS
WITH newest AS (
    SELECT s.shard, t.seen
    FROM generate_series(0, (SELECT shards FROM reliablepub_outbox) - 1) AS s (shard)
    CROSS JOIN LATERAL (
        SELECT seen FROM reliablepub_turns WHERE shard = s.shard ORDER BY turn DESC LIMIT 1
    ) AS t
)
SELECT n.shard, m.size FROM newest AS n CROSS JOIN LATERAL (
    SELECT size FROM reliablepub_messages
    WHERE shard = n.shard AND run IS NULL AND xid >= pg_snapshot_xmax(n.seen) OFFSET 0
) AS m
UNION ALL
SELECT n.shard, m.size
FROM newest AS n CROSS JOIN LATERAL pg_snapshot_xip(n.seen) AS x (xid) CROSS JOIN LATERAL (
    SELECT size FROM reliablepub_messages WHERE shard = n.shard AND run IS NULL AND xid = x.xid OFFSET 0
) AS m;

-- The newest turn of each shard is found by the index: enqueuers with a limit read this view often, and
-- a long transaction keeps old turns.
CREATE VIEW reliablepub_ledger AS
SELECT
    stored + n AS stored, confirmed, parked, expired, discarded, open_bytes + size AS open_bytes
FROM (
    SELECT
        sum(stored)::bigint AS stored, sum(confirmed)::bigint AS confirmed, sum(parked)::bigint AS parked,
        sum(expired)::bigint AS expired, sum(discarded)::bigint AS discarded,
        sum(open_bytes)::bigint AS open_bytes
    FROM generate_series(0, (SELECT shards FROM reliablepub_outbox) - 1) AS s (shard)
    CROSS JOIN LATERAL (
        SELECT * FROM reliablepub_turns WHERE shard = s.shard ORDER BY turn DESC LIMIT 1
    ) AS t
) AS counted,
(SELECT count(*) AS n, coalesce(sum(size), 0) AS size FROM reliablepub_uncounted) AS new;

CREATE VIEW reliablepub_in_flight_tags AS
WITH id_runs AS (
    SELECT
        f.epoch, f.sent_at, (r.value ->> 0)::bigint AS first_id, (r.value ->> 1)::bigint AS length,
        f.first_tag + coalesce(
            sum((r.value ->> 1)::bigint) OVER (
                PARTITION BY f.epoch, f.first_tag ORDER BY r.key
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ), 0
        )::bigint AS first_tag
    FROM reliablepub_in_flight AS f,
    json_array_elements(f.ids::json) WITH ORDINALITY AS r (value, key)
)
SELECT
    r.epoch, r.first_tag + m.id - r.first_id AS tag, m.id, m.message_id, m.exchange, m.routing_key,
    reliablepub_utc(r.sent_at) AS sent_at
FROM id_runs AS r
JOIN reliablepub_messages AS m ON m.id BETWEEN r.first_id AND r.first_id + r.length - 1
-- The message of a confirmed attempt has left; any other attempt that has ended is in the history.
WHERE NOT EXISTS (
    SELECT 1 FROM reliablepub_attempts AS a
    WHERE a.id = m.id AND a.epoch = r.epoch AND a.tag = r.first_tag + m.id - r.first_id
);

CREATE VIEW reliablepub_open AS
SELECT
    id, message_id, exchange, routing_key, ordering_key, reliablepub_utc(stored_at) AS stored_at,
    reliablepub_utc(nullif(due_at, '0')) AS due_at, reliablepub_utc(expires_at) AS expires_at,
    nacked, returned, refused, uncertain, size
FROM reliablepub_messages;

CREATE VIEW reliablepub_parked_messages AS
SELECT
    id, message_id, exchange, routing_key, ordering_key, state, outcome, reply_code, reply_text,
    nacked + returned + refused + uncertain AS attempts, reliablepub_utc(stored_at) AS stored_at,
    reliablepub_utc(parked_at) AS parked_at, reliablepub_utc(expires_at) AS expires_at, size
FROM reliablepub_parked;

CREATE VIEW reliablepub_held_keys AS
SELECT
    p.ordering_key, p.id, p.message_id, p.outcome, p.reply_code, p.reply_text,
    reliablepub_utc(p.parked_at) AS parked_at,
    (
        SELECT count(*) FROM reliablepub_messages AS m
        WHERE m.ordering_key = p.ordering_key AND m.id > p.id
    ) AS held_back
FROM reliablepub_parked AS p
WHERE p.ordering_key IS NOT NULL AND p.state = 'parked' AND p.is_skipped = 0;

CREATE VIEW reliablepub_confirmed_messages AS
SELECT
    id, message_id, exchange, routing_key, ordering_key, reliablepub_utc(stored_at) AS stored_at,
    reliablepub_utc(confirmed_at) AS confirmed_at, size
FROM reliablepub_confirmed;

CREATE VIEW reliablepub_history AS
SELECT
    id, message_id, reliablepub_utc(at) AS at, outcome, reply_code, reply_text, persistence, epoch, tag
FROM reliablepub_attempts ORDER BY attempt;

-- The last value of each sequence, and the highest one in use. After a move by logical replication or by
-- a dump of the rows alone, the first may be lower: the next rows would get values that are in use.
CREATE VIEW reliablepub_sequences AS
SELECT name, CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS last_value, most
FROM (
    SELECT
        'reliablepub_message_ids' AS name, last_value, is_called,
        greatest(
            (SELECT max(id) FROM reliablepub_messages), (SELECT max(id) FROM reliablepub_parked),
            (SELECT max(id) FROM reliablepub_confirmed), (SELECT max(id) FROM reliablepub_attempts),
            (SELECT max(id) FROM reliablepub_interventions), 0
        ) AS most
    FROM reliablepub_message_ids
    UNION ALL
    SELECT
        'reliablepub_runs_id_seq', last_value, is_called, coalesce((SELECT max(id) FROM reliablepub_runs), 0)
    FROM reliablepub_runs_id_seq
    UNION ALL
    SELECT
        'reliablepub_attempts_attempt_seq', last_value, is_called,
        coalesce((SELECT max(attempt) FROM reliablepub_attempts), 0)
    FROM reliablepub_attempts_attempt_seq
    UNION ALL
    SELECT
        'reliablepub_interventions_intervention_seq', last_value, is_called,
        coalesce((SELECT max(intervention) FROM reliablepub_interventions), 0)
    FROM reliablepub_interventions_intervention_seq
) AS s;

-- Every difference is 0, unless another program has changed the tables.
CREATE VIEW reliablepub_audit AS
SELECT
    stored, confirmed, parked, expired, discarded,
    stored - confirmed - parked - expired - discarded AS open,
    stored - confirmed - parked - expired - discarded
        - (SELECT count(*) FROM reliablepub_messages) AS open_difference,
    parked - (SELECT count(*) FROM reliablepub_parked WHERE state = 'parked') AS parked_difference,
    expired - (SELECT count(*) FROM reliablepub_parked WHERE state = 'expired') AS expired_difference,
    open_bytes
        - (SELECT coalesce(sum(size), 0) FROM reliablepub_messages)::bigint AS bytes_difference
FROM reliablepub_ledger;
