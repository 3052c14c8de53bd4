"""Faults of confirms and returns: how, how often and when the broker answers a publish.

Knows: the fields of each fault. Must never know: how the broker carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from reliablepub.testing.faults.rule import PublishFault


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack(PublishFault):
    """No queue accepts the message; its confirm is a basic.nack."""

    kind = "nack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Return(PublishFault):
    """The message is unroutable despite all bindings: basic.return (if mandatory), then the ack."""

    kind = "return"


@dataclass(frozen=True, slots=True, kw_only=True)
class DropReturn(PublishFault):
    """If the message is unroutable, its basic.return is not sent; its confirm is."""

    kind = "drop_return"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayReturn(PublishFault):
    """If the message is unroutable, its basic.return is sent `for_s` seconds late.

    So it follows the confirm, unless a `DelayConfirm` delays the confirm for longer.
    """

    kind = "delay_return"
    _positive = ("for_s",)
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LateReturn(PublishFault):
    """A basic.return after the ack of a message that was routed: RabbitMQ never does this."""

    kind = "late_return"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldConfirms(PublishFault):
    """The confirm of every matching publish waits for `FakeBroker.release_confirms()`."""

    kind = "hold_confirms"
    keep: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayConfirm(PublishFault):
    """The confirm is sent `for_s` seconds late; confirms of later publishes do not wait for it."""

    kind = "delay_confirm"
    _positive = ("for_s",)
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DropConfirm(PublishFault):
    """The message is accepted, and its confirm is never sent."""

    kind = "drop_confirm"


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateConfirm(PublishFault):
    """The confirm is sent, then sent again singly."""

    kind = "duplicate_confirm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleConfirms(PublishFault):
    """Confirms that fall due together are sent singly, in random order."""

    kind = "shuffle_confirms"
    keep: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayAck(PublishFault):
    """After the confirm of the publish comes an extra ack, which confirms nothing in flight.

    Attributes:
        beyond: The tag, counted from the last one opened on the channel.
        tag: The tag itself: never used or settled long ago; 0 with `multiple` means all tags.
        multiple: The `multiple` flag of the extra ack.
    """

    kind = "stray_ack"
    beyond: int | None = None
    tag: int | None = None
    multiple: bool = False

    def __post_init__(self) -> None:
        """Require exactly one of `beyond` and `tag`."""
        PublishFault.__post_init__(self)
        if (self.beyond is None) == (self.tag is None):
            raise ValueError("give either beyond or tag")
