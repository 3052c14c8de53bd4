"""pika's own log lines about our connections, kept out of the application's log.

Knows: pika's logger names, and which threads are ours. Must never know: what is logged instead.

pika logs one refused connection in eight lines at level ERROR, and bodies of returned messages at
WARNING. What happened to our connections is in `ConnectionLost`; the application's own use of pika,
on other threads, is none of our business.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_LOGGERS: Final = (
    "pika.adapters.base_connection",
    "pika.adapters.select_connection",
    "pika.adapters.utils.connection_workflow",
    "pika.adapters.utils.io_services_utils",
    "pika.adapters.utils.selector_ioloop_adapter",
    "pika.callback",
    "pika.channel",
    "pika.connection",
    "pika.heartbeat",
)
_our_threads: Final[set[int]] = set()


def quiet_this_thread() -> None:
    """From now on, drop what pika logs on the calling thread."""
    _our_threads.add(threading.get_ident())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if _is_not_ours not in logger.filters:
            logger.addFilter(_is_not_ours)


def unquiet_this_thread() -> None:
    """The thread is done with pika; its number may be given to another one."""
    _our_threads.discard(threading.get_ident())


def _is_not_ours(record: logging.LogRecord) -> bool:
    return record.thread not in _our_threads


@contextmanager
def quietly() -> Iterator[None]:
    """Drop what pika logs on this thread meanwhile."""
    is_ours = threading.get_ident() in _our_threads
    quiet_this_thread()
    try:
        yield
    finally:
        if not is_ours:
            unquiet_this_thread()
