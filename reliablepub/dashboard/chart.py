"""The lines of a chart, as points of an SVG polyline.

Knows: numbers. Must never know: what they count. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WIDTH: Final = 600
HEIGHT: Final = 80


def points(values: Sequence[float], most: float, steps: int) -> str:
    """The points of a line, the newest value at the right edge; ``steps`` fill the width."""
    if not values:
        return ""
    step = WIDTH / max(1, steps - 1)
    left = WIDTH - step * (len(values) - 1)
    scale = (HEIGHT - 4) / most if most > 0 else 0.0
    return " ".join(
        f"{left + step * n:.1f},{HEIGHT - 2 - value * scale:.1f}" for n, value in enumerate(values)
    )
