-- What people did to single messages.

CREATE TABLE reliablepub_interventions (
    intervention INTEGER PRIMARY KEY AUTOINCREMENT,
    id INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    exchange TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    at REAL NOT NULL,
    action TEXT NOT NULL CHECK (action IN ('retry', 'park', 'discard', 'reroute')),
    person TEXT NOT NULL,
    note TEXT NOT NULL
) STRICT;

CREATE INDEX reliablepub_interventions_of_message ON reliablepub_interventions (id);
