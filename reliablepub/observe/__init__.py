"""Observability: metrics, traces and health checks. Needs the extra ``observe``.

Knows: hooks, `Status`, and read-only access to the outbox. Must never know: what a turn of the
relay does. Imported on demand.
"""
