"""Log records on stderr, and every line there as JSON: ``reliablepub relay --log-format json``.

Knows: the fields that every line has, and log records. Must never know: what a line is about.

The format is found before click parses the arguments, so that an error in them is a line of JSON
as well.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Final

import click

from reliablepub.cli.config import CONFIG_VARIABLE, variable_of
from reliablepub.errors import ReliablePubError
from reliablepub.printable import one_line, printable
from reliablepub.relay.journal import EVENTS, LINK

FLAG: Final = "--log-format"
FORMATS: Final = ("text", "json")
LOGGER: Final = logging.getLogger("reliablepub")
_OWN: Final = {*vars(logging.makeLogRecord({})), "message", "asctime"}
"""Attributes of every record; the others are the fields of this one."""


_PRIORITIES: Final = {"CRITICAL": 2, "ERROR": 3, "WARNING": 4, "INFO": 6}
"""Of each level, as journald reads it at the start of a line (sd-daemon)."""


class _Stderr(logging.Handler):
    """How lines are printed; as a handler, it prints the log records within `records`."""

    is_json = False
    is_service = False
    """Whether lines of text begin with their time and level, or for journald with the level."""

    def __init__(self) -> None:
        super().__init__()
        self.warned: set[str] = set()  # by notes: a log record of the same text is not printed

    def emit(self, record: logging.LogRecord) -> None:
        (_print_as_json if self.is_json else _print_as_text)(record)


STDERR: Final = _Stderr()


def use(log_format: str) -> None:
    """Print lines in this format from now on."""
    STDERR.is_json = log_format == "json"
    sys.excepthook = _print_bug if STDERR.is_json else sys.__excepthook__


def wanted(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The format that the arguments, the environment or the configuration file ask for.

    Nothing is reported here: click parses all of it afterwards, and reports in this format. A
    pipe can be read only once, so it is left to click, and a format in it is not heeded.
    """
    given = _value(arguments, FLAG) or environment.get(variable_of(FLAG))
    if given is not None:
        return given
    path = _value(arguments, "--config") or environment.get(CONFIG_VARIABLE)
    if path is not None:
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            file = Path(path)
            if file.is_file():
                values = tomllib.loads(file.read_text(encoding="utf-8"))
                return str(values.get("relay", {}).get(FLAG.removeprefix("--"), ""))
    return "text"


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of a flag, as ``--flag VALUE`` or ``--flag=VALUE``; None without one."""
    found = None
    for one, after in zip_longest(arguments, arguments[1:]):
        if one == flag:
            found = after
        elif one.startswith(f"{flag}="):
            found = one.removeprefix(f"{flag}=")
    return found


def say(level: str, text: str, *, event: str = "note", head: str = "") -> None:
    """Print a line: as JSON with the event, as text with the head; a service has its own head."""
    if STDERR.is_json:
        _print_line(level, text, f"{LOGGER.name}.cli", {"event": event})
    else:
        _print(f"{_head(level) if STDERR.is_service else head}{text}")


def _head(level: str) -> str:
    return f"<{_PRIORITIES[level]}>" if _is_journal() else f"{_now()} {level:<8} "


def _is_journal() -> bool:
    """Whether stderr is read by journald, which notes the time itself (systemd.exec)."""
    found = os.fstat(2)
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _now() -> str:
    return f"{datetime.now(UTC).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def _print(line: str) -> None:
    """Print on stderr. That its disk is full, or its reader gone, ends no command."""
    with suppress(OSError):
        click.echo(line, err=True)


def _print_line(level: str, text: str, logger: str, fields: Mapping[str, object]) -> None:
    """Print one line of JSON on stderr; its ``event`` is among the fields."""
    values = {"time": _now(), "level": level, "logger": logger}
    _print(json.dumps({**values, "text": text, **fields}, default=str))


def _print_as_text(record: logging.LogRecord) -> None:
    """Print a warning or an error that the command does not print itself.

    It prints changes of the connection from `Status` (`LinkNotes`), and each warning of exposed
    files and passwords as a note.
    """
    is_link = record.name == LINK.name and getattr(record, "event", None) in EVENTS
    text = one_line(record.getMessage())
    if is_link or text in STDERR.warned:
        return
    say(record.levelname, text)
    error = record.exc_info[1] if record.exc_info else None
    # An error of the library says what to do; the traceback of any other tells of a bug.
    if error is not None and not isinstance(error, ReliablePubError):
        lines = "".join(traceback.format_exception(error)).splitlines()
        _print("\n".join(map(printable, lines)))  # a hook's error may quote a message


def _print_as_json(record: logging.LogRecord) -> None:
    fields = {name: value for name, value in vars(record).items() if name not in _OWN}
    if record.exc_info and record.exc_info[1] is not None:
        fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
    _print_line(record.levelname, record.getMessage(), record.name, fields)


@contextmanager
def records() -> Iterator[None]:
    """Print log records of the library within the block.

    As text: those of level WARNING and above, if the command does not print them itself. As JSON:
    all of level INFO and above.
    """
    STDERR.setLevel(logging.INFO if STDERR.is_json else logging.WARNING)
    level = LOGGER.level
    LOGGER.addHandler(STDERR)
    LOGGER.setLevel(STDERR.level)
    try:
        yield
    finally:
        LOGGER.setLevel(level)
        LOGGER.removeHandler(STDERR)


def _print_bug(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception that no command expects."""
    told = "".join(traceback.format_exception(kind, error, trace))
    text = f"a bug of reliablepub: {kind.__name__}: {error}"
    _print_line("CRITICAL", text, LOGGER.name, {"event": "bug", "traceback": told})
