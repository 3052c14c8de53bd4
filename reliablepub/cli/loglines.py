"""Log records on stderr, and every line there as JSON: ``reliablepub relay --log-format json``.

Knows: the fields that every line has, and log records. Must never know: what a line is about.

The format is found before click parses the arguments, so that an error in them is a line of JSON
as well.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Final

import click

from reliablepub.cli.config import CONFIG_VARIABLE, variable_of
from reliablepub.printable import one_line

FLAG: Final = "--log-format"
FORMATS: Final = ("text", "json")
LOGGER: Final = logging.getLogger("reliablepub")
_OWN: Final = {*vars(logging.makeLogRecord({})), "message", "asctime"}
"""Attributes of every record; the others are the fields of this one."""


class _Mode:
    is_json = False


def is_json() -> bool:
    """Whether lines on stderr are JSON."""
    return _Mode.is_json


def use(log_format: str) -> None:
    """Print lines in this format from now on."""
    _Mode.is_json = log_format == "json"
    sys.excepthook = _print_bug if _Mode.is_json else sys.__excepthook__


def wanted(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The format that the arguments, the environment or the configuration file ask for.

    Nothing is reported here: click parses all of it afterwards, and reports in this format.
    """
    given = _value(arguments, FLAG) or environment.get(variable_of(FLAG))
    if given is not None:
        return given
    path = _value(arguments, "--config") or environment.get(CONFIG_VARIABLE)
    if path is not None:
        with suppress(OSError, ValueError, AttributeError):
            file = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            return str(file.get("relay", {}).get(FLAG.removeprefix("--"), ""))
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


def print_line(level: str, text: str, logger: str, fields: Mapping[str, object]) -> None:
    """Print one line of JSON on stderr.

    Args:
        level: name of the level, such as ``WARNING``.
        text: the line for people.
        logger: name of the logger.
        fields: further fields, ``event`` among them.
    """
    now = time.time()
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    values = {"time": f"{at}.{int(now % 1 * 1000):03}Z", "level": level, "logger": logger}
    click.echo(json.dumps({**values, "text": text, **fields}, default=str), err=True)


class _AsText(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(one_line(record.getMessage()), err=True)


class _AsJson(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        print_line(record.levelname, record.getMessage(), record.name, fields)


@contextmanager
def records(important: logging.Logger) -> Iterator[None]:
    """Print log records of the library within the block.

    Args:
        important: the logger whose records of level WARNING and above are printed as text. As JSON,
            all records of level INFO and above are printed.
    """
    handler = _AsJson(logging.INFO) if is_json() else _AsText(logging.WARNING)
    logger = LOGGER if is_json() else important
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _print_bug(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception that no command expects."""
    told = "".join(traceback.format_exception(kind, error, trace))
    text = f"a bug of reliablepub: {kind.__name__}: {error}"
    print_line("CRITICAL", text, LOGGER.name, {"event": "bug", "traceback": told})
