"""basic.consume, get, ack, nack, reject, recover, qos and cancel on one channel.

Knows: which deliveries of a channel are not acknowledged. Must never know: how messages come into a
queue, which consumer gets the next one.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from pamqp.commands import Basic

from reliablepub.testing import wire
from reliablepub.testing.consumers import (
    PSEUDO_QUEUE,
    Consumer,
    Delivery,
    ReplyConsumer,
    deliver,
    generated_reply_name,
    is_single,
    join,
)
from reliablepub.testing.consumers import requeue as put_back
from reliablepub.testing.content_header import rewritten
from reliablepub.testing.faults import CancelConsumer, DelayDelivery, LoseAck, RepeatDelivery
from reliablepub.testing.fields import WireInt
from reliablepub.testing.queue_arguments import check_consumer_arguments
from reliablepub.testing.queues import Stream
from reliablepub.testing.replies import AmqpError, crashed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from reliablepub.testing.channel_base import ChannelBase
    from reliablepub.testing.faults import DeliveryFault
    from reliablepub.testing.history import Publish
    from reliablepub.testing.queues import Entry, Queue


class Consuming:
    """The consuming side of a channel."""

    def __init__(self, channel: ChannelBase) -> None:
        self.consumers: dict[str, Consumer] = {}
        self._channel = channel
        self._node = channel.connection.node
        self._prefetch_consumer = 0
        self._prefetch_channel = 0
        self._volume = 0
        """What counts against the channel-wide prefetch (rabbit_limiter)."""
        self._last_tag = 0
        self._unacked: dict[int, Delivery] = {}
        self._late: list[Delivery] = []
        """Deliveries that a fault delays."""
        self._is_timed = False
        """Whether a timer checks for deliveries that are not acknowledged in time."""

    @property
    def unacked(self) -> Mapping[int, Delivery]:
        """The deliveries that are not acknowledged, by their tags."""
        return self._unacked

    @property
    def is_congested(self) -> bool:
        """Whether the client reads more slowly than the server sends."""
        return self._channel.connection.is_congested

    @property
    def is_going_down(self) -> bool:
        """Whether the node goes down, and the client's connection with it."""
        return self._node.is_going_down

    def has_credit(self) -> bool:
        """Whether the channel-wide prefetch has room."""
        return not 0 < self._prefetch_channel <= self._volume

    def qos(self, method: Basic.Qos) -> None:
        """basic.qos: for the whole channel if global; otherwise for new consumers.

        A prefetch for consumers ends the channel-wide one.
        """
        if method.prefetch_size:
            raise AmqpError(540, f"prefetch_size!=0 ({method.prefetch_size})")
        count = method.prefetch_count or 0
        if not method.global_:
            self._prefetch_consumer, count = count, 0
        if not (self._prefetch_channel and count):
            self._volume = len(self._unacked) if count else 0
        self._prefetch_channel = count
        self._channel.reply(Basic.QosOk())
        self.deliver_all()

    def consume(self, method: Basic.Consume) -> None:
        """basic.consume."""
        name = self._channel.name_or_last(method.queue)
        if method.consumer_tag in self.consumers:
            raise AmqpError(530, f"attempt to reuse consumer tag '{method.consumer_tag}'")
        if name == PSEUDO_QUEUE:
            self._consume_replies(method)
            return
        queue = self._channel.queue_or_last(name, "read")
        where = self._channel.place("queue", queue.name)
        arguments: Mapping[str, Any] = method.arguments or {}
        if not isinstance(queue, Stream):
            check_consumer_arguments(arguments, queue.kind, where)
        tag = method.consumer_tag or self._node.generated_name("amq.ctag-")
        offset = self._offset(queue, method) if isinstance(queue, Stream) else 0
        ignores_flag = queue.kind != "classic"
        if ignores_flag and self._prefetch_channel:
            raise AmqpError(540, f"{where} does not support global qos")
        is_taken = queue.consumers and (method.exclusive or queue.consumers[0].exclusive)
        is_taken = is_taken or (method.exclusive and is_single(queue))
        if is_taken and not ignores_flag:
            raise AmqpError(403, f"{where} in exclusive use")
        consumer = Consumer(
            self,
            tag,
            queue,
            method.no_ack,
            method.exclusive,
            self._prefetch_consumer,
            arguments.get("x-priority", 0),
            offset=offset,
            is_limited=queue.kind == "classic",
        )
        self.consumers[tag] = consumer
        join(queue, consumer)
        self._channel.reply(Basic.ConsumeOk(tag), nowait=method.nowait)
        deliver(queue, self._node.now)

    def _offset(self, stream: Stream, method: Basic.Consume) -> int:
        """Return where a consumer of a stream begins; the errors are rabbit_stream_queue's."""
        where = self._channel.place("queue", stream.name)
        start: object = (method.arguments or {}).get("x-stream-offset", "next")
        offset = stream.first_offset(start, self._node.now, self._node.clock.wall())
        if offset is None:
            reason = f'{{invalid_stream_offset_arg,{{longstr,<<"{start!s}">>}}}}'
            raise AmqpError(406, f"invalid arg 'x-stream-offset' for {where}: {reason}")
        check_consumer_arguments(method.arguments or {}, "stream", where)
        if not self._prefetch_consumer:
            raise AmqpError(406, f"consumer prefetch count is not set for '{where}'")
        if method.no_ack:
            self._channel.check_not_stream(stream, "automatic acknowledgement")
        return offset

    def _consume_replies(self, method: Basic.Consume) -> None:
        """basic.consume of the pseudo-queue, which needs no permission."""
        if not method.no_ack:
            raise AmqpError(406, "reply consumer cannot acknowledge")
        if self._channel.reply_consumer is not None:
            raise AmqpError(406, "reply consumer already set")
        tag = method.consumer_tag or self._node.generated_name("amq.ctag-")
        self._channel.reply_consumer = ReplyConsumer(tag, generated_reply_name(self._node.random))
        self._node.reply_consumers[self._channel.reply_consumer.name] = self
        self._channel.reply(Basic.ConsumeOk(tag), nowait=method.nowait)

    def send_reply(self, publish: Publish) -> None:
        """basic.deliver of a direct reply; it has the next delivery tag, which is used again."""
        assert self._channel.reply_consumer is not None
        payload = wire.encode_deliver(
            self._channel.reply_consumer.tag,
            self._last_tag + 1,
            redelivered=False,
            exchange=publish.exchange,
            routing_key=publish.routing_key,
        )
        self._channel.send_content(payload, publish)

    def _cancel_replies(self) -> None:
        if self._channel.reply_consumer is not None:
            del self._node.reply_consumers[self._channel.reply_consumer.name]
            self._channel.reply_consumer = None

    def cancel(self, method: Basic.Cancel) -> None:
        """basic.cancel; an unknown consumer is not an error."""
        tag = method.consumer_tag or ""
        if self._channel.reply_consumer is not None and tag == self._channel.reply_consumer.tag:
            self._cancel_replies()
            self._channel.reply(Basic.CancelOk(tag), nowait=method.nowait)
            return
        consumer = self.consumers.pop(tag, None)
        self._channel.reply(Basic.CancelOk(tag), nowait=method.nowait)
        if consumer is not None:
            self._leave(consumer)

    def get(self, method: Basic.Get) -> None:
        """basic.get."""
        queue = self._channel.queue_or_last(method.queue, "read")
        self._channel.check_not_stream(queue, "basic.get")
        if queue.is_quorum and is_single(queue):
            refused = f"cannot obtain access to locked {self._channel.place('queue', queue.name)}."
            reason = "operations are not supported by quorum queues with single active consumer"
            raise AmqpError(405, f"{refused} basic.get {reason}")
        self._node.keep_while_used(self._channel.connection.vhost, queue)
        queue.expire(self._node.now)
        if not queue.ready:
            self._channel.reply(Basic.GetEmpty())
            return
        delivery = self._taken(queue.take(), queue, None)
        faults = self._node.script.on_delivery(queue.name)
        self._send(delivery, faults, partial(self._send_got, delivery, no_ack=method.no_ack))

    def _send_got(self, delivery: Delivery, *, no_ack: bool) -> None:
        queue, entry = delivery.queue, delivery.entry
        if not queue.is_quorum:  # whose message_count includes what expires now
            queue.expire(self._node.now)
        tag = self._open(delivery, no_ack=no_ack)
        publish = entry.publish
        payload = wire.encode_get_ok(
            tag,
            redelivered=entry.redelivered,
            exchange=publish.exchange,
            routing_key=publish.routing_key,
            message_count=len(queue.ready),
        )
        self._channel.send_content(payload, _counted(entry) if queue.is_quorum else publish)

    def send(self, consumer: Consumer, entry: Entry) -> None:
        """basic.deliver."""
        # Clients do not see what a crash delivers; nor do faults.
        faults = () if self.is_going_down else self._node.script.on_delivery(consumer.queue.name)
        if any(isinstance(fault, CancelConsumer) for fault in faults):
            consumer.queue.put_back(entry)
            self._cancel_by_server(consumer)
            self._leave(consumer)
            return
        if not consumer.no_ack:
            consumer.unacked += 1
            self._volume += consumer.is_limited
        delivery = self._taken(entry, consumer.queue, consumer)
        self._send(delivery, faults, partial(self._send_delivered, delivery, consumer))

    def _send_delivered(self, delivery: Delivery, consumer: Consumer) -> None:
        entry = delivery.entry
        tag = self._open(delivery, no_ack=consumer.no_ack)
        publish = entry.publish
        payload = wire.encode_deliver(
            consumer.tag,
            tag,
            redelivered=entry.redelivered,
            exchange=publish.exchange,
            routing_key=publish.routing_key,
        )
        if isinstance(consumer.queue, Stream):
            publish = _located(entry)
        elif entry.delivery_count:
            publish = _counted(entry)
        self._channel.send_content(payload, publish)

    def _taken(self, entry: Entry, queue: Queue, consumer: Consumer | None) -> Delivery:
        return Delivery(entry, queue, consumer, self._node.now)

    def _send(
        self, delivery: Delivery, faults: tuple[DeliveryFault, ...], send: Callable[[], None]
    ) -> None:
        """Send a delivery with its faults: late, twice, or with its ack ignored."""
        delivery.loses_ack = any(isinstance(fault, LoseAck) for fault in faults)
        if (
            any(isinstance(one, RepeatDelivery) for one in faults)
            and not delivery.entry.is_repeated
        ):
            copy = dataclasses.replace(delivery.entry, redelivered=True, is_repeated=True)
            delivery.queue.put_back(copy)
        late_s = max((one.for_s for one in faults if isinstance(one, DelayDelivery)), default=0.0)
        if late_s:
            self._late.append(delivery)
            self._node.after(late_s, partial(self._send_late, delivery, send))
        else:
            send()

    def _send_late(self, delivery: Delivery, send: Callable[[], None]) -> None:
        if any(one is delivery for one in self._late):  # otherwise it is back in its queue
            self._late = [one for one in self._late if one is not delivery]
            send()

    def acknowledge(self, tag: int, *, multiple: bool) -> None:
        """basic.ack."""
        self._settle_or_hold(self._close(tag, multiple=multiple), None)

    def reject(self, tag: int, *, multiple: bool, requeue: bool) -> None:
        """basic.nack and basic.reject."""
        deliveries = self._close(tag, multiple=multiple)
        for delivery in deliveries.values():
            self._channel.check_not_stream(delivery.queue, "basic.nack and basic.reject")
        self._settle_or_hold(deliveries, requeue)

    def recover(self, *, nowait: bool) -> None:
        """basic.recover with requeue; recover-ok precedes the messages."""
        if any(isinstance(one.queue, Stream) for one in self._unacked.values()):
            raise crashed()
        self._channel.reply(Basic.RecoverOk(), nowait=nowait)
        deliveries, self._unacked = self._unacked, {}
        self.settle(deliveries, requeue=True)

    def _settle_or_hold(self, deliveries: dict[int, Delivery], requeue: bool | None) -> None:  # noqa: FBT001
        if self._channel.transaction is None:
            self.settle(deliveries, requeue)
        else:
            self._channel.transaction.add_settlement(deliveries, requeue)

    def settle(self, deliveries: dict[int, Delivery], requeue: bool | None) -> None:  # noqa: FBT001
        """Settle deliveries: ack (None), requeue (True), or reject and drop (False).

        One consumer after the other, and then the channel-wide prefetch, as RabbitMQ does: with
        each step a queue may deliver.
        """
        groups: dict[tuple[str, str], list[Delivery]] = {}
        for delivery in deliveries.values():
            tag = delivery.consumer.tag if delivery.consumer is not None else ""
            groups.setdefault((delivery.queue.name, tag), []).append(delivery)
        for key in sorted(groups):
            self._settle_group(groups[key], requeue)
        limited = sum(bool(one.consumer and one.consumer.is_limited) for one in deliveries.values())
        self._volume = max(0, self._volume - limited)
        self.deliver_all()

    def _settle_group(self, deliveries: list[Delivery], requeue: bool | None) -> None:  # noqa: FBT001
        """Settle deliveries of one queue to one consumer, or with basic.get."""
        queue, consumer = deliveries[0].queue, deliveries[0].consumer
        if consumer is not None:
            consumer.unacked -= len(deliveries)
        if requeue:
            put_back(deliveries, self._node.now, is_lost=False)
            return
        if requeue is False:
            for delivery in deliveries:
                queue.bury(delivery.entry.publish, "rejected")
        deliver(queue, self._node.now)

    def reopen(self, deliveries: dict[int, Delivery]) -> None:
        """Make the deliveries of a transaction that was rolled back unacknowledged again."""
        self._unacked = dict(sorted((self._unacked | deliveries).items()))

    def handle_queue_deleted(self, consumer: Consumer) -> None:
        """Handle a deleted queue: send basic.cancel if the client announced the capability."""
        self._cancel_by_server(consumer)
        self._return_late(consumer)

    def _cancel_by_server(self, consumer: Consumer) -> None:
        del self.consumers[consumer.tag]
        if self._channel.connection.has_capability("consumer_cancel_notify"):
            self._channel.reply(Basic.Cancel(consumer.tag, nowait=True))

    def deliver_all(self) -> None:
        """Deliver from every queue of this channel's consumers, which may take messages again."""
        for queue in self._queues():
            deliver(queue, self._node.now)

    def close(self) -> None:
        """End with the channel: remove its consumers, and requeue unacknowledged deliveries."""
        self._cancel_replies()
        for consumer in self.consumers.values():
            consumer.queue.consumers.remove(consumer)
        gone, self.consumers = self.consumers, {}
        deliveries = [*self._unacked.values(), *self._late]
        self._unacked, self._late = {}, []
        put_back(deliveries, self._node.now, is_lost=True)
        for consumer in gone.values():
            self._hand_over(consumer.queue)

    def _queues(self) -> set[Queue]:
        return {consumer.queue for consumer in self.consumers.values()}

    def _leave(self, consumer: Consumer) -> None:
        consumer.queue.consumers.remove(consumer)
        self._return_late(consumer)
        self._hand_over(consumer.queue)

    def _hand_over(self, queue: Queue) -> None:
        """After a consumer has left: deliver to the others, or delete an auto-delete queue."""
        deliver(queue, self._node.now)
        vhost = self._channel.connection.vhost
        self._node.keep_while_used(vhost, queue)
        is_unused = queue.auto_delete and not queue.consumers and not queue.is_deleted
        if is_unused and not self._node.is_going_down:
            vhost.remove_queue(queue.name)

    def _return_late(self, consumer: Consumer) -> None:
        """Requeue delayed deliveries of a consumer that has left."""
        returned = [one for one in self._late if one.consumer is consumer]
        self._volume = max(0, self._volume - len(returned) * consumer.is_limited)
        self._late = [one for one in self._late if one.consumer is not consumer]
        put_back(returned, self._node.now, is_lost=True)

    def _open(self, delivery: Delivery, *, no_ack: bool) -> int:
        self._last_tag += 1
        if not no_ack:
            self._unacked[self._last_tag] = delivery
            self._watch_time()
        return self._last_tag

    def _watch_time(self) -> None:
        """Set a timer for the time at which the oldest delivery must be acknowledged."""
        timeout_s = self._node.options.consumer_timeout_s
        if timeout_s is None or self._is_timed or not self._unacked:
            return
        self._is_timed = True
        oldest = next(iter(self._unacked.values()))
        check = WeakMethod(self._check_time)  # or the timer would keep closed channels alive
        self._node.timers.at(oldest.at + timeout_s, lambda: (found := check()) and found())

    def _check_time(self) -> None:
        """Close the channel if its oldest delivery is late (rabbit_channel, consumer_timeout)."""
        self._is_timed = False
        timeout_s = self._node.options.consumer_timeout_s
        assert timeout_s is not None
        oldest = next(iter(self._unacked.values()), None)
        if oldest is None or oldest.at + timeout_s > self._node.now:
            self._watch_time()
            return
        error = AmqpError(
            406,
            f"delivery acknowledgement on channel {self._channel.number} timed out. Timeout value "
            f"used: {timeout_s * 1000:.0f} ms. This timeout value can be configured, see consumers "
            "doc guide to learn more",
        )
        self._channel.close(error.code, error.reply_text, (0, 0))

    def _close(self, tag: int, *, multiple: bool) -> dict[int, Delivery]:
        if multiple and tag == 0:
            tags = list(self._unacked)
        elif tag not in self._unacked:  # with `multiple`, earlier tags are not settled either
            raise AmqpError(406, f"unknown delivery tag {tag}")
        else:
            tags = [one for one in self._unacked if one <= tag] if multiple else [tag]
        return {one: self._unacked.pop(one) for one in tags if not self._unacked[one].loses_ack}


def _counted(entry: Entry) -> Publish:
    """Return the message with the header that counts its returns to a quorum queue."""
    return _with_header(entry.publish, "x-delivery-count", entry.delivery_count)


def _located(entry: Entry) -> Publish:
    """Return the message with its offset, and without headers that a stream does not keep."""
    headers = entry.publish.properties.headers or {}
    lost = {name for name, value in headers.items() if isinstance(value, dict | list)}
    return _with_header(entry.publish, "x-stream-offset", entry.position, drop=lost)


def _with_header(publish: Publish, name: str, value: int, *, drop: Collection[str] = ()) -> Publish:
    header = rewritten(publish.header, drop=drop, add={name: WireInt(value, "long")})
    return dataclasses.replace(publish, header=header)
