"""Output: results to stdout, everything else to stderr, each error on one line.

Knows: the two streams, JSON, CSV, tables, and the format of numbers in text. Must never know: what
is printed.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Final

import click

from reliablepub.cli import loglines
from reliablepub.cli.commands import Exit, Failure
from reliablepub.cli.grid import lay_out
from reliablepub.cli.passwords import without_passwords
from reliablepub.outbox.database import PASSED_OVER_MAX
from reliablepub.printable import one_line, printable

_AGE_MAX_S: Final = 1e11
"""About 3 000 years. A damaged row can hold any number, even infinity."""
_WARNING: Final = "warning: "
Cells = Mapping[str, Callable[[Mapping[str, Any]], object]]
"""What makes the cell of a column from a row, by its title."""
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system without hard links, such as FAT."""
_FORMULAS: Final = ("=", "+", "-", "@")
"""Characters with which a formula begins in a spreadsheet."""


@contextmanager
def keeping_exit_code() -> Iterator[None]:
    """Print the result of a run within the block; if stdout fails, the run keeps its exit code.

    An error line says so, unless the reader of stdout is gone or the terminal was closed.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            print_error(f"the result cannot be written: {error.strerror}")


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Create a file for message bodies, mode 0600 from the start; it is on disk after the block."""
    # An incomplete file never has the final name, however the process ends
    part = Path(f"{path}.{os.getpid()}.part")
    exists = Failure(f"{path} exists; name a new file", Exit.BAD_INPUT)
    if os.path.lexists(path):
        raise exists

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600)

    try:
        part.unlink(missing_ok=True)  # of a process that was killed and had this id
        with open(part, "xb", opener=opener) as file:
            yield file
            file.flush()
            _sync(file.fileno())  # the messages in it may be discarded next
        _name(part, path)
    except FileExistsError:
        raise exists from None
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}", Exit.BAD_INPUT) from None
    finally:
        with suppress(OSError):
            part.unlink()


def _name(part: Path, path: Path) -> None:
    """Give a file its final name, on disk."""
    try:
        os.link(part, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError from None
        part.rename(path)
    with suppress(OSError):  # of a directory that this user may not read
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            _sync(fd)
        finally:
            os.close(fd)


def _sync(fd: int) -> None:
    if sys.platform == "darwin":  # whose fsync leaves the data in the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def print_result(text: str) -> None:
    """Print one line of the command's result; control characters are escaped."""
    click.echo(printable(text))


def print_text(text: str) -> None:
    """Print lines; tabs stay, other characters that a terminal would act on are escaped."""
    for line in text.split("\n"):
        click.echo("\t".join(map(printable, line.removesuffix("\r").split("\t"))))


def print_data(line: str) -> None:
    """Print one line for programs, in UTF-8; the caller has escaped unprintable characters."""
    assert line.isprintable()
    click.echo(line.encode())


def print_json(value: object) -> None:
    """Print the command's result as one JSON value on one line.

    What JSON lacks becomes text: NaN and infinity, which a header or a damaged row may hold, and
    bytes in the place of a text or a number, which only a damaged row holds.
    """
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        text = json.dumps(_as_json(value), allow_nan=False)
    click.echo(text)


def _as_json(value: Any) -> Any:  # noqa: ANN401 - any value of JSON
    match value:
        case Mapping():
            return {str(name): _as_json(one) for name, one in value.items()}
        case list() | tuple():
            return [_as_json(one) for one in value]
        case bytes():
            return value.decode(errors="backslashreplace")
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value


def print_either(value: object, text: str, *, as_json: bool) -> None:
    """Print the command's result, as JSON or as a line of text."""
    if as_json:
        print_json(value)
    else:
        print_result(text)


def print_note(text: str, *, event: str = "note") -> None:
    """Print a note on stderr; as JSON (`loglines`) with this event.

    A note that begins with ``warning:`` has the level WARNING there.
    """
    text = one_line(without_passwords(text))
    said = text.removeprefix(_WARNING)
    if said == text:
        loglines.say("INFO", text, event=event)
    else:
        loglines.STDERR.warned.add(said)
        loglines.say("WARNING", said, event=event, head=_WARNING)


def print_error(text: str) -> None:
    """Print an error on stderr, as one line that begins with ``Error:``, or as JSON."""
    loglines.say("ERROR", one_line(text), event="error", head="Error: ")


def print_table(values: Mapping[str, object]) -> None:
    """Print names and values in two columns, one pair a line."""
    width = max(map(len, values))
    for name, value in values.items():
        click.echo(printable(f"{name:<{width}}  {value}"))


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    form: str | None,  # ``json``, ``csv``, or None for a table
    titles: Sequence[str],
    *,
    cells: Cells | None = None,  # of the titles that are not the name of their value
    nothing: str,  # printed instead of a table without rows
    names: Sequence[str] = (),  # the header line of CSV without rows
    lesser: Sequence[str] = (),  # titles that a narrow terminal leaves out, the first one first
    below: Callable[[Mapping[str, Any]], str] | None = None,  # text below a row; may be empty
    limit: int | None = None,
) -> None:
    """Print rows: all values as JSON or CSV, or selected columns as a table."""
    if form == "json":
        print_json(rows)
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        if header := list(rows[0] if rows else names):
            writer.writerow(header)
        writer.writerows(map(_cell, row.values()) for row in rows)
        sys.stdout.flush()  # at the end of the process, an error would be a traceback
    elif not rows:
        print_result(nothing)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        makers = [(cells or {}).get(one) or itemgetter(one.replace(" ", "_")) for one in titles]
        values = [[make(row) for make in makers] for row in rows]
        table = [["" if one is None else one_line(str(one)) for one in row] for row in values]
        notes = [] if below is None else [one_line(below(row)) for row in rows]
        lines, left_out = lay_out(titles, table, width=width, lesser=lesser, below=notes)
        for line in lines:
            print_result(line)
        if left_out:
            print_note(f"left out, as the terminal is narrow: {', '.join(left_out)}")
    if len(rows) == limit:
        print_note(f"the first {limit}; there may be more, see --limit")


def _cell(value: object) -> object:
    """A CSV cell; a quote is put before text that a spreadsheet would run as a formula."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(_FORMULAS) else text


def quoted(word: object) -> str:
    """A word of a command that the user is told to run, in quotes if a shell needs them."""
    return shlex.quote(str(word))


def same_outbox(name: object) -> str:
    """The option ``--outbox`` of a command that the user is told to run.

    The name of an outbox on a server lacks the user and the parameters of its URL: with the name
    alone, libpq would connect as another user, and without the TLS that was asked for.
    """
    return f"--outbox {'...' if '://' in str(name) else quoted(name)}"


def count_of(number: int, noun: str) -> str:
    """``1 message``, ``2 messages``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def standby_words(standbys: Iterable[tuple[str, float | None]]) -> str:
    """Hosts of relays that stand by, and for how many seconds each has; None is unknown."""
    return ", ".join(
        one_line(host) if age_s is None else f"{one_line(host)} for {age(age_s)}"
        for host, age_s in standbys
    )


def passed_over_words(ids: Sequence[int]) -> str:
    """Describe messages that a relay leaves out, of which `PASSED_OVER_MAX` are told of a shard."""
    count = f"{'at least ' if len(ids) >= PASSED_OVER_MAX else ''}{count_of(len(ids), 'message')}"
    return f"{count} due for more than a minute, and left out by a running relay: from id {ids[0]}"


def age(seconds: float) -> str:
    """A duration in its two largest units, such as ``2 h 5 min``."""
    if not abs(seconds) < _AGE_MAX_S:
        return "ages"
    whole = int(seconds)
    days, hours, minutes = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def ago(at: float | None, now: float | None = None) -> str:
    """A time relative to now: ``5 s ago`` or ``in 5 s``; empty for None."""
    if at is None:
        return ""
    if not isinstance(at, int | float):
        return _damaged(at)
    seconds = (time.time() if now is None else now) - at
    return f"{age(seconds)} ago" if seconds >= 0 else f"in {age(-seconds)}"


def _damaged(value: object) -> str:
    return f"{value!r:.40} (damaged)"


def size_of(count: float) -> str:
    """A size in the largest unit, up to GiB, in which it is at least 1."""
    if not isinstance(count, int | float):
        return _damaged(count)
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:  # noqa: PLR2004
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def answer_words(row: Mapping[str, Any]) -> str:
    """How an attempt ended, and the broker's code and words."""
    code = f"{row['reply_code']} " if row["reply_code"] else ""
    return one_line(f"{row['outcome']}: {code}{row['reply_text']}")


def paused_words(row: Mapping[str, Any], at: float, now: float) -> str:
    """A paused destination in words: name, reason, times, messages waiting."""
    key = row["routing_key"]
    where = f"{row['exchange'] or '(default)'} / {'every routing key' if key is None else key}"
    if row.get("user_id") is not None:
        where = f"user_id {row['user_id']}"
    paused_s = max(0.0, now - row["since"])
    wait = f"{count_of(row['waiting'], 'message')} wait{'s' if row['waiting'] == 1 else ''}"
    probe_in_s = at + row["probe_in_s"] - now  # at: when the relay wrote its status
    probe = f"probed in {age(probe_in_s)}" if probe_in_s >= 1 else "probed now"
    said = f"{where}: {row['reason']}; for {age(paused_s)}; {wait}; {probe}"
    gives_up_at = row.get("gives_up_at")
    if gives_up_at is not None:
        left_s = gives_up_at - now
        when = f"in {age(left_s)}, unless this ends" if left_s >= 1 else "when probed"
        said += f"; given up {when}"
    return one_line(said)
