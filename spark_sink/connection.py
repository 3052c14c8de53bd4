"""The connection of this Python worker: lent to one task after the other, closed when idle.

Knows: `Publisher`, and how a Python worker lives. Must never know: rows.

Spark keeps a Python worker for the next task, of this job or another, and runs one task at a time
in it; a worker that is idle for a minute is killed without notice. So a connection is kept in a
global of this module, for a shorter time than that, and with nothing unconfirmed on it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tenacity import stop_after_attempt, wait_random_exponential

from reliablepub import Publisher, PublisherClosed, Retries, RetryPolicy
from spark_sink.address import ssl_context, urls
from spark_sink.settings import Settings

_LAST_CONFIRMS_S: Final = 0.0
"""How long a task that has failed goes on sending: not at all."""
_OPEN_BYTES_MAX: Final = 2 * 1024**3
"""More than a task ever has under way (`task.Sending`), and than the largest message has."""
_OPEN_MESSAGES_MAX: Final = 1_000_000


class _Resent:
    """A hook that counts messages whose fate is unknown, and that are sent once more."""

    def __init__(self) -> None:
        self.messages = 0

    def on_uncertain(self, events: Sequence[object]) -> None:
        """Their confirms were lost."""
        self.messages += len(events)


@dataclass(frozen=True)
class Lent:
    """What a task has for its time.

    Attributes:
        publisher: connects, or is connected.
    """

    publisher: Publisher
    _resent: _Resent

    @property
    def resent(self) -> int:
        """Messages sent once more because their confirm was lost, in all tasks so far."""
        return self._resent.messages


@dataclass(frozen=True)
class _Kept:
    """A publisher between two tasks."""

    lent: Lent
    key: tuple[object, ...]
    pid: int
    timer: threading.Timer


_lock = threading.Lock()
_kept: _Kept | None = None


@contextmanager
def publisher(settings: Settings, spread_s: float = 0.0) -> Iterator[Lent]:
    """Lend the worker's publisher, opening it first where there is none that fits.

    After an error it is closed at once: what it has not sent is not sent any more, since Spark is
    going to replay the task.

    Args:
        settings: the options.
        spread_s: seconds over which the workers of a large cluster spread their connections, each
            waiting for a random part of them.

    Raises:
        ConfigurationError: there is no telling where the broker is.
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
        lent.publisher.close(_LAST_CONFIRMS_S)
        raise
    if settings.max_connections is None:
        _keep(lent, key, settings.idle_timeout_s)
    else:
        lent.publisher.close()


def _open(settings: Settings, addresses: tuple[str, ...]) -> Lent:
    resent = _Resent()
    publisher = Publisher(
        addresses,
        outbox=None,
        window_min=settings.window_min,
        window_max=settings.window,
        window_bytes_max=settings.window_bytes,
        confirm_timeout_s=settings.confirm_timeout_s,
        heartbeat_s=settings.heartbeat_s,
        retry=_retry(settings),
        hooks=[resent],
        open_messages_max=_OPEN_MESSAGES_MAX,
        open_bytes_max=_OPEN_BYTES_MAX,
        ssl_context=ssl_context(settings),
    )
    return Lent(publisher, resent)


def _retry(settings: Settings) -> RetryPolicy:
    """The sink's own: a task is short, and Spark tries it again."""

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
    """The kept publisher, if it fits and lives; another is closed: one connection a worker."""
    global _kept
    with _lock:
        kept, _kept = _kept, None
    if kept is None or kept.pid != os.getpid():
        return None
    kept.timer.cancel()
    try:
        if kept.key == key:
            kept.lent.publisher.flush(0)  # nothing is open: it tells whether somebody is there
            return kept.lent
    except PublisherClosed:
        pass
    kept.lent.publisher.close(_LAST_CONFIRMS_S)
    return None


def _keep(lent: Lent, key: tuple[object, ...], idle_timeout_s: float) -> None:
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
        kept.lent.publisher.close(_LAST_CONFIRMS_S)
