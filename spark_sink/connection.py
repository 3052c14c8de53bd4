"""The connection of this Python worker: lent to one task after the other, closed when idle.

Knows: `Publisher`, and how a Python worker lives. Must never know: rows.

Spark keeps a Python worker for the next task, of this job or another, and runs one task at a time
in it; a worker that is idle for a minute is killed without notice. So a connection is kept in a
global of this module, for a shorter time than that, and with nothing unconfirmed on it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from tenacity import stop_after_attempt

from reliablepub import Publisher, PublisherClosed, Retries, RetryPolicy
from spark_sink.address import ssl_context, urls
from spark_sink.settings import Settings

_LAST_CONFIRMS_S: Final = 0.0
"""How long a task that has failed goes on sending: not at all."""


@dataclass(frozen=True)
class _Kept:
    """A publisher between two tasks."""

    publisher: Publisher
    key: tuple[object, ...]
    pid: int
    timer: threading.Timer


_lock = threading.Lock()
_kept: _Kept | None = None


@contextmanager
def publisher(settings: Settings) -> Iterator[Publisher]:
    """Lend the worker's publisher, opening it first where there is none that fits.

    After an error it is closed at once: what it has not sent is not sent any more, since Spark is
    going to replay the task.

    Raises:
        ConfigurationError: there is no telling where the broker is.
    """
    addresses = tuple(urls(settings))
    key = (*settings.connection, addresses)
    lent = _take(key) or _open(settings, addresses)
    try:
        yield lent
    except BaseException:
        lent.close(_LAST_CONFIRMS_S)
        raise
    if settings.max_connections is None:
        _keep(lent, key, settings.idle_timeout_s)
    else:
        lent.close()


def _open(settings: Settings, addresses: tuple[str, ...]) -> Publisher:
    return Publisher(
        addresses,
        outbox=None,
        window_min=settings.window_min,
        window_max=settings.window,
        window_bytes_max=settings.window_bytes,
        confirm_timeout_s=settings.confirm_timeout_s,
        heartbeat_s=settings.heartbeat_s,
        retry=_retry(settings),
        full_timeout_s=settings.delivery_timeout_s,
        ssl_context=ssl_context(settings),
    )


def _retry(settings: Settings) -> RetryPolicy:
    policy = RetryPolicy()
    return replace(
        policy,
        nacked=_budget(policy.nacked, settings.nacked_attempts),
        returned=_budget(policy.returned, settings.returned_attempts),
        refused=_budget(policy.refused, settings.refused_attempts),
    )


def _budget(usual: Retries, attempts: int | None) -> Retries:
    return usual if attempts is None else replace(usual, stop=stop_after_attempt(attempts))


def _take(key: tuple[object, ...]) -> Publisher | None:
    """The kept publisher, if it fits and lives; another is closed: one connection a worker."""
    global _kept
    with _lock:
        kept, _kept = _kept, None
    if kept is None or kept.pid != os.getpid():
        return None
    kept.timer.cancel()
    try:
        if kept.key == key:
            kept.publisher.flush(0)  # nothing is open: it only tells whether somebody is there
            return kept.publisher
    except PublisherClosed:
        pass
    kept.publisher.close(_LAST_CONFIRMS_S)
    return None


def _keep(lent: Publisher, key: tuple[object, ...], idle_timeout_s: float) -> None:
    global _kept  # noqa: PLW0603 - the worker's
    timer = threading.Timer(idle_timeout_s, close_idle)
    timer.daemon = True
    with _lock:
        _kept = _Kept(lent, key, os.getpid(), timer)
    timer.start()


def close_idle() -> None:
    """Close the kept connection, if there is one."""
    global _kept
    with _lock:
        kept, _kept = _kept, None
    if kept is not None and kept.pid == os.getpid():
        kept.timer.cancel()
        kept.publisher.close(_LAST_CONFIRMS_S)
