"""Everything that can be checked before a write, checked at once, in the program that asks for it.

Knows: DataFrames, sessions. Must never know: how rows are written.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

from reliablepub import ConfigurationError
from spark_sink.existence import check
from spark_sink.options import parse
from spark_sink.schema import match
from spark_sink.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOCAL_WITHOUT_RETRIES = re.compile(r"local(\[[^,\]]*\])?")


class SparkSinkWarning(UserWarning):
    """Something about the session makes failures or duplicates likelier than they need be."""


def validate(df: DataFrame, **options: object) -> None:
    """Check a write before it is started.

    A batch write checks the same things when it starts; a stream shows a wrong option only at its
    first batch, in ``awaitTermination()``. So call this before ``start()``.

    Args:
        df: what is to be written, batch or streaming.
        options: of the write.

    Raises:
        ConfigurationError: an option is wrong.
        SchemaError: a column is wrong.
        TopologyError: the broker does not have what the options name (with ``checkTopology``).
    """
    settings = parse({name: _text(value) for name, value in options.items()})
    columns = match(df.schema, settings)
    if df.isStreaming and settings.write_id is not None:
        raise ConfigurationError(
            "option 'writeId' is for batch writes; a stream is known by its checkpoint"
        )
    if settings.check_topology:
        check(settings, columns)
    conf = df.sparkSession.conf
    master = conf.get("spark.master", "") or ""
    is_speculating = (conf.get("spark.speculation", "") or "").lower() == "true"
    for doubt in doubts(settings, master=master, is_speculating=is_speculating):
        warnings.warn(doubt, SparkSinkWarning, stacklevel=2)


def doubts(settings: Settings, *, master: str, is_speculating: bool) -> list[str]:
    """What is allowed, and likely to be regretted.

    Args:
        settings: of the write.
        master: of the session.
        is_speculating: whether the session lets two attempts of a task race.
    """
    doubts = []
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
            "who deduplicates by these ids drops rows that never arrived; sort within partitions"
        )
    return doubts


def _text(value: object) -> str:
    """As Spark makes options text."""
    return str(value).lower() if isinstance(value, bool) else str(value)
