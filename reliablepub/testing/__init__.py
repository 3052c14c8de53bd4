"""A fake RabbitMQ broker for tests: AMQP 0-9-1 over real TCP, with scripted faults.

Names are imported on first access: each run of pytest loads this package for its plugin, and few
runs need a broker.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reliablepub.testing import faults
    from reliablepub.testing.broker import FakeBroker
    from reliablepub.testing.faults import load_faults
    from reliablepub.testing.history import Fate, Published, StoredMessage
    from reliablepub.testing.options import NodeOptions, Permissions
    from reliablepub.testing.views import ClientState, ConsumerState, QueueState, UnackedMessage

__all__ = [
    "ClientState",
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

_LAZY = {
    "ClientState": "views",
    "ConsumerState": "views",
    "FakeBroker": "broker",
    "Fate": "history",
    "NodeOptions": "options",
    "Permissions": "options",
    "Published": "history",
    "QueueState": "views",
    "StoredMessage": "history",
    "UnackedMessage": "views",
    "faults": "faults",
    "load_faults": "faults",
}
"""Names that are imported on first access, and their modules."""


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # type checkers read the imports above

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415 - few runs need it

        module = import_module(f"{__name__}.{_LAZY[name]}")
        value = globals()[name] = module if name == _LAZY[name] else getattr(module, name)
        return value
