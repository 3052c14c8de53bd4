"""Runs blocking work of an outbox for a coroutine, in a thread.

Knows: asyncio. Must never know: outboxes, frameworks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a thread, in this context. If the caller is cancelled, wait for the thread.

    Otherwise the thread would go on using the session, and the pool's connection below it, after
    the caller has given both back.
    """
    # A future and not a task: `asyncio.run` cancels all tasks at its end.
    future = asyncio.get_running_loop().run_in_executor(None, copy_context().run, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):  # a second one
                await asyncio.wait([future])
        future.exception()  # retrieved, or asyncio would log it
        raise
