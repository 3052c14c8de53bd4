"""What happens to the messages in flight when a channel or the connection ends.

Knows: the lanes, and the reason for the end. Must never know: windows, deadlines, or when a
channel is reopened (the session knows).

    ====================================  ======================================================
    end                                   messages in flight
    ====================================  ======================================================
    channel, because of a publish, by a   suspects: halved on the quarantine channel; a message
    soft error                            that was alone in flight is judged by the evidence
                                          (`reliablepub._core.evidence`): refused, or set aside
    channel, because confirms are         sent again, first in line; the overdue ones a few at a
    overdue                               time (`reliablepub._core.lane`)
    connection, or channel by a hard      sent again, first in line
    error
    the same, `STRIKES_MAX` times in a    suspects: halved, while fresh messages wait; a message
    row before the broker answered any    that was alone in flight is *set aside*, never refused
    of them
    anything else                         sent again, first in line
    ====================================  ======================================================

A returned message is settled as returned. It is no suspect: the broker has already routed it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Generic, TypeVar

from reliablepub._core.events import ChannelClosed, ConfirmedEach, Ended
from reliablepub._core.evidence import Evidence, Verdict
from reliablepub._core.lane import Lane
from reliablepub._core.quarantine import Quarantine
from reliablepub.outcome import Concern, Outcome, OutcomeKind, Persistence

K = TypeVar("K")


class Aftermath(Generic[K]):
    """Ends epochs, and moves the messages that were in flight to a buffer or the quarantine."""

    __slots__ = ("_evidence", "_is_named", "_main", "_quarantine", "settlements")

    def __init__(
        self,
        main: Lane[K],
        quarantine: Quarantine[K],
        evidence: Evidence[K],
        is_named: Callable[[K, str], bool],  # whether the broker's reply text names a message
    ) -> None:
        self._main = main
        self._quarantine = quarantine
        self._evidence = evidence
        self._is_named = is_named
        self.settlements: list[Ended[K]] = []  # not polled yet

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

    def lost(self, lanes: Sequence[Lane[K]], reason: str, now: float) -> None:
        """End the epochs of lanes: the connection is lost, or a hard error has closed a channel."""
        has_lost = any(lane.in_flight for lane in lanes)
        is_trying = self._quarantine.is_alone and self._quarantine.in_flight > 0
        if not self._evidence.is_struck_again(has_lost=has_lost, is_trying=is_trying):
            for lane in lanes:
                self.send_again(lane, reason)
            return
        self._evidence.fresh_suspects()
        # Losses count against a message only if it was alone in flight each time.
        losses = self._quarantine.losses if is_trying else 0
        outcome = Outcome(OutcomeKind.UNCERTAIN, 0, reason)
        suspects = [key for lane in lanes for key in self.close(lane, outcome)]
        if len(suspects) == 1:
            self._quarantine.set_aside(suspects[0], now, reason, losses=losses)
        else:
            self._quarantine.suspect((), suspects, is_alone=True)

    def refused(self, lane: Lane[K], event: ChannelClosed, now: float) -> Verdict:
        """End a lane's epoch: by a soft error, one of its publishes made the broker close it."""
        is_alone, losses = False, 0
        if lane is self._quarantine:
            is_alone, losses = self._quarantine.is_alone, self._quarantine.losses
        else:
            self._evidence.fresh_suspects()
        refused = Outcome(OutcomeKind.REFUSED, event.reply_code, event.reply_text)
        suspects = lane.suspects
        if len(suspects) != 1:  # several were in flight, or none
            text = "this message, or one in flight with it, closed the channel: "
            uncertain = Outcome(OutcomeKind.UNCERTAIN, event.reply_code, text + event.reply_text)
            named: list[K] = []
            others: list[K] = []
            for key in self.close(lane, uncertain):
                (named if self._is_named(key, event.reply_text) else others).append(key)
            self._quarantine.suspect(named, others, is_alone=is_alone)
            return Verdict.UNCLEAR
        [key] = suspects
        verdict = self._evidence.verdict(key, refused)
        if verdict is Verdict.REFUSED:
            self.close(lane, refused)
        elif verdict is Verdict.PLACE:
            self.close(lane, replace(refused, shown=Concern.EXCHANGE))
        else:
            text = f"closed the channel, and no other message has passed since: {event.reply_text}"
            known = Persistence.NOT_WRITTEN
            self.close(lane, Outcome(OutcomeKind.UNCERTAIN, event.reply_code, text, known))
            if verdict is Verdict.BROKER:
                self._quarantine.expect(key)
            else:
                why = f"{event.reply_code} {text}"
                self._quarantine.set_aside(key, now, why, losses=losses, is_alone=False)
        return verdict

    def overdue(self, lane: Lane[K], reason: str, *, late_before: float) -> None:
        """End a lane's epoch: confirms are overdue. What was written by `late_before` is late."""
        # Suspects are cleared: a guilty message closes its channel at once.
        self.send_again(lane, reason, by=self._main, late_before=late_before)

    def send_again(
        self,
        lane: Lane[K],
        reason: str,
        *,
        by: Lane[K] | None = None,
        late_before: float = -inf,  # messages that were written by then are late from now on
    ) -> None:
        """End a lane's epoch; all in flight is uncertain, and goes first in the next epoch."""
        by = by or (lane if lane is self._quarantine else self._main)
        late = lane.late_keys(late_before)
        uncertain = self.close(lane, Outcome(OutcomeKind.UNCERTAIN, 0, reason))
        if late:  # they stay late, and join the others of that kind
            by.late.extend(key for key in uncertain if key in late)
            uncertain = [key for key in uncertain if key not in late]
        by.buffer.extendleft(reversed(uncertain))

    def close(self, lane: Lane[K], outcome: Outcome) -> list[K]:
        """End the lane's epoch; return the keys of the uncertain messages, in order."""
        settlements, uncertain = lane.close(outcome)
        self.settlements += settlements
        return uncertain
