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
from reliablepub.testing.fields import erlang_term, field_type, is_same
from reliablepub.testing.queue_arguments import (
    COMPARED,
    check_exchange_argument,
    check_queue_arguments,
    check_replicated_flags,
    check_server_named,
    queue_type,
)
from reliablepub.testing.queues import Stream, new_queue
from reliablepub.testing.replies import AmqpError
from reliablepub.testing.routing import EXCHANGE_TYPES, Exchange, new_binding

if TYPE_CHECKING:
    from reliablepub.testing.channel_base import ChannelBase
    from reliablepub.testing.queues import Queue
    from reliablepub.testing.routing import Binding


def declare_exchange(channel: ChannelBase, method: ExchangeMethods.Declare) -> None:
    """exchange.declare."""
    vhost = channel.connection.vhost
    name, arguments = _stripped(method.exchange), dict(method.arguments or {})
    if not method.passive and method.exchange_type not in EXCHANGE_TYPES:
        wrong = "unknown" if method.exchange_type else "invalid"
        raise AmqpError(503, f"{wrong} exchange type '{method.exchange_type}'")
    _check_not_default(name)
    if not method.passive:
        channel.check_access("configure", "exchange", name)
    if method.passive:
        channel.exchange(name, None)
    elif name not in vhost.exchanges:
        _check_name(name, "exchange")
        _check_onward(channel, "exchange", name, arguments, "alternate-exchange")
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
    _check_not_default(name)
    if name.startswith("amq."):
        raise AmqpError(403, f"deletion of system {channel.place('exchange', name)} not allowed")
    channel.check_access("configure", "exchange", name)
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
    if not method.passive:
        if name:
            _check_name(name, "queue")
        else:
            check_server_named(arguments)
            name = node.generated_name("amq.gen-")
        channel.check_access("configure", "queue", name)
    if method.passive or name in vhost.queues:
        queue = channel.queue(name)
        if not method.passive:
            _check_same_queue(channel, queue, method, arguments)
    else:
        _check_onward(channel, "queue", name, arguments, "x-dead-letter-exchange")
        check_queue_arguments(arguments, channel.place("queue", name))
        if queue_type(arguments) != "classic":
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
        consumers = 0 if isinstance(queue, Stream) else len(queue.consumers)
        counts = (len(queue.ready), consumers)
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
    if method.if_empty and queue.ready:
        raise AmqpError(406, f"{where} not empty")
    if method.if_unused and queue.consumers:
        raise AmqpError(406, f"{where} in use")


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
    if source in vhost.exchanges and binding in vhost.exchanges[source].bindings:
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
    return source, new_binding(name, key, method.arguments)


def _exchange_binding(
    channel: ChannelBase, method: ExchangeMethods.Bind | ExchangeMethods.Unbind
) -> tuple[str, Binding]:
    destination, source = _stripped(method.destination), _stripped(method.source)
    channel.check_access("write", "exchange", destination)
    _check_not_default(destination)
    _check_not_default(source)
    channel.check_access("read", "exchange", source)
    key = method.routing_key or ""
    return source, new_binding(destination, key, method.arguments, to_exchange=True)


def _bind(channel: ChannelBase, source: str, binding: Binding) -> None:
    """Add a binding; if both ends are missing, the 404 names the source."""
    vhost = channel.connection.vhost
    exchange = channel.exchange(source, None)
    if binding.to_exchange:
        channel.exchange(binding.destination, None)
    elif binding.destination not in vhost.queues:
        raise AmqpError(404, f"no {channel.place('queue', binding.destination)}")
    if exchange.type == "headers":
        _check_match(binding.arguments.get("x-match", "all"))
    if not binding.to_exchange:
        channel.queue(binding.destination)  # raises 405 if exclusive to another connection
    vhost.bind(source, binding)


def _stripped(name: str) -> str:
    """Return the name without CR and LF, which RabbitMQ strips in declarations and bindings."""
    return name.replace("\r", "").replace("\n", "")


def _check_not_default(name: str) -> None:
    if not name:
        raise AmqpError(403, "operation not permitted on the default exchange")


def _check_name(name: str, what: str) -> None:
    if name.startswith("amq."):
        raise AmqpError(403, f"{what} name '{name}' contains reserved prefix 'amq.*'")


def _check_onward(
    channel: ChannelBase, what: str, name: str, arguments: dict[str, Any], argument: str
) -> None:
    """Check the rights of forwarding: to read here, and to write to the other exchange."""
    if argument in arguments:
        check_exchange_argument(arguments, argument, channel.place(what, name))
        channel.check_access("read", what, name)
        channel.check_access("write", "exchange", arguments[argument])


def _check_match(mode: object) -> None:
    shown = erlang_term(mode)
    if not isinstance(mode, str):
        wrong = f"Invalid x-match field type {field_type(mode)} (value {shown})"
        raise AmqpError(406, f"{wrong}; expected longstr")
    if mode not in ("all", "any", "all-with-x", "any-with-x"):
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
    _check_same_arguments(COMPARED[queue.kind], arguments, queue.arguments, where)


def _check_same(name: str, received: object, current: object, where: str) -> None:
    if not _is_same(received, current):
        values = f"received '{_erlang(received)}' but current is '{_erlang(current)}'"
        raise AmqpError(406, f"inequivalent arg '{name}' for {where}: {values}")


def _check_same_arguments(
    names: tuple[str, ...], received: dict[str, Any], current: dict[str, Any], where: str
) -> None:
    for name in names:
        if name in received and name in current:
            _check_same(name, received[name], current[name], where)
        elif name in received or name in current:
            if name == "x-queue-type" and "classic" in (received.get(name), current.get(name)):
                continue
            one, other = _described(received, name), _described(current, name)
            values = f"received {one} but current is {other}"
            raise AmqpError(406, f"inequivalent arg '{name}' for {where}: {values}")


def _described(arguments: dict[str, Any], name: str) -> str:
    if name not in arguments:
        return "none"
    value = arguments[name]
    return f"the value '{_erlang(value)}' of type '{field_type(value)}'"


def _is_same(one: object, other: object) -> bool:
    """Whether RabbitMQ takes two values for equal: integers of any type, but no other number."""
    return is_same(one, other) and isinstance(one, float) == isinstance(other, float)


def _erlang(value: object) -> str:
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="surrogateescape")
    return value if isinstance(value, str) else erlang_term(value)
