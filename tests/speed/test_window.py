"""The window that adapts beside fixed ones, on RabbitMQ nearby and far away.

The table of docs/performance.md, as ratios: rounds are interleaved, in another order each, and of
each window the median is taken. The window that adapts has the limits that it has by default, and
what it takes to begin with counts as well.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from reliablepub import Message, Publisher
from reliablepub.relay.handover import WINDOW_MAX, WINDOW_MIN
from tests.amqp_probe import AmqpProbe
from tests.chaos.proxy import Proxy
from tests.speed.peers import BODY

pytestmark = [pytest.mark.bench, pytest.mark.rabbit, pytest.mark.timeout(3_600)]

FIXED = [10, 100, 1_000, 3_000, 10_000]
ADAPTIVE = 0
ROUNDS = 5
LASTS_S = 12.0
QUEUES = 8


def run(url: str, queues: Sequence[str], outbox: Path, window: int) -> tuple[float, int]:
    """Publish for a while.

    Returns:
        confirmed messages per second, and the window at the end.
    """
    least, most = (window, window) if window else (WINDOW_MIN, WINDOW_MAX)
    with Publisher(
        url, outbox=outbox, window_min=least, window_max=most, close_timeout_s=0
    ) as publisher:
        publisher.publish(BODY, routing_key=queues[0]).result(30)  # connected from here on
        since = time.perf_counter()

        def messages() -> Iterator[Message]:
            for queue in itertools.cycle(queues):
                if time.perf_counter() > since + LASTS_S:
                    return
                yield Message(BODY, routing_key=queue)

        # More may be stored than a narrow window lets through: only what is confirmed counts.
        receipt = publisher.publish_many(messages())
        rate = receipt.confirmed / (time.perf_counter() - since)
        return rate, publisher.status.window


@pytest.mark.parametrize("away_s", [0.0, 0.02], ids=["nearby", "40 ms there and back"])
def test_it_finds_the_best_fixed_window(rabbitmq: AmqpProbe, tmp_path: Path, away_s: float) -> None:
    queues = [rabbitmq.declare_queue() for _ in range(QUEUES)]
    rates: dict[int, list[float]] = {window: [] for window in (*FIXED, ADAPTIVE)}
    ends = []
    with Proxy(urlsplit(rabbitmq.url).port or 5672) as proxy:
        proxy.delay_s = away_s
        url = proxy.url if away_s else rabbitmq.url
        for turn in range(ROUNDS):
            for window in random.sample(list(rates), len(rates)):
                rate, end = run(url, queues, tmp_path / f"{turn}-{window}.db", window)
                rates[window].append(rate)
                ends += [end] if window == ADAPTIVE else []
                rabbitmq.purge(*queues)
    medians = {window: statistics.median(rates[window]) for window in rates}
    best = max(medians[window] for window in FIXED)
    print(f"\n{'window':>8}  confirmed/s  of the best fixed")
    for window, median in medians.items():
        print(f"{window or 'adapts':>8}  {median:11,.0f}  {median / best:17.2f}")
    print(
        f"it ended at {sorted(ends)}; medians of {ROUNDS} rounds of {LASTS_S:g} s, 1 KiB, on disk"
    )
    assert medians[ADAPTIVE] > 0.8 * best
