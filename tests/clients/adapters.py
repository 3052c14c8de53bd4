"""Which clients there are, and the module that adapts each.

A library is imported only when its client is asked for.
"""

from __future__ import annotations

import importlib
from types import ModuleType

MODULES = {
    "pika": "with_pika",
    "aio-pika": "with_aio_pika",
    "FastStream": "with_faststream",
    "kombu": "with_kombu",
    "AMQPStorm": "with_amqpstorm",
    "rabbitpy": "with_rabbitpy",
    "reliablepub `Publisher`": "with_publisher",
    "reliablepub `AsyncPublisher`": "with_async_publisher",
}
OURS = frozenset({"reliablepub `Publisher`", "reliablepub `AsyncPublisher`"})


def adapter(client: str) -> ModuleType:
    """Its `publish_all` is a `letters.PublishAll`; its docstring says how the client is used."""
    return importlib.import_module(f"tests.clients.{MODULES[client]}")
