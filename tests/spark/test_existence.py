"""`checkTopology`: the driver asks the broker, without Spark here."""

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from reliablepub import TopologyError
from reliablepub.testing import FakeBroker
from spark_sink import RabbitMQDataSource
from spark_sink.contact import check
from spark_sink.options import parse
from spark_sink.schema import match
from tests.amqp_probe import AmqpProbe


def schema(*names: str) -> StructType:
    return StructType([StructField(name, StringType()) for name in names])


@pytest.mark.parametrize(
    ("columns", "options", "problem"),
    [
        (("value",), {"exchange": "absent"}, "absent"),
        (("value",), {"routing_key": "nobody"}, "nobody"),
        (("value", "routing_key"), {"exchange": "absent"}, "absent"),
    ],
)
def test_what_is_missing_is_named(
    fake: FakeBroker, columns: tuple[str, ...], options: dict[str, str], problem: str
) -> None:
    given = {"url": fake.url, "checktopology": "true", **options}
    with pytest.raises(TopologyError, match=problem):
        RabbitMQDataSource(given).writer(schema(*columns), overwrite=False)


def test_what_is_there_passes_and_is_not_touched(broker: AmqpProbe) -> None:
    exchange = broker.declare_exchange(kind="topic", durable=False)
    queue = broker.declare_queue(arguments={"x-max-length": 5})
    for columns, options in (
        (("value",), {"exchange": exchange}),
        (("value",), {"routing_key": queue}),
        (("value", "exchange", "routing_key"), {}),
    ):
        settings = parse({"url": broker.url, **options})
        check(settings, match(schema(*columns), settings))
    assert broker.drain(queue) == []


def test_no_broker_at_all(fake: FakeBroker) -> None:
    settings = parse({"url": fake.url, "routing_key": "q"})
    fake.stop()
    with pytest.raises(TopologyError, match="no connection held"):
        check(settings, match(schema("value"), settings))
