"""Whether a client told its caller the truth.

The truth is the broker's history. To be unsure is no lie: the caller knows that he must send again.
It must never know a client.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from reliablepub.testing import Fate, Published
from tests.clients.letters import CONFIRMED, NACKED, REFUSED, RETURNED, Letter


class Judgment(enum.StrEnum):
    """What a telling was worth, the best first."""

    TRUE = "true"
    UNSURE = "unsure"
    HUNG = "hung"
    FALSE_FAILURE = "false failure"
    FALSE_CONFIRM = "false confirm"
    LOST = "lost"


HONEST = frozenset({Judgment.TRUE, Judgment.UNSURE})

_FAILURES = frozenset({RETURNED, NACKED, REFUSED})
_FAILED = frozenset({Fate.RETURNED, Fate.NACKED, Fate.REFUSED})


def judge(
    letter: Letter, told: str | None, published: Sequence[Published], *, has_ended: bool
) -> Judgment:
    """What was told of a letter, against every copy of it that the broker has seen.

    Args:
        letter: The message.
        told: None if the caller was told nothing.
        published: The broker's history.
        has_ended: Whether the client had done all it was asked, or was still at it.
    """
    fates = {one.fate for one in published if one.body == letter.body}
    is_taken = Fate.ACCEPTED in fates
    if told is None:
        if not has_ended:
            return Judgment.HUNG
        return Judgment.UNSURE if is_taken else Judgment.LOST
    if told == CONFIRMED:
        return Judgment.TRUE if is_taken else Judgment.FALSE_CONFIRM
    if told in _FAILURES:
        is_true = fates & _FAILED and not is_taken
        return Judgment.TRUE if is_true else Judgment.FALSE_FAILURE
    return Judgment.UNSURE
