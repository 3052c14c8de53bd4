"""basic.publish on one channel: from a complete message to its confirm.

Knows: the checks of rabbit_channel's handle_method(#'basic.publish'{}), where faults act on a
publish, when it is settled. Must never know: frames, sockets.

Unroutable and transient messages are settled at once, persistent ones when every durable queue has
written them. basic.return is sent before the confirm.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reliablepub.testing import faults, wire
from reliablepub.testing.confirms import Confirm, ConfirmLedger
from reliablepub.testing.consumers import PSEUDO_QUEUE
from reliablepub.testing.content_header import rewritten
from reliablepub.testing.fields import field_type
from reliablepub.testing.history import Fate
from reliablepub.testing.queue_arguments import TTL_MAX_MS
from reliablepub.testing.replies import AmqpError, reply_text
from reliablepub.testing.routing import copied_keys, routing_keys

if TYPE_CHECKING:
    from reliablepub.testing.channel_base import ChannelBase
    from reliablepub.testing.history import Publish
    from reliablepub.testing.queues import Queue

PUBLISH_IDS = (60, 40)
"""Class and method of basic.publish, as errors name it."""
_RAISED_BY_METHODS = frozenset({503, 504, 506, 530, 540})  # other codes name no class and method


class Publishing:
    """The publishing side of a channel."""

    def __init__(self, channel: ChannelBase) -> None:
        self.ledger: ConfirmLedger | None = None
        self._channel = channel
        self._node = channel.connection.node
        self._late_returns: list[Publish] = []

    def confirm_select(self) -> None:
        """confirm.select: idempotent; never resets the delivery tags."""
        if self._channel.transaction is not None:
            raise AmqpError(406, "cannot switch from tx to confirm mode")
        self.ledger = self.ledger or ConfirmLedger()

    def publish(self, publish: Publish) -> None:
        """Handle a publish that has arrived completely: withhold or process it."""
        self._node.history.add(publish)
        publish.faults = self._node.script.on_publish(publish.routing_key)
        for fault in publish.faults:
            if isinstance(fault, faults.Block | faults.Freeze):
                self._node.trigger(fault)
        if self._node.alarm is not None or self._node.triggered:
            self._channel.connection.withhold(publish, self.resume)
        else:
            self.process(publish)

    def resume(self, publish: Publish) -> None:
        """Process a publish that was withheld."""
        try:
            self.process(publish)
        except AmqpError as error:
            ids = PUBLISH_IDS if error.ids is None else error.ids
            end = self._channel.connection if error.is_hard else self._channel
            end.close(error.code, error.reply_text, ids)

    def process(self, publish: Publish) -> None:
        """Process a publish that is not, or no longer, withheld."""
        endings = [fault for fault in publish.faults if isinstance(fault, faults.EndingFault)]
        for fault in endings:
            if not fault.accepted:
                is_close = isinstance(fault, faults.CloseChannel | faults.CloseConnection)
                publish.fate = Fate.REFUSED if is_close else Fate.LOST
                self._end(fault)
                return
        if faults.DeleteExchange in _kinds(publish):
            self._delete_exchange(publish.exchange)
        publish.fate = Fate.REFUSED
        self.check_destination(publish)
        self._check_properties(publish)
        if self._channel.transaction is None:
            self.take(publish)
        else:
            publish.fate = Fate.WITHHELD
            self._channel.transaction.add_publish(publish)
        for fault in endings:
            self._node.write_now(publish)
            self._end(fault)
            return

    def check_destination(self, publish: Publish) -> None:
        """Check what RabbitMQ checks before it decodes the properties: the size, the exchange.

        Raises:
            AmqpError: The publish is refused.
        """
        size_max = self._node.options.max_message_size
        if len(publish.body) > size_max:
            raise AmqpError(406, oversize(len(publish.body), size_max))
        if self._channel.exchange(publish.exchange, "write").internal:
            where = self._channel.place("exchange", publish.exchange)
            raise AmqpError(403, f"cannot publish to internal {where}")

    def _check_properties(self, publish: Publish) -> None:
        properties, user = publish.properties, self._channel.connection.user
        if properties.reply_to == PSEUDO_QUEUE:
            _rewrite(publish, reply_to=self._channel.reply_name())
        if properties.user_id is not None and properties.user_id != user:
            asked = f"user_id property set to '{properties.user_id}'"
            raise AmqpError(406, f"{asked} but authenticated user was '{user}'")
        if properties.expiration is not None:
            _check_expiration(properties.expiration)
        if properties.delivery_mode not in (None, 1, 2):
            reason = f"{{delivery_mode_unknown,{properties.delivery_mode}}}"
            raise AmqpError(406, f"invalid message: {reason}")
        for name in ("CC", "BCC"):
            copies = (properties.headers or {}).get(name, [])
            if not isinstance(copies, list):
                reason = f'{{unacceptable_type_in_header,"{name}",{field_type(copies)}}}'
                raise AmqpError(406, f"invalid message: {reason}")

    def take(self, publish: Publish) -> None:
        """Route a publish that passed its checks."""
        if self.ledger is not None:
            publish.delivery_tag = self.ledger.open_tag()
        kinds = _kinds(publish)
        vhost = self._channel.connection.vhost
        queues = [] if faults.Return in kinds else vhost.route(publish)
        keys = [] if kinds & {faults.Return, faults.Nack} else routing_keys(publish)
        if "BCC" in (publish.properties.headers or {}):  # blind: consumers must not see it
            publish.blind_keys = tuple(copied_keys(publish, "BCC"))
            _rewrite(publish, drop=("BCC",))
        has_replied = self._node.reply(publish, keys)
        if faults.Nack in kinds:
            publish.rejected = True
            publish.fate = Fate.NACKED
            if faults.Return in kinds and publish.mandatory:
                self._return(publish)
            self.settle(publish)
        elif queues:
            self._enqueue(publish, queues)
        elif publish.mandatory:
            publish.fate = Fate.RETURNED
            self._return(publish)
            self.settle(publish)
        else:
            publish.fate = Fate.ACCEPTED if has_replied else Fate.UNROUTABLE
            self.settle(publish)

    def _enqueue(self, publish: Publish, queues: list[Queue]) -> None:
        publish.fate = Fate.ACCEPTED
        for queue in queues:
            if not self._node.enqueue(queue, publish, self.settle):
                # One queue that refuses makes it a nack; the others keep their copy.
                publish.rejected = True
                publish.fate = Fate.NACKED
        if publish.rejected or not publish.waiting:
            self.settle(publish)
        for fault in publish.faults:
            if isinstance(fault, faults.DeleteQueue):
                self._delete_queues(queues if fault.queue is None else fault.queue)

    def _delete_exchange(self, name: str) -> None:
        vhost = self._channel.connection.vhost
        if name and name in vhost.exchanges:  # the default exchange cannot be deleted
            vhost.remove_exchange(name)

    def _delete_queues(self, doomed: list[Queue] | str) -> None:
        vhost = self._channel.connection.vhost
        names = [doomed] if isinstance(doomed, str) else [queue.name for queue in doomed]
        for name in names:
            if name in vhost.queues:
                self._node.remove_queue(vhost, name)

    def settle(self, publish: Publish) -> None:
        """Confirm a publish with an ack or nack; a fault may delay or drop the confirm."""
        if not self._channel.is_open:
            return
        if self._channel.transaction is not None:
            self._channel.transaction.handle_settled(publish)
        if self.ledger is None or not publish.delivery_tag:  # published before confirm.select
            return
        kinds = _kinds(publish)
        if faults.DropConfirm in kinds:
            return  # the tag stays unconfirmed, so that no multiple ack covers it
        if faults.HoldConfirms in kinds:
            self._node.hold(publish, self.settle)
            return
        for fault in publish.faults:
            if isinstance(fault, faults.DelayConfirm):
                self._node.after(fault.for_s, lambda: self._settle_late(publish))
                return
        tag, nack = publish.delivery_tag, publish.rejected
        if faults.ShuffleConfirms in kinds:
            self.ledger.settle_shuffled(tag, nack=nack)
        else:
            self.ledger.settle(tag, nack=nack)
        for fault in publish.faults:
            self._add_extra(fault, publish)
        self._node.settled(self.send_confirms)

    def _settle_late(self, publish: Publish) -> None:
        publish.drop_faults(faults.DelayConfirm)
        self.settle(publish)

    def _add_extra(self, fault: faults.Fault, publish: Publish) -> None:
        assert self.ledger is not None
        if isinstance(fault, faults.DuplicateConfirm):
            self.ledger.add_extra(Confirm(publish.delivery_tag, nack=publish.rejected))
        elif isinstance(fault, faults.StrayAck):
            tag = fault.tag
            if fault.beyond is not None:
                tag = self.ledger.last_tag + fault.beyond
            self.ledger.add_extra(Confirm(tag or 0, multiple=fault.multiple))
        elif isinstance(fault, faults.LateReturn):
            self._late_returns.append(publish)

    def send_confirms(self) -> None:
        """Send the confirms that are due in one write, then late returns."""
        if self.ledger is None or not self._channel.is_open:
            return
        number = self._channel.number
        frames = [
            wire.encode_confirm(number, one.delivery_tag, multiple=one.multiple, nack=one.nack)
            for one in self.ledger.poll(self._node.random)
        ]
        self._channel.connection.send(b"".join(frames))
        late, self._late_returns = self._late_returns, []
        for publish in late:
            self._send_return(publish)

    def _return(self, publish: Publish) -> None:
        for fault in publish.faults:
            if isinstance(fault, faults.DropReturn):
                return
            if isinstance(fault, faults.DelayReturn):
                self._node.after(fault.for_s, lambda: self._send_return(publish))
                return
        self._send_return(publish)

    def _send_return(self, publish: Publish) -> None:
        if not self._channel.is_open:
            return
        method = wire.encode_return(publish.exchange, publish.routing_key)
        self._channel.send_content(method, publish)

    def _end(self, fault: faults.EndingFault) -> None:
        connection = self._channel.connection
        if isinstance(fault, faults.CloseChannel):
            self._channel.close(fault.code, reply_text(fault.code, fault.text), PUBLISH_IDS)
        elif isinstance(fault, faults.CloseConnection):
            ids = PUBLISH_IDS if fault.code in _RAISED_BY_METHODS else (0, 0)
            connection.close(fault.code, reply_text(fault.code, fault.text), ids)
        elif isinstance(fault, faults.DropConnection):
            if fault.after_bytes:
                connection.cut(sent=fault.after_bytes, reset=fault.reset)
            else:
                connection.drop(reset=fault.reset)
        elif isinstance(fault, faults.HalfOpen):
            connection.go_mute()
        elif isinstance(fault, faults.Crash):
            self._node.trigger(fault)
            connection.drop(reset=True)


def _kinds(publish: Publish) -> set[type[faults.Fault]]:
    return {type(fault) for fault in publish.faults}


def _rewrite(publish: Publish, *, drop: tuple[str, ...] = (), reply_to: str | None = None) -> None:
    """Change the header of a publish; other publishes may share the old one."""
    publish.header = rewritten(publish.header, drop=drop, reply_to=reply_to)


def oversize(size: int, size_max: int) -> str:
    """Return RabbitMQ's reply text for a body that is too large."""
    return f"message size {size} is larger than configured max size {size_max}"


def _check_expiration(text: str) -> None:
    """Raise 406 as rabbit_basic:parse_expiration and rabbit_misc:check_expiry do."""
    number = re.match(r"[+-]?[0-9]+", text)
    if number is None:
        fault = "no_integer"
    elif number.end() < len(text):
        fault = f'{{leftover_string,"{text[number.end() :]}"}}'
    elif int(text) < 0:
        fault = f"{{value_negative,{int(text)}}}"
    elif int(text) > TTL_MAX_MS:
        fault = f"{{value_too_large,{int(text)}}}"
    else:
        return
    raise AmqpError(406, f"invalid expiration '{text}': {fault}")
