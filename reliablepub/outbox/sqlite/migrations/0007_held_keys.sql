-- Behind what holds a key is what was put in after it: others of its key may be on their way still.

DROP VIEW reliablepub_held_keys;

CREATE VIEW reliablepub_held_keys AS
SELECT
    p.ordering_key,
    p.id,
    p.message_id,
    p.outcome,
    p.reply_code,
    p.reply_text,
    datetime(p.parked_at, 'unixepoch') AS parked_at,
    (
        SELECT count(*) FROM reliablepub_messages AS m
        WHERE m.ordering_key = p.ordering_key AND m.id > p.id
    ) AS held_back
FROM reliablepub_parked AS p
WHERE p.ordering_key IS NOT NULL AND p.state = 'parked' AND p.is_skipped = 0;
