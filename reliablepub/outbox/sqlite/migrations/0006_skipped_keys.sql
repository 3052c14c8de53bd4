-- Skipping a key is written down like everything else that people do. A CHECK cannot be changed, so
-- the table is made again; its numbers go on where they were, because a relay knows the last one.

DROP INDEX reliablepub_interventions_of_message;
ALTER TABLE reliablepub_interventions RENAME TO reliablepub_interventions_before;

CREATE TABLE reliablepub_interventions (
    intervention INTEGER PRIMARY KEY AUTOINCREMENT,
    id INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    exchange TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    at REAL NOT NULL,
    action TEXT NOT NULL CHECK (action IN ('retry', 'park', 'discard', 'reroute', 'skip')),
    person TEXT NOT NULL,
    note TEXT NOT NULL
) STRICT;

INSERT INTO reliablepub_interventions SELECT * FROM reliablepub_interventions_before;

DELETE FROM sqlite_sequence WHERE name = 'reliablepub_interventions';

INSERT INTO sqlite_sequence (name, seq)
SELECT 'reliablepub_interventions', seq FROM sqlite_sequence
WHERE name = 'reliablepub_interventions_before';

DROP TABLE reliablepub_interventions_before;

CREATE INDEX reliablepub_interventions_of_message ON reliablepub_interventions (id);
