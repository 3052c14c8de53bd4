"""How late an event loop is: what its other tasks feel while publishing goes on.

It knows asyncio. It must never know publishers.
"""

import asyncio
from typing import Self

TICK_S = 0.001


class LagMeter:
    """Ticks beside the work of a loop, in ``async with``, and notes how late each tick is."""

    def __init__(self) -> None:
        self._late_s: list[float] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _tick(self) -> None:
        time = asyncio.get_running_loop().time
        while True:
            due = time() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late_s.append(time() - due)

    @property
    def worst_ms(self) -> float:
        """The latest tick."""
        return 1_000 * max(self._late_s)

    def percentile_ms(self, percent: float) -> float:
        """So many percent of the ticks were not later."""
        ordered = sorted(self._late_s)
        return 1_000 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    def __str__(self) -> str:
        return f"loop lag p99 {self.percentile_ms(99):.1f} ms, worst {self.worst_ms:.1f} ms"
