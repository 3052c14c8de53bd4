"""A fake RabbitMQ broker for tests: AMQP 0-9-1 over real TCP, with scripted faults."""

from reliablepub.testing import faults
from reliablepub.testing.broker import FakeBroker
from reliablepub.testing.faults import load_faults
from reliablepub.testing.history import Fate, Published, StoredMessage
from reliablepub.testing.options import NodeOptions, Permissions

__all__ = [
    "FakeBroker",
    "Fate",
    "NodeOptions",
    "Permissions",
    "Published",
    "StoredMessage",
    "faults",
    "load_faults",
]
