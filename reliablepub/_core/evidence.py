"""What a close is evidence of: a message, its place, or the broker.

Knows: which messages were answered and which closed a channel, in which order, and where each goes
(its place: an exchange). Must never know: lanes, channels, the clock, what a place is.

AMQP 0-9-1 (1.2, reply codes) calls an error that closes a channel *soft* and one that closes the
connection *hard*. A soft error may be about one message; a hard error, such as 501, 506, 530 or
541, is about the client, the connection or the broker, on whichever of the two it arrives.

A message is *suspected* when a channel closes while it is in flight, and it is *passed* when the
broker answers it otherwise: by an ack, a nack or a return. So a message that was alone on a channel
when the broker closed it is judged by what passed:

    ===============================================  ==============================================
    evidence                                         verdict
    ===============================================  ==============================================
    the reply text names an exchange or a user       `Verdict.REFUSED`: where the outcome concerns
    (404, 403, ``user_id``)                          more than this message, its destination is
                                                     paused, and its messages wait
    since this message was first suspected by this   `Verdict.REFUSED`: it alone is at fault
    reply code, on this connection, another message
    passed to its place
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

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Generic, NamedTuple, TypeVar

from reliablepub.outcome import Concern, Outcome

K = TypeVar("K")

SEVERAL: Final = 3
"""Different messages in a row whose refusals are no longer about the messages."""
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


class Suspicion(NamedTuple):
    """When messages were first suspected, and of what."""

    passed: int  # messages that had passed by then
    reply_code: int  # of the close; 0 if a connection was lost


NEVER: Final = Suspicion(0, 0)
"""Of messages that are sent alone for another reason."""


@dataclass(slots=True)
class _Run(Generic[K]):
    """Messages to one place that closed their channels in a row, without one that passed there."""

    since: int  # messages that had passed, to any place, when it began
    keys: set[K] = field(default_factory=set)


class Evidence(Generic[K]):
    """Answers and closes, as far as a verdict needs them."""

    __slots__ = (
        *("_has_heard", "_is_weighed", "_passed", "_place_of", "_runs", "_strikes"),
        *("count", "doubt"),
    )

    def __init__(self, place_of: Callable[[K], Hashable], *, is_weighed: bool) -> None:
        self._place_of = place_of
        self._is_weighed = is_weighed  # else a soft error is about the message alone with it
        self._passed: dict[Hashable, int] = {}  # value of `count` after the last one to a place
        self._runs: dict[Hashable, _Run[K]] = {}
        self._strikes = 0
        self._has_heard = False
        self.count = 0  # messages that passed while there were suspects
        self.doubt: Outcome | None = None  # the reply by which the broker refuses every message

    @property
    def has_runs(self) -> bool:
        """Whether a place has closed channels since a message passed there."""
        return bool(self._runs)

    def connected(self) -> None:
        """Start with a new connection: what passed on an earlier one proves nothing here."""
        self._passed.clear()
        self._has_heard = False

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
            self.count += 1
            place = self._place_of(key)
            self._passed[place] = self.count
            self._runs.pop(place, None)

    def suspicion(self, reply_code: int = 0) -> Suspicion:
        """A suspicion that begins now."""
        return Suspicion(self.count, reply_code)

    def is_against(self, key: K, since: Suspicion) -> bool:
        """Whether another message has passed to the place of this one since it was suspected."""
        return self._passed.get(self._place_of(key), 0) > since.passed

    def is_refusing(self, key: K) -> bool:
        """Whether the place of this message has a run."""
        return self._place_of(key) in self._runs

    def verdict(self, key: K, outcome: Outcome, since: Suspicion) -> Verdict:
        """Judge a message that was alone on a channel which the broker closed by a soft error."""
        is_told = outcome.concern is not Concern.MESSAGE or not self._is_weighed
        if is_told or self.is_against(key, since):
            return Verdict.REFUSED
        run = self._runs.setdefault(self._place_of(key), _Run(self.count))
        if len(run.keys) < SEVERAL:
            run.keys.add(key)
        if len(run.keys) == SEVERAL and self.count > run.since:
            return Verdict.PLACE
        if len(run.keys) == SEVERAL or self.doubt is not None:
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
