"""A fake RabbitMQ broker for tests: AMQP 0-9-1 over real TCP, with scripted faults."""

from reliablepub.testing import faults
from reliablepub.testing.broker import FakeBroker
from reliablepub.testing.faults import load_faults
from reliablepub.testing.history import Fate, Published, StoredMessage
from reliablepub.testing.options import NodeOptions, Permissions
from reliablepub.testing.views import ConsumerState, QueueState, UnackedMessage

__all__ = [
    "ConsumerState",
    "FakeBroker",
    "Fate",
    "NodeOptions",
    "Permissions",
    "Published",
    "QueueState",
    "StoredMessage",
    "UnackedMessage",
    "faults",
    "load_faults",
]
