"""Routing in one virtual host: exchanges, bindings and queues.

Knows: RabbitMQ's routing rules (default, direct, fanout, topic and headers exchanges,
exchange-to-exchange bindings, alternate exchanges, CC and BCC), what survives a restart. Must never
know: channels, frames, time, connections.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reliablepub.testing.fields import field_type, is_same
from reliablepub.testing.queues import Buried, Queue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reliablepub.testing.history import Publish

EXCHANGE_TYPES = frozenset({"direct", "fanout", "topic", "headers"})

_PREDECLARED = {
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.topic": "topic",
    "amq.headers": "headers",
    "amq.match": "headers",
    "amq.rabbitmq.trace": "topic",
}


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding from an exchange to a queue or to another exchange."""

    destination: str
    to_exchange: bool
    routing_key: str
    identity: tuple[tuple[str, str, str], ...] = ()
    """Names, types and values of the arguments: bindings that differ in one are two bindings."""
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)


def new_binding(
    destination: str,
    routing_key: str,
    arguments: Mapping[str, Any] | None,
    *,
    to_exchange: bool = False,
) -> Binding:
    """Make a binding to a queue, or to an exchange."""
    table = dict(sorted((arguments or {}).items()))
    identity = tuple((name, field_type(value), repr(value)) for name, value in table.items())
    return Binding(destination, to_exchange, routing_key, identity, table)


@dataclass(slots=True, eq=False)
class Exchange:
    """An exchange and the bindings from it, in the order of their creation."""

    name: str
    type: str
    durable: bool = False
    auto_delete: bool = False
    internal: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    bindings: dict[Binding, None] = field(default_factory=dict)

    def matches(self, routing_key: str, headers: Mapping[str, Any]) -> Iterable[Binding]:
        """Return the bindings that match a message's routing key and headers."""
        if self.type == "fanout":
            return self.bindings
        if self.type == "direct":
            return [one for one in self.bindings if one.routing_key == routing_key]
        if self.type == "topic":
            words = _words(routing_key)
            return [one for one in self.bindings if topic_matches(_words(one.routing_key), words)]
        return [one for one in self.bindings if headers_match(one.arguments, headers)]


def routing_keys(publish: Publish) -> list[str]:
    """Return the routing key of a publish, and those in its CC and BCC headers."""
    keys = [publish.routing_key]
    if publish.properties.headers:
        keys += copied_keys(publish, "CC") + copied_keys(publish, "BCC")
    keys += publish.blind_keys
    return keys


def copied_keys(publish: Publish, name: str) -> list[str]:
    """Return the routing keys in the header `CC` or `BCC`; RabbitMQ ignores what is no string."""
    copies = (publish.properties.headers or {}).get(name)
    return [key for key in copies if isinstance(key, str)] if isinstance(copies, list) else []


def _words(key: str) -> list[str]:
    """Return the words of a routing key or of a topic pattern; an empty key has none."""
    return key.split(".") if key else []


def topic_matches(pattern: list[str], words: list[str]) -> bool:
    """Whether a topic pattern matches: `*` is one word, `#` is none or more.

    The rule is rabbit_exchange_type_topic:trie_match.
    """
    # reachable[i]: the pattern read so far can have consumed exactly i words.
    reachable = [True] + [False] * len(words)
    for part in pattern:
        if part == "#":
            first = reachable.index(True) if True in reachable else len(reachable)
            reachable = [i >= first for i in range(len(reachable))]
        else:
            reachable = [False] + [
                before and part in ("*", word)
                for before, word in zip(reachable, words, strict=False)
            ]
    return reachable[-1]


def headers_match(arguments: Mapping[str, Any], headers: Mapping[str, Any]) -> bool:
    """Whether a headers binding matches (rabbit_exchange_type_headers:headers_match)."""
    mode = arguments.get("x-match", "all")
    with_x = mode in ("all-with-x", "any-with-x")
    wanted = {
        key: value
        for key, value in arguments.items()
        if key != "x-match" and (with_x or not key.startswith("x-"))
    }
    # A binding argument without a value only requires that the header exists.
    hits = (
        key in headers and (value is None or is_same(headers[key], value))
        for key, value in wanted.items()
    )
    return all(hits) if mode.startswith("all") else any(hits)


class VirtualHost:
    """Everything that is declared in one virtual host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead: deque[Buried] = deque()
        """Messages that queues have dropped, to be routed to a dead letter exchange."""
        self.exchanges: dict[str, Exchange] = {"": Exchange("", "direct", durable=True)}
        self.queues: dict[str, Queue] = {}
        for predeclared, kind in _PREDECLARED.items():
            is_internal = predeclared == "amq.rabbitmq.trace"
            self.exchanges[predeclared] = Exchange(
                predeclared, kind, durable=True, internal=is_internal
            )

    def add_exchange(self, exchange: Exchange) -> None:
        """Add an exchange; it must not exist yet."""
        self.exchanges[exchange.name] = exchange

    def add_queue(self, queue: Queue) -> None:
        """Add a queue; it must not exist yet."""
        queue.dead = self.dead
        self.queues[queue.name] = queue

    def remove_exchange(self, name: str) -> None:
        """Delete an exchange and the bindings that lead to it."""
        del self.exchanges[name]
        self._unbind_all(name, to_exchange=True)

    def remove_queue(self, name: str) -> Queue:
        """Delete a queue and its bindings; return the queue, marked as deleted."""
        queue = self.queues.pop(name)
        queue.is_deleted = True
        self._unbind_all(name, to_exchange=False)
        return queue

    def bind(self, source: str, binding: Binding) -> None:
        """Add a binding between existing ends; an equal binding is not added twice."""
        self.exchanges[source].bindings[binding] = None

    def unbind(self, source: str, binding: Binding) -> None:
        """Remove a binding; an auto-delete exchange is deleted with its last one."""
        exchange = self.exchanges.get(source)
        if exchange is None or binding not in exchange.bindings:
            return
        del exchange.bindings[binding]
        if exchange.auto_delete and not exchange.bindings:
            self.remove_exchange(source)

    def route(self, publish: Publish) -> list[Queue]:
        """Return the queues that a publish reaches, each once (rabbit_exchange:route)."""
        headers = publish.properties.headers or {}
        return self._route(publish.exchange, routing_keys(publish), headers)

    def _route(self, start: str, keys: list[str], headers: Mapping[str, Any]) -> list[Queue]:
        found: dict[str, Queue] = {}
        seen = {start}
        work = [start]
        while work:
            name = work.pop()
            exchange = self.exchanges.get(name)
            # An alternate exchange may not exist. The default exchange as one has no bindings.
            if exchange is None or (not name and start):
                continue
            queues, exchanges = self._destinations(exchange, keys, headers)
            found |= queues
            alternate = exchange.arguments.get("alternate-exchange")
            if not queues and not exchanges and alternate is not None:
                exchanges = [alternate]
            work += [name for name in exchanges if name not in seen]
            seen.update(exchanges)
        return list(found.values())

    def _destinations(
        self, exchange: Exchange, keys: list[str], headers: Mapping[str, Any]
    ) -> tuple[dict[str, Queue], list[str]]:
        if not exchange.name:  # the default exchange: every queue is bound by its own name
            return {key: self.queues[key] for key in keys if key in self.queues}, []
        queues: dict[str, Queue] = {}
        exchanges: list[str] = []
        for key in keys:
            for binding in exchange.matches(key, headers):
                if binding.to_exchange:
                    exchanges.append(binding.destination)
                else:
                    queues[binding.destination] = self.queues[binding.destination]
        return queues, exchanges

    def restart(self, *, keep_unwritten: bool) -> None:
        """Drop everything that is not durable, and messages that are not on disk.

        A publish that is left in no queue becomes lost.
        """
        lost: set[Publish] = set()
        for queue in list(self.queues.values()):
            lost.update(queue.lose(keep_unwritten=keep_unwritten))
            if not queue.durable or queue.owner is not None:
                self.remove_queue(queue.name)
        for exchange in list(self.exchanges.values()):
            if not exchange.durable and exchange.name in self.exchanges:
                self.remove_exchange(exchange.name)
        kept = {entry.publish for queue in self.queues.values() for entry in queue.ready}
        for publish in lost - kept:
            publish.mark_lost()

    def _unbind_all(self, destination: str, *, to_exchange: bool) -> None:
        for exchange in list(self.exchanges.values()):
            for binding in list(exchange.bindings):
                if binding.destination == destination and binding.to_exchange == to_exchange:
                    self.unbind(exchange.name, binding)
