-- Since when a message has been refused: a budget of refusals may be a time.

ALTER TABLE reliablepub_messages ADD COLUMN refused_at REAL;
