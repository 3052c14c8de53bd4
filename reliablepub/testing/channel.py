"""One channel: dispatches methods, assembles content, and closes.

This module knows which method belongs to which side of the channel, how a publish is assembled
from its method, header and body frames (rabbit_command_assembler), and channel.close.
It must never know sockets or other channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pamqp import commands

from reliablepub.testing import declaring, decoding, encoding, wire
from reliablepub.testing.consuming import Consuming
from reliablepub.testing.history import Publish
from reliablepub.testing.options import EVERYTHING
from reliablepub.testing.publishing import Publishing, oversize
from reliablepub.testing.replies import AmqpError
from reliablepub.testing.transactions import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from pamqp.base import Frame

    from reliablepub.testing.connection import Connection
    from reliablepub.testing.queues import Queue
    from reliablepub.testing.routing import Exchange

_PUBLISH_IDS = (60, 40)


class Channel:
    """The server's side of a channel: open, or closed by the server and waiting for close-ok."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.is_open = True
        self.is_awaiting_close_ok = False
        self.last_queue = ""
        """The queue that an empty name stands for: the last one declared on this channel."""
        self.transaction: Transaction | None = None
        self.publishing = Publishing(self)
        self.consuming = Consuming(self)
        self._method: tuple[str, str, bool, bool] | None = None
        self._header: bytes | None = None
        self._body: list[bytes] = []
        self._missing = 0

    # ------------------------------------------------------------------------------ frames in

    def handle_frame(self, kind: int, payload: bytes) -> None:
        """Handle a frame of this channel; a soft error closes the channel, a hard one is raised.

        Raises:
            AmqpError: A hard error, with the method that caused it.
        """
        if not self.is_open:
            return
        try:
            if kind == wire.METHOD:
                self._handle_method(payload)
            elif kind == wire.HEADER:
                self._handle_header(payload)
            else:
                self._handle_body(payload)
        except AmqpError as error:
            if error.ids is None:
                error.ids = decoding.ids_of(payload) if kind == wire.METHOD else _PUBLISH_IDS
            if error.is_hard:
                raise
            self.close(error.code, error.reply_text, error.ids)

    def _handle_method(self, payload: bytes) -> None:
        if self._method is not None:
            raise self._interrupted()
        if payload.startswith(decoding.PUBLISH):
            self._method = decoding.decode_publish(payload)
            return
        method = decoding.decode_method(payload)
        handle = _HANDLERS.get(type(method))
        if handle is None:
            raise AmqpError(503, "unimplemented method")
        handle(self, method)

    def _handle_header(self, payload: bytes) -> None:
        class_id, size, _flags = decoding.decode_header(payload)
        if self._method is None or self._header is not None:
            raise self._interrupted()
        if class_id != decoding.BASIC_CLASS:
            explanation = "expected content header for class 60, got one for class"
            raise AmqpError(505, f"{explanation} {class_id} instead")
        size_max = self.connection.node.options.max_message_size
        if size > size_max:
            raise AmqpError(406, oversize(size, size_max))
        self._header = payload
        self._missing = size
        if not size:
            self._complete()

    def _handle_body(self, payload: bytes) -> None:
        if self._header is None:
            raise self._interrupted()
        self._missing -= len(payload)
        if self._missing < 0:
            # RabbitMQ waits for ever after a body that is longer than declared. So does this
            # channel, but it drops the bytes.
            self._body.clear()
            return
        if payload:  # any number of empty body frames is legal
            self._body.append(payload)
        if not self._missing:
            self._complete()

    def _interrupted(self) -> AmqpError:
        """505 for a frame of the wrong kind; the text names the frame that was expected."""
        if self._method is None:
            explanation = "expected method frame, got non method frame instead"
            return AmqpError(505, explanation, (0, 0))
        if self._header is None:
            expected, got = "content header for class 60", "content header"
        else:
            expected, got = "content body", "content body"
        return AmqpError(505, f"expected {expected}, got non {got} frame instead", _PUBLISH_IDS)

    def _complete(self) -> None:
        assert self._method is not None
        assert self._header is not None
        exchange, routing_key, mandatory, immediate = self._method
        header, body = self._header, b"".join(self._body)
        self._method, self._header, self._body = None, None, []
        if immediate:
            raise AmqpError(540, "immediate=true")
        try:
            properties = decoding.decode_properties(header)
        except decoding.MalformedError:  # the channel process of RabbitMQ crashes
            raise AmqpError(541, ids=(0, 0)) from None
        publish = Publish(
            exchange=exchange,
            routing_key=routing_key,
            mandatory=mandatory,
            header=header,
            properties=properties,
            body=body,
            connection=self.connection.number,
            channel=self.number,
        )
        self.publishing.publish(publish)

    def resume(self, publish: Publish) -> None:
        """Process a publish that was withheld."""
        try:
            self.publishing.process(publish)
        except AmqpError as error:  # the checks of a publish raise soft errors only
            self.close(error.code, error.reply_text, _PUBLISH_IDS)

    # ------------------------------------------------------------------------------ frames out

    def reply(self, method: Frame, *, nowait: bool = False) -> None:
        """Answer with a method, unless the client asked for no answer."""
        if not nowait:
            self.connection.send(encoding.encode_method(self.number, method))

    def send_method(self, payload: bytes) -> None:
        """Send a method that is encoded already."""
        self.connection.send(wire.encode_frame(wire.METHOD, self.number, payload))

    def send_content(self, method: bytes, publish: Publish) -> None:
        """Send a method with the content of a publish."""
        frame_max = self.connection.frame_max
        self.connection.send(
            encoding.encode_content(self.number, method, publish.header, publish.body, frame_max)
        )

    # ------------------------------------------------------------------------------ the end

    def close(self, code: int, text: str, ids: tuple[int, int]) -> None:
        """Send channel.close; publishes in flight get no confirm, and later input is ignored."""
        if not self.is_open:
            return
        self.release()
        self.is_awaiting_close_ok = True
        self.send_method(encoding.encode_close(commands.Channel.Close, code, text, ids))

    def release(self) -> None:
        """Stop: open delivery tags are dropped, deliveries go back to their queues."""
        if self.is_open:
            self.is_open = False
            self._method, self._header, self._body = None, None, []
            if self.transaction is not None:
                self.transaction.release()
            self.consuming.close()

    # ------------------------------------------------------------------------------ look-ups

    def check_access(self, right: str, what: str, name: str) -> None:
        """Raise 403 unless the user has the right to `configure`, `write` or `read` the name."""
        if not self.connection.permissions.allow(right, name or "amq.default"):
            place, user = self.place(what, name or "amq.default"), self.connection.user
            raise AmqpError(403, f"access to {place} refused for user '{user}'")

    def name_or_last(self, name: str) -> str:
        """The name; an empty one stands for the last queue declared on this channel."""
        if not name and not self.last_queue:
            raise AmqpError(404, "no previously declared queue")
        return name or self.last_queue

    def queue_or_last(self, name: str, right: str) -> Queue:
        """The queue; an empty name stands for the last one declared on this channel."""
        name = self.name_or_last(name)
        self.check_access(right, "queue", name)
        return self.queue(name)

    def exchange(self, name: str, right: str | None) -> Exchange:
        """The exchange; raises 403 without the right (None needs none), or 404."""
        if right is not None and self.connection.permissions is not EVERYTHING:
            self.check_access(right, "exchange", name)
        exchange = self.connection.vhost.exchanges.get(name)
        if exchange is None:
            explanation = f"no {self.place('exchange', name)}"
            raise AmqpError(404, explanation)
        return exchange

    def queue(self, name: str) -> Queue:
        """The queue; raises 404, or 405 if the queue is exclusive to another connection."""
        queue = self.connection.vhost.queues.get(name)
        if queue is None:
            explanation = f"no {self.place('queue', name)}"
            raise AmqpError(404, explanation)
        if queue.owner not in (None, self.connection.number):
            raise self.locked(name)
        return queue

    def locked(self, name: str) -> AmqpError:
        """405: exclusive to another connection, or declared with a different exclusive flag."""
        return AmqpError(
            405,
            f"cannot obtain exclusive access to locked {self.place('queue', name)}. "
            "It could be originally declared on another connection or the exclusive property "
            "value does not match that of the original declaration.",
        )

    def place(self, what: str, name: str) -> str:
        """`queue 'q' in vhost '/'`, as in RabbitMQ's texts (rabbit_misc:rs)."""
        return f"{what} '{name}' in vhost '{self.connection.vhost.name}'"


def _confirm_select(channel: Channel, method: commands.Confirm.Select) -> None:
    channel.publishing.confirm_select()
    channel.reply(commands.Confirm.SelectOk(), nowait=method.nowait)


def _tx_select(channel: Channel, _: commands.Tx.Select) -> None:
    if channel.publishing.ledger is not None:
        raise AmqpError(406, "cannot switch from confirm to tx mode")
    channel.transaction = channel.transaction or Transaction(channel)
    channel.reply(commands.Tx.SelectOk())


def _transaction(channel: Channel) -> Transaction:
    if channel.transaction is None:
        raise AmqpError(406, "channel is not transactional")
    return channel.transaction


def _flow(channel: Channel, method: commands.Channel.Flow) -> None:
    if not method.active:
        raise AmqpError(540, "active=false")
    channel.reply(commands.Channel.FlowOk(active=True))


def _recover(
    channel: Channel, method: commands.Basic.Recover | commands.Basic.RecoverAsync
) -> None:
    if not method.requeue:
        raise AmqpError(540, "requeue=false")
    if isinstance(method, commands.Basic.Recover):
        channel.reply(commands.Basic.RecoverOk())
    channel.consuming.recover()


_HANDLERS: dict[type[Frame], Callable[[Channel, Any], None]] = {
    commands.Basic.Ack: lambda c, m: c.consuming.acknowledge(m.delivery_tag, multiple=m.multiple),
    commands.Basic.Cancel: lambda c, m: c.consuming.cancel(m),
    commands.Basic.Consume: lambda c, m: c.consuming.consume(m),
    commands.Basic.Get: lambda c, m: c.consuming.get(m),
    commands.Basic.Nack: lambda c, m: c.consuming.reject(
        m.delivery_tag, multiple=m.multiple, requeue=m.requeue
    ),
    commands.Basic.Qos: lambda c, m: c.consuming.qos(m),
    commands.Basic.Recover: _recover,
    commands.Basic.RecoverAsync: _recover,
    commands.Basic.Reject: lambda c, m: c.consuming.reject(
        m.delivery_tag, multiple=False, requeue=m.requeue
    ),
    commands.Channel.Flow: _flow,
    commands.Confirm.Select: _confirm_select,
    commands.Exchange.Bind: declaring.bind_exchange,
    commands.Exchange.Declare: declaring.declare_exchange,
    commands.Exchange.Delete: declaring.delete_exchange,
    commands.Exchange.Unbind: declaring.unbind_exchange,
    commands.Queue.Bind: declaring.bind_queue,
    commands.Queue.Declare: declaring.declare_queue,
    commands.Queue.Delete: declaring.delete_queue,
    commands.Queue.Purge: declaring.purge_queue,
    commands.Queue.Unbind: declaring.unbind_queue,
    commands.Tx.Commit: lambda c, _: _transaction(c).commit(),
    commands.Tx.Rollback: lambda c, _: _transaction(c).rollback(),
    commands.Tx.Select: _tx_select,
}
