"""A picture of a set: confirms a second, messages in flight, and the faults.

    python -m tests.chaos.picture HISTORY.jsonl.gz PICTURE.svg

RELIABLEPUB_CHAOS_REPORT has sets keep their histories. It knows these files and SVG; it must never
know clusters or publishers.
"""

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from tests import svg

WIDTH: Final = 880
LEFT, RIGHT, HEIGHT, GAP, HEAD = 70, 20, 150, 20, 34
ROW, LETTER = 15, 6.8
CONFIRMED, IN_FLIGHT, FAULT, HEALING = "#2a8a4a", "#c26a12", "#f3c9c9", "#fbf0dc"
LINE: Final = "#999"
LEGEND: Final = {
    "confirmed per second": CONFIRMED,
    "in flight": IN_FLIGHT,
    "fault": FAULT,
    "until it flows again": HEALING,
}
ENDS: Final = ("confirmed", "returned", "nacked", "refused", "uncertain")
STEP_S: Final = 0.5


def read(history: Path) -> tuple[dict[str, Any], list[int], list[int]]:
    """A set's result; messages confirmed in each step, and in flight at its end."""
    with gzip.open(history, "rt") as file:
        result = json.loads(next(file))
        events = [json.loads(line) for line in file]
    steps = 1 + int(max([result["took_s"], *(event[0] for event in events)]) / STEP_S)
    confirmed, moved = [0] * steps, [0] * steps
    for at, what, _, _, tag, _ in events:
        step = int(at / STEP_S)
        confirmed[step] += what == "confirmed"
        moved[step] += (what == "sent") - bool(what in ENDS and tag)
    return result, confirmed, list(accumulate(moved))


def draw(history: Path, picture: Path) -> None:
    """Write the picture of a history."""
    result, confirmed, in_flight = read(history)
    end_s = len(confirmed) * STEP_S
    title = f"RabbitMQ {result['version']}, {result['handling']}, {result['door']}"
    names = [*_names(result["incidents"], end_s)]
    top = HEAD + ROW * (1 + max((row for row, _, _ in names), default=0))
    middle, bottom = top + HEIGHT + GAP, top + 2 * HEIGHT + GAP
    parts = [svg.text(LEFT, 20, title), *_faults(result["incidents"], end_s, top, bottom)]
    parts += [svg.text(x, HEAD + ROW * row + 11, name) for row, x, name in names]
    rates = [round(count / STEP_S) for count in confirmed]
    parts += _curve(rates, end_s, top, CONFIRMED)
    parts += _curve(in_flight, end_s, middle, IN_FLIGHT)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at_s = end_s * share
        parts.append(svg.text(_x(at_s, end_s), bottom + 18, f"{at_s:.0f} s", "middle"))
    for number, (name, color) in enumerate(LEGEND.items()):
        parts.append(svg.box(LEFT + 160 * number, bottom + 32, 14, 10, color))
        parts.append(svg.text(LEFT + 160 * number + 20, bottom + 41, name))
    svg.write(picture, WIDTH, bottom + 52, parts)


def _x(at_s: float, end_s: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at_s / end_s


def _names(incidents: Sequence[dict[str, Any]], end_s: float) -> Iterator[tuple[int, float, str]]:
    """The faults' names, each in the first row in which it hides no other: row, x, name."""
    ends: list[float] = []
    for incident in incidents:
        name = " + ".join(incident["faults"])
        x = min(_x(incident["began_s"], end_s), WIDTH - LETTER * len(name))
        row = next((row for row, end in enumerate(ends) if end < x), len(ends))
        ends[row : row + 1] = [x + LETTER * (len(name) + 1)]
        yield row, x, name


def _faults(
    incidents: Sequence[dict[str, Any]], end_s: float, top: float, bottom: float
) -> Iterator[str]:
    for incident in incidents:
        began, ended = _x(incident["began_s"], end_s), _x(incident["ended_s"], end_s)
        flows = _x(incident["ended_s"] + incident["flows_after_s"], end_s)
        yield svg.box(began, top, max(2.0, ended - began), bottom - top, FAULT)
        yield svg.box(ended, top, flows - ended, bottom - top, HEALING)
        yield svg.line(LINE, [(began, top), (began, bottom)], 1)


def _curve(values: Sequence[int], end_s: float, top: float, color: str) -> Iterator[str]:
    most, bottom = max(1, *values), top + HEIGHT
    points = (
        (_x((step + 0.5) * STEP_S, end_s), bottom - HEIGHT * value / most)
        for step, value in enumerate(values)
    )
    yield svg.line(color, points, 1.5)
    yield svg.line(LINE, [(LEFT, bottom), (WIDTH - RIGHT, bottom)], 1)
    yield svg.text(LEFT - 8, top + 12, f"{most}", "end")
    yield svg.text(LEFT - 8, bottom + 4, "0", "end")


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
