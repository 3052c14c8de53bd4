"""Declares or checks a topology on an open connection, before anything is published.

Knows: pika's channels, and RabbitMQ's replies. Must never know: what will be published.

Steps are taken one after another. The broker closes the channel when a step fails, so the next step
gets a new channel, and all problems are found, not only the first. There is never more than one
channel, and none at the end: the user, or the connection, may be limited to one.

A check changes nothing:

- A passive declaration shows whether an object exists.
- An ordinary declaration of an existing object shows whether its arguments match: if not, RabbitMQ
  refuses it with 406. It refuses with 403 if the user may not configure the object, which is no
  problem for a publisher.
- A publish with an invalid ``expiration`` shows whether the user may write to an exchange. RabbitMQ
  checks permissions first, then refuses the message with 406, so it never arrives
  (rabbit_channel:handle_method of basic.publish). A 403 for the routing key alone comes after the
  permission to write, so it is no problem either: no other routing key is known.
- AMQP has no query for bindings. A missing binding shows when messages are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import pika
from pika import exceptions
from pika.adapters.select_connection import SelectConnection
from pika.channel import Channel

from reliablepub.outcome import Concern, Outcome, OutcomeKind
from reliablepub.topology import Binding, Exchange, Queue, Topology
from reliablepub.transport.base import text

Act: TypeAlias = Callable[[Channel, Callable[..., None]], Any]
"""Sends a request on a channel; the callback is called when the broker has answered."""

_ACCESS_REFUSED: Final = 403
_PRECONDITION_FAILED: Final = 406

Excuse: TypeAlias = Callable[[exceptions.ChannelClosedByBroker], bool]
"""Whether a refusal counts as success."""


def _nothing(_: exceptions.ChannelClosedByBroker) -> bool:
    return False


def _not_ours_to_configure(error: exceptions.ChannelClosedByBroker) -> bool:
    return bool(error.reply_code == _ACCESS_REFUSED)


def _refused_as_meant(error: exceptions.ChannelClosedByBroker) -> bool:
    outcome = Outcome(OutcomeKind.REFUSED, error.reply_code, text(error.reply_text))
    is_of_key = outcome.reply_code == _ACCESS_REFUSED and outcome.concern is Concern.ADDRESS
    return outcome.reply_code == _PRECONDITION_FAILED or is_of_key


class _Step(NamedTuple):
    """One request to the broker."""

    whom: str  # for problem texts
    act: Act
    is_excused: Excuse = _nothing


Steps: TypeAlias = Generator[_Step, bool, None]
"""Yields steps; receives whether the last step succeeded."""


class Provision:
    """Declares or checks one topology on one connection."""

    def __init__(
        self,
        connection: SelectConnection,
        topology: Topology,
        on_end: Callable[[list[str]], None],  # called once, unless the connection is lost
        *,
        reopen_after_s: float,
    ) -> None:
        self._connection = connection
        self._steps = _declaring(topology) if topology.declare else _checking(topology)
        self._step: _Step | None = None
        self._on_end = on_end
        # RabbitMQ may still count a closed channel against the limit of its user.
        self._reopen_after_s = reopen_after_s
        self._problems: list[str] = []
        self._channel: Channel | None = None
        self.taken: int = 0  # steps, the current one included

    def start(self) -> None:
        """Take the first step."""
        self._step = next(self._steps, None)
        self._take()

    @property
    def awaits(self) -> str:
        """The request to which the broker owes an answer; empty at the end."""
        if self._step is not None:
            return f"the declaration of {self._step.whom}"
        return "" if self._channel is None else "the closing of the channel for declarations"

    def _take(self) -> None:
        """Take the current step, on the open channel or on a new one; at the end, close it."""
        self.taken += 1
        if self._step is None:
            if self._channel is None:
                self._on_end(self._problems)
            else:
                self._channel.close()  # `_closed` follows
        elif self._channel is None:
            channel = self._connection.channel(on_open_callback=self._opened)
            channel.add_on_close_callback(self._closed)
        else:
            self._step.act(self._channel, self._done)

    def _opened(self, channel: Channel) -> None:
        self._channel = channel
        self._take()

    def _done(self, *_: object) -> None:
        self._go_on(is_well=True)

    def _closed(self, channel: Channel, error: Exception) -> None:
        """Record a step that the broker refused, if there is one, and go on without this channel.

        pika frees the channel's number only after this callback. A lost connection is reported
        elsewhere.
        """
        if channel is not self._channel or not self._connection.is_open:
            return
        self._channel = None
        is_well = True
        if self._step is not None:
            assert isinstance(error, exceptions.ChannelClosedByBroker)
            is_well = self._step.is_excused(error)
            if not is_well:
                words = text(error.reply_text)
                self._problems.append(f"{self._step.whom}: {error.reply_code} {words}")
        go_on = partial(self._go_on, is_well=is_well)
        self._connection.ioloop.call_later(self._reopen_after_s, go_on)

    def _go_on(self, *, is_well: bool) -> None:
        if not self._connection.is_open:
            return  # lost since the channel ended
        try:
            self._step = self._steps.send(is_well)
        except StopIteration:
            self._step = None
        self._take()


def _declaring(topology: Topology) -> Steps:
    for exchange in topology.exchanges:
        yield _Step(str(exchange), partial(_declare_exchange, exchange))
    for queue in topology.queues:
        yield _Step(str(queue), partial(_declare_queue, queue))
    for binding in topology.bindings:
        yield _Step(str(binding), partial(_bind, binding))


def _checking(topology: Topology) -> Steps:
    for exchange in topology.exchanges:
        is_there = yield _Step(str(exchange), partial(_find_exchange, exchange.name))
        if is_there:
            declare = partial(_declare_exchange, exchange)
            yield _Step(str(exchange), declare, _not_ours_to_configure)
        if is_there and not exchange.internal:
            yield _Step(str(exchange), partial(_try_to_publish, exchange), _refused_as_meant)
    for queue in topology.queues:
        is_there = yield _Step(str(queue), partial(_find_queue, queue.name))
        if is_there:
            yield _Step(str(queue), partial(_declare_queue, queue), _not_ours_to_configure)
    yield from _checking_ends(topology)


def _checking_ends(topology: Topology) -> Steps:
    """Steps for objects that bindings name but the topology does not list."""
    exchanges = dict.fromkeys(binding.exchange for binding in topology.bindings)
    exchanges |= dict.fromkeys(b.to_exchange for b in topology.bindings if b.to_exchange)
    queues = dict.fromkeys(binding.queue for binding in topology.bindings if binding.queue)
    for name in exchanges.keys() - {exchange.name for exchange in topology.exchanges}:
        yield _Step(f"exchange {name!r}", partial(_find_exchange, name))
    for name in queues.keys() - {queue.name for queue in topology.queues}:
        yield _Step(f"queue {name!r}", partial(_find_queue, name))


def _find_exchange(name: str, channel: Channel, done: Callable[..., None]) -> None:
    channel.exchange_declare(name, passive=True, callback=done)


def _find_queue(name: str, channel: Channel, done: Callable[..., None]) -> None:
    channel.queue_declare(name, passive=True, callback=done)


def _declare_exchange(exchange: Exchange, channel: Channel, done: Callable[..., None]) -> None:
    channel.exchange_declare(
        exchange.name,
        exchange_type=exchange.type,
        durable=exchange.durable,
        auto_delete=exchange.auto_delete,
        internal=exchange.internal,
        arguments=dict(exchange.arguments),
        callback=done,
    )


def _declare_queue(queue: Queue, channel: Channel, done: Callable[..., None]) -> None:
    channel.queue_declare(
        queue.name,
        durable=queue.durable,
        auto_delete=queue.auto_delete,
        arguments=dict(queue.arguments),
        callback=done,
    )


def _bind(binding: Binding, channel: Channel, done: Callable[..., None]) -> None:
    key, arguments = binding.routing_key, dict(binding.arguments)
    if binding.queue:
        channel.queue_bind(binding.queue, binding.exchange, key, arguments, callback=done)
    else:
        channel.exchange_bind(binding.to_exchange, binding.exchange, key, arguments, callback=done)


def _try_to_publish(exchange: Exchange, channel: Channel, done: Callable[..., None]) -> None:
    """Publish a message that the broker must refuse: by 403 if the user may not publish."""
    refused = pika.BasicProperties(expiration="a check by reliablepub")
    channel.basic_publish(exchange.name, "", b"", refused)
    # A publish that is not refused has no answer; this request has one.
    channel.exchange_declare(exchange.name, passive=True, callback=done)
