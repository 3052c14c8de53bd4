"""Read-only records of a running node: its queues, consumers and unacknowledged messages.

Knows: where the node has its state. Must never know: how the state changes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reliablepub.testing.history import StoredMessage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reliablepub.testing.node import Client, Node
    from reliablepub.testing.queues import Entry
    from reliablepub.testing.routing import VirtualHost


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue, with the numbers of its ready and unacknowledged messages and of its consumers."""

    name: str
    durable: bool
    exclusive: bool
    auto_delete: bool
    arguments: Mapping[str, Any]
    ready: int
    unacked: int
    consumers: int


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """A consumer; `connection` counts connections from 1, and `prefetch` 0 means no limit."""

    tag: str
    queue: str
    connection: int
    channel: int
    no_ack: bool
    exclusive: bool
    prefetch: int
    priority: int
    unacked: int


@dataclass(frozen=True, slots=True)
class ClientState:
    """A client that has logged in; `connection` counts connections from 1.

    `properties` holds the client properties that it sent (connection.start-ok).
    """

    connection: int
    user: str
    properties: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UnackedMessage(StoredMessage):
    """A message that was delivered and is not yet acknowledged.

    `consumer_tag` is None after basic.get.
    """

    queue: str
    connection: int
    channel: int
    delivery_tag: int
    consumer_tag: str | None


def stored(entry: Entry) -> StoredMessage:
    """Return the record of a message in a queue."""
    publish = entry.publish
    return StoredMessage(
        exchange=publish.exchange,
        routing_key=publish.routing_key,
        body=publish.body,
        header=publish.header,
        redelivered=entry.redelivered,
    )


def queues(node: Node, vhost: VirtualHost) -> tuple[QueueState, ...]:
    """Return the queues of a virtual host, in the order of their declaration."""
    unacked = Counter(message.queue for message in unacknowledged(node, vhost))
    return tuple(
        QueueState(
            name=queue.name,
            durable=queue.durable,
            exclusive=queue.owner is not None,
            auto_delete=queue.auto_delete,
            arguments=dict(queue.arguments),
            ready=len(queue.ready),
            unacked=unacked[queue.name],
            consumers=len(queue.consumers),
        )
        for queue in vhost.queues.values()
    )


def consumers(node: Node, vhost: VirtualHost) -> tuple[ConsumerState, ...]:
    """Return the consumers of the queues of a virtual host."""
    return tuple(
        ConsumerState(
            tag=consumer.tag,
            queue=consumer.queue.name,
            connection=number,
            channel=channel,
            no_ack=consumer.no_ack,
            exclusive=consumer.exclusive,
            prefetch=consumer.prefetch,
            priority=consumer.priority,
            unacked=consumer.unacked,
        )
        for number, connection in _connections(node, vhost)
        for channel, consuming in connection.consuming()
        for consumer in consuming.consumers.values()
    )


def clients(node: Node, vhost: VirtualHost) -> tuple[ClientState, ...]:
    """Return the clients that have logged in to a virtual host."""
    return tuple(
        ClientState(number, one.user, one.client_properties)
        for number, one in _connections(node, vhost)
        if one.is_open
    )


def unacknowledged(node: Node, vhost: VirtualHost) -> tuple[UnackedMessage, ...]:
    """Return the messages of a virtual host that were delivered and are not acknowledged."""
    return tuple(
        UnackedMessage(
            exchange=delivery.entry.publish.exchange,
            routing_key=delivery.entry.publish.routing_key,
            body=delivery.entry.publish.body,
            header=delivery.entry.publish.header,
            redelivered=delivery.entry.redelivered,
            queue=delivery.queue.name,
            connection=number,
            channel=channel,
            delivery_tag=tag,
            consumer_tag=None if delivery.consumer is None else delivery.consumer.tag,
        )
        for number, connection in _connections(node, vhost)
        for channel, consuming in connection.consuming()
        for tag, delivery in consuming.unacked.items()
    )


def _connections(node: Node, vhost: VirtualHost) -> Iterator[tuple[int, Client]]:
    return ((number, one) for number, one in node.connections.items() if one.vhost is vhost)
