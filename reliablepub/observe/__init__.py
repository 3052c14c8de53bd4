"""For whoever watches: metrics, traces, health. Needs the extra ``observe``; loaded when asked for.

Knows: hooks, `Status`, the outbox's read-only look. Must never know: what a turn of the relay does.
"""
