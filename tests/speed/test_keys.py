"""What an ordering key costs: each message of a key waits for the confirm of the one before.

``make bench`` prints the table of docs/performance.md. The measure is the round trip: a message
that is published alone, and waited for, before the next one is. Rounds are interleaved, and of each
way the median is taken.
"""

import statistics
import time
from pathlib import Path

import pytest

from reliablepub import Message, Publisher
from tests.amqp_probe import AmqpProbe

pytestmark = [pytest.mark.bench, pytest.mark.rabbit, pytest.mark.timeout(1_800)]

BODY = bytes(1_024)
ROUNDS = 3
ALONE = 300
KEYS = {1: 300, 10: 3_000, 100: 10_000, 1_000: 20_000, 10_000: 20_000}
"""How many keys there are, and how many messages then."""
NO_KEY = 20_000


def alone(publisher: Publisher, queue: str) -> float:
    """Messages per second, one after the other."""
    begun = time.perf_counter()
    for _ in range(ALONE):
        publisher.publish(BODY, routing_key=queue).result(60)
    return ALONE / (time.perf_counter() - begun)


def together(publisher: Publisher, queue: str, count: int, keys: int | None) -> float:
    """Messages per second, all handed over at once, their keys in turn."""
    begun = time.perf_counter()
    receipt = publisher.publish_many(
        Message(BODY, routing_key=queue, ordering_key=f"key-{n % keys}" if keys else None)
        for n in range(count)
    )
    assert receipt.wait(600).confirmed == count
    return count / (time.perf_counter() - begun)


def test_keys_beside_round_trips(rabbitmq: AmqpProbe, tmp_path: Path) -> None:
    queue = rabbitmq.declare_queue()
    rates: dict[str, list[float]] = {}

    def noted(way: str, rate: float) -> None:
        rates.setdefault(way, []).append(rate)

    with Publisher(rabbitmq.url, outbox=tmp_path / "outbox.db") as publisher:
        together(publisher, queue, NO_KEY, None)  # warm, and with a window of its size
        for _ in range(ROUNDS):
            noted("alone, each waited for", alone(publisher, queue))
            for keys, count in KEYS.items():
                noted(f"{keys:,} keys", together(publisher, queue, count, keys))
            noted("no key", together(publisher, queue, NO_KEY, None))
            rabbitmq.purge(queue)
    medians = {way: statistics.median(found) for way, found in rates.items()}
    round_trips = medians["alone, each waited for"]
    print(f"\n{'':24}{'messages/s':>12}{'to a round trip':>18}")
    for way, rate in medians.items():
        print(f"{way:24}{rate:12,.0f}{rate / round_trips:18.1f}")
    assert medians["100 keys"] > medians["1 keys"]
