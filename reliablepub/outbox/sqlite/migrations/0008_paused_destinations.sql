-- What waits until its destination is well, by destination: found and counted without a look at others.

CREATE INDEX reliablepub_messages_held ON reliablepub_messages (exchange, routing_key)
WHERE due_at = 9e999;
