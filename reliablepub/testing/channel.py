"""One channel: dispatches methods and assembles content.

Knows: which side of the channel handles a method, how a publish is assembled from its method,
header and body frames (rabbit_command_assembler). Must never know: sockets, other channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from pamqp import commands
from pamqp.base import Frame

from reliablepub.testing import declaring, decoding, wire
from reliablepub.testing.channel_base import ChannelBase, Transaction
from reliablepub.testing.consuming import Consuming
from reliablepub.testing.content_header import BASIC_CLASS, decode_header
from reliablepub.testing.history import Publish
from reliablepub.testing.publishing import PUBLISH_IDS, Publishing, oversize
from reliablepub.testing.replies import AmqpError, crashed

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliablepub.testing.channel_base import Peer

_SHARED_MAX_BYTES = 65_536
"""Maximum size of a body that a channel keeps, to share it with an equal next one."""

_WITH_CONTENT = (commands.Basic.Deliver, commands.Basic.GetOk, commands.Basic.Return)
"""Methods with content that a server only sends; a basic.publish is decoded apart."""

_T = TypeVar("_T", str, bytes)


class Channel(ChannelBase):
    """The server's side of a channel: not open yet, open, or closed and waiting for close-ok.

    In each of these states, frames must form whole commands.
    """

    def __init__(self, connection: Peer, number: int) -> None:
        super().__init__(connection, number)
        self.publishing: Final = Publishing(self)
        self.consuming: Final = Consuming(self)
        self._method: tuple[str, str, bool, bool] | Frame | None = None
        """The method whose content is due; a basic.publish, in parts, is the only legal one."""
        self._method_ids = (0, 0)
        self._header: bytes | None = None
        self._body: list[bytes] = []
        self._missing = 0
        self._last: Publish | None = None
        """The last publish, if it is small: the next one shares its equal parts."""

    # ------------------------------------------------------------------------------ frames in

    def handle_frame(self, kind: int, payload: bytes) -> None:
        """Handle a frame of this channel; a soft error closes the channel, a hard one is raised.

        Raises:
            AmqpError: A hard error, with the method that caused it.
        """
        try:
            if kind == wire.METHOD:
                self._handle_method(payload)
            elif kind == wire.HEADER:
                self._handle_header(payload)
            else:
                self._handle_body(payload)
        except AmqpError as error:
            if error.ids is None:
                error.ids = decoding.ids_of(payload) if kind == wire.METHOD else self._method_ids
            if error.is_hard:
                raise
            self.close(error.code, error.reply_text, error.ids)

    def _handle_method(self, payload: bytes) -> None:
        if self._method is not None:
            raise self._interrupted()
        if payload.startswith(decoding.PUBLISH):
            self._method = decoding.decode_publish(payload)
            self._method_ids = PUBLISH_IDS
            return
        method = decoding.decode_method(payload)
        if isinstance(method, _WITH_CONTENT):
            self._method, self._method_ids = method, decoding.ids_of(payload)
        elif isinstance(method, commands.Channel.Open):
            self._open()
        elif isinstance(method, commands.Channel.CloseOk) and self.is_awaiting_close_ok:
            self.is_gone: bool = True
        elif self.is_awaiting_close_ok:
            if isinstance(method, commands.Channel.Close):
                self.reply(commands.Channel.CloseOk())
        else:
            self._handle(method)

    def _open(self) -> None:
        if self.is_open or self.is_awaiting_close_ok:
            raise AmqpError(504, "second 'channel.open' seen")
        self.is_open: bool = True
        self.send_method(wire.CHANNEL_OPEN_OK)

    def _handle(self, method: Frame) -> None:
        if not self.is_open:
            raise AmqpError(504, "expected 'channel.open'")
        if isinstance(method, commands.Channel.Close):
            self.release()
            self.reply(commands.Channel.CloseOk())
            self.is_gone = True
            return
        handle = _HANDLERS.get(type(method))
        if handle is None:
            raise AmqpError(503, "unimplemented method")
        handle(self, method)

    def _handle_header(self, payload: bytes) -> None:
        class_id, weight, size = decode_header(payload)
        if self._method is None or self._header is not None or weight:
            raise self._interrupted()
        if class_id != BASIC_CLASS:
            explanation = "expected content header for class 60, got one for class"
            raise AmqpError(505, f"{explanation} {class_id} instead")
        self._header = payload
        self._missing = size
        size_max = self.connection.node.options.max_message_size
        if size > size_max and self.is_open:  # its body still has to arrive, and is dropped
            raise AmqpError(406, oversize(size, size_max))
        if not size:
            self._complete()

    def _handle_body(self, payload: bytes) -> None:
        if self._header is None:
            raise self._interrupted()
        self._missing -= len(payload)
        if self._missing < 0:
            # RabbitMQ waits forever after a body that is longer than declared. So does this
            # channel, but it drops the bytes.
            self._body.clear()
            return
        if payload and self.is_open:  # any number of empty body frames is legal
            self._body.append(payload)
        if not self._missing:
            self._complete()

    def _interrupted(self) -> AmqpError:
        """Make a 505 for a frame of the wrong kind; the text names the expected frame."""
        if self._method is None:
            explanation = "expected method frame, got non method frame instead"
            return AmqpError(505, explanation, (0, 0))
        if self._header is None:
            expected, got = "content header for class 60", "content header"
        else:
            expected, got = "content body", "content body"
        explanation = f"expected {expected}, got non {got} frame instead"
        return AmqpError(505, explanation, self._method_ids)

    def _complete(self) -> None:
        assert self._method is not None
        assert self._header is not None
        method, header, body = self._method, self._header, b"".join(self._body)
        self._method, self._header, self._body = None, None, []
        if self.is_awaiting_close_ok:
            return
        if not self.is_open:
            raise AmqpError(504, "expected 'channel.open'")
        if isinstance(method, Frame):
            raise AmqpError(503, "unimplemented method")
        exchange, routing_key, mandatory, immediate = method
        if immediate:
            raise AmqpError(540, "immediate=true")
        last = self._last
        if last is not None:  # so that a million equal messages take the memory of one
            exchange = _old(exchange, last.exchange)
            routing_key = _old(routing_key, last.routing_key)
            header, body = _old(header, last.header), _old(body, last.body)
        publish = Publish(
            exchange=exchange,
            routing_key=routing_key,
            mandatory=mandatory,
            header=header,
            body=body,
            connection=self.connection.number,
            channel=self.number,
        )
        try:
            publish.properties  # noqa: B018 - decoded on demand, and checked here
        except decoding.MalformedError:
            self.publishing.check_destination(publish)
            raise crashed() from None
        self._last = publish if len(body) <= _SHARED_MAX_BYTES else None
        self.publishing.publish(publish)

    # ------------------------------------------------------------------------------ the end

    def release(self) -> None:
        """Stop: drop open delivery tags, and requeue unacknowledged deliveries."""
        if self.is_open:
            self.is_open = False
            self._last = None
            self._body.clear()
            if self.transaction is not None:
                self.transaction.release()
            self.consuming.close()


def _old(new: _T, old: _T) -> _T:
    """Return the old object if both are equal, so that the new one is freed."""
    return old if new == old else new


def _confirm_select(channel: Channel, method: commands.Confirm.Select) -> None:
    channel.publishing.confirm_select()
    channel.reply(commands.Confirm.SelectOk(), nowait=method.nowait)


def _tx_select(channel: Channel, _: commands.Tx.Select) -> None:
    if channel.publishing.ledger is not None:
        raise AmqpError(406, "cannot switch from confirm to tx mode")
    consuming = channel.consuming
    channel.transaction = channel.transaction or Transaction(
        channel, channel.publishing.take, consuming.settle, consuming.reopen
    )
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
    channel.consuming.recover(nowait=isinstance(method, commands.Basic.RecoverAsync))


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
