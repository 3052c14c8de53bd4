"""Where a scenario takes place: real nodes, queues of both kinds, a network, and a load.

It knows how a run is set up, watched and brought to its account. It must never know what goes wrong
in it: that is the scenario's.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pika

from reliablepub import Publisher
from tests.amqp_probe import AmqpProbe
from tests.chaos.account import attempts, close_account
from tests.chaos.load import KEYS, OPTIONS, WINDOW_MAX, Load, message
from tests.chaos.proxy import Proxy
from tests.chaos.timeline import Timeline
from tests.rabbitmq import RabbitMQNode
from tests.waiting import until

CALM_S = 1.0
DRAIN_S = 100.0
QUEUE_AGE_S = 3.0


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        seconds: from the first message to the last confirm.
        incidents: how often the fault happened.
        stored: messages whose `publish_many` returned.
        turned_away: messages it refused.
        confirmed: of those stored.
        duplicates: arrivals beyond the first.
        uncertain: attempts whose fate was unknowable, so that they were made again.
        refused: attempts that were returned, nacked or refused, and made again later.
        connections: made in all.
        wrong: what must not be.
    """

    seconds: float
    incidents: int
    stored: int
    turned_away: int
    confirmed: int
    duplicates: int
    uncertain: int
    refused: int
    connections: int
    wrong: list[str]

    def report(self, name: str) -> str:
        """One line of JSON."""
        return json.dumps({"scenario": name} | asdict(self))


class Arena:
    """One exchange, a classic and a quorum queue, and the way there.

    Args:
        nodes: one, or those of a cluster; all are running.
        proxy: to the first of them.
        folder: for the outbox.

    Attributes:
        exchange: what is published to.
        queues: by routing key.
        load: of the run.
    """

    load: Load

    def __init__(self, nodes: Sequence[RabbitMQNode], proxy: Proxy, folder: Path) -> None:
        self.nodes = nodes
        self.node = nodes[0]
        self.proxy = proxy
        self.outbox = folder / "outbox.db"
        self.timeline = Timeline()
        self.probe = AmqpProbe(self.node.url)
        self.exchange = self.probe.declare_exchange()
        self.queues = dict.fromkeys(KEYS, "")
        for key in KEYS:
            self.declare(key)
            self.bind(key)

    def declare(self, key: str) -> None:
        """Declare the queue of a key, again under its name if it had one.

        In a cluster a classic queue is down with its node, so there both are quorum queues.
        """
        is_quorum = key == "quorum" or len(self.nodes) > 1
        arguments = {"x-queue-type": "quorum"} if is_quorum else {}
        self._declared_at = time.monotonic()
        self.queues[key] = self.probe.declare_queue(self.queues[key] or None, arguments=arguments)

    def bind(self, key: str) -> None:
        self.probe.bind(self.queues[key], self.exchange, key)

    def wait_until_queues_outlive_a_kill(self) -> None:
        """A quorum queue must be a second old for that.

        RabbitMQ 3.10.8 registers its members in a file that it writes a moment later. A node that
        is killed before has the queue's log, and does not know whose it is: the queue comes back
        empty, without what was confirmed, and without a leader.
        """
        time.sleep(max(0.0, self._declared_at + QUEUE_AGE_S - time.monotonic()))

    @property
    def urls(self) -> list[str]:
        """Where the publisher connects to: through the proxy, or to any node of a cluster."""
        return [self.proxy.url] if len(self.nodes) == 1 else [node.url for node in self.nodes]

    # ------------------------------------------------------------------ a run

    def run(self, incident: Callable[["Arena"], None], *, for_s: float) -> Result:
        """Publish, let it happen again and again for so long, and close the account."""
        began = time.monotonic()
        incidents = 0
        with Publisher(self.urls, outbox=self.outbox, **OPTIONS) as publisher:  # type: ignore[arg-type]
            load = self.load = Load(publisher, lambda number: message(self.exchange, number))
            self.timeline = Timeline()
            with self.timeline.watch(lambda: load.counts), _running(load):
                self._confirmed_more_than(load, 0)
                while not incidents or time.monotonic() - began < for_s:
                    incident(self)
                    incidents += 1
                    self._confirmed_more_than(load, load.counts[1])
                    time.sleep(CALM_S)
                load.stop()
                status = publisher.flush(DRAIN_S)
            told = load.settle()
            connections = status.connects
        took_s = time.monotonic() - began
        failed = attempts(self.outbox)
        account = close_account(
            told,
            self.arrivals(),
            self.outbox,
            lambda number: message(self.exchange, number),
            duplicates_max=failed.uncertain + failed.nacked,
        )
        wrong = list(account.wrong)
        if failed.uncertain_at_once > WINDOW_MAX:
            wrong.append(
                f"{failed.uncertain_at_once} messages were uncertain at once; "
                f"the window is {WINDOW_MAX}"
            )
        return Result(
            seconds=round(took_s, 1),
            incidents=incidents,
            stored=account.promised,
            turned_away=load.turned_away,
            confirmed=len(told.confirmed),
            duplicates=account.duplicates,
            uncertain=failed.uncertain,
            refused=failed.refused,
            connections=connections,
            wrong=wrong,
        )

    def _confirmed_more_than(self, load: Load, count: int) -> None:
        """It works (again): something new is confirmed."""
        until(lambda: load.counts[1] > count, DRAIN_S, what="another confirm")

    def arrivals(self) -> Iterator[tuple[bytes, str]]:
        """Everything in the queues, by a client of its own."""
        with closing(pika.BlockingConnection(pika.URLParameters(self.node.url))) as connection:
            channel = connection.channel()
            for queue in self.queues.values():
                for _, properties, body in channel.consume(
                    queue, auto_ack=True, inactivity_timeout=1.0
                ):
                    if body is None or properties is None:
                        break
                    yield body, properties.message_id or ""
                channel.cancel()

    def close(self) -> None:
        self.probe.close()


@contextmanager
def _running(load: Load) -> Iterator[None]:
    load.start()
    try:
        yield
    finally:
        load.stop()
