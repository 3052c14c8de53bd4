"""The base of every fault: the fields that say when a rule acts.

Knows: when a rule acts. Must never know: what a fault does.

By default a rule acts once (after the control functions of franz-go's kfake). `nth` selects one
event, `share` a random share of events, `times` a number of events, `keep` all events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reliablepub.testing.replies import NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A rule about events: publishes, deliveries or connections.

    The base class of a fault says which: `PublishFault`, `DeliveryFault` or `ConnectionFault`.

    Attributes:
        nth: Act on the nth matching event, counted from 1, and not before.
        share: Act on this share of the events, at random (0 to 1), until the rule is removed.
        times: Act at most this many times.
        keep: Act on every matching event, unless `times` limits it.
    """

    kind: ClassVar[str]
    _positive: ClassVar[tuple[str, ...]] = ()
    """Fields that must be more than 0, unless they are None."""

    nth: int | None = None
    share: float | None = None
    times: int | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        """Check the ranges of numbers, and the reply code if there is one."""
        if self.nth is not None and self.nth < 1:
            raise ValueError("nth counts from 1")
        if self.times is not None and self.times < 1:
            raise ValueError("times must be 1 or more")
        if self.share is not None and not 0 <= self.share <= 1:
            raise ValueError("share must be between 0 and 1")
        for name in self._positive:
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0")
        if (code := getattr(self, "code", None)) is not None and code not in NAMES:
            raise ValueError(f"{code} is not an AMQP reply code")

    @property
    def times_max(self) -> int | None:
        """Maximum number of times that the rule acts; None for no limit."""
        if self.times is None and (self.keep or self.share is not None):
            return None
        return self.times or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFault(Fault):
    """A rule about publishes; with `routing_key`, only about those with this key."""

    routing_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryFault(Fault):
    """A rule about deliveries to consumers; with `queue`, only about those of this queue."""

    queue: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFault(Fault):
    """A rule about connections; each new connection is an event."""
