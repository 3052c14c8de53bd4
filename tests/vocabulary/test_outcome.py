"""What each of the six outcomes says about where the message may be."""

import pickle

import pytest

from reliablepub.outcome import CONFIRMED, Confirmed, Outcome, OutcomeKind, Persistence


def test_there_are_six_outcomes() -> None:
    words = "confirmed returned nacked refused uncertain expired"
    assert [kind.value for kind in OutcomeKind] == words.split()


@pytest.mark.parametrize(
    ("kind", "persistence"),
    [
        (OutcomeKind.CONFIRMED, Persistence.PERSISTED),
        (OutcomeKind.RETURNED, Persistence.NOT_WRITTEN),
        (OutcomeKind.NACKED, Persistence.POSSIBLY_PERSISTED),
        (OutcomeKind.REFUSED, Persistence.NOT_WRITTEN),
        (OutcomeKind.UNCERTAIN, Persistence.POSSIBLY_PERSISTED),
        (OutcomeKind.EXPIRED, Persistence.POSSIBLY_PERSISTED),
    ],
)
def test_only_a_confirm_says_persisted(kind: OutcomeKind, persistence: Persistence) -> None:
    assert Outcome(kind).persistence is persistence


def test_outcomes_are_values() -> None:
    assert pickle.loads(pickle.dumps(CONFIRMED)) == Outcome(OutcomeKind.CONFIRMED, 0, "")
    assert Confirmed("m1") == Confirmed("m1")
