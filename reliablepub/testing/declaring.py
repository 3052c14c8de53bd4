"""exchange.* and queue.*: declare, delete, bind, unbind, purge, with RabbitMQ's refusals.

Knows: which declarations RabbitMQ refuses, and the reply texts. Must never know: messages in
flight, how a reply is encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pamqp.commands import Exchange as ExchangeMethods
from pamqp.commands import Queue as QueueMethods

from reliablepub.testing import wire
from reliablepub.testing.consumers import PSEUDO_QUEUE, check_reply_name
from reliablepub.testing.fields import field_type
from reliablepub.testing.queue_arguments import (
    COMPARED,
    check_queue_arguments,
    check_replicated_flags,
)
from reliablepub.testing.queues import Stream, new_queue
from reliablepub.testing.replies import AmqpError, erlang_binary
from reliablepub.testing.routing import EXCHANGE_TYPES, Binding, Exchange

if TYPE_CHECKING:
    from reliablepub.testing.channel_base import ChannelBase
    from reliablepub.testing.queues import Queue


_CLASSIC = frozenset({None, "classic"})
"""Values of `x-queue-type` that mean a classic queue; None: the argument is absent."""


def declare_exchange(channel: ChannelBase, method: ExchangeMethods.Declare) -> None:
    """exchange.declare."""
    vhost = channel.connection.vhost
    name, arguments = _stripped(method.exchange), dict(method.arguments or {})
    _check_not_default(name)
    if not method.passive:
        channel.check_access("configure", "exchange", name)
        _check_onward(channel, "exchange", name, arguments.get("alternate-exchange"))
    if method.passive:
        channel.exchange(name, None)
    elif name not in vhost.exchanges:
        _check_name(name, "exchange")
        if method.exchange_type not in EXCHANGE_TYPES:
            wrong = "unknown" if method.exchange_type else "invalid"
            raise AmqpError(503, f"{wrong} exchange type '{method.exchange_type}'")
        vhost.add_exchange(
            Exchange(
                name,
                method.exchange_type,
                durable=method.durable,
                auto_delete=method.auto_delete,
                internal=method.internal,
                arguments=arguments,
            )
        )
    else:
        declared = vhost.exchanges[name]
        where = channel.place("exchange", name)
        _check_same("type", method.exchange_type, declared.type, where)
        _check_same("durable", method.durable, declared.durable, where)
        _check_same("auto_delete", method.auto_delete, declared.auto_delete, where)
        _check_same("internal", method.internal, declared.internal, where)
        _check_same_arguments(("alternate-exchange",), arguments, declared.arguments, where)
    channel.reply(ExchangeMethods.DeclareOk(), nowait=method.nowait)


def delete_exchange(channel: ChannelBase, method: ExchangeMethods.Delete) -> None:
    """exchange.delete; deleting an exchange that does not exist is not an error."""
    vhost = channel.connection.vhost
    name = _stripped(method.exchange)
    channel.check_access("configure", "exchange", name)
    _check_not_default(name)
    if name.startswith("amq."):
        raise AmqpError(403, f"deletion of system {channel.place('exchange', name)} not allowed")
    if name in vhost.exchanges:
        if method.if_unused and vhost.exchanges[name].bindings:
            raise AmqpError(406, f"{channel.place('exchange', name)} in use")
        vhost.remove_exchange(name)
    channel.reply(ExchangeMethods.DeleteOk(), nowait=method.nowait)


def bind_exchange(channel: ChannelBase, method: ExchangeMethods.Bind) -> None:
    """exchange.bind, from `source` to `destination`."""
    source, binding = _exchange_binding(channel, method)
    _bind(channel, source, binding)
    channel.reply(ExchangeMethods.BindOk(), nowait=method.nowait)


def unbind_exchange(channel: ChannelBase, method: ExchangeMethods.Unbind) -> None:
    """exchange.unbind; a binding that does not exist is not an error."""
    source, binding = _exchange_binding(channel, method)
    channel.connection.vhost.unbind(source, binding)
    channel.reply(ExchangeMethods.UnbindOk(), nowait=method.nowait)


def declare_queue(channel: ChannelBase, method: QueueMethods.Declare) -> None:
    """queue.declare; for an empty name the server generates one."""
    connection = channel.connection
    node, vhost = connection.node, connection.vhost
    arguments = dict(method.arguments or {})
    name = _stripped(method.queue)
    if method.queue.startswith(PSEUDO_QUEUE):
        _declare_pseudo_queue(channel, name, nowait=method.nowait)
        return
    if not name and not method.passive:
        name = node.generated_name("amq.gen-")
    if not method.passive:
        channel.check_access("configure", "queue", name)
        _check_onward(channel, "queue", name, arguments.get("x-dead-letter-exchange"))
    if method.passive or name in vhost.queues:
        queue = channel.queue(name)
        if not method.passive:
            _check_same_queue(channel, queue, method, arguments)
    else:
        if method.queue:
            _check_name(name, "queue")
        check_queue_arguments(arguments, channel.place("queue", name))
        if arguments.get("x-queue-type") in ("quorum", "stream"):
            check_replicated_flags(
                channel.place("queue", name),
                durable=method.durable,
                exclusive=method.exclusive,
                auto_delete=method.auto_delete,
            )
        queue = new_queue(
            name,
            durable=_is_durable(method),
            auto_delete=method.auto_delete,
            owner=connection.number if method.exclusive else None,
            arguments=arguments,
        )
        vhost.add_queue(queue)
    channel.last_queue = queue.name
    node.keep_while_used(vhost, queue)
    if not method.nowait:
        queue.expire(node.now)
        counts = (len(queue.ready), len(queue.consumers))
        channel.send_method(wire.encode_declare_ok(queue.name, *counts))


def _declare_pseudo_queue(channel: ChannelBase, name: str, *, nowait: bool) -> None:
    """queue.declare of a name of direct reply-to; it is always passive."""
    check_reply_name(name)
    if name != PSEUDO_QUEUE and name not in channel.connection.node.reply_consumers:
        raise AmqpError(404, f"no {channel.place('queue', name)}")
    channel.last_queue = name
    if not nowait:
        channel.send_method(wire.encode_declare_ok(name, 0, 1))


def delete_queue(channel: ChannelBase, method: QueueMethods.Delete) -> None:
    """queue.delete: publishes waiting for the queue are acked; an unknown queue is not an error."""
    vhost = channel.connection.vhost
    name = channel.name_or_last(_stripped(method.queue))
    channel.check_access("configure", "queue", name)
    count = 0
    if name in vhost.queues:
        queue = channel.queue(name)
        if queue.is_quorum and (method.if_unused or method.if_empty):
            flag = "if-unused" if method.if_unused else "if-empty"
            refused = f"cannot delete {channel.place('queue', name)}. queue.delete operations with"
            raise AmqpError(540, f"{refused} {flag} flag set are not supported by quorum queues")
        if not isinstance(queue, Stream):  # RabbitMQ deletes a stream whatever the flags say
            _check_deletable(channel, queue, method)
            count = len(queue.ready)
        channel.reply(QueueMethods.DeleteOk(count), nowait=method.nowait)
        channel.connection.node.remove_queue(vhost, name)
        queue.purge()
    else:
        channel.reply(QueueMethods.DeleteOk(count), nowait=method.nowait)


def _check_deletable(channel: ChannelBase, queue: Queue, method: QueueMethods.Delete) -> None:
    where = channel.place("queue", queue.name)
    if method.if_unused and queue.consumers:
        raise AmqpError(406, f"{where} in use")
    if method.if_empty and queue.ready:
        raise AmqpError(406, f"{where} not empty")


def purge_queue(channel: ChannelBase, method: QueueMethods.Purge) -> None:
    """queue.purge."""
    queue = channel.queue_or_last(method.queue, "read")
    channel.check_not_stream(queue, "queue.purge")
    count = queue.purge()
    channel.reply(QueueMethods.PurgeOk(count), nowait=method.nowait)


def bind_queue(channel: ChannelBase, method: QueueMethods.Bind) -> None:
    """queue.bind."""
    source, binding = _queue_binding(channel, method)
    _bind(channel, source, binding)
    channel.reply(QueueMethods.BindOk(), nowait=method.nowait)


def unbind_queue(channel: ChannelBase, method: QueueMethods.Unbind) -> None:
    """queue.unbind; a binding that does not exist is not an error. The method has no nowait."""
    vhost = channel.connection.vhost
    source, binding = _queue_binding(channel, method)
    if source in vhost.exchanges and binding.destination in vhost.queues:
        channel.queue(binding.destination)  # raises 405 if exclusive to another connection
        vhost.unbind(source, binding)
    channel.reply(QueueMethods.UnbindOk())


def _queue_binding(
    channel: ChannelBase, method: QueueMethods.Bind | QueueMethods.Unbind
) -> tuple[str, Binding]:
    given, source = _stripped(method.queue), _stripped(method.exchange)
    name = channel.name_or_last(given)
    channel.check_access("write", "queue", name)
    _check_not_default(source)
    channel.check_access("read", "exchange", source)
    key = method.routing_key or ("" if given else name)
    return source, Binding(name, False, key, frozen_arguments(method.arguments))  # noqa: FBT003


def _exchange_binding(
    channel: ChannelBase, method: ExchangeMethods.Bind | ExchangeMethods.Unbind
) -> tuple[str, Binding]:
    destination, source = _stripped(method.destination), _stripped(method.source)
    channel.check_access("write", "exchange", destination)
    _check_not_default(destination)
    _check_not_default(source)
    channel.check_access("read", "exchange", source)
    arguments = frozen_arguments(method.arguments)
    return source, Binding(destination, True, method.routing_key or "", arguments)  # noqa: FBT003


def _bind(channel: ChannelBase, source: str, binding: Binding) -> None:
    """Add a binding; if both ends are missing, the 404 names the source."""
    exchange = channel.exchange(source, None)
    if binding.to_exchange:
        channel.exchange(binding.destination, None)
    else:
        channel.queue(binding.destination)
    if exchange.type == "headers":
        _check_match(dict(binding.arguments).get("x-match", "all"))
    channel.connection.vhost.bind(source, binding)


def _stripped(name: str) -> str:
    """Return the name without CR and LF, which RabbitMQ strips in declarations and bindings."""
    return name.replace("\r", "").replace("\n", "")


def frozen_arguments(table: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """Return binding arguments as a hashable value; nested values are compared by their `repr`."""
    return tuple(
        (key, repr(value) if isinstance(value, dict | list | bytearray) else value)
        for key, value in sorted((table or {}).items())
    )


def _check_not_default(name: str) -> None:
    if not name:
        raise AmqpError(403, "operation not permitted on the default exchange")


def _check_name(name: str, what: str) -> None:
    if name.startswith("amq."):
        raise AmqpError(403, f"{what} name '{name}' contains reserved prefix 'amq.*'")


def _check_onward(channel: ChannelBase, what: str, name: str, onward: object) -> None:
    """Check the rights of forwarding: to read here, and to write to the other exchange."""
    if isinstance(onward, str):
        channel.check_access("read", what, name)
        channel.check_access("write", "exchange", onward)


def _check_match(mode: object) -> None:
    if mode not in ("all", "any", "all-with-x", "any-with-x"):
        shown = erlang_binary(str(mode).encode())
        expected = "expected all, any, all-with-x, or any-with-x"
        raise AmqpError(406, f"Invalid x-match field value {shown}; {expected}")


def _is_durable(method: QueueMethods.Declare) -> bool:
    return bool(method.durable and not method.exclusive)  # an exclusive queue never is


def _check_same_queue(
    channel: ChannelBase, queue: Queue, method: QueueMethods.Declare, arguments: dict[str, Any]
) -> None:
    where = channel.place("queue", queue.name)
    if method.exclusive != (queue.owner is not None):
        raise channel.locked(queue.name)
    _check_same("durable", _is_durable(method), queue.durable, where)
    _check_same("auto_delete", method.auto_delete, queue.auto_delete, where)
    _check_same_arguments(COMPARED, arguments, queue.arguments, where)


def _check_same(name: str, received: object, current: object, where: str) -> None:
    if received != current:
        values = f"received '{_erlang(received)}' but current is '{_erlang(current)}'"
        raise AmqpError(406, f"inequivalent arg '{name}' for {where}: {values}")


def _check_same_arguments(
    names: tuple[str, ...], received: dict[str, Any], current: dict[str, Any], where: str
) -> None:
    for name in names:
        if name == "x-queue-type" and not {received.get(name), current.get(name)} - _CLASSIC:
            continue
        if name in received and name in current:
            _check_same(name, received[name], current[name], where)
        elif received.get(name) != current.get(name):
            one, other = _described(received, name), _described(current, name)
            values = f"received {one} but current is {other}"
            raise AmqpError(406, f"inequivalent arg '{name}' for {where}: {values}")


def _described(arguments: dict[str, Any], name: str) -> str:
    if name not in arguments:
        return "none"
    value = arguments[name]
    return f"the value '{_erlang(value)}' of type '{field_type(value)}'"


def _erlang(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
