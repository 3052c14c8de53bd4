"""Faults of verdicts: what a publish is answered with, how often, and when.

This module must never know how the broker carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass

from reliablepub.testing.faults.rule import PublishFault, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack(PublishFault):
    """No queue takes the message; its confirm is a basic.nack."""

    kind = "nack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Return(PublishFault):
    """The message is unroutable, whatever is bound: basic.return (if mandatory), then the ack."""

    kind = "return"


@dataclass(frozen=True, slots=True, kw_only=True)
class DropReturn(PublishFault):
    """If the message is unroutable, its basic.return is not sent; its confirm is."""

    kind = "drop_return"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayReturn(PublishFault):
    """If the message is unroutable, its basic.return comes `for_s` late, and so after its confirm.

    With a `DelayConfirm` that is longer it still comes before it.
    """

    kind = "delay_return"
    for_s: float

    def __post_init__(self) -> None:
        """A delay lasts."""
        PublishFault.__post_init__(self)
        check_positive(for_s=self.for_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateReturn(PublishFault):
    """A basic.return after the ack of a message that was routed: RabbitMQ never does this."""

    kind = "late_return"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldConfirms(PublishFault):
    """Confirms are not sent until `FakeBroker.release_confirms()`; for every publish it matches."""

    kind = "hold_confirms"
    keep: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayConfirm(PublishFault):
    """The confirm is sent `for_s` after it was due; those of later publishes do not wait for it."""

    kind = "delay_confirm"
    for_s: float

    def __post_init__(self) -> None:
        """A delay lasts."""
        PublishFault.__post_init__(self)
        check_positive(for_s=self.for_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropConfirm(PublishFault):
    """The message is taken and its confirm never sent."""

    kind = "drop_confirm"


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateConfirm(PublishFault):
    """The confirm is sent, and sent again singly."""

    kind = "duplicate_confirm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleConfirms(PublishFault):
    """Confirms that fall due together are sent singly, in random order."""

    kind = "shuffle_confirms"
    keep: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayAck(PublishFault):
    """With the confirm of the publish comes an ack that confirms nothing that is in flight.

    Attributes:
        beyond: The tag is this far beyond the last one opened on the channel.
        tag: The tag itself: a number never used or long settled; 0 with `multiple` means all.
        multiple: The flag of the stray ack.
    """

    kind = "stray_ack"
    beyond: int | None = None
    tag: int | None = None
    multiple: bool = False

    def __post_init__(self) -> None:
        """Exactly one of the two ways to name the tag."""
        PublishFault.__post_init__(self)
        if (self.beyond is None) == (self.tag is None):
            raise ValueError("say either beyond or tag")
