"""Small pictures side by side: what changes when one thing grows a thousandfold, and what does not.

It knows numbers over a logarithm and SVG. It must never know what they measure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import svg

WIDTH, HEIGHT, COLUMNS = 440, 230, 2
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 46, 32
COLORS = ("#1f5fa8", "#c26a12", "#2a8a4a")
GRID = "#ddd"

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        title: what it shows, with its unit.
        lines: their names, and their points.
        is_flat: whether what it shows should not grow: then it begins at 0. Otherwise both ways
            are logarithms.
    """

    title: str
    lines: Mapping[str, Points]
    is_flat: bool = True


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """All of them, from left to right."""
    rows = math.ceil(len(panels) / COLUMNS)
    parts: list[str] = []
    for number, panel in enumerate(panels):
        left, top = number % COLUMNS * WIDTH, number // COLUMNS * HEIGHT
        parts += _parts(panel, left, top)
    svg.write(path, WIDTH * COLUMNS, HEIGHT * rows, parts)


def _parts(panel: Panel, left: float, top: float) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    across = _Scale([x for x, _ in points], left + LEFT, left + WIDTH - RIGHT)
    values = [y for _, y in points]
    bottom = top + HEIGHT - BOTTOM
    up = _Scale(values, bottom, top + TOP, is_linear=panel.is_flat)
    parts = [svg.text(left + LEFT, top + 16, panel.title)]
    for tick in up.ticks():
        parts.append(svg.line(GRID, [(left + LEFT, up(tick)), (left + WIDTH - RIGHT, up(tick))], 1))
        parts.append(svg.text(left + LEFT - 6, up(tick) + 4, _short(tick), "end"))
    parts += [
        svg.text(across(tick), bottom + 18, _short(tick), "middle") for tick in across.ticks()
    ]
    for number, (name, line) in enumerate(panel.lines.items()):
        color = COLORS[number]
        parts.append(svg.line(color, [(across(x), up(y)) for x, y in line]))
        parts += [svg.box(across(x) - 2, up(y) - 2, 4, 4, color) for x, y in line]
        if name:
            from_left = left + LEFT + 130 * number
            parts.append(svg.box(from_left, top + 25, 12, 8, color))
            parts.append(svg.text(from_left + 17, top + 33, name))
    return parts


class _Scale:
    """From values to places. On a logarithm, 0 stands a step before the smallest."""

    def __init__(
        self, values: Sequence[float], begin: float, end: float, *, is_linear: bool = False
    ) -> None:
        self._is_linear = is_linear
        self._begin, self._length = begin, end - begin
        above = [value for value in values if value > 0] or [1.0]
        self._has_zero = not is_linear and min(values) <= 0
        if is_linear:
            self._least, self._most = 0.0, 1.25 * max(above)
        else:
            least, most = math.floor(math.log10(min(above))), math.log10(max(above))
            self._first = least
            self._least, self._most = least - self._has_zero, max(most, least + 1)

    def __call__(self, value: float) -> float:
        if not self._is_linear:
            value = math.log10(value) if value > 0 else self._least
        return self._begin + self._length * (value - self._least) / (self._most - self._least)

    def ticks(self) -> list[float]:
        """Round values, four or more."""
        if self._is_linear:
            step = 10 ** math.floor(math.log10(self._most / 2))
            step *= next(n for n in (5, 2, 1) if self._most / (n * step) >= 2)
            return [step * n for n in range(int(self._most / step) + 1)]
        powers = [10.0**n for n in range(self._first, math.floor(self._most) + 1)]
        return [0.0, *powers] if self._has_zero else powers


def _short(value: float) -> str:
    """`10`, `10 k`, `1 M`."""
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
