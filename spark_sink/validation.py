"""`validate`: checks of a write before it is started, made in the calling program.

Knows: DataFrames, sessions. Must never know: how rows are written.

The folder of a report is checked when the write starts: the calling program may be a client of
Spark Connect, on another host.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

from reliablepub import ConfigurationError
from spark_sink.cluster import check_connections, rate_of_task, slots
from spark_sink.contact import ask, check
from spark_sink.options import check_stream, has_password, parse
from spark_sink.schema import have_doubles, match
from spark_sink.settings import Settings
from spark_sink.trigger import check_named

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOCAL_WITHOUT_RETRIES = re.compile(r"local(\[[^,\]]*(,\s*1\s*)?\])?")


class SparkSinkWarning(UserWarning):
    """A setting of the session or the write makes failures or duplicates more likely."""


def validate(
    df: DataFrame, *, trigger: object = None, output_mode: object = "append", **options: object
) -> None:
    """Check a write before it is started.

    A batch write checks its options when it starts, but gives no warnings. A stream reports an
    invalid option or a continuous trigger only after its start, in ``awaitTermination()``, so call
    this before ``start()``.

    Args:
        df: the DataFrame to write, batch or streaming.
        trigger: a mapping with the arguments of ``writeStream.trigger()``, such as
            ``{"processingTime": "1 second"}``.
        output_mode: output mode of a stream, as for ``writeStream.outputMode()``.
        options: options of the write; None means "not given", as in Spark.

    Raises:
        ConfigurationError: an option is invalid.
        SchemaError: a column is invalid.
        TopologyError: the exchange or queue does not exist (with ``checkTopology``).
        BrokerRefused: the broker or TLS refuses the connection.
    """
    check_named(trigger)
    _check_mode(str(output_mode))
    given = {name: _text(value) for name, value in options.items() if value is not None}
    settings = parse(given)
    columns = match(df.schema, settings)
    if df.isStreaming:
        check_stream(settings)
    session = df.sparkSession

    def conf(name: str) -> str | None:
        return session.conf.get(name, None)

    check_connections(settings, slots(conf))
    rate_of_task(settings, slots(conf))
    ask(settings, again=True)
    if settings.check_topology:
        check(settings, columns)
    is_speculating = (conf("spark.speculation") or "").lower() == "true"
    found = doubts(
        settings,
        master=conf("spark.master") or "",
        is_speculating=is_speculating,
        needs_ids=df.isStreaming and not columns.have_ids,
        has_doubles=have_doubles(df.schema),
        shows_url=_is_remote(session) and not conf("spark.redaction.string.regex"),
    )
    for doubt in found:
        warnings.warn(doubt, SparkSinkWarning, stacklevel=2)


def _check_mode(output_mode: str) -> None:
    if output_mode.lower() != "append":
        raise ConfigurationError(
            f"output mode {output_mode!r}: messages can only be added; use 'append'"
        )


def _is_remote(session: object) -> bool:
    """Whether a session is one of Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect.")


def doubts(
    settings: Settings,
    *,
    master: str,
    is_speculating: bool,
    needs_ids: bool = False,
    has_doubles: bool = False,
    shows_url: bool = False,
) -> list[str]:
    """Texts of the warnings: allowed settings that make failures or duplicates more likely.

    Args:
        settings: options of the write.
        master: master URL of the session.
        is_speculating: whether the session lets two attempts of a task race.
        needs_ids: whether the write is a stream whose rows have no ids or keys.
        has_doubles: whether headers have numbers of binary floating point.
        shows_url: whether Spark shows the option ``url`` as it is.
    """
    doubts = []
    if shows_url and settings.url is not None and has_password(settings.url):
        doubts.append(
            "Spark Connect shows the password in 'url' in its event log and its page of requests: "
            "use passwordFile, passwordEnv, urlFile or urlEnv, or set spark.redaction.string.regex "
            "on the server"
        )
    if needs_ids and settings.identity == "content":
        doubts.append(
            "a row's message_id depends on its partition: rows replayed by a restart with another "
            "number of cores come with other ids, as duplicates that no consumer recognizes. Name "
            "the key columns of the rows in idColumns, or add a column 'message_id'"
        )
    if has_doubles:
        doubts.append(
            "headers have a float or double, which consumers with pika read as a whole number, 0.1 "
            "as 0: send a decimal or a string if such consumers need it"
        )
    if _LOCAL_WITHOUT_RETRIES.fullmatch(master):
        doubts.append(
            f"master {master} never retries a task, so one lost connection fails the write; use "
            "local[N,4]"
        )
    if is_speculating:
        doubts.append(
            "spark.speculation is on: rows are published twice (under one id), and a losing "
            "attempt may go on for a moment after the write has returned; turn it off here"
        )
    if settings.identity == "position":
        doubts.append(
            "identity=position: after a shuffle a retried task gets its rows in another order, and "
            "a consumer that deduplicates by these ids drops rows it never received; sort within "
            "partitions"
        )
    return doubts


def _text(value: object) -> str:
    """An option's value as Spark turns it into text."""
    return str(value).lower() if isinstance(value, bool) else str(value)
