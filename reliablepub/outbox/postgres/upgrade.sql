-- How an outbox of each earlier version gets the tables of the next one. A step is never changed; functions
-- and views are created anew from `schema.sql` after the last one.

-- From version 3.
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
ALTER TABLE reliablepub_interventions DROP CONSTRAINT interventions_action_check;
UPDATE reliablepub_outbox SET version = 4;
