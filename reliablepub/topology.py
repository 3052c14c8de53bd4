"""Exchanges, queues and bindings that a publisher counts on, as data.

Knows: what AMQP can say of them, and TOML. Must never know: connections, whether they are there.

As a file::

    declare = true            # false: they are only checked, and nothing is made

    [[exchange]]
    name = "orders"
    type = "topic"

    [[queue]]
    name = "billing"
    arguments = { x-queue-type = "quorum" }

    [[binding]]
    exchange = "orders"
    queue = "billing"
    routing_key = "order.*"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from reliablepub.errors import ConfigurationError

_SHORT_STRING_MAX = 255


def _check_names(kind: str, **names: str) -> None:
    for name, value in names.items():
        if not isinstance(value, str) or len(value.encode()) > _SHORT_STRING_MAX:
            msg = f"{kind}: {name} is {value!r:.80}; it must be a text of at most 255 bytes"
            raise ConfigurationError(msg)


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange.

    Attributes:
        name: not empty; the default exchange is always there.
        type: ``direct``, ``fanout``, ``topic``, ``headers`` or a plug-in's.
        durable: it outlives a restart of the broker.
        auto_delete: it is deleted with its last binding.
        internal: only other exchanges may publish to it.
        arguments: such as ``alternate-exchange``.
    """

    kind: ClassVar[str] = "exchange"

    name: str
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse names that AMQP cannot carry."""
        _check_names(self.kind, name=self.name, type=self.type)
        if not self.name:
            msg = "exchange: name is empty; the default exchange cannot be declared"
            raise ConfigurationError(msg)

    def __str__(self) -> str:
        """Name it."""
        return f"exchange {self.name!r}"


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue.

    Attributes:
        name: not empty.
        durable: it outlives a restart of the broker.
        auto_delete: it is deleted with its last consumer.
        arguments: such as ``x-queue-type``.
    """

    kind: ClassVar[str] = "queue"

    name: str
    durable: bool = True
    auto_delete: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse names that AMQP cannot carry."""
        _check_names(self.kind, name=self.name)
        if not self.name:
            msg = "queue: name is empty; nobody could publish to it"
            raise ConfigurationError(msg)

    def __str__(self) -> str:
        """Name it."""
        return f"queue {self.name!r}"


@dataclass(frozen=True, slots=True)
class Binding:
    """What goes from an exchange to a queue, or to another exchange.

    Attributes:
        exchange: where it comes from.
        queue: where it goes, or empty.
        to_exchange: where it goes instead, or empty.
        routing_key: which messages, as the exchange's type reads it.
        arguments: likewise, for ``headers``.
    """

    kind: ClassVar[str] = "binding"

    exchange: str
    queue: str = ""
    to_exchange: str = ""
    routing_key: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what leads nowhere, or to two places."""
        names = {"exchange": self.exchange, "queue": self.queue, "to_exchange": self.to_exchange}
        _check_names(self.kind, **names, routing_key=self.routing_key)
        if not self.exchange or bool(self.queue) == bool(self.to_exchange):
            msg = "binding: it has an exchange, and either a queue or to_exchange"
            raise ConfigurationError(msg)

    def __str__(self) -> str:
        """Name both ends."""
        end = f"queue {self.queue!r}" if self.queue else f"exchange {self.to_exchange!r}"
        return f"binding of {end} to exchange {self.exchange!r} with key {self.routing_key!r}"


@dataclass(frozen=True, slots=True)
class Topology:
    """What a publisher counts on.

    Attributes:
        exchanges: declared first, and in this order.
        queues: declared second.
        bindings: made last.
        declare: make what is missing; otherwise everything is only checked.
    """

    exchanges: Sequence[Exchange] = ()
    queues: Sequence[Queue] = ()
    bindings: Sequence[Binding] = ()
    declare: bool = True

    @classmethod
    def from_toml(cls, text: str) -> Topology:
        """Read the text of a file.

        Raises:
            ConfigurationError: it says something else, or what it says makes no sense.
        """
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            msg = f"the topology is no TOML: {error}"
            raise ConfigurationError(msg) from error
        declare = tables.pop("declare", True)
        if not isinstance(declare, bool):
            msg = f"declare is {declare!r}; it must be true or false"
            raise ConfigurationError(msg)
        read = {kind: _all_of(kind, tables.pop(kind.kind, [])) for kind in _KINDS}
        if tables:
            msg = f"the topology has {', '.join(sorted(tables))}; {_KNOWN}"
            raise ConfigurationError(msg)
        return cls(read[Exchange], read[Queue], read[Binding], declare)


_KINDS: tuple[type[Any], ...] = (Exchange, Queue, Binding)
_KNOWN = "known are declare, [[exchange]], [[queue]] and [[binding]]"
T = TypeVar("T")


def _all_of(kind: type[Any], tables: object) -> tuple[Any, ...]:
    """All tables of one kind."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        msg = f"{kind.kind} is no list of tables; write [[{kind.kind}]]"
        raise ConfigurationError(msg)
    return tuple(_one_of(kind, table) for table in tables)


def _one_of(kind: type[Any], table: dict[str, Any]) -> object:
    known = {attribute.name: attribute.type for attribute in fields(kind)}
    for name, value in table.items():
        if name not in known:
            msg = f"{kind.kind} has {name!r}; known are {', '.join(known)}"
            raise ConfigurationError(msg)
        wanted = {"str": str, "bool": bool}.get(str(known[name]), dict)
        if not isinstance(value, wanted):
            msg = f"{kind.kind}: {name} is {value!r}, not a {wanted.__name__}"
            raise ConfigurationError(msg)
    try:
        return kind(**table)
    except TypeError as error:
        msg = f"{kind.kind}: something is missing: {error}"
        raise ConfigurationError(msg) from error
