-- When a message is too late, and which others it must not overtake.

ALTER TABLE reliablepub_messages ADD COLUMN expires_at REAL;
ALTER TABLE reliablepub_messages ADD COLUMN ordering_key TEXT;
ALTER TABLE reliablepub_parked ADD COLUMN expires_at REAL;
ALTER TABLE reliablepub_parked ADD COLUMN ordering_key TEXT;
ALTER TABLE reliablepub_parked ADD COLUMN is_skipped INTEGER NOT NULL DEFAULT 0;

CREATE INDEX reliablepub_messages_expiring ON reliablepub_messages (expires_at)
WHERE expires_at IS NOT NULL;

-- With the id, which every index ends with: in the order of their commits.
CREATE INDEX reliablepub_messages_of_key ON reliablepub_messages (ordering_key)
WHERE ordering_key IS NOT NULL;

-- A parked message holds its key: what was put in after it waits, until a person has decided.
CREATE INDEX reliablepub_parked_holding ON reliablepub_parked (ordering_key)
WHERE ordering_key IS NOT NULL AND state = 'parked' AND is_skipped = 0;

-- However a key is let go, its next message falls due, and so is found by the relay.
CREATE TRIGGER reliablepub_key_skipped AFTER UPDATE OF is_skipped ON reliablepub_parked
WHEN NEW.ordering_key IS NOT NULL AND NEW.is_skipped <> 0
BEGIN
    UPDATE reliablepub_messages SET due_at = stored_at
    WHERE due_at IS NULL AND id = (
        SELECT min(id) FROM reliablepub_messages WHERE ordering_key = NEW.ordering_key
    );
END;

CREATE TRIGGER reliablepub_key_released AFTER DELETE ON reliablepub_parked
WHEN OLD.ordering_key IS NOT NULL
BEGIN
    UPDATE reliablepub_messages SET due_at = stored_at
    WHERE due_at IS NULL AND id = (
        SELECT min(id) FROM reliablepub_messages WHERE ordering_key = OLD.ordering_key
    );
END;

CREATE VIEW reliablepub_held_keys AS
SELECT
    p.ordering_key,
    p.id,
    p.message_id,
    p.outcome,
    p.reply_code,
    p.reply_text,
    datetime(p.parked_at, 'unixepoch') AS parked_at,
    (SELECT count(*) FROM reliablepub_messages AS m WHERE m.ordering_key = p.ordering_key)
        AS held_back
FROM reliablepub_parked AS p
WHERE p.ordering_key IS NOT NULL AND p.state = 'parked' AND p.is_skipped = 0;

DROP VIEW reliablepub_open;
CREATE VIEW reliablepub_open AS
SELECT
    id,
    message_id,
    exchange,
    routing_key,
    ordering_key,
    datetime(stored_at, 'unixepoch') AS stored_at,
    datetime(due_at, 'unixepoch') AS due_at,
    datetime(expires_at, 'unixepoch') AS expires_at,
    nacked,
    returned,
    refused,
    uncertain,
    size
FROM reliablepub_messages;

DROP VIEW reliablepub_parked_messages;
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
