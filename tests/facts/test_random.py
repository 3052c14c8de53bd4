"""Random conversations, word by word the same with the fake and with RabbitMQ.

Each seed is one conversation on two channels: declarations with any arguments, bindings, publishes,
consumers, acknowledgments, transactions, most of them about the same few names. Both brokers are
told one thing, answer, and are compared before the next. What RabbitMQ does concurrently (who is
confirmed or delivered to first) is compared without its order.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from pamqp import commands, header
from pamqp.base import Frame

from reliablepub.testing import FakeBroker
from tests.amqp_probe import unique
from tests.facts.raw_client import END, Properties, RawClient, told
from tests.facts.site import FakeSite
from tests.rabbitmq import RabbitMQNode

pytestmark = [pytest.mark.rabbit, pytest.mark.soak]

STEPS = 30
QUIET_S = 0.05
PATIENCE_S = 10.0
TYPES = ("direct", "fanout", "topic", "headers")
ODD_TYPES = ("", "no-such-type")
CONSUMER = ("x-priority", "x-stream-offset", "x-cancel-on-ha-failover")
ODD = (None, -1, True, "odd", 1.5, ["odd"], {"odd": 1})
"""Values that most arguments cannot have."""
KEYS = ("", "a", "a.b", "a.b.c", "b", "#", "*.b")
CONTENTFUL = ("basic.deliver", "basic.getok", "basic.return")


@dataclass(frozen=True)
class Saying:
    """One thing to say, and how many answers it has."""

    text: str
    say: Callable[[RawClient], object]
    answers: int = 1


@dataclass
class Talker:
    """What is said next; the same for the same seed but for the beginning of names."""

    seed: int
    prefix: str
    said: int = 0
    bodies: int = 0
    queued: Saying | None = None
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def next(self) -> Saying:
        queued, self.queued = self.queued, None
        if queued is not None:
            return queued
        self.said += 1
        channel = self.pick(1, 1, 1, 2)
        if self.said <= 7:  # there must be something to talk about
            declare = self.exchange_declare if self.said <= 3 else self.queue_declare
            return _call(declare(), channel)
        weights = {
            self.exchange_declare: 7,
            self.queue_declare: 7,
            self.queue_bind: 10,
            self.exchange_bind: 4,
            self.less: 7,
            self.get: 8,
            self.acknowledge: 9,
            self.consume: 6,
            self.of_the_channel: 5,
            self.odd: 2,
        }
        kind = self.random.random()
        if kind < 0.03:
            return self.reopened(channel)
        if kind < 0.30:
            return self.publish(channel)
        build = self.random.choices(list(weights), list(weights.values()))[0]
        return _call(build(), channel)

    # ------------------------------------------------------------------ words

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def maybe(self, share: float) -> bool:
        return self.random.random() < share

    def queue(self) -> str:
        return self.prefix + str(self.pick("q0", "q1", "q2"))

    def exchange(self) -> str:
        if self.maybe(0.1):
            return str(self.pick("amq.direct", "amq.topic", "amq.headers", ""))
        return self.prefix + str(self.pick("e0", "e1", "e2", "e3"))

    def key(self) -> str:
        return str(self.pick(*KEYS, self.prefix + "q0"))

    def some(self, likely: dict[str, tuple[float, tuple[Any, ...]]]) -> dict[str, Any]:
        return {
            name: self.pick(*values)
            for name, (share, values) in likely.items()
            if self.maybe(share)
        }

    # ------------------------------------------------------------------ sayings

    def exchange_declare(self) -> Frame:
        return commands.Exchange.Declare(
            exchange=self.exchange(),
            exchange_type=self.pick(*TYPES),
            durable=self.maybe(0.7),
            auto_delete=self.maybe(0.15),
            internal=self.maybe(0.08),
            passive=self.maybe(0.05),
            arguments=self.some({"alternate-exchange": (0.2, (self.exchange(),))}),
        )

    def odd(self) -> Frame:
        """What a client may get wrong."""
        argument = self.pick(
            *("x-max-length", "x-overflow", "x-message-ttl", "x-dead-letter-exchange"),
            *("x-max-priority", "x-queue-mode", "x-expires", "x-max-age", "x-delivery-limit"),
            *("x-dead-letter-routing-key", "x-single-active-consumer", "x-anything"),
        )
        queue, exchange, value = self.queue(), self.exchange(), self.pick(*ODD)
        bind = commands.Queue.Bind(queue=queue, exchange=exchange, arguments={"x-match": value})
        return self.pick(  # type: ignore[no-any-return]
            commands.Queue.Declare(queue=queue, durable=True, arguments={argument: value}),
            commands.Queue.Declare(queue="amq.mine", passive=self.maybe(0.5)),
            commands.Exchange.Declare(exchange=exchange, exchange_type=self.pick(*ODD_TYPES)),
            commands.Exchange.Declare(exchange=exchange, arguments={"alternate-exchange": value}),
            commands.Basic.Consume(
                queue=queue, consumer_tag="t0", arguments={self.pick(*CONSUMER): value}
            ),
            commands.Basic.Consume(queue="", consumer_tag="t1"),
            commands.Basic.Qos(prefetch_size=1),
            commands.Basic.Recover(requeue=False),
            commands.Basic.GetEmpty(),
            commands.Channel.Flow(active=False),
            commands.Queue.Purge(queue=""),
            bind,
        )

    def queue_declare(self) -> Frame:
        likely = {
            "x-max-length": (0.25, (0, 1, 2)),
            "x-max-length-bytes": (0.1, (0, 3, 10)),
            "x-overflow": (0.2, ("drop-head", "reject-publish", "reject-publish-dlx")),
            "x-message-ttl": (0.2, (0, 1, 100_000)),
            "x-dead-letter-exchange": (0.4, ("", self.prefix + "e0", self.prefix + "e1")),
            "x-max-priority": (0.15, (0, 1, 5)),
            "x-single-active-consumer": (0.05, (True,)),
        }
        arguments = self.some(likely)
        if "x-dead-letter-exchange" in arguments and self.maybe(0.6):
            arguments["x-dead-letter-routing-key"] = self.pick(self.queue(), "a")
        return commands.Queue.Declare(
            queue=self.queue(),
            durable=self.maybe(0.8),
            exclusive=self.maybe(0.1),
            auto_delete=self.maybe(0.08),
            passive=self.maybe(0.1),
            arguments=arguments,
        )

    def match(self) -> dict[str, Any]:
        modes = ("all", "any", "any-with-x", "all-with-x", "bogus")
        likely = {"x-match": (0.3, modes), "h": (0.3, ("1", 1, None)), "x-h": (0.2, ("1",))}
        return self.some(likely)

    def queue_bind(self) -> Frame:
        return commands.Queue.Bind(
            queue=self.queue(),
            exchange=self.exchange(),
            routing_key=self.key(),
            arguments=self.match(),
        )

    def exchange_bind(self) -> Frame:
        return commands.Exchange.Bind(
            destination=self.exchange(),
            source=self.exchange(),
            routing_key=self.key(),
            arguments=self.match(),
        )

    def less(self) -> Frame:
        queue, exchange, key = self.queue(), self.exchange(), self.key()
        return self.pick(  # type: ignore[no-any-return]
            commands.Queue.Unbind(queue=queue, exchange=exchange, routing_key=key),
            commands.Exchange.Unbind(destination=self.exchange(), source=exchange, routing_key=key),
            commands.Exchange.Delete(exchange=exchange, if_unused=self.maybe(0.5)),
            commands.Queue.Delete(queue=queue, if_unused=self.maybe(0.4), if_empty=self.maybe(0.4)),
            commands.Queue.Purge(queue=queue),
        )

    def publish(self, channel: int) -> Saying:
        self.bodies += 1
        body, mandatory = b"m%d" % self.bodies, self.maybe(0.7)
        direct = self.maybe(0.5)
        exchange, key = ("", self.queue()) if direct else (self.exchange(), self.key())
        headers = {
            "h": (0.2, ("1", 1, True)),
            "x-h": (0.1, ("1",)),
            "CC": (0.1, ([self.queue()], ["a"], "a")),
            "BCC": (0.1, ([self.queue()], ["a.b"])),
        }
        likely = {
            "delivery_mode": (0.6, (1, 2)),
            "priority": (0.2, (0, 1, 3, 9)),
            "expiration": (0.1, ("0", "1", "100000", "soon", "-1")),
            "message_id": (0.1, ("m",)),
            "user_id": (0.04, ("guest", "bob")),
            "reply_to": (0.04, ("amq.rabbitmq.reply-to", "me")),
            "headers": (0.5, (self.some(headers),)),
        }
        values = self.some(likely)
        properties = Properties(**values)

        def say(client: RawClient) -> None:
            client.publish(
                key,
                body,
                exchange=exchange,
                properties=properties,
                mandatory=mandatory,
                channel=channel,
            )

        text = f"{channel}: publish {exchange!r} {key!r} {body!r} {mandatory=} {values}"
        return Saying(text, say, 0)

    def get(self) -> Frame:
        return commands.Basic.Get(queue=self.queue(), no_ack=self.maybe(0.4))

    def acknowledge(self) -> Frame:
        tag, multiple, requeue = self.pick(0, 1, 1, 2, 3), self.maybe(0.4), self.maybe(0.5)
        return self.pick(  # type: ignore[no-any-return]
            commands.Basic.Ack(tag, multiple),
            commands.Basic.Nack(tag, multiple, requeue),
            commands.Basic.Reject(tag, requeue),
        )

    def consume(self) -> Frame:
        if self.maybe(0.3):
            return commands.Basic.Cancel(self.pick("t0", "t1"))
        return commands.Basic.Consume(
            queue=self.queue(),
            consumer_tag=self.pick("t0", "t1"),
            no_ack=self.maybe(0.3),
            exclusive=self.maybe(0.1),
            arguments=self.some({"x-priority": (0.1, (3,))}),
        )

    def of_the_channel(self) -> Frame:
        return self.pick(  # type: ignore[no-any-return]
            commands.Basic.Recover(requeue=True),
            commands.Basic.Qos(prefetch_count=self.pick(0, 1, 2), global_=self.maybe(0.3)),
            commands.Tx.Select(),
            commands.Tx.Commit(),
            commands.Tx.Rollback(),
            commands.Channel.Flow(active=True),
        )

    def reopened(self, channel: int) -> Saying:
        """A channel may be opened again when close-ok was heard, and not before."""
        mode = self.pick(commands.Tx.Select(), commands.Confirm.Select())

        def say(client: RawClient) -> None:
            client.send(commands.Channel.Open(), channel)
            client.send(mode, channel)

        self.queued = Saying(f"{channel}: {commands.Channel.Open.name}, {mode.name}", say, 2)
        return _call(commands.Channel.Close(200, "", 0, 0), channel)


def _call(method: Frame, channel: int) -> Saying:
    answers = 0 if isinstance(method, Unanswered) else 1
    text = f"{channel}: {method.name} {dict(method)}"
    return Saying(text, lambda client: client.send(method, channel), answers)


Unanswered = commands.Basic.Ack | commands.Basic.Nack | commands.Basic.Reject


Heard = tuple[list[tuple[int, str]], Counter[tuple[int, str]]]
"""What a broker said, the channels one after the other; and apart from it, singly, its confirms."""


class Listener:
    """One broker, and a connection to it that is made again when it was ended."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: RawClient | None = None
        self._lines: list[tuple[int, str]] = []
        self._awaited = 0

    def connect(self) -> RawClient:
        self.close()
        self._client = RawClient(self._url).opened(channels=2)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.__exit__()
            self._client = None

    def answers(self, saying: Saying) -> Heard:
        """What it says to that, until it is quiet for a moment."""
        saying.say(self._client or self.connect())
        self._lines, self._awaited = [], saying.answers
        deadline = time.monotonic() + PATIENCE_S
        heard = self.more()
        while self._awaited > 0 and self._client is not None:
            assert time.monotonic() < deadline, f"no answer to {saying.text}: {heard}"
            heard = self.more()
        return heard

    def more(self) -> Heard:
        """The same, and what it has said since."""
        try:
            while self._client is not None:
                self._client.patience(QUIET_S)
                self._note(self._client, *self._client.hear())
        except TimeoutError:
            pass
        return _sorted(self._lines)

    def _note(self, client: RawClient, channel: int, heard: Any) -> None:
        self._lines.append((channel, _line(channel, heard)))
        self._awaited -= _is_answer(heard)
        if heard is None or isinstance(heard, commands.Connection.Close):
            self.close()
        elif isinstance(heard, commands.Channel.Close):
            client.send(commands.Channel.CloseOk(), channel)
            client.send(commands.Channel.Open(), channel)
            client.send(commands.Confirm.Select(), channel)
            self._awaited += 2


def _is_answer(heard: object) -> bool:
    name = getattr(heard, "name", "")
    return name.endswith(("Ok", "Empty")) or isinstance(heard, commands.Channel.Close)


def _line(channel: int, heard: Any) -> str:
    if heard is None:
        return END
    if not isinstance(heard, header.ContentHeader):
        return told(channel, heard)
    properties: dict[str, Any] = {
        name: value for name, value in heard.properties if value not in (None, "")
    }
    headers = properties.get("headers") or {}
    for death in headers.get("x-death", []):
        del death["time"]
    if headers:
        properties["headers"] = _ordered(headers)
    return f"header {heard.body_size} {sorted(properties.items())}"


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value)}
    return [_ordered(one) for one in value] if isinstance(value, list) else value


def _sorted(lines: list[tuple[int, str]]) -> Heard:
    said: list[tuple[int, str]] = []
    confirms: Counter[tuple[int, str]] = Counter()
    rest = iter(lines)
    for channel, line in rest:
        word = line.removeprefix("2: ")
        if word.startswith(("basic.ack", "basic.nack")):
            confirms[channel, word.removesuffix(" multiple")] += 1
        elif word.startswith(CONTENTFUL):  # its header and its only body frame
            said.append((channel, "\n      ".join([line, next(rest)[1], next(rest)[1]])))
        else:
            said.append((channel, line))
    return sorted(said, key=lambda one: one[0]), confirms


@pytest.fixture
def both(rabbitmq_node: RabbitMQNode) -> Iterator[list[Listener]]:
    if rabbitmq_node.version >= (4, 0):
        pytest.skip("the fake follows 3.10")
    with FakeBroker(options=FakeSite.options()) as broker:
        listeners = [Listener(broker.url), Listener(rabbitmq_node.url)]
        yield listeners
        for listener in listeners:
            listener.close()


def disagreement(both: list[Listener], saying: Saying) -> str | None:
    """What they answer, if it is not the same; the slower one gets its time."""
    fake, real = both
    said = fake.answers(saying), real.answers(saying)
    deadline = time.monotonic() + PATIENCE_S
    while said[0] != said[1] and time.monotonic() < deadline:
        said = fake.more(), real.more()
    return None if said[0] == said[1] else f"   fake: {said[0]}\n   real: {said[1]}"


@pytest.mark.parametrize("seed", range(500))
def test_a_conversation(both: list[Listener], seed: int) -> None:
    talker = Talker(seed, unique("talk-"))
    protocol = [f"seed {seed}"]
    for listener in both:
        listener.connect()
    for _ in range(STEPS):
        saying = talker.next()
        protocol.append(saying.text)
        difference = disagreement(both, saying)
        if difference is not None:
            pytest.fail("\n".join([*protocol, difference]).replace(talker.prefix, ""))
    _tidy(both, talker.prefix)


def _tidy(both: list[Listener], prefix: str) -> None:
    for listener in both:
        listener.connect()
        for name in ("q0", "q1", "q2"):
            listener.answers(_call(commands.Queue.Delete(queue=prefix + name), 1))
        for name in ("e0", "e1", "e2", "e3"):
            listener.answers(_call(commands.Exchange.Delete(exchange=prefix + name), 1))
