"""Wait for a condition that another thread, process or broker makes true."""

import asyncio
import time
from collections.abc import Callable


def until(
    holds: Callable[[], object],
    timeout_s: float = 60.0,
    *,
    every_s: float = 0.01,
    what: str = "the condition",
) -> None:
    """Return once `holds()` is true; fail if it is still false after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:g} s"
        time.sleep(every_s)


async def until_async(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Do as `until`, while the event loop goes on."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - another thread makes it true
            await asyncio.sleep(0.005)
