"""The data source ``reliablepub_outbox``: reads outboxes, for analysis.

Knows: Spark's DataSource protocol, `Outbox`. Must never know: SQL.

Each file is one partition. Files are only read, and reading does not block their relay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from glob import glob
from pathlib import Path
from typing import Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType, TimestampType

from reliablepub import ConfigurationError, Outbox
from spark_sink.failures import in_one_line

_OPTIONS: Final = frozenset(("path", "paths", "view"))
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

    Options: the path (``load("/var/lib/app/*.db")``; wildcards are allowed, and all hosts must
    share the disk) and ``view``: ``open`` (the default) or another of `COLUMNS`.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "reliablepub_outbox"

    def schema(self) -> StructType:
        """The columns of the view.

        Raises:
            ConfigurationError: an option or the view is unknown.
        """
        with in_one_line():
            return _columns_of(self._view)

    def reader(self, schema: StructType) -> OutboxReader:
        """A reader of all files.

        Raises:
            ConfigurationError: the path is missing or not absolute, no file matches, an option or
                the view is unknown, or the columns are not those of the view.
        """
        with in_one_line():
            view = self._view
            files = sorted({file for pattern in self._patterns for file in _matching(pattern)})
            if [(field.name, field.dataType) for field in schema] != [
                (field.name, field.dataType) for field in _columns_of(view)
            ]:
                raise ConfigurationError(f"view {view!r} has columns of its own: give no schema")
            return OutboxReader(files, view)

    @property
    def _patterns(self) -> list[str]:
        given = [path for path in (self.options.get("path"),) if path]
        try:
            paths = json.loads(self.options.get("paths", "[]"))  # of load([...])
        except ValueError:
            paths = None
        patterns = [*given, *paths] if isinstance(paths, list) else []
        if not patterns or not all(
            isinstance(pattern, str) and Path(pattern).is_absolute() for pattern in patterns
        ):
            raise ConfigurationError(
                "name the outboxes by an absolute path: load('/var/lib/app/*.db'). Spark does not "
                "pass the OPTIONS of a table: create a TEMPORARY VIEW ... OPTIONS (path '...')"
            )
        return patterns

    @property
    def _view(self) -> str:
        unknown = sorted({name.lower() for name in self.options} - _OPTIONS)
        # When a table is made, Spark adds its properties, of which "provider" is always one.
        if unknown and "provider" not in unknown:
            raise ConfigurationError(
                f"there is no option {', '.join(map(repr, unknown))}; there are a path, and 'view'"
            )
        view = self.options.get("view", "open").lower()
        if view not in COLUMNS:
            raise ConfigurationError(f"option 'view' must be {' or '.join(COLUMNS)}")
        return view


def _columns_of(view: str) -> StructType:
    return StructType([StructField(name, _type_of(name)) for name in COLUMNS[view]])


def _matching(pattern: str) -> list[str]:
    """The absolute paths of the files that match."""
    found = glob(pattern)  # noqa: PTH207 - a pattern may begin at the root
    if not found:
        raise ConfigurationError(f"no file matches {pattern}")
    return [str(Path(file).absolute()) for file in found]


@dataclass
class _File(InputPartition):
    """One outbox file."""

    path: str


class OutboxReader(DataSourceReader):
    """Reads outbox files, one task each.

    Args:
        files: absolute paths.
        view: name of the view, a key of `COLUMNS`.
    """

    def __init__(self, files: Sequence[str], view: str) -> None:
        self._files = files
        self._view = view

    def partitions(self) -> Sequence[InputPartition]:
        """One partition a file."""
        return [_File(path) for path in self._files]

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        """The rows of a file (on an executor).

        Raises:
            OutboxError: the file is not an outbox, or cannot be read.
        """
        assert isinstance(partition, _File)
        with in_one_line():
            for row in Outbox(partition.path).rows(self._view):
                values = {"outbox": partition.path} | row
                yield tuple(_value(name, values[name]) for name in COLUMNS[self._view])


def _value(name: str, value: object) -> object:
    """A value in Spark's type: views give times as text, in UTC."""
    if name in _TIMES and isinstance(value, str):
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    return value


def _type_of(name: str) -> DataType:
    if name in _TIMES:
        return TimestampType()
    return StringType() if name in _TEXT else LongType()
