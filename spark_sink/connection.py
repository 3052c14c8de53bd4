"""The connection of a Python worker: reused by one task after another, closed when idle.

Knows: `Publisher`, and the life of a Python worker. Must never know: rows.

Spark reuses a Python worker for later tasks, of this job or another, and runs one task at a time
in it. It kills a worker that has been idle for a minute, without notice. So a global of this module
keeps the connection for 30 seconds (``idleTimeout``), with nothing unconfirmed on it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from tenacity import stop_after_attempt, wait_random_exponential

from reliablepub import Publisher, PublisherClosed, PublisherFailed, Retries, RetryPolicy
from spark_sink.address import credentials, ssl_context, urls
from spark_sink.settings import Settings

_LAST_CONFIRMS_S: Final = 0.0
"""A failed task stops sending at once: Spark replays it."""
OPEN_BYTES_MAX: Final = 2 * 1024**3
"""More than a task has open at any time (`task.Sending`), and than the largest message has."""
_OPEN_MESSAGES_MAX: Final = 1_000_000


class Lent:
    """A publisher lent to a task, and the publisher's hook that counts attempts.

    Attributes:
        publisher: connected, or connecting.
        resent: messages sent again because their confirm was lost, in all tasks of this worker.
        refusals: attempts that the broker has nacked, returned or refused.
    """

    publisher: Publisher

    def __init__(self) -> None:
        self.resent: int = 0
        self.refusals: int = 0

    def on_uncertain(self, events: Sequence[object]) -> None:
        """Count messages whose confirms were lost."""
        self.resent += len(events)

    def on_nacked(self, events: Sequence[object]) -> None:
        """Count refusals."""
        self.refusals += len(events)

    on_returned: Final = on_nacked
    on_refused: Final = on_nacked


@dataclass(frozen=True)
class _Kept:
    """A publisher kept between two tasks."""

    lent: Lent
    key: tuple[object, ...]
    pid: int
    timer: threading.Timer


_lock = threading.Lock()
_kept: _Kept | None = None


@contextmanager
def publisher(settings: Settings, spread_s: float = 0.0) -> Iterator[Lent]:
    """Lend the worker's publisher to a task; open one if none with these settings is kept.

    After an error the publisher is closed at once and sends nothing more: Spark replays the task.

    Args:
        settings: the options.
        spread_s: seconds over which the workers of a large cluster spread their connections: each
            waits a random time of at most this.

    Raises:
        ConfigurationError: no URL of a broker is given or found.
    """
    addresses = tuple(urls(settings))
    key = (*settings.connection, addresses)
    lent = _take(key)
    if lent is None:
        time.sleep(random.uniform(0.0, spread_s))  # noqa: S311 - no secret
        lent = _open(settings, addresses)
    try:
        yield lent
    except BaseException:
        _close_at_once(lent)
        raise
    if settings.max_connections is None:
        _keep(lent, key, settings.idle_timeout_s)
    else:
        with suppress(PublisherFailed):  # every row is settled
            lent.publisher.close()


def _open(settings: Settings, addresses: tuple[str, ...]) -> Lent:
    lent = Lent()
    lent.publisher = Publisher(
        addresses,
        outbox=None,
        window_min=settings.window_min,
        window_max=settings.window,
        window_bytes_max=settings.window_bytes,
        confirm_timeout_s=settings.confirm_timeout_s,
        heartbeat_s=settings.heartbeat_s,
        retry=_retry(settings),
        hooks=[lent],
        open_messages_max=_OPEN_MESSAGES_MAX,
        open_bytes_max=OPEN_BYTES_MAX,
        ssl_context=ssl_context(settings),
        credentials=credentials(settings),
        connection_name=settings.connection_name,
    )
    return lent


def _retry(settings: Settings) -> RetryPolicy:
    """The sink's retry policy: short waits, because Spark retries a failed task itself."""

    def budget(attempts: int, wait_max_s: float) -> Retries:
        wait = wait_random_exponential(multiplier=0.2, max=wait_max_s)
        return Retries(stop_after_attempt(attempts), wait)

    return RetryPolicy(
        nacked=budget(settings.nacked_attempts, 60),
        returned=budget(settings.returned_attempts, 5),
        refused=budget(settings.refused_attempts, 60),
        breaker=None,
    )


def _take(key: tuple[object, ...]) -> Lent | None:
    """The kept publisher if its settings match and it is alive; any other one is closed."""
    global _kept
    with _lock:
        kept, _kept = _kept, None
    if kept is None or kept.pid != os.getpid():
        return None
    kept.timer.cancel()
    try:
        if kept.key == key:
            kept.lent.publisher.flush(0)  # raises if the relay has ended; nothing is open to flush
            return kept.lent
    except PublisherClosed:
        pass
    _close_at_once(kept.lent)
    return None


def _keep(lent: Lent, key: tuple[object, ...], idle_timeout_s: float) -> None:
    global _kept  # noqa: PLW0603 - one connection a worker
    timer = threading.Timer(idle_timeout_s, close_idle)
    timer.daemon = True
    with _lock:
        _kept = _Kept(lent, key, os.getpid(), timer)
    timer.start()


def close_idle() -> None:
    """Close the kept connection, if any."""
    global _kept
    with _lock:
        kept, _kept = _kept, None
    if kept is not None and kept.pid == os.getpid():
        kept.timer.cancel()
        _close_at_once(kept.lent)


def _close_at_once(lent: Lent) -> None:
    """Close a publisher from which nothing more is wanted, also one that has failed."""
    with suppress(PublisherFailed):
        lent.publisher.close(_LAST_CONFIRMS_S)
