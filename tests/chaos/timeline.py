"""A picture of a run: what was published, confirmed and open, and when something was wrong.

It knows numbers over time and SVG; it must never know where they come from.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests import svg

WIDTH, HEIGHT = 880, 400
POINTS_MAX = 300
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 70, 50
STORED, CONFIRMED, OPEN, FAULT = "#1f5fa8", "#2a8a4a", "#c26a12", "#f3c9c9"


@dataclass
class Timeline:
    """Samples and faults of one run; `with timeline.watch(...)` takes them.

    Attributes:
        samples: seconds, messages stored, messages confirmed.
        faults: name, beginning and end in seconds.
    """

    samples: list[tuple[float, int, int]] = field(default_factory=list)
    faults: list[tuple[str, float, float]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Something is wrong for as long as this lasts."""
        began = self.now
        try:
            yield
        finally:
            self.faults.append((name, began, self.now))

    @contextmanager
    def watch(self, counts: Callable[[], tuple[int, int]], every_s: float = 0.1) -> Iterator[None]:
        """Take a sample now and then, in a thread.

        Args:
            counts: gives messages stored and messages confirmed.
            every_s: seconds between two samples.
        """
        is_over = threading.Event()

        def sample() -> None:
            while not is_over.wait(every_s):
                self.samples.append((self.now, *counts()))

        thread = threading.Thread(target=sample, name="timeline")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def draw(self, path: Path, title: str) -> None:
        """Write the picture."""
        svg.write(path, WIDTH, HEIGHT, _parts(self, title))


def _parts(timeline: Timeline, title: str) -> list[str]:
    end = max([1.0, *(t for t, _, _ in timeline.samples), *(to for _, _, to in timeline.faults)])
    most = max([1, *(stored for _, stored, _ in timeline.samples)])

    def x(t: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * t / end

    def y(count: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * count / most

    every = len(timeline.samples) // POINTS_MAX + 1

    def line(color: str, values: list[tuple[float, int]]) -> str:
        return svg.line(color, ((x(t), y(count)) for t, count in values[::every]))

    parts = [svg.text(LEFT, 20, title)]
    named: list[str] = []
    for name, began, ended in timeline.faults:
        width = max(2.0, x(ended) - x(began))
        parts.append(svg.box(x(began), TOP, width, HEIGHT - TOP - BOTTOM, FAULT))
        if name not in named:
            is_late = x(began) > 0.75 * WIDTH
            left, anchor = (x(ended), "end") if is_late else (x(began), "start")
            parts.append(svg.text(left, TOP - 32 + 14 * (len(named) % 3), name, anchor))
            named.append(name)
    parts += [
        line(STORED, [(t, stored) for t, stored, _ in timeline.samples]),
        line(CONFIRMED, [(t, confirmed) for t, _, confirmed in timeline.samples]),
        line(OPEN, [(t, stored - confirmed) for t, stored, confirmed in timeline.samples]),
    ]
    for share in (0.0, 0.5, 1.0):
        parts.append(svg.text(LEFT - 8, y(most * share) + 4, f"{most * share:.0f}", "end"))
        parts.append(
            svg.text(x(end * share), HEIGHT - BOTTOM + 18, f"{end * share:.0f} s", "middle")
        )
    legend = [(STORED, "stored"), (CONFIRMED, "confirmed"), (OPEN, "open"), (FAULT, "fault")]
    for number, (color, name) in enumerate(legend):
        left = LEFT + 110 * number
        parts.append(svg.box(left, HEIGHT - 18, 14, 10, color))
        parts.append(svg.text(left + 20, HEIGHT - 9, name))
    return parts
