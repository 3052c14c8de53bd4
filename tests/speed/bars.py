"""The picture of docs/performance.md, drawn from the first table of the page.

``python -m tests.speed.bars`` draws it anew after the table has changed; a test compares the two.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import svg

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
PICTURE = PAGE.with_name("speed.svg")
ROW = re.compile(
    r"^\| (?P<name>[^|]+) \| (?P<rate>[\d ]+) \| [\d.]+ \| (?P<cost>\d+) µs \|$", re.MULTILINE
)

LEFT, BARS, RIGHT, STEP, TOP = 330, 230, 60, 22, 34
WIDTH = LEFT + 2 * (BARS + RIGHT)
OURS, OTHERS = "#1f5fa8", "#b8b8b8"


@dataclass(frozen=True)
class Row:
    """One way to publish.

    Attributes:
        name: of the way.
        rate: confirmed messages per second.
        cost: microseconds of the client's CPU time per message.
    """

    name: str
    rate: int
    cost: int


def rows(page: str) -> list[Row]:
    """Read the rows of the table in which each way has a rate and a cost."""
    found = [match.groupdict() for match in ROW.finditer(page)]
    return [
        Row(one["name"].replace("`", ""), int(one["rate"].replace(" ", "")), int(one["cost"]))
        for one in found
    ]


def draw(path: Path, ways: list[Row]) -> None:
    """Draw two bars for each way: messages per second, and CPU time."""
    right = LEFT + BARS + RIGHT
    parts = [
        svg.text(LEFT, 20, "confirmed messages per second"),
        svg.text(right, 20, "µs of the client's CPU time per message"),
    ]
    for number, way in enumerate(ways):
        top = TOP + number * STEP
        color = OURS if "Publisher" in way.name else OTHERS
        parts.append(svg.text(LEFT - 8, top + 13, way.name, "end"))
        bars = (
            (LEFT, way.rate, max(one.rate for one in ways), f"{way.rate:,}".replace(",", " ")),
            (right, way.cost, max(one.cost for one in ways), str(way.cost)),
        )
        for left, value, most, words in bars:
            length = BARS * value / most
            parts.append(svg.box(left, top, length, STEP - 6, color))
            parts.append(svg.text(left + length + 5, top + 13, words))
    svg.write(path, WIDTH, TOP + STEP * len(ways) + 8, parts)


def drawn(page: str) -> str:
    """Return the picture of a page."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.svg"
        draw(path, rows(page))
        return path.read_text()


if __name__ == "__main__":
    draw(PICTURE, rows(PAGE.read_text()))
