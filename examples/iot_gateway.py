"""An IoT gateway whose line is down half of the time: it measures on, and nothing is lost.

Run it with nothing installed but reliablepub; it brings a broker along, and cuts the line::

    python examples/iot_gateway.py

or against your own, whose line stays up: ``python examples/iot_gateway.py amqp://guest@localhost/``

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
CUT_OR_MENDED = {12, 37, 62, 87}  # in these rounds


class Line:
    """What the weather does to a gateway's uplink."""

    def __init__(self, broker: FakeBroker) -> None:
        """It is up at first."""
        self._next = itertools.cycle((broker.stop, broker.start))

    def toggle(self) -> None:
        """Cut it, or mend it."""
        next(self._next)()


def measure_on(publisher: Publisher, queue: str, toggle_line: Callable[[], None]) -> int:
    """Publish every reading at once; whether the line is up is not the sensors' concern."""
    measured = 0
    for number in range(ROUNDS):
        if number in CUT_OR_MENDED:
            toggle_line()
        for sensor in SENSORS:
            reading = {"sensor": sensor, "n": number, "celsius": 20.0 + number % 7}
            publisher.publish(json.dumps(reading).encode(), routing_key=queue)
            measured += 1
    return measured


def arrived(url: str, queue: str) -> dict[str, set[int]]:
    """What the cloud has received: numbers by sensor, each once however often it came."""
    seen: set[str] = set()
    by_sensor: dict[str, set[int]] = defaultdict(set)
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for method, properties, body in channel.consume(queue, inactivity_timeout=0.5):
            if method is None or properties is None or body is None:
                break
            channel.basic_ack(method.delivery_tag)
            if properties.message_id not in seen:  # a duplicate has its first arrival's id
                seen.add(properties.message_id or "")
                reading = json.loads(body)
                by_sensor[reading["sensor"]].add(reading["n"])
        channel.queue_delete(queue)
    return by_sensor


def main() -> None:
    """Measure while the line goes and comes, then look at what has arrived."""
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
