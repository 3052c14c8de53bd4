"""The data source ``reliablepub_outbox``: reads outboxes, for analysis.

Knows: Spark's DataSource protocol, `Outbox`. Must never know: SQL.

Each file is one partition. Files are only read, and reading does not block their relay. Among the
files of many hosts some may be empty, cut off or not an outbox: ``unreadable`` says what becomes of
those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from glob import glob
from pathlib import Path
from typing import Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType, TimestampType

from reliablepub import ConfigurationError, Outbox, ReliablePubError
from spark_sink.failures import in_one_line
from spark_sink.paths import local_path
from spark_sink.unread import UnreadStream

_OPTIONS: Final = frozenset(("path", "paths", "view", "unreadable"))
_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_ERROR: Final = "_error"
"""The column with the reason why a file cannot be read, with ``unreadable=collect``."""
_TIMES: Final = ("stored_at", "due_at", "expires_at", "parked_at", "confirmed_at", "at")
_TEXT: Final = (
    "outbox",
    "message_id",
    "exchange",
    "routing_key",
    "ordering_key",
    "state",
    "outcome",
    "reply_text",
    *("persistence", "epoch"),
    *("action", "person", "note"),
    _ERROR,
)
_MESSAGE: Final = ("outbox", "id", "message_id", "exchange", "routing_key", "ordering_key")
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "open": (
        *_MESSAGE,
        *("stored_at", "due_at", "expires_at"),
        *("nacked", "returned", "refused", "uncertain", "size"),
    ),
    "parked": (
        *_MESSAGE,
        *("state", "outcome", "reply_code", "reply_text", "attempts"),
        *("stored_at", "parked_at", "expires_at", "size"),
    ),
    "confirmed": (*_MESSAGE, "stored_at", "confirmed_at", "size"),
    "history": (
        *("outbox", "attempt", "id", "message_id", "at"),
        *("outcome", "reply_code", "reply_text", "persistence", "epoch", "tag"),
    ),
    "interventions": (
        *("outbox", "intervention", "id", "message_id", "exchange", "routing_key"),
        *("at", "action", "person", "note"),
    ),
    "audit": (
        *("outbox", "stored", "confirmed", "parked", "expired", "discarded", "open"),
        *("open_difference", "parked_difference", "expired_difference", "bytes_difference"),
    ),
}
"""The columns of each view: those of `Outbox.rows`, and the file's path in `outbox`."""


class OutboxDataSource(DataSource):
    """Outboxes as a DataFrame.

    Options: the path (``load("/var/lib/app/*.db")``; wildcards and ``{a,b}`` are allowed, and all
    hosts must share the disk); ``view``: ``open`` (the default) or another of `COLUMNS`;
    ``unreadable``: ``fail`` (the default), or ``collect`` for a row with the path and the reason.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "reliablepub_outbox"

    def schema(self) -> StructType:
        """The columns of the view.

        Raises:
            ConfigurationError: an option or its value is unknown.
        """
        with in_one_line():
            return _schema_of(self._columns)

    def reader(self, schema: StructType) -> OutboxReader:
        """A reader of all files.

        Raises:
            ConfigurationError: the path is missing or not absolute, no file matches, an option or
                its value is unknown, or the columns are not those of the view.
        """
        with in_one_line():
            view, columns = self._one_of("view", *COLUMNS), self._columns
            files = sorted({file for pattern in self._patterns for file in _matching(pattern)})
            if [(field.name, field.dataType) for field in schema] != [
                (field.name, field.dataType) for field in _schema_of(columns)
            ]:
                raise ConfigurationError(f"view {view!r} has columns of its own: give no schema")
            return OutboxReader(files, view, columns)

    def streamReader(self, schema: StructType) -> UnreadStream:  # noqa: N802 - Spark's name
        """A reader that refuses to begin: an outbox is a table whose rows leave it."""
        del schema
        return UnreadStream("outboxes are read as a batch: use spark.read, not readStream")

    @property
    def _patterns(self) -> list[str]:
        given = [path for path in (self.options.get("path"),) if path]
        try:
            paths = json.loads(self.options.get("paths", "[]"))  # of load([...])
        except ValueError:
            paths = None
        patterns = [*given, *paths] if isinstance(paths, list) else []
        local = [local_path(pattern) for pattern in patterns if isinstance(pattern, str)]
        absolute = [path for path in local if path is not None and Path(path).is_absolute()]
        if not patterns or len(absolute) < len(patterns):
            raise ConfigurationError(
                "name the outboxes by an absolute path: load('/var/lib/app/*.db'). Spark does not "
                "pass the OPTIONS of a table: create a TEMPORARY VIEW ... OPTIONS (path '...')"
            )
        return absolute

    @property
    def _columns(self) -> tuple[str, ...]:
        unknown = sorted({name.lower() for name in self.options} - _OPTIONS)
        # When a table is made, Spark adds its properties, of which "provider" is always one.
        if unknown and "provider" not in unknown:
            raise ConfigurationError(
                f"there is no option {', '.join(map(repr, unknown))}; there are a path, 'view' and "
                "'unreadable'"
            )
        columns = COLUMNS[self._one_of("view", *COLUMNS)]
        collects = self._one_of("unreadable", "fail", "collect") == "collect"
        return (*columns, _ERROR) if collects else columns

    def _one_of(self, name: str, *words: str) -> str:
        """The value of an option, by default the first of its words."""
        value = self.options.get(name, words[0]).lower()
        if value not in words:
            raise ConfigurationError(f"option {name!r} must be {' or '.join(words)}")
        return value


def _schema_of(columns: Sequence[str]) -> StructType:
    return StructType([StructField(name, _type_of(name)) for name in columns])


def _matching(pattern: str) -> list[str]:
    """The absolute paths of the files that match."""
    plain = _without_braces(pattern)
    found = [file for each in plain for file in glob(each)]  # noqa: PTH207 - it may begin at the root
    if not found:
        raise ConfigurationError(f"no file matches {pattern}")
    return [str(Path(file).absolute()) for file in found]


def _without_braces(pattern: str) -> list[str]:
    """The patterns that ``{a,b}`` stands for, which Spark's own sources accept too."""
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    start, end = pattern[: found.start()], pattern[found.end() :]
    return [
        plain for word in found[1].split(",") for plain in _without_braces(f"{start}{word}{end}")
    ]


@dataclass
class _File(InputPartition):
    """One outbox file."""

    path: str


class OutboxReader(DataSourceReader):
    """Reads outbox files, one task each.

    Args:
        files: absolute paths.
        view: name of the view, a key of `COLUMNS`.
        columns: those of the view; with `_ERROR`, a file that cannot be read is a row.
    """

    def __init__(self, files: Sequence[str], view: str, columns: Sequence[str]) -> None:
        self._files = files
        self._view = view
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        """One partition a file."""
        return [_File(path) for path in self._files]

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        """The rows of a file (on an executor).

        Raises:
            OutboxError: the file is not an outbox, or cannot be read; not with ``collect``.
        """
        assert isinstance(partition, _File)
        with in_one_line():
            try:
                for row in Outbox(partition.path).rows(self._view):
                    yield self._row(outbox=partition.path, **row)
            except ReliablePubError as error:
                if _ERROR not in self._columns:
                    raise
                yield self._row(outbox=partition.path, **{_ERROR: str(error)})

    def _row(self, **values: object) -> tuple[object, ...]:
        return tuple(_value(name, values.get(name)) for name in self._columns)


def _value(name: str, value: object) -> object:
    """A value in Spark's type: views give times as text, in UTC."""
    if name in _TIMES and isinstance(value, str):
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    return value


def _type_of(name: str) -> DataType:
    if name in _TIMES:
        return TimestampType()
    return StringType() if name in _TEXT else LongType()
