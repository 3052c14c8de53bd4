"""``reliablepub outbox export | import``: writes messages as lines of JSON, and reads them back.

Knows: files, standard input and output. Must never know: the content of a line.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryFile
from typing import IO, Final

import click

from reliablepub.cli import encoded
from reliablepub.cli.choosing import named, rows_named, selection_options
from reliablepub.cli.commands import Exit, Failure, command
from reliablepub.cli.options import inspected_option, json_option
from reliablepub.cli.output import (
    count_of,
    new_file,
    print_data,
    print_either,
    print_error,
    print_note,
    quoted,
)
from reliablepub.cli.progress import Bar, changing, patiently
from reliablepub.message import BODY_BYTES_MAX
from reliablepub.outbox.admin.selection import Selection, find_ids
from reliablepub.outbox.admin.transfer import BadLine, export_lines, import_lines
from reliablepub.outbox.database import Database

_BLOCK_BYTES: Final = 1 << 20
_LINE_BYTES_MAX: Final = BODY_BYTES_MAX * 4 // 3 + 4 * _BLOCK_BYTES
"""Longest line: the largest body as base64, and all other columns with every character escaped."""


@command(
    "export",
    exits={
        2: "bad usage, an unknown ID, the --to file exists or cannot be written, or messages were "
        "left out that are encrypted, or that an ID names and that are gone"
    },
)
@click.argument("names", metavar="[ID...]", nargs=-1)
@inspected_option
@selection_options
@click.option(
    "--to",
    "target",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A new file, readable by you alone; stdout unless given.",
)
def export_messages(
    names: tuple[str, ...], database: Database, chosen: Selection, target: Path | None
) -> int:
    """Write messages with their bodies as lines of JSON (NDJSON), byte for byte.

    Messages are selected by ID (row number, message id, key or correlation id) or by a filter; all
    of them otherwise. They stay in the outbox. Encrypted messages cannot be moved, and are left
    out.

    \b
    Examples:
      reliablepub outbox export --state parked --to parked.ndjson \\
        --outbox outbox.db
      reliablepub outbox export 17 --outbox outbox.db
    """
    if names and chosen != Selection():
        raise click.UsageError("give IDs or a filter, not both")
    with patiently("looking through the outbox"):
        # In the order of storing, which `import` keeps: messages of an ordering key need it.
        ids = sorted(rows_named(database, names) if names else find_ids(database, chosen))
    encrypted: list[int] = []
    gone: list[int] = []
    lines = export_lines(database, ids, encrypted, gone)
    if target is None:
        for line in lines:
            print_data(line)
    else:
        count = 0
        with new_file(target) as file, Bar(len(ids)) as bar:
            for count, line in enumerate(lines, 1):
                file.write(f"{line}\n".encode())
                bar.show("done", count)
        print_note(f"{count_of(count, 'message')} written to {target}")
    if names and gone:
        print_error(f"{named(gone)} left out: no longer in {database.name}")
    if encrypted:
        _tell_of_encrypted(encrypted, database)
    return Exit.BAD_INPUT if encrypted or (names and gone) else Exit.CONFIRMED


def _tell_of_encrypted(encrypted: list[int], database: Database) -> None:
    remedy = "keep a physical backup of the server instead (pg_basebackup)"
    if database.file is not None:
        copying = f"sqlite3 {quoted(database.name)} \".backup 'copy.db'\""
        remedy = f"keep a copy of the whole file instead: {copying}"
    print_error(
        f"{count_of(len(encrypted), 'message')} left out: encrypted, and bound to this outbox, so "
        f"no other outbox can import them; {remedy}"
    )


@command(
    "import",
    exits={2: "bad usage, or a line is not one that export wrote; the lines before it are stored"},
)
@click.argument("source", metavar="FILE", type=click.Path())
@inspected_option
@json_option
def import_messages(source: str, database: Database, as_json: bool) -> None:
    """Store messages that `reliablepub outbox export` has written; `-` reads them from stdin.

    The next relay publishes open messages; parked ones stay parked. Messages that the outbox has
    already are left out, and so are the lines of FILE that an earlier import has stored: it can be
    repeated, also after an interruption. A message that was rerouted or encrypted since it was
    exported is not recognized, and is stored again. Each line is checked against its checksum.

    \b
    Example:
      reliablepub outbox import parked.ndjson --outbox outbox.db
    """
    with _opened(source) as raw:
        digest, lines = _measured(raw)
        raw.seek(0)
        try:
            with changing(lines) as progress:
                for brought in import_lines(database, _lines(raw), f"import {digest}"):
                    progress("done", brought.stored + brought.known)
        except BadLine as error:
            raise Failure(f"{error}; the lines before it are stored", Exit.BAD_INPUT) from error
    there = f"; {brought.known} were there already, or imported before"
    text = f"{count_of(brought.stored, 'message')} stored{there if brought.known else ''}"
    print_either({"stored": brought.stored, "known": brought.known}, text, as_json=as_json)


def _opened(source: str) -> IO[bytes]:
    """The input as a seekable file; what cannot be read twice is copied to a temporary file."""
    if source == "-":
        return _copy_of(sys.stdin.buffer)
    raw = Path(source).open("rb")  # noqa: SIM115 - the caller closes it
    if raw.seekable():
        return raw
    with raw:
        return _copy_of(raw)


def _copy_of(raw: IO[bytes]) -> IO[bytes]:
    copy = TemporaryFile()  # noqa: SIM115 - the caller closes it
    copyfileobj(raw, copy, _BLOCK_BYTES)
    copy.seek(0)
    return copy


def _lines(raw: IO[bytes]) -> Iterator[str]:
    """The lines as text, which is UTF-8 and not compressed."""
    number = 0
    while line := raw.readline(_LINE_BYTES_MAX + 1):
        number += 1
        if number == 1 and (words := encoded.hint(line)):
            raise BadLine(words)
        if len(line) > _LINE_BYTES_MAX:
            raise BadLine(f"line {number} is too long for a message")
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise BadLine(f"line {number} is not UTF-8 (byte {error.start + 1})") from None


def _measured(raw: IO[bytes]) -> tuple[str, int]:
    """The SHA-256 of the lines, which identifies the import, and their number."""
    digest, lines = hashlib.sha256(), 0
    while block := raw.read(_BLOCK_BYTES):
        digest.update(block)
        lines += block.count(b"\n")
    return digest.hexdigest(), lines
