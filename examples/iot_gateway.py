"""An IoT gateway that is offline half of the time, and loses no reading.

Needs only reliablepub; starts a fake broker, and stops it from time to time::

    python examples/iot_gateway.py

or uses your own, which stays up: ``python examples/iot_gateway.py amqp://guest:guest@localhost/``

It prints::

    measured: 400
    arrived: 400 different, every sensor complete
    parked: 0
"""

import itertools
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pika

from reliablepub import Publisher
from reliablepub.testing import FakeBroker

SENSORS = ("boiler", "roof", "cellar", "street")
ROUNDS = 100
TOGGLED = {12, 37, 62, 87}  # rounds in which the line goes down, or up again


class Line:
    """The gateway's uplink, which is up at first."""

    def __init__(self, broker: FakeBroker) -> None:
        self._next = itertools.cycle((broker.stop, broker.start))

    def toggle(self) -> None:
        """Interrupt the line, or restore it."""
        next(self._next)()


def measure_on(publisher: Publisher, queue: str, toggle_line: Callable[[], None]) -> int:
    """Publish each reading when it is taken, whether the line is up or not."""
    measured = 0
    for number in range(ROUNDS):
        if number in TOGGLED:
            toggle_line()
        for sensor in SENSORS:
            reading = {"sensor": sensor, "n": number, "celsius": 20.0 + number % 7}
            publisher.publish(json.dumps(reading).encode(), routing_key=queue)
            measured += 1
    return measured


def arrived(url: str, queue: str) -> dict[str, set[int]]:
    """The distinct readings that arrived: their numbers by sensor."""
    seen: set[str] = set()
    by_sensor: dict[str, set[int]] = defaultdict(set)
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for method, properties, body in channel.consume(queue, inactivity_timeout=0.5):
            if method is None or properties is None or body is None:
                break
            channel.basic_ack(method.delivery_tag)
            if properties.message_id not in seen:  # a duplicate has the id of its first delivery
                seen.add(properties.message_id or "")
                reading = json.loads(body)
                by_sensor[reading["sensor"]].add(reading["n"])
        channel.queue_delete(queue)
    return by_sensor


def main() -> None:
    """Measure while the line goes down and up, then count the readings that arrived."""
    queue = "gateway.readings"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if len(sys.argv) > 1:
            url, toggle_line = sys.argv[1], lambda: None
        else:
            broker = stack.enter_context(FakeBroker())
            url, toggle_line = broker.url, Line(broker).toggle
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            connection.channel().queue_declare(queue, durable=True)
        with Publisher(url, outbox=folder / "readings.db") as publisher:
            print("measured:", measure_on(publisher, queue, toggle_line))
            status = publisher.flush(timeout_s=60)
        numbers = arrived(url, queue)
        is_complete = all(numbers[sensor] == set(range(ROUNDS)) for sensor in SENSORS)
        total = sum(map(len, numbers.values()))
        print(f"arrived: {total} different,", "every sensor complete" if is_complete else "GAPS")
        print("parked:", status.counters.parked)


if __name__ == "__main__":
    main()
