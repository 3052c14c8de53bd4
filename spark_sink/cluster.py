"""The number of tasks that may run at once, derived from the session's configuration.

Knows: names of Spark's configuration. Must never know: connections, rows.

Tasks do not know of each other. Each knows the configuration, which Spark passes to it as local
properties.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Final

from reliablepub import ConfigurationError
from spark_sink.settings import Settings

_LOCAL: Final = re.compile(r"local(?:\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\])?")
_LOCAL_CLUSTER: Final = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]")
_CONNECTS_PER_S: Final = 100
"""Connections per second that RabbitMQ opens with ease; above this, they are spread over time."""
_SPREAD_S_MAX: Final = 10.0

Conf = Callable[[str], str | None]


def slots(conf: Conf) -> int | None:
    """Most tasks that run at once; None if the configuration does not bound them.

    For ``local[*]`` this is an estimate: Spark counts the CPUs that Java sees, which a CPU quota
    reduces, and does not tell its tasks.

    Args:
        conf: gives the value of a name; None if it is not set.
    """
    cpus = _number(conf("spark.task.cpus")) or 1
    master = conf("spark.master") or ""
    if local := _LOCAL.fullmatch(master):
        wanted = local[1]
        return ((os.cpu_count() or 1) if wanted == "*" else int(wanted or 1)) // cpus
    if cluster := _LOCAL_CLUSTER.fullmatch(master):
        return int(cluster[1]) * (int(cluster[2]) // cpus)
    has_manager = master.startswith(("yarn", "k8s"))
    if not has_manager and (cores_max := _number(conf("spark.cores.max"))):
        return cores_max // cpus
    cores = _number(conf("spark.executor.cores")) or (1 if has_manager else None)
    executors = _executors(conf, has_manager=has_manager)
    return executors * (cores // cpus) if cores and executors else None


def _executors(conf: Conf, *, has_manager: bool) -> int | None:
    """Most executors of the session; a standalone cluster does not look at their number."""
    if (conf("spark.dynamicAllocation.enabled") or "").lower() == "true":
        return _number(conf("spark.dynamicAllocation.maxExecutors"))
    return _number(conf("spark.executor.instances")) if has_manager else None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def check_connections(settings: Settings, at_once: int | None, partition: int = 0) -> None:
    """Refuse a task of a write that may have more of them at once than ``maxConnections``.

    Each task checks before it publishes. If `at_once` is known, all tasks refuse alike. If it is
    None, only those of partitions beyond the first ``maxConnections`` refuse, while others publish.

    Args:
        settings: the options.
        at_once: most tasks at once, from `slots`.
        partition: number of this task's partition; if `at_once` is None, it is compared instead.

    Raises:
        ConfigurationError: more tasks than ``maxConnections`` may run at once.
    """
    most = settings.max_connections
    if most is None:
        return
    if at_once is not None and at_once > most:
        raise ConfigurationError(
            f"{at_once} tasks may write at once, and maxConnections is {most}: raise it, or give "
            "the session fewer cores. To bound the connections of one write, leave maxConnections "
            f"out and write df.coalesce({most})"
        )
    if at_once is None and partition >= most:
        raise ConfigurationError(
            f"there are more partitions than maxConnections={most}, and the configuration does not "
            f"say how many of them run at once; write df.coalesce({most}). Rows of other "
            "partitions may have been sent"
        )


def rate_of_task(settings: Settings, at_once: int | None) -> float | None:
    """A task's share of ``maxRowsPerSecond``, in rows per second; None without a limit.

    Raises:
        ConfigurationError: the number of tasks that share the rate is unknown.
    """
    if settings.max_rows_per_second is None:
        return None
    tasks = at_once or settings.max_connections
    if tasks is None:
        raise ConfigurationError(
            "maxRowsPerSecond is shared among the tasks that run at once, and the configuration "
            "does not bound them (spark.cores.max; on YARN and Kubernetes spark.executor.instances "
            "and .cores): set maxConnections to their number"
        )
    return settings.max_rows_per_second / tasks


def spread_s(partition: int, at_once: int | None) -> float:
    """Seconds over which this task and those before it spread their connections."""
    tasks = partition if at_once is None else min(partition, at_once)
    return min(_SPREAD_S_MAX, max(0, tasks - _CONNECTS_PER_S) / _CONNECTS_PER_S)
