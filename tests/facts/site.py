"""What can be done to a broker of either kind: the same verbs for the fake one and RabbitMQ itself.

It must never know a frame.
"""

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
        self.node.ctl("add_user", "nobody", "nobody")
        return "nobody"

    def add_reader(self) -> str:
        if "reader" not in self.node.ctl("list_users"):
            self.node.ctl("add_user", "reader", "reader")
        self.node.ctl("set_permissions", "reader", ".*", "^$", ".*")
        return "reader"
