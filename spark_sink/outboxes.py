"""The data source ``reliablepub_outbox``: reads outboxes, for analysis.

Knows: Spark's DataSource protocol, `Outbox`. Must never know: SQL, nor where a kind of outbox is.

A partition is an outbox, or a range of the numbers of its rows. Outboxes are only read, and reading
does not block their relay. Among those of many hosts some may be empty, cut off, not an outbox or
out of reach: ``unreadable`` says what becomes of those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from glob import glob
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType, TimestampType

from reliablepub import ConfigurationError, Outbox, ReliablePubError
from spark_sink.failures import in_one_line
from spark_sink.options import split_urls
from spark_sink.paths import local_path
from spark_sink.unread import UnreadStream

_OPTIONS: Final = frozenset(("path", "paths", "url", "view", "unreadable", "numpartitions"))
_URL: Final = re.compile(r"postgres(ql)?://")
_PASSWORD: Final = re.compile(r"://[^/@]*:[^/]*@|password=")
"""In a URL without percent signs, a password; or an address so odd that it may be one."""
_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_ERROR: Final = "_error"
"""The column with the reason why an outbox cannot be read, with ``unreadable=collect``."""
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
"""The columns of each view: those of `Outbox.rows`, and `Outbox.name` in `outbox`."""


class OutboxDataSource(DataSource):
    """Outboxes as a DataFrame.

    Options: the path (``load("/var/lib/app/*.db")``; wildcards and ``{a,b}`` are allowed, and all
    hosts must share the disk) or the URL of a PostgreSQL database without its password; ``url``:
    such a URL, or several separated by commas, which may have passwords; ``view``: ``open`` (the
    default) or another of `COLUMNS`; ``numPartitions``: number of ranges per outbox (1);
    ``unreadable``: ``fail`` (the default), or ``collect`` for a row with the outbox and the reason.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "reliablepub_outbox"

    def schema(self) -> StructType:
        """The columns of the view.

        Raises:
            ConfigurationError: an option or its value is unknown, or a path has a password.
        """
        with in_one_line():
            # Here, because a temporary view that is made of the DataFrame shows its path.
            if any(_PASSWORD.search(unquote(place)) for place in self._places if _URL.match(place)):
                raise ConfigurationError(
                    "a path has a password, which Spark would show: give the URL as option 'url', "
                    "or the password to the hosts, in PGPASSWORD or a password file of libpq"
                )
            return _schema_of(self._columns)

    def reader(self, schema: StructType) -> OutboxReader:
        """A reader of all outboxes.

        Raises:
            ConfigurationError: no outbox is named, a path is not absolute, no file matches, a URL
                is not one of PostgreSQL, or it needs an extra that is not installed; an option or
                its value is unknown, or the columns are not those of the view.
        """
        with in_one_line():
            view, columns = self._one_of("view", *COLUMNS), self._columns
            partitions, outboxes = self._partitions, self._outboxes()
            if [(field.name, field.dataType) for field in schema] != [
                (field.name, field.dataType) for field in _schema_of(columns)
            ]:
                raise ConfigurationError(f"view {view!r} has columns of its own: give no schema")
            return OutboxReader(outboxes, view, columns, partitions)

    def streamReader(self, schema: StructType) -> UnreadStream:  # noqa: N802 - Spark's name
        """A reader that refuses to begin: an outbox is a table whose rows leave it."""
        del schema
        return UnreadStream("outboxes are read as a batch: use spark.read, not readStream")

    @property
    def _places(self) -> list[str]:
        """The paths, with wildcards, and URLs of `load`; none if its list holds anything else."""
        given = [path for path in (self.options.get("path"),) if path]
        try:
            paths = json.loads(self.options.get("paths", "[]"))  # of load([...])
        except ValueError:
            return []
        places = [*given, *paths] if isinstance(paths, list) else []
        return places if all(isinstance(place, str) for place in places) else []

    def _outboxes(self) -> dict[str, str]:
        """The path or URL of each outbox by its name, which has no password."""
        places = self._places
        urls = [url for url in split_urls(self.options.get("url", "")) if url]
        if not all(map(_URL.match, urls)):
            raise ConfigurationError("option 'url' takes postgresql://...; for a file give a path")
        local = [local_path(place) for place in places if not _URL.match(place)]
        absolute = [path for path in local if path is not None and Path(path).is_absolute()]
        if not (places or urls) or len(absolute) < len(local):
            raise ConfigurationError(
                "name the outboxes by an absolute path, load('/var/lib/app/*.db'), or a URL, "
                "load('postgresql://user@host/database'). Spark does not pass the OPTIONS of a "
                "table: create a TEMPORARY VIEW ... OPTIONS (path '...')"
            )
        found = {file: file for pattern in absolute for file in _matching(pattern)}
        found |= {Outbox(url).name: url for url in (*filter(_URL.match, places), *urls)}
        return dict(sorted(found.items()))

    @property
    def _partitions(self) -> int:
        given = self.options.get("numPartitions", "1")
        if not re.fullmatch(r"[1-9]\d{0,5}", given):
            raise ConfigurationError("option 'numPartitions' must be a whole number from 1")
        return int(given)

    @property
    def _columns(self) -> tuple[str, ...]:
        unknown = sorted({name.lower() for name in self.options} - _OPTIONS)
        # When a table is made, Spark adds its properties, of which "provider" is always one.
        if unknown and "provider" not in unknown:
            raise ConfigurationError(
                f"there is no option {', '.join(map(repr, unknown))}; there are a path, 'url', "
                "'view', 'numPartitions' and 'unreadable'"
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
class _Part(InputPartition):
    """Rows of one outbox: those from the number `first` to `last`, or without an end."""

    name: str
    where: str = field(repr=False)  # a path, or a URL that may have a password
    first: int
    last: int | None


class OutboxReader(DataSourceReader):
    """Reads outboxes, one task for each or for each of its ranges.

    Args:
        outboxes: absolute paths and URLs by the names of the outboxes.
        view: name of the view, a key of `COLUMNS`.
        columns: those of the view; with `_ERROR`, an outbox that cannot be read is a row.
        partitions: ranges of each outbox, at most.
    """

    def __init__(
        self, outboxes: Mapping[str, str], view: str, columns: Sequence[str], partitions: int
    ) -> None:
        self._outboxes = outboxes
        self._view = view
        self._columns = columns
        self._partitions = partitions

    def partitions(self) -> Sequence[InputPartition]:
        """The ranges of all outboxes (on the driver)."""
        return [
            _Part(name, where, first, last)
            for name, where in self._outboxes.items()
            for first, last in _ranges(self._span(where), self._partitions)
        ]

    def _span(self, where: str) -> tuple[int, int] | None:
        if self._partitions == 1:
            return None
        try:
            with Outbox(where) as outbox:
                return outbox.span(self._view)
        except ReliablePubError:
            return None  # one task tells why, as it does of an outbox that is not divided

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        """The rows of a range (on an executor).

        Raises:
            OutboxError: it is not an outbox, or cannot be read; not with ``collect``.
            ConfigurationError: this host lacks the extra of its database; not with ``collect``.
        """
        assert isinstance(partition, _Part)
        with in_one_line():
            try:
                with Outbox(partition.where) as outbox:
                    for row in outbox.rows(self._view, partition.first, partition.last):
                        yield self._row(outbox=partition.name, **row)
            except ReliablePubError as error:
                if _ERROR not in self._columns:
                    raise
                yield self._row(outbox=partition.name, **{_ERROR: str(error)})

    def _row(self, **values: object) -> tuple[object, ...]:
        return tuple(_value(name, values.get(name)) for name in self._columns)


def _ranges(span: tuple[int, int] | None, most: int) -> Iterator[tuple[int, int | None]]:
    """Divide a span of numbers; the first range has no lower end and the last no upper one."""
    lowest, highest = span or (1, 1)
    numbers = highest - lowest + 1
    count = min(most, numbers)
    starts = [1, *(lowest + numbers * n // count for n in range(1, count))]
    for first, after in zip(starts, [*starts[1:], None], strict=True):
        yield first, None if after is None else after - 1


def _value(name: str, value: object) -> object:
    """A value in Spark's type: views give times as text, in UTC."""
    if name in _TIMES and isinstance(value, str):
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    return value


def _type_of(name: str) -> DataType:
    if name in _TIMES:
        return TimestampType()
    return StringType() if name in _TEXT else LongType()
