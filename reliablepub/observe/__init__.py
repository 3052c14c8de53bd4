"""Observability: metrics and traces, which need the extra ``observe``, and health checks.

Knows: hooks, `Status`, and read-only access to the outbox. Must never know: what a turn of the
relay does. Imported on demand.
"""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str | None:
    """The version of reliablepub; None if it runs without being installed."""
    try:
        return version("reliablepub")
    except PackageNotFoundError:
        return None
