"""A broker that a test may do harm to: the fake one and the real one, with the same few handles.

It knows how each of the two is cut off, alarmed, killed and revived. It must never know the
publisher.
"""

from typing import Final, Protocol

from reliablepub.testing import FakeBroker, Permissions
from tests.amqp_probe import AmqpProbe
from tests.rabbitmq import RabbitMQNode

OTHER: Final = "shop"
PASSWORD: Final = "secret"
NARROW: Final = "narrow"
"""A user of the fake broker with a limit of channels."""
NARROW_CHANNEL_MAX: Final = {NARROW: 1}


class Rig(Protocol):
    """What a test of behavior may do to a broker."""

    probe: AmqpProbe

    @property
    def url(self) -> str:
        """Where it is, also while it is down."""

    def drop_connections(self) -> None:
        """End every connection at once."""

    def block(self) -> None:
        """Raise an alarm: the next publish on a connection is withheld, and blocks it."""

    def unblock(self) -> None:
        """Clear the alarm."""

    def freeze(self) -> None:
        """Have it hear and say nothing more, on connections that stay."""

    def thaw(self) -> None:
        """Have it go on, with what it was sent meanwhile."""

    def kill(self) -> None:
        """Let it die without a word."""

    def start(self) -> None:
        """Bring it back, with what it had confirmed."""

    def url_of_other_user(self, *, channel_max: int | None = None) -> str:
        """For a user with all permissions, and perhaps with so many channels at most."""

    def may_write(self, pattern: str) -> None:
        """What that user may publish to from now on; its connections end."""

    def change_password(self) -> None:
        """That user cannot log in any more; its connections end."""

    def change_password_back(self) -> None:
        """It can again."""


class FakeRig:
    """The bundled broker."""

    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker
        self.url = broker.url
        self.probe = AmqpProbe(broker.url)

    def drop_connections(self) -> None:
        self._broker.drop_connections()

    def block(self) -> None:
        self._broker.block("low on memory")

    def unblock(self) -> None:
        self._broker.unblock()

    def freeze(self) -> None:
        self._broker.freeze()

    def thaw(self) -> None:
        self._broker.thaw()

    def kill(self) -> None:
        self._broker.crash(lose_unsynced=True)

    def start(self) -> None:
        self._broker.start()

    def url_of_other_user(self, *, channel_max: int | None = None) -> str:
        if channel_max is not None:
            assert {NARROW: channel_max} == NARROW_CHANNEL_MAX
            return self._broker.url_of(NARROW)
        self._broker.set_password(OTHER, PASSWORD)
        return self._broker.url_of(OTHER)

    def may_write(self, pattern: str) -> None:
        self._broker.set_permissions(OTHER, Permissions(write=pattern))
        self.drop_connections()

    def change_password(self) -> None:
        self._broker.set_password(OTHER, "another")
        self.drop_connections()

    def change_password_back(self) -> None:
        self.url_of_other_user()


class RealRig:
    """RabbitMQ itself."""

    def __init__(self, node: RabbitMQNode) -> None:
        self._node = node
        self.url = node.url
        self.probe = AmqpProbe(node.url)

    def drop_connections(self) -> None:
        self._node.close_all_connections("cut by a test")

    def block(self) -> None:
        self._node.set_memory_alarm()

    def unblock(self) -> None:
        self._node.clear_memory_alarm()

    def freeze(self) -> None:
        self._node.pause()

    def thaw(self) -> None:
        self._node.resume()

    def kill(self) -> None:
        if self._node.is_running:
            # A declaration is answered a moment before it is on disk; a test's queue is old.
            self._node.eval("mnesia:sync_log().")
        self._node.kill()

    def start(self) -> None:
        self._node.start()

    def url_of_other_user(self, *, channel_max: int | None = None) -> str:
        self._node.add_user(OTHER, PASSWORD)
        self._node.set_permissions(OTHER)
        if channel_max is not None:
            self._node.set_channel_max(OTHER, channel_max)
        return self.url.replace("guest:guest", f"{OTHER}:{PASSWORD}")

    def may_write(self, pattern: str) -> None:
        self._node.set_permissions(OTHER, write=pattern)
        self.drop_connections()

    def change_password(self) -> None:
        self._node.change_password(OTHER, "another")
        self.drop_connections()

    def change_password_back(self) -> None:
        self._node.change_password(OTHER, PASSWORD)
