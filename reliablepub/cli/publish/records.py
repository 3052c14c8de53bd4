"""The input of ``reliablepub publish``: reads lines, and makes a message from each record.

Knows: files, NDJSON, plain lines, templates, `Message`. Must never know: what becomes of a message.

Reading is lazy: memory holds at most one block (256 KiB) and one line.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, Self

from reliablepub.cli import encoded
from reliablepub.cli.publish.template import Template, TemplateError
from reliablepub.cli.signals import Stop, readable
from reliablepub.errors import InvalidMessage
from reliablepub.front.relay_client import SOURCE_BYTES_MAX
from reliablepub.message import BODY_BYTES_MAX, Message

_BLOCK_BYTES: Final = 256 * 1024
STDIN: Final = "-"
_BOM: Final = b"\xef\xbb\xbf"
TEXTS: Final = ("exchange", "routing_key", "message_id", "ordering_key")
"""What of a message a template can make; the first two are empty unless given, and the publisher
generates a message id."""


class Line(NamedTuple):
    """A line that is not blank."""

    number: int  # from 1
    body: bytes  # without the line end


class BadRecord(Exception):
    """A line that cannot be published."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(f"line {number}: {problem}")
        self.number = number  # of the line, from 1


def read_lines(fd: int, stop: Stop) -> Iterator[Line | None]:
    """The lines of an open file that are not blank, until its end or a signal."""
    number = 0
    for line in _split(fd, stop):
        if line is None:
            yield None  # the next read would wait: the caller can publish the lines so far
            continue
        number += 1
        if len(line) > BODY_BYTES_MAX:
            raise BadRecord(number, f"is longer than {BODY_BYTES_MAX} bytes")
        if number == 1:
            line = line.removeprefix(_BOM)  # noqa: PLW2901 - the BOM is not part of the record
            if words := encoded.hint(line):
                raise BadRecord(number, words)
        if line and not line.isspace():
            yield Line(number, line.removesuffix(b"\r"))


def _split(fd: int, stop: Stop) -> Iterator[bytes | None]:
    is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
    begun: list[bytes] = []  # parts of a line that spans blocks; joined once
    begun_bytes = 0
    while not stop.is_set:
        if not is_regular and not readable([fd], 0):
            yield None
            if not stop.wait_readable(fd):
                return
        block = os.read(fd, _BLOCK_BYTES)
        if not block:
            break
        first, *rest = block.split(b"\n")
        begun.append(first)
        begun_bytes += len(first)
        if rest:
            yield b"".join(begun)
            yield from rest[:-1]
            begun, begun_bytes = [rest[-1]], len(rest[-1])
        elif begun_bytes > BODY_BYTES_MAX:
            break  # too long for a message: stop buffering, `read_lines` reports the line
    if not stop.is_set and begun_bytes:
        yield b"".join(begun)


@dataclass(slots=True)
class Recipe:
    """How a line becomes a message."""

    templates: Mapping[str, Template]  # by the names of some of `TEXTS`
    is_ndjson: bool | None  # None until the first record has shown it
    expires_in_s: float | None = None  # after storing
    not_before: datetime | None = None
    check: Callable[[Message], None] | None = None  # raises for what the outbox cannot store

    def message(self, line: Line) -> Message:
        """Make the message of a line, or raise `BadRecord`."""
        if self.is_ndjson is None:
            self.is_ndjson = line.body.lstrip().startswith(b"{")
        record = _parsed(line) if self.is_ndjson else None
        try:
            message = Message(
                line.body,
                **self._filled(line, record),
                expires_in_s=self.expires_in_s,
                not_before=self.not_before,
                content_type="text/plain" if record is None else "application/json",
            )
            if self.check is not None:
                self.check(message)
        except InvalidMessage as error:
            raise BadRecord(line.number, str(error)) from None
        return message

    def _filled(self, line: Line, record: dict[str, object] | None) -> dict[str, Any]:
        texts = {}
        for name, template in self.templates.items():
            if record is None and template.fields:
                problem = (
                    f"{_option(name)} takes field {template.fields[0]!r} from each record, "
                    "but plain lines have no fields"
                )
                raise BadRecord(line.number, problem)
            try:
                texts[name] = template.fill(record or {})
            except TemplateError as error:
                problem = f"{error} ({_option(name)} {template.text})"
                raise BadRecord(line.number, problem) from None
        return texts


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parsed(line: Line) -> dict[str, object]:
    try:
        record = _decode(line.body.decode())
    except UnicodeDecodeError as error:
        raise BadRecord(line.number, f"is not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        problem = f"is not valid JSON: {error.msg} (column {error.colno})"
        raise BadRecord(line.number, problem) from None
    except RecursionError:
        raise BadRecord(line.number, "is not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise BadRecord(line.number, f"is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadRecord(line.number, "is not a JSON object")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_decode: Final = json.JSONDecoder(parse_constant=_no_constant).decode
"""Made once: `json.loads` makes a decoder for each call that has options."""


@dataclass(slots=True)
class Source:
    """A file, or stdin, open for reading."""

    name: str  # as the user gave it; ``-`` for stdin
    fd: int
    is_regular: bool  # and so can be read twice
    count: int = 0  # of records that were read
    _checked: tuple[int, tuple[int, int]] | None = None  # the records and the version of a file

    @classmethod
    def open(cls, name: str) -> Self:
        """Open a file, or stdin for ``-``."""
        if name == STDIN:
            return cls(name, 0, is_regular=False)
        # Without O_NONBLOCK, a pipe without a writer would be waited for here, deaf to signals.
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(fd, True)
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            os.close(fd)
            raise IsADirectoryError(21, "is a directory", name)
        return cls(name, fd, is_regular=stat.S_ISREG(mode))

    def __enter__(self) -> Self:
        """Return the open source."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file; stdin stays open."""
        if self.name != STDIN:
            os.close(self.fd)

    def check(self, recipe: Recipe, stop: Stop) -> int:
        """Make a message of each record, keep none, go back to the start, and return the count."""
        for line in self.lines(stop):
            if line is not None:
                recipe.message(line)
        os.lseek(self.fd, 0, os.SEEK_SET)
        self._checked = self.count, self.version
        return self.count

    def lines(self, stop: Stop, *, done: int = 0) -> Iterator[Line | None]:
        """The lines after so many records; at their end, a file must be as it was checked."""
        number = self.count = 0
        for line in read_lines(self.fd, stop):
            if line is not None:
                number = line.number
                self.count += 1
            if line is None or self.count > done:
                yield line
        is_whole = self._checked is not None and not stop.is_set
        if is_whole and self._checked != (self.count, self.version):  # records may be half written
            raise BadRecord(number + 1, "the file was changed while it was read")

    def identity(self, recipe: Recipe) -> str:
        """A name for this file with these templates; a changed file has another name.

        ``--not-before`` and ``--expires-in`` are not part of the name: an interrupted run resumes
        with other times too.
        """
        size, mtime_ns = self.version
        name = json.dumps(
            {
                "path": str(Path(self.name).resolve()),
                "size": size,
                "mtime_ns": mtime_ns,
                "exchange": "",
                "routing_key": "",
                "message_id": None,  # names stay those of versions without its template
                "is_ndjson": recipe.is_ndjson,
            }
            | {name: template.text for name, template in recipe.templates.items()}
        )
        if len(name) <= SOURCE_BYTES_MAX:
            return name
        return sha256(name.encode()).hexdigest()

    @property
    def version(self) -> tuple[int, int]:
        """Size and modification time, which a changed file does not keep."""
        found = os.fstat(self.fd)
        return found.st_size, found.st_mtime_ns
