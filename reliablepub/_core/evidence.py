"""What a close is evidence of: a message, its place, or the broker.

Knows: which messages were answered and which closed a channel, in which order, and where each goes
(its place: an exchange). Must never know: lanes, channels, the clock, what a place is.

AMQP 0-9-1 (1.2, reply codes) calls an error that closes a channel *soft* and one that closes the
connection *hard*. A soft error may be about one message; a hard error, such as 501, 506, 530 or
541, is about the client, the connection or the broker, on whichever of the two it arrives.

A message is *suspected* when a channel closes while it is in flight, and it is *passed* when the
broker answers it otherwise: by an ack, a nack or a return. So a message that was alone on a channel
when the broker closed it is judged by what passed. Each message that passes speaks against one
suspect; but none does that passed before another close of a channel with fresh messages, which may
be the beginning of an outage.

    ===============================================  ==============================================
    evidence                                         verdict
    ===============================================  ==============================================
    the reply text names an exchange or a user       `Verdict.REFUSED`: where the outcome concerns
    (404, 403, ``user_id``)                          more than this message, its destination is
                                                     paused, and its messages wait
    another message has passed to its place, on      `Verdict.REFUSED`: it alone is at fault
    this connection, and spoke against none yet
    `SEVERAL` different messages to this place in a  `Verdict.PLACE`: refused, as the whole place
    row closed their channels; none passed there,
    but elsewhere
    the same, and none passed anywhere               `Verdict.BROKER`: an outage; probed by one
                                                     message at a time, on a new connection
    none of these yet                                `Verdict.UNCLEAR`: set aside, and tried again
                                                     once one has passed
    ===============================================  ==============================================

A hard error, or a lost connection, blames nobody: it is an outage. After `STRIKES_MAX` of them in
a row before the broker answered any message in flight, the messages in flight are suspected of
causing it. They are tried in halves, but never refused: to the client, a message that crashes the
broker and an outage look alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from enum import Enum, auto
from typing import Final, Generic, TypeVar

from reliablepub.outcome import Concern, Outcome

K = TypeVar("K")

SEVERAL: Final = 3
"""Different messages in a row whose refusals are no longer about the messages."""
_CREDIT_MAX: Final = 10
"""Most messages in a row that are refused by what passed before them: an outage may have begun."""
STRIKES_MAX: Final = 3
"""Connections lost in a row, before the broker answered any message in flight, after which the
messages in flight are suspected."""
_HARD_BELOW_500: Final = frozenset({320, 402})
_HARD_FROM: Final = 500


def is_soft(reply_code: int) -> bool:
    """Whether an error may be about a single message."""
    return reply_code < _HARD_FROM and reply_code not in _HARD_BELOW_500


class Verdict(Enum):
    """Who is at fault when a message that was alone on a channel closed it."""

    REFUSED = auto()
    PLACE = auto()
    BROKER = auto()
    UNCLEAR = auto()


class Evidence(Generic[K]):
    """Answers and closes, as far as a verdict needs them."""

    __slots__ = "_credits", "_has_heard", "_is_weighed", "_place_of", "_runs", "_strikes", "doubt"

    def __init__(self, place_of: Callable[[K], Hashable], *, is_weighed: bool) -> None:
        self._place_of = place_of
        self._is_weighed = is_weighed  # else a soft error is about the message alone with it
        # By place: messages that passed, each of which speaks against one suspect; and messages
        # that closed their channels in a row, without one that passed there.
        self._credits: Counter[Hashable] = Counter()
        self._runs: dict[Hashable, set[K]] = {}
        self._strikes = 0
        self._has_heard = False
        self.doubt: Outcome | None = None  # the reply by which the broker refuses every message

    @property
    def has_runs(self) -> bool:
        """Whether a place has closed channels since a message passed there."""
        return bool(self._runs)

    def connected(self) -> None:
        """Start with a new connection: what passed on an earlier one proves nothing here."""
        self._credits.clear()
        self._has_heard = False

    def fresh_suspects(self) -> None:
        """Note a close with messages that were not suspected before: perhaps an outage begins."""
        self._credits.clear()

    def sent_alone(self, key: K) -> None:
        """Note that a message is sent alone: what passed before says nothing about it."""
        del self._credits[self._place_of(key)]

    def nothing_heard(self) -> None:
        """Forget earlier answers: nothing is in flight, and suspects are about to be written."""
        self._has_heard = False

    def heard(self) -> None:
        """Note that the broker has answered a message in flight."""
        self._has_heard = True
        self._strikes = 0

    def passed(self, keys: Iterable[K]) -> None:
        """Note messages that the broker answered without closing their channel.

        Needed only while there are suspects, or a run.
        """
        self.doubt = None
        for key in keys:
            place = self._place_of(key)
            self._credits[place] = min(self._credits[place] + 1, _CREDIT_MAX)
            self._runs.pop(place, None)

    def judges(self) -> Callable[[K], bool]:
        """A function that tells of one message after the other whether it can be judged now."""
        left = self._credits.copy()

        def can_judge(key: K) -> bool:
            place = self._place_of(key)
            left[place] -= 1
            return left[place] >= 0

        return can_judge

    def is_refusing(self, key: K) -> bool:
        """Whether the place of this message has a run."""
        return self._place_of(key) in self._runs

    def verdict(self, key: K, outcome: Outcome) -> Verdict:
        """Judge a message that was alone on a channel which the broker closed by a soft error."""
        place = self._place_of(key)
        if outcome.concern is not Concern.MESSAGE or not self._is_weighed:
            return Verdict.REFUSED
        if self._credits[place]:
            self._credits[place] -= 1
            return Verdict.REFUSED
        run = self._runs.setdefault(place, set())
        if len(run) < SEVERAL:
            run.add(key)
        if len(run) == SEVERAL and self._credits.total():  # all of other places
            return Verdict.PLACE
        if len(run) == SEVERAL or self.doubt is not None:
            self.doubt = outcome
            return Verdict.BROKER
        return Verdict.UNCLEAR

    def is_struck_again(self, *, has_lost: bool, is_trying: bool) -> bool:
        """Whether a hard error, or a lost connection, makes the messages in flight suspects."""
        if self._has_heard or not has_lost:
            return False
        self._strikes += 1
        # While suspects are in flight without any other message, one loss is enough.
        return self._strikes >= STRIKES_MAX or is_trying
