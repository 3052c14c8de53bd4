"""The bridge: the one place that sees both the outbox and the wire."""
