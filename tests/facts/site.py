"""What can be done to a broker of either kind: the same verbs for the fake one and RabbitMQ itself.

It must never know a frame.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from reliablepub.testing import FakeBroker, NodeOptions, Permissions
from tests.rabbitmq import RabbitMQNode

MAX_MESSAGE_SIZE = 1024 * 1024


class Site(Protocol):
    """A broker under observation."""

    url: str
    is_fake: bool
    version: tuple[int, ...]
    """The version of RabbitMQ, or the one that the fake follows."""

    def block(self) -> None:
        """Raise a memory alarm."""

    def unblock(self) -> None:
        """Clear it."""

    def add_nobody(self) -> str:
        """A user who is given no permissions; the name is the password."""

    def add_reader(self) -> str:
        """A user who may do all but write; the name is the password."""

    def consumer_timeout_ms(self) -> AbstractContextManager[int]:
        """How long new channels wait for an acknowledgement; no longer than can be waited for."""

    def let_pass(self, milliseconds: int) -> None:
        """Have so much time gone by on the broker's clock, now or soon."""


class FakeSite:
    """The fake broker."""

    is_fake = True
    version: tuple[int, ...] = (3, 10)

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.url = broker.url

    @staticmethod
    def options() -> NodeOptions:
        """As the real node is configured."""
        return NodeOptions(
            max_message_size=MAX_MESSAGE_SIZE,
            users={"guest": "guest", "nobody": "nobody", "reader": "reader"},
            permissions={"reader": {"/": Permissions(write="^$")}},
        )

    def block(self) -> None:
        self.broker.block()

    def unblock(self) -> None:
        self.broker.unblock()

    def add_nobody(self) -> str:
        return "nobody"

    def add_reader(self) -> str:
        return "reader"

    @contextmanager
    def consumer_timeout_ms(self) -> Iterator[int]:
        yield 1_800_000

    def let_pass(self, milliseconds: int) -> None:
        self.broker.advance(milliseconds / 1000)


class RealSite:
    """RabbitMQ."""

    is_fake = False

    def __init__(self, node: RabbitMQNode) -> None:
        self.node = node
        self.url = node.url
        self.version = node.version

    def block(self) -> None:
        self.node.set_memory_alarm()

    def unblock(self) -> None:
        self.node.clear_memory_alarm()

    def add_nobody(self) -> str:
        self.node.add_user("nobody", "nobody")
        return "nobody"

    def add_reader(self) -> str:
        self.node.add_user("reader", "reader")
        self.node.set_permissions("reader", write="^$")
        return "reader"

    @contextmanager
    def consumer_timeout_ms(self) -> Iterator[int]:
        before = self.node.eval(
            "{element(2, application:get_env(rabbit, consumer_timeout)), "
            "element(2, application:get_env(rabbit, channel_tick_interval))}."
        )
        # RabbitMQ looks at each tick, and closes the channel again until close-ok has come.
        self._set_consumer_timeout("{1000, 3000}")
        try:
            yield 1000
        finally:
            self._set_consumer_timeout(before)

    def _set_consumer_timeout(self, value_and_tick: str) -> None:
        self.node.eval(
            f"{{Value, Tick}} = {value_and_tick}, "
            "application:set_env(rabbit, consumer_timeout, Value), "
            "application:set_env(rabbit, channel_tick_interval, Tick)."
        )

    def let_pass(self, milliseconds: int) -> None:
        """Its time passes by itself."""
