"""Observability: metrics and traces, which need the extra ``observe``, and health checks.

Knows: hooks, `Status`, and read-only access to the outbox. Must never know: what a turn of the
relay does. Imported on demand.
"""
