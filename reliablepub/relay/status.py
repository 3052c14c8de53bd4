"""How a publisher is doing: one frozen picture a turn, made by the relay, read by anybody.

Knows: counts and words. Must never know: how they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from reliablepub.outbox.entry import Counters


class Link(StrEnum):
    """Where the connection to the broker stands."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    BLOCKED = "blocked"
    DISCONNECTED = "disconnected"


@dataclass(frozen=True, slots=True)
class Status:
    """A publisher at one moment.

    Attributes:
        link: where the connection stands.
        reason: why it is blocked or was last lost; empty when there is nothing to say.
        counters: the ledger, of everybody who uses the outbox.
        in_flight: messages written and not settled.
        buffered: messages in memory, waiting for the window.
        connects: connections made so far.
        violations: confirms and returns that made no sense.
        stale: events of channels that were over.
    """

    link: Link = Link.DISCONNECTED
    reason: str = ""
    counters: Counters = field(default_factory=Counters)
    in_flight: int = 0
    buffered: int = 0
    connects: int = 0
    violations: int = 0
    stale: int = 0

    @property
    def open(self) -> int:
        """Messages accepted and not yet settled."""
        return self.counters.open
