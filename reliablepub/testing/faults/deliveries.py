"""Faults of deliveries, between a queue and its consumers.

Knows: the fields of each fault. Must never know: how the broker carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from reliablepub.testing.faults.rule import DeliveryFault


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelConsumer(DeliveryFault):
    """The server cancels the consumer (basic.cancel) that would get the message.

    The message stays in the queue, and unacknowledged messages stay with the channel. The fault
    does not act on basic.get.
    """

    kind = "cancel_consumer"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayDelivery(DeliveryFault):
    """The message is delivered `for_s` seconds late; later messages overtake it.

    A basic.get is answered late.
    """

    kind = "delay_delivery"
    _positive = ("for_s",)
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatDelivery(DeliveryFault):
    """The message is delivered once more, to the next free consumer, marked as redelivered."""

    kind = "repeat_delivery"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseAck(DeliveryFault):
    """The ack, nack or reject of the message is lost: it stays unacknowledged.

    It is delivered again when its channel ends.
    """

    kind = "lose_ack"
