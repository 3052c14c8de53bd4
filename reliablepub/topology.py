"""Topology: the exchanges, queues and bindings that a publisher needs, as data.

Knows: their AMQP arguments, and TOML. Must never know: connections, or what exists on a broker.

As a TOML file::

    declare = true            # false: check only, declare nothing

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from reliablepub.errors import ConfigurationError, InvalidMessage
from reliablepub.headers import SHORT_STRING_MAX, checked_arguments


def _check_names(kind: str, **names: str) -> None:
    for name, value in names.items():
        if not isinstance(value, str) or not _is_short(value):
            msg = f"{kind}: {name} is {value!r:.80}; it must be a string of at most 255 bytes"
            raise ConfigurationError(msg)


def _is_short(text: str) -> bool:
    try:
        return len(text.encode()) <= SHORT_STRING_MAX
    except UnicodeEncodeError:  # an argument of a command that is not UTF-8 has such characters
        return False


def _check_kinds(of: Exchange | Queue | Binding) -> None:
    for one in fields(of):
        value = getattr(of, one.name)
        wanted = {"str": str, "bool": bool}.get(str(one.type), Mapping)
        if not isinstance(value, wanted):
            msg = f"{of.kind}: {one.name} is {value!r:.80}, not a {wanted.__name__.lower()}"
            raise ConfigurationError(msg)
        if wanted is Mapping:
            try:
                object.__setattr__(of, one.name, checked_arguments(getattr(of, one.name)))
            except InvalidMessage as error:
                raise ConfigurationError(f"{of.kind}: {error}") from None


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange.

    Attributes:
        name: exchange name; not empty, because the default exchange always exists.
        type: ``direct``, ``fanout``, ``topic``, ``headers``, or a type from a plugin.
        durable: the exchange survives a restart of the broker.
        auto_delete: the broker deletes the exchange when its last binding is removed.
        internal: only other exchanges may publish to it.
        arguments: optional arguments, such as ``alternate-exchange``.

    Raises:
        ConfigurationError: the name is empty, a name is longer than 255 bytes, or AMQP cannot hold
            an argument.
    """

    kind: ClassVar[str] = "exchange"

    name: str
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject names that AMQP cannot carry."""
        _check_names(self.kind, name=self.name, type=self.type)
        _check_kinds(self)
        if not self.name:
            msg = "exchange: name is empty; the default exchange cannot be declared"
            raise ConfigurationError(msg)

    def __str__(self) -> str:
        """Kind and name."""
        return f"exchange {self.name!r}"


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue.

    Attributes:
        name: queue name; not empty.
        durable: the queue survives a restart of the broker.
        auto_delete: the broker deletes the queue when its last consumer leaves.
        arguments: optional arguments, such as ``x-queue-type``.

    Raises:
        ConfigurationError: the name is empty or longer than 255 bytes, or AMQP cannot hold an
            argument.
    """

    kind: ClassVar[str] = "queue"

    name: str
    durable: bool = True
    auto_delete: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject names that AMQP cannot carry."""
        _check_names(self.kind, name=self.name)
        _check_kinds(self)
        if not self.name:
            msg = "queue: name is empty; the broker would choose a name that no publisher knows"
            raise ConfigurationError(msg)

    def __str__(self) -> str:
        """Kind and name."""
        return f"queue {self.name!r}"


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding from an exchange to a queue, or to another exchange.

    Attributes:
        exchange: source exchange.
        queue: destination queue; empty if the destination is an exchange.
        to_exchange: destination exchange; empty if the destination is a queue.
        routing_key: binding key; its meaning depends on the type of the source exchange.
        arguments: optional arguments, such as the headers that a ``headers`` exchange matches.

    Raises:
        ConfigurationError: a name is longer than 255 bytes, the source is empty, or there is not
            exactly one destination.
    """

    kind: ClassVar[str] = "binding"

    exchange: str
    queue: str = ""
    to_exchange: str = ""
    routing_key: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject a binding without exactly one destination."""
        names = {"exchange": self.exchange, "queue": self.queue, "to_exchange": self.to_exchange}
        _check_names(self.kind, **names, routing_key=self.routing_key)
        _check_kinds(self)
        if not self.exchange or bool(self.queue) == bool(self.to_exchange):
            msg = "binding: it needs an exchange, and either a queue or to_exchange"
            raise ConfigurationError(msg)

    def __str__(self) -> str:
        """Source, destination and key."""
        end = f"queue {self.queue!r}" if self.queue else f"exchange {self.to_exchange!r}"
        return f"binding of {end} to exchange {self.exchange!r} with key {self.routing_key!r}"


@dataclass(frozen=True, slots=True)
class Topology:
    """The exchanges, queues and bindings that a publisher needs.

    Attributes:
        exchanges: exchanges, declared first, in this order.
        queues: queues, declared after the exchanges.
        bindings: bindings, declared last.
        declare: whether missing objects are declared; if False, everything is only checked.

    Raises:
        ConfigurationError: a value has the wrong type, such as a name in place of a `Queue`.
    """

    exchanges: Sequence[Exchange] = ()
    queues: Sequence[Queue] = ()
    bindings: Sequence[Binding] = ()
    declare: bool = True

    def __post_init__(self) -> None:
        """Reject names in place of exchanges and queues here, not on the relay's thread."""
        kinds = {"exchanges": Exchange, "queues": Queue, "bindings": Binding}
        for name, kind in kinds.items():
            given = getattr(self, name)
            if not isinstance(given, Iterable):
                msg = f"topology: {name} is {given!r:.80}, not a list of {kind.__name__}(...)"
                raise ConfigurationError(msg)
            several = tuple(given)  # a generator can be read only once
            object.__setattr__(self, name, several)
            for one in several:
                if not isinstance(one, kind):
                    msg = f"topology: {one!r:.80} is not {kind.__name__}(...)"
                    raise ConfigurationError(msg)
        if not isinstance(self.declare, bool):
            raise ConfigurationError(f"declare is {self.declare!r:.80}; it must be true or false")

    @classmethod
    def from_toml(cls, text: str) -> Topology:
        """Parse the text of a TOML file.

        Raises:
            ConfigurationError: the text is not TOML, has an unknown name, or has an invalid value.
        """
        import tomllib  # noqa: PLC0415 - few topologies are files

        try:
            tables = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: also of an endless number
            msg = f"the topology is not valid TOML: {error}"
            raise ConfigurationError(msg) from error
        declare = tables.pop("declare", True)
        read = {kind: _all_of(kind, tables.pop(kind.kind, [])) for kind in _KINDS}
        if tables:
            msg = f"the topology has {', '.join(sorted(tables))}; {_KNOWN}"
            raise ConfigurationError(msg)
        return cls(read[Exchange], read[Queue], read[Binding], declare)


_KINDS: tuple[type[Any], ...] = (Exchange, Queue, Binding)
_KNOWN = "known are declare, [[exchange]], [[queue]] and [[binding]]"
T = TypeVar("T")


def _all_of(kind: type[Any], tables: object) -> tuple[Any, ...]:
    """Parse the tables of one kind."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        msg = f"{kind.kind} is not a list of tables; write [[{kind.kind}]]"
        raise ConfigurationError(msg)
    return tuple(_one_of(kind, table) for table in tables)


def _one_of(kind: type[Any], table: dict[str, Any]) -> object:
    known = {attribute.name: attribute.type for attribute in fields(kind)}
    for name, value in table.items():
        if name not in known:
            which = f" {table['name']!r}" if isinstance(table.get("name"), str) else ""
            msg = f"{kind.kind}{which} has {name!r}; known are {', '.join(known)}"
            raise ConfigurationError(msg)
        # Annotations are text in this module; every other field is a table of arguments.
        wanted = {"str": str, "bool": bool}.get(str(known[name]), dict)
        if not isinstance(value, wanted):
            msg = f"{kind.kind}: {name} is {value!r}, not a {wanted.__name__}"
            raise ConfigurationError(msg)
    try:
        return kind(**table)
    except TypeError as error:
        msg = f"{kind.kind}: a value is missing: {error}"
        raise ConfigurationError(msg) from error
