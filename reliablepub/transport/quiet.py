"""Log filter that drops pika's log records about reliablepub's connections.

Knows: pika's logger names, and the threads on which reliablepub uses pika. Must never know: what is
logged instead.

pika logs one refused connection in eight lines at level ERROR, and bodies of returned messages at
WARNING. For reliablepub's connections, `ConnectionLost` has the reason. Records of other threads,
on which the application uses pika itself, pass.
"""

from __future__ import annotations

import logging
import os
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
os.register_at_fork(after_in_child=_our_threads.clear)  # a child's threads may get the same ids


def quiet_this_thread() -> None:
    """Drop pika's log records of the calling thread from now on."""
    _our_threads.add(threading.get_ident())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if _is_not_ours not in logger.filters:
            logger.addFilter(_is_not_ours)


def unquiet_this_thread() -> None:
    """End `quiet_this_thread`. Needed at the end of a thread, since its id may be reused."""
    _our_threads.discard(threading.get_ident())


def _is_not_ours(record: logging.LogRecord) -> bool:
    return record.thread not in _our_threads


@contextmanager
def quietly() -> Iterator[None]:
    """Drop pika's log records of this thread within the context."""
    is_ours = threading.get_ident() in _our_threads
    quiet_this_thread()
    try:
        yield
    finally:
        if not is_ours:
            unquiet_this_thread()
