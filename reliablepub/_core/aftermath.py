"""What becomes of messages in flight when their channel, or the whole connection, is gone.

Knows: the two lanes, and what was said at the end. Must never know: windows, deadlines, when a
channel is opened again (the session's).

    ====================================  ======================================================
    the end                               who was in flight
    ====================================  ======================================================
    a channel, because of a publish       suspects: halved on the quarantine channel; refused when
                                          it was the only one
    the connection, because of a publish  likewise, and fresh messages wait while they are tried
    (`reliablepub._core.blame`)
    the connection, nobody blamed         sent again, first in line
    that, `STRIKES_MAX` times in a row,   suspects of a connection: halved; *set aside*, never
    before the broker said anything of    refused, when it was the only one
    what was in flight
    anything else                         sent again, first in line
    ====================================  ======================================================

A returned message was routed, if to nowhere: it is settled as returned, and no suspect.

``connection.close`` names no channel. So it proves nothing against the only message in flight as
long as the broker may still be reading what was written on a channel that ended before, on the same
connection. Then that message is tried on the next one, which is clean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from reliablepub._core.blame import blames_a_publish
from reliablepub._core.confirms import Violation
from reliablepub._core.events import (
    ChannelClosed,
    ConfirmedEach,
    ConnectionClose,
    ConnectionLost,
    Ended,
)
from reliablepub._core.lane import Lane
from reliablepub._core.quarantine import Quarantine
from reliablepub.outcome import Outcome, OutcomeKind

K = TypeVar("K")

STRIKES_MAX: Final = 3
"""So many connections in a row, lost before the broker said anything of what was in flight, make
suspects of it."""


class Aftermath(Generic[K]):
    """Ends epochs, and puts whoever was in flight where they belong.

    Args:
        main: the lane of fresh messages.
        quarantine: the lane of suspects.
        is_named: whether the broker's words name a message.

    Attributes:
        settlements: attempts that have ended and were not told yet.
        violations: what the broker said out of turn, in epochs that are over.
    """

    __slots__ = (
        "_has_heard",
        "_is_clean",
        "_is_named",
        "_main",
        "_quarantine",
        "_strikes",
        "settlements",
        "violations",
    )

    def __init__(
        self, main: Lane[K], quarantine: Quarantine[K], is_named: Callable[[K, str], bool]
    ) -> None:
        self._main = main
        self._quarantine = quarantine
        self._is_named = is_named
        self._strikes = 0
        self.settlements: list[Ended[K]] = []
        self.violations: Counter[Violation] = Counter()
        self.connected()

    # ------------------------------------------------------------------ evidence

    def connected(self) -> None:
        """A new connection, on which nothing was written yet."""
        self._is_clean = True
        self._has_heard = False

    def nothing_heard(self) -> None:
        """Nothing is in flight of which the broker could have said something."""
        self._has_heard = False

    def heard(self) -> None:
        """The broker has said something of what is in flight."""
        self._has_heard = True
        self._strikes = 0

    def ended(self, one: Ended[K]) -> None:
        """It has said how attempts ended; those that are confirmed in a row are told at once."""
        last = self.settlements[-1] if self.settlements else None
        if (
            isinstance(one, ConfirmedEach)
            and isinstance(last, ConfirmedEach)
            and one.epoch == last.epoch
        ):
            last.tags += one.tags
            last.keys += one.keys
        else:
            self.settlements.append(one)

    def all_violations(self) -> Counter[Violation]:
        """What it said out of turn, in epochs that go on as well; only to be read."""
        current = (self._main.violations, self._quarantine.violations)
        return sum(filter(None, current), self.violations)  # each turn asks, and mostly it is none

    # ------------------------------------------------------------------ endings

    def connection_lost(self, event: ConnectionLost, now: float) -> None:
        """Both lanes are at an end.

        Args:
            event: with the broker's words, if there were any.
            now: on the session's active clock.
        """
        lanes = (self._quarantine, self._main)
        reason = f"connection lost: {event.reason}"
        if blames_a_publish(event.close):
            self._isolate(lanes, event.close)
        elif self._is_struck_again():
            self._suspect(lanes, Outcome(OutcomeKind.UNCERTAIN, 0, reason), now)
        else:
            for lane in lanes:
                self.send_again(lane, reason)

    def channel_closed(self, lane: Lane[K], event: ChannelClosed) -> None:
        """A lane is at an end because of one of its publishes."""
        self._isolate((lane,), event)

    def overdue(self, lane: Lane[K], reason: str) -> None:
        """A lane is at an end because it owes verdicts for too long.

        What closes a channel or a connection does so at once, so suspects are suspects no more.
        """
        self.send_again(lane, reason, by=self._main)

    def send_again(self, lane: Lane[K], reason: str, *, by: Lane[K] | None = None) -> None:
        """Everything in flight is uncertain and goes first on the next epoch, here or elsewhere."""
        uncertain = self.close(lane, Outcome(OutcomeKind.UNCERTAIN, 0, reason))
        (by or lane).buffer.extendleft(reversed(uncertain))

    def close(self, lane: Lane[K], outcome: Outcome) -> list[tuple[K, int]]:
        """End the lane's epoch; give back, in order, what is uncertain."""
        self.violations += lane.violations
        settlements, uncertain = lane.close(outcome)
        self.settlements += settlements
        self._is_clean = self._is_clean and not uncertain
        return uncertain

    # ------------------------------------------------------------------ inside

    def _isolate(self, lanes: Sequence[Lane[K]], close: ChannelClosed | ConnectionClose) -> None:
        """One of those in flight made the broker close the channel, or all: find out which."""
        is_connection = isinstance(close, ConnectionClose)
        is_alone = is_connection or (self._quarantine in lanes and self._quarantine.is_alone)
        is_proof = self._is_clean or not is_connection
        outcome = Outcome(OutcomeKind.REFUSED, close.reply_code, close.reply_text)
        if sum(lane.suspects for lane in lanes) > 1 or not is_proof:
            what = "connection" if is_connection else "channel"
            text = f"this message, or one in flight with it, closed the {what}: {close.reply_text}"
            outcome = Outcome(OutcomeKind.UNCERTAIN, close.reply_code, text)
        named: list[tuple[K, int]] = []
        others: list[tuple[K, int]] = []
        for item in (item for lane in lanes for item in self.close(lane, outcome)):
            is_named = self._is_named(item[0], close.reply_text)
            (named if is_named else others).append(item)
        self._quarantine.suspect(named, others, is_alone=is_alone)

    def _is_struck_again(self) -> bool:
        """Whether connections are lost, one after the other, over what was in flight."""
        if self._has_heard or not (self._main.in_flight or self._quarantine.in_flight):
            return False
        self._strikes += 1
        return self._strikes >= STRIKES_MAX or self._is_trying

    @property
    def _is_trying(self) -> bool:
        """Whether suspects are in flight, with nothing beside them."""
        return self._quarantine.is_alone and self._quarantine.in_flight > 0

    def _suspect(self, lanes: Sequence[Lane[K]], outcome: Outcome, now: float) -> None:
        """One of those in flight may be what costs us the connections; nobody says so."""
        losses = self._quarantine.losses if self._is_trying else 0
        suspects = [item for lane in lanes for item in self.close(lane, outcome)]
        if len(suspects) == 1:
            self._quarantine.set_aside(suspects[0], now, losses=losses + 1)
        else:
            self._quarantine.suspect((), suspects, is_alone=True)
