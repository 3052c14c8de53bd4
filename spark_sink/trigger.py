"""Detection and refusal of continuous triggers, which never call a sink in Python.

Knows: the trigger as a caller names it, and its traces in a query's checkpoint and Java object.
Must never know: rows, brokers.

Spark does not tell a sink its trigger. The order of events shows it: a micro-batch has its offsets
in the checkpoint before it asks for a writer, and its commit afterwards. A continuous query asks
for its writer before it writes offsets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from reliablepub import ConfigurationError
from spark_sink.paths import local_path

_WORDS: Final = (
    "a continuous trigger never calls a sink in Python, and would publish nothing: use "
    "trigger(processingTime=...) or trigger(availableNow=True)"
)


def check_named(trigger: object) -> None:
    """Refuse a continuous trigger before the query starts.

    Args:
        trigger: a mapping with the arguments of ``writeStream.trigger()``, or None.

    Raises:
        ConfigurationError: the trigger is continuous.
    """
    if isinstance(trigger, Mapping) and trigger.get("continuous") is not None:
        raise ConfigurationError(_WORDS)


def check_checkpoint(location: str | None) -> None:
    """Refuse a query that asks for a writer without a micro-batch under way.

    Args:
        location: the option ``checkpointLocation``; checked only if it is a folder of this host.

    Raises:
        ConfigurationError: the query is continuous.
    """
    path = None if location is None else local_path(location)
    if path is None:
        return
    folder = Path(path)
    # Spark writes `metadata` when a query starts: a folder without it is not the checkpoint.
    # `Path.is_file` raises for a folder that this user may not enter.
    if not os.path.isfile(folder / "metadata"):  # noqa: PTH113
        return
    try:
        is_micro_batch = _has_micro_batch(folder)
    except OSError:
        return
    if not is_micro_batch:
        raise ConfigurationError(
            f"{_WORDS}. No micro-batch is under way in {location}; if a continuous query has left "
            "its epochs there, begin with a new checkpoint: micro-batches treat them as done. Or "
            "the checkpoint is on another file system, and this is an old directory of that name "
            "on the driver: write its scheme, such as hdfs://"
        )


def is_continuous(query: Any, sink: str) -> bool:  # noqa: ANN401 - Spark's, and Java's
    """Whether a query has a continuous trigger; False with Spark Connect, which does not show it.

    Args:
        query: a `StreamingQuery`.
        sink: name of the format; queries that write to another format give False.
    """
    java = getattr(query, "_jsq", None)
    if java is None:
        return False
    execution = java.streamingQuery()
    return bool(
        execution.sink().name() == sink
        and execution.trigger().toString().startswith("ContinuousTrigger")
    )


def _has_micro_batch(checkpoint: Path) -> bool:
    """Whether the newest offsets belong to a micro-batch that is not committed."""
    numbers = [int(path.name) for path in checkpoint.glob("offsets/*") if path.name.isdecimal()]
    if not numbers:
        return False
    newest = max(numbers)
    lines = (checkpoint / "offsets" / str(newest)).read_text().splitlines()
    has_metadata = len(lines) > 1 and bool(lines[1].strip())  # a continuous query writes none
    return has_metadata and not (checkpoint / "commits" / str(newest)).exists()
