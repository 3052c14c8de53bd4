"""The few shapes that the pictures in docs/ are drawn with. It knows SVG, and nothing else."""

from collections.abc import Iterable
from pathlib import Path

TEXT = "#333"


def box(x: float, y: float, width: float, height: float, color: str) -> str:
    """A filled rectangle."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'
    )


def line(color: str, points: Iterable[tuple[float, float]], width: float = 2) -> str:
    """Through all points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline fill="none" stroke="{color}" stroke-width="{width:g}" points="{path}"/>'


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Words, small; the anchor says which end of them is at x."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-family="sans-serif" '
        f'font-size="12" fill="{TEXT}">{words}</text>'
    )


def write(path: Path, width: float, height: float, parts: Iterable[str]) -> None:
    """The picture, on white."""
    view = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">'
    path.write_text("\n".join([view, box(0, 0, width, height, "white"), *parts, "</svg>\n"]))
