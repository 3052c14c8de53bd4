-- How an outbox of each earlier version gets the tables of the next one. A step is never changed; the
-- outbox that all steps make is that of `schema.sql`.

-- From version 10.
CREATE TEMP TABLE reliablepub_kept AS SELECT * FROM main.reliablepub_interventions;

DROP TABLE main.reliablepub_interventions;

CREATE TABLE main.reliablepub_interventions (
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

INSERT INTO main.reliablepub_interventions SELECT * FROM temp.reliablepub_kept;

DROP TABLE temp.reliablepub_kept;

CREATE TABLE main.reliablepub_originals (
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
