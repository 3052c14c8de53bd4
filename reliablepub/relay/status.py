"""How a publisher is doing: one frozen picture a turn, made by the relay, read by anybody.

Knows: counts and words. Must never know: how they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from reliablepub.outbox.entry import Counters
from reliablepub.printable import one_line

_PAUSES_TOLD: Final = 3


class Link(StrEnum):
    """Where the connection to the broker stands."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    BLOCKED = "blocked"
    DISCONNECTED = "disconnected"
    FAILED = "failed"
    """The relay has failed, and there is no connection any more."""


@dataclass(frozen=True, slots=True)
class Paused:
    """A destination that is paused (`Breaker`).

    Attributes:
        exchange: to which nothing is sent for now.
        routing_key: with which nothing is sent there; None where it is the whole exchange.
        refusals: so many in a row; 0 once one was confirmed, or when an earlier run has paused it.
        probe_in_s: seconds until the next message is tried there.
        since: wall clock, seconds since 1970.
        reason: the last refusal, with the broker's words.
        waiting: messages that wait for it; those that expire or that a person takes are counted
            until the next probe.
    """

    exchange: str
    routing_key: str | None
    refusals: int
    probe_in_s: float
    since: float
    reason: str
    waiting: int


@dataclass(frozen=True, slots=True)
class Status:
    """A publisher at one moment.

    Attributes:
        link: where the connection stands.
        reason: why it is blocked, was last lost, or has failed; while there is a connection,
            `trouble`; empty when there is nothing to say.
        counters: the ledger, of everybody who uses the outbox.
        in_flight: messages written and not settled.
        window: most messages in flight for now.
        buffered: messages in memory, waiting for the window.
        connects: connections made so far.
        violations: confirms and returns that made no sense.
        stale: events of channels that were over.
        aside: messages set aside: every connection was lost while one of them was alone in flight,
            and the broker blames none. They are tried again, alone, after waits up to a minute.
        is_flushed: of a status that ``flush`` gives: whether all that it waits for is settled.
        paused: destinations to which nothing is sent for now (`Breaker`), those first that were
            paused first; at most 100 of them.
        paused_destinations: how many there are.
        hooks_off: why pika is used by its public interface alone, which is slower and just as safe:
            another version than those tested, or a hook that has failed. Empty while all is well.
        callback_errors: how often a callback of the application's has raised.
        trouble: why the outbox takes or records nothing for now, such as "disk full: ..."; empty
            when it does.
        is_refused: whether the broker refuses the credentials or the vhost, or TLS the other side;
            `reason` says which. It is tried again, but helps only when one of the sides is changed.
        turns: how many turns the relay has taken. An idle one takes some every second; when the
            number stands still, the relay does. Statuses that differ in nothing else are equal.
    """

    link: Link = Link.DISCONNECTED
    reason: str = ""
    counters: Counters = field(default_factory=Counters)
    in_flight: int = 0
    window: int = 0
    buffered: int = 0
    connects: int = 0
    violations: int = 0
    stale: int = 0
    aside: int = 0
    is_flushed: bool = False
    paused: tuple[Paused, ...] = ()
    paused_destinations: int = 0
    hooks_off: str = ""
    callback_errors: int = 0
    trouble: str = ""
    is_refused: bool = False
    turns: int = field(default=0, compare=False)

    @property
    def open(self) -> int:
        """Messages accepted and not yet settled."""
        return self.counters.open


def waits_for(status: Status) -> list[str]:
    """Why messages stay open, as far as the relay knows: each in one line, few of them."""
    told = []
    if status.link is not Link.CONNECTED:
        told.append(f"the publisher is {status.link}" + (status.reason and f": {status.reason}"))
    elif status.trouble:
        told.append(status.trouble)
    for one in status.paused[:_PAUSES_TOLD]:
        where = f"exchange {one.exchange!r}"
        if one.routing_key is not None:
            where += f", routing key {one.routing_key!r}"
        told.append(f"{where} is paused, {one.waiting} messages wait: {one.reason}")
    if status.paused_destinations > _PAUSES_TOLD:
        told.append(f"{status.paused_destinations - _PAUSES_TOLD} more destinations are paused")
    return [one_line(line) for line in told]


def described(failure: BaseException) -> str:
    """Why a relay has failed, in one line."""
    said = one_line(str(failure))
    return f"the relay has failed: {type(failure).__name__}{': ' if said else ''}{said}"
