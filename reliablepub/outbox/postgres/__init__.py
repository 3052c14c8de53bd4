"""The outbox in PostgreSQL. Imported when an outbox is named by a ``postgresql://`` URL."""
