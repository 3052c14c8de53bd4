-- Roles with the least privileges for an outbox. The owner of the outbox or a superuser runs this
-- script, any number of times, and grants the roles to login roles: GRANT role_enqueuer TO app.
-- `role_` stands for the name of the schema and `_`; see sql.py.

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['role_enqueuer', 'role_relay', 'role_reader'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) THEN
            EXECUTE pg_catalog.format('CREATE ROLE %I NOLOGIN', name);
        END IF;
    END LOOP;
END
$$;
GRANT USAGE ON SCHEMA reliablepub_ TO role_enqueuer, role_relay, role_reader;
-- Everyone may call new functions, unless an administrator has changed that default.
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA reliablepub_ TO role_enqueuer, role_relay, role_reader;

-- Processes that enqueue. They cannot read a message.
-- Not `xid` and `run`, by which a relay finds and counts new rows, nor the counts of attempts: values that
-- the relay never writes would end it.
REVOKE INSERT ON reliablepub_messages FROM role_enqueuer;
GRANT INSERT (
    id, stored_at, due_at, expires_at, checksum, shard, size, message_id, exchange, routing_key,
    properties, body, ordering_key
) ON reliablepub_messages TO role_enqueuer;
GRANT USAGE ON SEQUENCE reliablepub_message_ids TO role_enqueuer;
GRANT SELECT ON reliablepub_outbox TO role_enqueuer;
-- For `enqueue(key=...)`.
GRANT SELECT, INSERT, UPDATE ON reliablepub_keys TO role_enqueuer;
GRANT SELECT (id) ON reliablepub_messages, reliablepub_parked TO role_enqueuer;
-- For limits of open messages: counts alone.
GRANT SELECT ON reliablepub_ledger TO role_enqueuer;

-- Relays, and operators who retry, park, reroute, discard or prune messages.
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA reliablepub_ TO role_relay;
REVOKE INSERT, UPDATE, DELETE ON reliablepub_outbox FROM role_relay;
-- `UPDATE`: a relay sets sequences that are behind their rows after a move.
GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA reliablepub_ TO role_relay;

-- Readers: `outbox status`, `watch`, `doctor` and the views. They cannot read bodies or properties.
GRANT SELECT ON
    reliablepub_outbox, reliablepub_turns, reliablepub_runs, reliablepub_status,
    reliablepub_in_flight, reliablepub_attempts, reliablepub_interventions, reliablepub_sources,
    reliablepub_keys, reliablepub_uncounted, reliablepub_ledger, reliablepub_in_flight_tags,
    reliablepub_open, reliablepub_parked_messages, reliablepub_held_keys,
    reliablepub_confirmed_messages, reliablepub_history, reliablepub_audit, reliablepub_sequences,
    reliablepub_owners
TO role_reader;
GRANT SELECT ON SEQUENCE reliablepub_message_ids TO role_reader;
GRANT SELECT (
    id, xid, stored_at, due_at, expires_at, refused_at, run, shard, size, nacked, returned, refused,
    uncertain, message_id, exchange, routing_key, ordering_key
) ON reliablepub_messages TO role_reader;
GRANT SELECT (
    id, shard, message_id, exchange, routing_key, stored_at, parked_at, state, outcome, reply_code,
    reply_text, nacked, returned, refused, uncertain, size, expires_at, ordering_key, is_skipped
) ON reliablepub_parked TO role_reader;
GRANT SELECT (
    id, confirmed_at, message_id, exchange, routing_key, ordering_key, stored_at, size
) ON reliablepub_confirmed TO role_reader;
