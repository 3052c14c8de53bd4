"""The table of options of a write.

Knows: names, types, defaults and meanings. Must never know: how Spark passes options, DataFrames.

Each field of `Settings` is an option. This one table parses, checks and documents the options.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, Final

_VARIABLE: Final = re.compile(r"[A-Za-z0-9_.-]+")  # Kubernetes allows - and .
_TRUE_FALSE: Final = {"true": True, "false": False}
_WHOLE_MAX: Final = 2**31 - 1
_DAYS_MAX: Final = 36_500
_SECONDS_MAX: Final = 1_000_000
"""More than 11 days; epoll(7) waits for at most 24."""


def _text(value: str) -> str:
    if not value:
        raise ValueError("must not be empty")
    return value


def _variable(value: str) -> str:
    """The name of an environment variable; errors show it, so it must not be a URL or password."""
    if not _VARIABLE.fullmatch(value):
        raise ValueError("must be the name of an environment variable: letters, digits and _ . -")
    return value


def _file(value: str) -> str:
    """The path of a file; errors show it, so it must not be a URL with a password, or a key."""
    if not value or any(mark in value for mark in ("://", "\n", "-----BEGIN")):
        raise ValueError("must be a path, not a URL or the content of a file, and not empty")
    return value


def _names(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    if not all(names) or len({name.lower() for name in names}) < len(names):
        raise ValueError("must be names of columns, separated by commas, each once")
    return names


def _boolean(value: str) -> bool:
    if value.lower() not in _TRUE_FALSE:
        raise ValueError("must be true or false")
    return _TRUE_FALSE[value.lower()]


def _whole(least: int, most: int = _WHOLE_MAX) -> Callable[[str], int]:
    def parse(value: str) -> int:
        # Python refuses to read a number of thousands of digits, in words of its own.
        digits = value.strip().lstrip("0") or "0"
        is_number = value.strip().isdecimal() and len(digits) <= len(str(most))
        number = int(digits) if is_number else -1
        if not least <= number <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return number

    return parse


def _seconds(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= _SECONDS_MAX:
        raise ValueError(f"must be a number of seconds above 0 and at most {_SECONDS_MAX}")
    return number


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.lower() not in words:
            raise ValueError(f"must be {' or '.join(words)}")
        return value.lower()

    return parse


def _option(
    name: str,
    meaning: str,
    default: object = None,
    parse: Callable[[str], Any] = _text,
    *,
    is_connection: bool = False,
    is_secret: bool = False,
) -> Any:  # noqa: ANN401 - as dataclasses.field
    metadata = {"name": name, "parse": parse, "meaning": meaning, "is_connection": is_connection}
    return field(default=default, repr=not is_secret, metadata=metadata)


_connection: Final = partial(_option, is_connection=True)
_FAIL_OR_COLLECT: Final = _one_of("fail", "collect")
_COLLECT: Final = "`fail` fails the task; `collect` counts and reports it, and continues"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The checked options of one write. Picklable; `repr` omits values that may hold a password."""

    # ---------------------------------------------------------------- the broker
    url: str | None = _connection(
        "url",
        "`amqp://user@host:port/vhost` or `amqps://...`; several, with commas, for failover",
        is_secret=True,
    )
    url_env: str = _connection(
        "urlEnv",
        "environment variable of the executors that holds the URL, if neither `url` nor "
        "`urlFile` is given",
        "RELIABLEPUB_URL",
        _variable,
    )
    url_file: str | None = _connection(
        "urlFile",
        "file on the executors that holds the URL; a bare name is looked for among Spark's own "
        "files (`--files`) too",
        parse=_file,
    )
    password_env: str | None = _connection(
        "passwordEnv",
        "environment variable of the executors that holds the password",
        parse=_variable,
    )
    password_file: str | None = _connection(
        "passwordFile",
        "file on the executors that holds the password or token, read at each connection and "
        "before the token expires; found like `urlFile`",
        parse=_file,
    )
    ca_file: str | None = _connection(
        "caFile",
        "file with certificate authorities (PEM) for `amqps`, instead of the system's",
        parse=_file,
    )
    cert_file: str | None = _connection(
        "certFile", "file with the client certificate (PEM)", parse=_file
    )
    key_file: str | None = _connection(
        "keyFile", "file with the key of `certFile` (PEM), if not in the same file", parse=_file
    )
    heartbeat_s: int = _connection("heartbeat", "AMQP heartbeat, in seconds", 10, _whole(1, 65_535))
    connection_name: str | None = _connection(
        "connectionName",
        "name of the connections on RabbitMQ's management page; by default it names host and "
        "process",
        parse=_text,
    )
    idle_timeout_s: float = _connection(
        "idleTimeout",
        "seconds for which a Python worker keeps its connection for the next task",
        30.0,
        _seconds,
    )
    max_connections: int | None = _connection(
        "maxConnections",
        "most connections at once: a write whose session may run more tasks at once is refused, "
        "and no connection is kept for the next task",
        parse=_whole(1),
    )

    # ---------------------------------------------------------------- speed and patience
    window: int = _connection("window", "most rows in flight, for each task", 4_096, _whole(1))
    window_min: int = _connection(
        "windowMin",
        "most rows in flight at first; the window adapts from there. A value equal to `window` "
        "fixes it",
        32,
        _whole(1),
    )
    window_bytes: int = _connection(
        "windowBytes", "most bytes in flight, for each task", 16 * 1024 * 1024, _whole(1)
    )
    confirm_timeout_s: float = _connection(
        "confirmTimeout",
        "seconds that a confirm may take before the row is sent again on a new channel",
        30.0,
        _seconds,
    )
    delivery_timeout_s: float = _connection(
        "deliveryTimeout",
        "seconds without an answer of the broker (an outage, an alarm) after which a task fails, "
        "for Spark to retry it; longer than the waits between the attempts for a row",
        120.0,
        _seconds,
    )
    max_rows_per_second: int | None = _option(
        "maxRowsPerSecond",
        "most rows per second over all tasks; divided equally among the tasks that may run at once",
        parse=_whole(1),
    )
    nacked_attempts: int = _connection(
        "nackedAttempts", "how often a row may be nacked before it is given up", 10, _whole(1)
    )
    returned_attempts: int = _connection(
        "returnedAttempts", "how often a row may be unroutable before it is given up", 3, _whole(1)
    )
    refused_attempts: int = _connection(
        "refusedAttempts",
        "how often a row may close its channel before it is given up",
        1,
        _whole(1),
    )

    check_topology: bool = _option(
        "checkTopology",
        "ask the broker on the driver, before a batch and in `validate`, for the exchange "
        "or queue that the options name",
        default=False,
        parse=_boolean,
    )

    # ---------------------------------------------------------------- rows that are not confirmed
    unroutable: str = _option(
        "unroutable", f"a row for which no queue is bound: {_COLLECT}", "fail", _FAIL_OR_COLLECT
    )
    refused: str = _option(
        "refused",
        f"a row that is nacked, or for which the broker closes the channel: {_COLLECT}",
        "fail",
        _FAIL_OR_COLLECT,
    )
    invalid: str = _option(
        "invalid", f"a row that cannot be an AMQP message: {_COLLECT}", "fail", _FAIL_OR_COLLECT
    )
    report: str | None = _option(
        "report",
        "directory (a path or URI that all hosts share) for `writes/*.json`, the counts of each "
        "write, `failed/*.parquet`, the collected rows, and `fatal/*.parquet`, the rows that fail "
        "a write",
    )
    report_keep: int = _option(
        "reportKeep",
        "for how many writes (micro-batches) `report` keeps the counts; about a tenth more before "
        "the oldest are deleted",
        1_000,
        _whole(1),
    )
    report_keep_days: int | None = _option(
        "reportKeepDays",
        "for how many days `report` keeps the rows in `failed` and `fatal`; by default until you "
        "delete their files",
        parse=_whole(1, _DAYS_MAX),
    )

    # ---------------------------------------------------------------- identity
    identity: str = _option(
        "identity",
        "source of the `message_id` where no column of that name gives it; `position` is unsafe "
        "after a shuffle",
        "content",
        _one_of("content", "position"),
    )
    id_columns: tuple[str, ...] = _option(
        "idColumns",
        "columns that are the key of a row in your data, such as `order_id,version`: the "
        "`message_id` is a digest of their values, and they need not be published",
        (),
        _names,
    )
    write_id: str | None = _option(
        "writeId",
        "name of a batch write: a repetition under this name gives the same ids; random by "
        "default. Needed in `foreachBatch`",
    )

    # ---------------------------------------------------------------- constants of every row
    value_format: str = _option(
        "valueFormat",
        "`bytes` for a string or binary column `value`; `json` sends any other column, such as a "
        "struct, as JSON",
        "bytes",
        _one_of("bytes", "json"),
    )
    exchange: str | None = _option("exchange", "exchange; the default one if empty", parse=str)
    routing_key: str | None = _option("routing_key", "routing key", parse=str)
    content_type: str | None = _option("content_type", "such as `application/json`")
    content_encoding: str | None = _option("content_encoding", "such as `gzip`")
    correlation_id: str | None = _option("correlation_id", "correlation id")
    reply_to: str | None = _option("reply_to", "queue for replies")
    type: str | None = _option("type", "application-defined type")
    user_id: str | None = _option(
        "user_id", "user of the connection; RabbitMQ refuses any other name"
    )
    app_id: str | None = _option("app_id", "name of the application")
    priority: int | None = _option("priority", "for priority queues", parse=_whole(0, 255))
    expiration: int | None = _option(
        "expiration",
        "milliseconds after which the broker drops the message",
        parse=_whole(0, 315_360_000_000),  # ten years, as for a `Message`
    )
    persistent: bool | None = _option(
        "persistent",
        "whether messages survive a restart of the broker; true by default",
        parse=_boolean,
    )

    @property
    def connection(self) -> tuple[object, ...]:
        """Values of the connection options: equal for writes that can share a connection."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.metadata["is_connection"])

    @property
    def collects(self) -> bool:
        """Whether some kind of unconfirmed row is collected instead of failing its task."""
        return "collect" in (self.unroutable, self.refused, self.invalid)


TABLE: Final[tuple[Field[Any], ...]] = fields(Settings)
