"""The outbox in a SQLite file."""
