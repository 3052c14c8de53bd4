-- What a `LoneWriter` has on its connection, and only there: one statement that stores a message, counts
-- it, and notes that it is being sent. A connection that was opened again has no such view, so that
-- nothing can be stored without being counted.

CREATE TEMP TABLE reliablepub_lone_terms (
    run INTEGER NOT NULL,
    epoch TEXT,
    messages_max INTEGER NOT NULL,
    bytes_max INTEGER NOT NULL
);

INSERT INTO temp.reliablepub_lone_terms VALUES (0, NULL, 0, 0);

CREATE TEMP VIEW reliablepub_lone AS
SELECT id, message_id, exchange, routing_key, properties, stored_at, size, checksum, body
FROM main.reliablepub_messages;

CREATE TEMP TRIGGER reliablepub_lone_stored INSTEAD OF INSERT ON reliablepub_lone
BEGIN
    UPDATE reliablepub_ledger
    SET last_id = NEW.id, stored = stored + 1, open_bytes = open_bytes + NEW.size
    WHERE last_id = NEW.id - 1 AND EXISTS (
        SELECT 1 FROM reliablepub_lone_terms
        WHERE run = (SELECT max(id) FROM reliablepub_runs)
        AND stored - confirmed - parked - expired - discarded < messages_max
        AND open_bytes + NEW.size <= bytes_max
    );

    SELECT raise(ABORT, 'another id is next, another relay is the owner, or there is no room') WHERE changes() = 0;

    INSERT INTO reliablepub_messages (
        id, message_id, exchange, routing_key, properties, stored_at, size, checksum, body
    ) VALUES (
        NEW.id, NEW.message_id, NEW.exchange, NEW.routing_key, NEW.properties, NEW.stored_at,
        NEW.size, NEW.checksum, NEW.body
    );

    SELECT raise(ABORT, 'a trigger of another program keeps the row out') WHERE changes() = 0;

    INSERT INTO reliablepub_in_flight (epoch, first_tag, count, ids, sent_at)
    SELECT epoch, NEW.id, 1, json_array(json_array(NEW.id, 1)), NEW.stored_at
    FROM reliablepub_lone_terms WHERE epoch IS NOT NULL;
END;
