"""What happens to the messages in flight when a channel or the connection ends.

Knows: the two lanes, and the reason for the end. Must never know: windows, deadlines, or when a
channel is reopened (the session knows).

    ====================================  ======================================================
    end                                   messages in flight
    ====================================  ======================================================
    channel, because of a publish         suspects: halved on the quarantine channel; a message
                                          that was alone in flight is refused
    connection, because of a publish      suspects: halved on the quarantine channel, while fresh
    (`reliablepub._core.blame`)           messages wait; a message that was alone in flight is
                                          refused
    channel, because confirms are         sent again, first in line; the overdue ones a few at a
    overdue                               time (`reliablepub._core.lane`)
    connection, no publish blamed         sent again, first in line
    connection, no publish blamed,        suspects: halved, while fresh messages wait; a message
    `STRIKES_MAX` times in a row before   that was alone in flight is *set aside*, never refused
    the broker answered any of them
    anything else                         sent again, first in line
    ====================================  ======================================================

A returned message is settled as returned. It is no suspect: the broker has already routed it.

``connection.close`` names no channel. Publishes that were written earlier, on a channel of this
connection that has ended, may still be in the broker's input. Then the close is no proof against
the only message in flight, and that message is tried again on the next connection, which carries
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, Generic, TypeVar

from reliablepub._core.blame import blames_a_publish
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
"""Connections lost in a row, before the broker answered any message in flight, after which the
messages in flight become suspects."""


class Aftermath(Generic[K]):
    """Ends epochs, and moves the messages that were in flight to a buffer or the quarantine.

    Args:
        main: the lane of fresh messages.
        quarantine: the lane of suspects.
        is_named: whether the broker's reply text names the message of a key.

    Attributes:
        settlements: attempts that have ended, not polled yet.
    """

    __slots__ = (
        "_has_heard",
        "_is_clean",
        "_is_named",
        "_main",
        "_quarantine",
        "_strikes",
        "settlements",
    )

    def __init__(
        self, main: Lane[K], quarantine: Quarantine[K], is_named: Callable[[K, str], bool]
    ) -> None:
        self._main = main
        self._quarantine = quarantine
        self._is_named = is_named
        self._strikes = 0
        self.settlements: list[Ended[K]] = []
        self.connected()

    # ------------------------------------------------------------------ evidence

    def connected(self) -> None:
        """Start with a new connection, on which nothing has been written."""
        self._is_clean = True
        self._has_heard = False

    def nothing_heard(self) -> None:
        """Forget earlier answers: nothing is in flight, and suspects are about to be written."""
        self._has_heard = False

    def heard(self) -> None:
        """Note that the broker has answered a message in flight."""
        self._has_heard = True
        self._strikes = 0

    def ended(self, one: Ended[K]) -> None:
        """Record ended attempts; consecutive confirms of an epoch are joined into one record."""
        last = self.settlements[-1] if self.settlements else None
        if (
            isinstance(one, ConfirmedEach)
            and isinstance(last, ConfirmedEach)
            and one.epoch == last.epoch
        ):
            last.tags += one.tags
            last.keys += one.keys
            last.batches += one.batches
        else:
            self.settlements.append(one)

    # ------------------------------------------------------------------ endings

    def connection_lost(self, event: ConnectionLost, now: float) -> None:
        """End the epochs of both lanes.

        Args:
            event: the loss, with the broker's ``connection.close`` if it sent one.
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
        """End a lane's epoch, because one of its publishes made the broker close the channel."""
        self._isolate((lane,), event)

    def overdue(self, lane: Lane[K], reason: str, *, late_before: float) -> None:
        """End a lane's epoch, because its confirms are overdue.

        Suspects are cleared and go to the main lane: a guilty message closes its channel at once.

        Args:
            lane: the lane that ends.
            reason: reply text of the uncertain outcomes.
            late_before: messages that were written by then are late from now on (`Lane.late`).
        """
        self.send_again(lane, reason, by=self._main, late_before=late_before)

    def send_again(
        self,
        lane: Lane[K],
        reason: str,
        *,
        by: Lane[K] | None = None,
        late_before: float = -inf,
    ) -> None:
        """End a lane's epoch; all in flight is uncertain, and goes first in the next epoch.

        Late messages stay late, and join the others of that kind.

        Args:
            lane: the lane that ends.
            reason: reply text of the uncertain outcomes.
            by: the lane that sends the messages again; by default ``lane``.
            late_before: messages that were written by then are late from now on.
        """
        by, late = by or lane, lane.late_keys(late_before)
        uncertain = self.close(lane, Outcome(OutcomeKind.UNCERTAIN, 0, reason))
        if late:
            by.late += [key for key in uncertain if key in late]
            uncertain = [key for key in uncertain if key not in late]
        by.buffer.extendleft(reversed(uncertain))

    def close(self, lane: Lane[K], outcome: Outcome) -> list[K]:
        """End the lane's epoch; return the keys of the uncertain messages, in order."""
        settlements, uncertain = lane.close(outcome)
        self.settlements += settlements
        self._is_clean = self._is_clean and not uncertain
        return uncertain

    # ------------------------------------------------------------------ inside

    def _isolate(self, lanes: Sequence[Lane[K]], close: ChannelClosed | ConnectionClose) -> None:
        """Quarantine the messages in flight: one of them made the broker close.

        A message that is proven guilty is settled as refused.
        """
        is_connection = isinstance(close, ConnectionClose)
        is_alone = is_connection or (self._quarantine in lanes and self._quarantine.is_alone)
        # Publishes of an ended channel may still have closed the connection (see the module).
        is_proof = self._is_clean or not is_connection
        outcome = Outcome(OutcomeKind.REFUSED, close.reply_code, close.reply_text)
        if sum(lane.suspects for lane in lanes) > 1 or not is_proof:
            what = "connection" if is_connection else "channel"
            text = f"this message, or one in flight with it, closed the {what}: {close.reply_text}"
            outcome = Outcome(OutcomeKind.UNCERTAIN, close.reply_code, text)
        named: list[K] = []
        others: list[K] = []
        for key in (key for lane in lanes for key in self.close(lane, outcome)):
            is_named = self._is_named(key, close.reply_text)
            (named if is_named else others).append(key)
        self._quarantine.suspect(named, others, is_alone=is_alone)

    def _is_struck_again(self) -> bool:
        """Whether messages in flight are now suspected of losing the connection.

        While suspects are being tried, one loss is enough.
        """
        if self._has_heard or not (self._main.in_flight or self._quarantine.in_flight):
            return False
        self._strikes += 1
        return self._strikes >= STRIKES_MAX or self._is_trying

    @property
    def _is_trying(self) -> bool:
        """Whether suspects are in flight, without any other message."""
        return self._quarantine.is_alone and self._quarantine.in_flight > 0

    def _suspect(self, lanes: Sequence[Lane[K]], outcome: Outcome, now: float) -> None:
        """Quarantine the messages in flight: one of them may be the cause of the lost connections.

        The broker blames none, so none is refused.
        """
        # Losses count against a message only if it was alone in flight each time.
        losses = self._quarantine.losses if self._is_trying else 0
        suspects = [key for lane in lanes for key in self.close(lane, outcome)]
        if len(suspects) == 1:
            self._quarantine.set_aside(suspects[0], now, losses=losses + 1)
        else:
            self._quarantine.suspect((), suspects, is_alone=True)
