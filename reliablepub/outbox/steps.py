"""Large changes in small steps, so that whoever relays or enqueues beside them hardly notices.

Knows: one transaction a step, the write lock, and the log. Must never know: what is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from reliablepub.outbox.checkpoints import behind_commit_if_long
from reliablepub.outbox.place import WritingConnection
from reliablepub.outbox.transactions import surely

T = TypeVar("T")

CHUNK: Final = 500
"""Messages in one transaction: a relay that waits for it hardly notices."""
PAUSE_S_MAX: Final = 0.2


def step_by_step(
    connection: WritingConnection, path: Path, steps: Iterable[Callable[[], T]]
) -> Iterator[T]:
    """Take each step in a transaction of its own, and leave the write lock to others as long.

    Args:
        connection: that may write, outside of a transaction.
        path: the outbox.
        steps: each may be called twice, if the disk fails during its commit (see `surely`).

    Returns:
        what each step came to, once it is on disk.

    Raises:
        OutboxError: a step was not taken; those before it stay.
    """
    pause_s = 0.0
    for step in steps:
        time.sleep(pause_s)
        begun = time.monotonic()
        # Without a relay nobody else shortens the log, and a million rows would make it as long.
        with behind_commit_if_long(connection, path):
            result = surely(connection, path, step)
        pause_s = min(PAUSE_S_MAX, time.monotonic() - begun)
        yield result
