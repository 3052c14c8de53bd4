"""How many tasks may run at once, from a session's configuration, without Spark."""

import os

import pytest

from reliablepub import ConfigurationError
from spark_sink.cluster import check_connections, rate_of_task, slots, spread_s
from spark_sink.options import parse


@pytest.mark.parametrize(
    ("conf", "tasks"),
    [
        ({"spark.master": "local"}, 1),
        ({"spark.master": "local[3]"}, 3),
        ({"spark.master": "local[3, 4]"}, 3),
        ({"spark.master": "local[*]"}, os.cpu_count()),
        ({"spark.master": "local[5]", "spark.task.cpus": "2"}, 2),
        ({"spark.master": "local-cluster[2,4,1024]", "spark.task.cpus": "2"}, 4),
        ({"spark.master": "spark://host:7077"}, None),
        ({"spark.master": "spark://host:7077", "spark.cores.max": "48"}, 48),
        ({"spark.master": "k8s://host", "spark.cores.max": "4"}, None),  # which it ignores
        (  # a standalone cluster starts as many executors as it has room for
            {
                "spark.master": "spark://host:7077",
                "spark.executor.instances": "1",
                "spark.executor.cores": "1",
            },
            None,
        ),
        ({"spark.master": "yarn"}, None),
        ({"spark.master": "yarn", "spark.executor.instances": "5"}, 5),
        (
            {
                "spark.master": "k8s://host",
                "spark.executor.instances": "10",
                "spark.executor.cores": "8",
                "spark.task.cpus": "2",
            },
            40,
        ),
        (
            {
                "spark.master": "yarn",
                "spark.executor.instances": "5",
                "spark.executor.cores": "4",
                "spark.dynamicAllocation.enabled": "true",
            },
            None,
        ),
        (
            {
                "spark.master": "yarn",
                "spark.executor.cores": "4",
                "spark.dynamicAllocation.enabled": "true",
                "spark.dynamicAllocation.maxExecutors": "20",
            },
            80,
        ),
        ({}, None),
    ],
)
def test_what_the_configuration_bounds(conf: dict[str, str], tasks: int | None) -> None:
    assert slots(conf.get) == tasks


def test_connections_are_checked_where_the_tasks_are_known() -> None:
    settings = parse({"maxconnections": "10"})
    check_connections(settings, 10, partition=5_000)
    with pytest.raises(ConfigurationError, match="11 tasks may write at once"):
        check_connections(settings, 11, partition=0)
    check_connections(parse({}), 1_000)


def test_partitions_stand_for_tasks_where_those_are_not_known() -> None:
    settings = parse({"maxconnections": "10"})
    check_connections(settings, None, partition=9)
    with pytest.raises(ConfigurationError, match=r"write df.coalesce\(10\). Rows of other .* sent"):
        check_connections(settings, None, partition=10)


def test_a_rate_is_shared_among_the_tasks() -> None:
    assert rate_of_task(parse({}), None) is None
    assert rate_of_task(parse({"maxrowspersecond": "1000"}), 10) == 100.0
    both = parse({"maxrowspersecond": "1000", "maxconnections": "50"})
    assert rate_of_task(both, 10) == 100.0
    assert rate_of_task(both, None) == 20.0
    with pytest.raises(ConfigurationError, match="set maxConnections to their number"):
        rate_of_task(parse({"maxrowspersecond": "1000"}), None)


@pytest.mark.parametrize(
    ("partition", "tasks", "seconds"),
    [(5_000, 8, 0), (50, None, 0), (300, None, 2.0), (799, 800, 6.99), (9_999, 5_000, 10.0)],
)
def test_a_large_cluster_spreads_its_connections(
    partition: int, tasks: int | None, seconds: float
) -> None:
    assert spread_s(partition, tasks) == seconds
