"""The confirm ledger against a model that scans: slow, and obviously right."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reliablepub._core.confirms import ConfirmLedger, EpochUntrusted
from reliablepub.outcome import CONFIRMED, NACKED, Outcome, OutcomeKind

GONE = Outcome(OutcomeKind.UNCERTAIN)
SHORT_RUN, SOAK_RUN = 200_000, 10_000_000

Settled = list[tuple[int, int, Outcome]]


class Model:
    """Every tag ever sent, with its state; each question is answered by looking at all of them."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.open: set[int] = set()
        self.returned: dict[int, Outcome] = {}
        self.violations = 0

    @property
    def last(self) -> int:
        return len(self.keys)

    def knows(self, tag: int) -> bool:
        return tag in range(1, self.last + 1)

    def register(self, key: int) -> int:
        self.keys.append(key)
        self.open.add(self.last)
        return self.last

    def take_back(self) -> int:
        self.open.remove(self.last)
        return self.keys.pop()

    def confirm(self, tag: int, verdict: Outcome, *, multiple: bool) -> Settled:
        covered = [t for t in sorted(self.open) if t == tag or (multiple and t <= tag)]
        self.violations += not covered
        return self._settle(covered, verdict)

    def note_return(self, tag: int, outcome: Outcome) -> None:
        if tag in self.open and tag not in self.returned:
            self.returned[tag] = outcome
        else:
            self.violations += 1

    def close(self) -> Settled:
        return self._settle(sorted(self.open), GONE)

    def _settle(self, tags: list[int], verdict: Outcome) -> Settled:
        self.open -= set(tags)
        return [(t, self.keys[t - 1], self.returned.pop(t, verdict)) for t in tags]


class Pair:
    """The ledger and its model, told the same and asked the same."""

    def __init__(self) -> None:
        self.ledger: ConfirmLedger[int] = ConfirmLedger(1)
        self.model = Model()
        self.next_key = 0

    def register(self) -> None:
        self.next_key += 1
        assert self.ledger.register([self.next_key]) == self.model.register(self.next_key)

    @property
    def can_take_back(self) -> bool:
        return self.model.last in self.model.open and self.model.last not in self.model.returned

    def take_back(self) -> None:
        assert self.ledger.take_back(self.model.last) == self.model.take_back()

    def confirm(self, tag: int, verdict: Outcome, *, multiple: bool) -> None:
        if not self.model.knows(tag):
            self.model.violations += 1
            with pytest.raises(EpochUntrusted):
                self.ledger.handle_confirm(tag, verdict, multiple=multiple)
            return
        settled = self.ledger.handle_confirm(tag, verdict, multiple=multiple)
        assert settled == self.model.confirm(tag, verdict, multiple=multiple)

    def acks(self, tags: list[int]) -> None:
        """All at once, or none: then one needs a closer look, as would any if one was returned."""
        is_odd = len(set(tags)) < len(tags) or not self.model.open.issuperset(tags)
        if is_odd or self.model.returned:
            assert self.ledger.handle_acks(tags) is None
            return
        keys = [self.model.keys[tag - 1] for tag in tags]
        assert self.ledger.handle_acks(tags) == keys
        for tag in tags:
            self.model.confirm(tag, CONFIRMED, multiple=False)

    def acks_up_to(self, tag: int) -> None:
        """All that it covers, or none: likewise."""
        is_odd = not self.model.knows(tag) or tag < min(self.model.open, default=tag + 1)
        if is_odd or self.model.returned:
            assert self.ledger.handle_acks_up_to(tag) is None
            return
        settled = self.model.confirm(tag, CONFIRMED, multiple=True)
        tags, keys = [tag for tag, _, _ in settled], [key for _, key, _ in settled]
        assert self.ledger.handle_acks_up_to(tag) == (tags, keys)

    def note_return(self, tag: int) -> None:
        outcome = Outcome(OutcomeKind.RETURNED, 312, f"NO_ROUTE {tag}")
        if not self.model.knows(tag):
            self.model.violations += 1
            with pytest.raises(EpochUntrusted):
                self.ledger.handle_return(tag, outcome.reply_code, outcome.reply_text)
            return
        self.ledger.handle_return(tag, outcome.reply_code, outcome.reply_text)
        self.model.note_return(tag, outcome)

    def close(self) -> None:
        assert self.ledger.close(GONE) == self.model.close()

    def check(self) -> None:
        assert self.ledger.last_tag == self.model.last
        assert self.ledger.outstanding == len(self.model.open)
        assert self.ledger.outstanding - len(self.ledger.unreturned) == len(self.model.returned)
        assert self.ledger.lowest_tag == min(self.model.open, default=self.model.last + 1)
        assert self.ledger.violations.total() == self.model.violations


class LedgerMachine(RuleBasedStateMachine):
    """Any order of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    @rule(count=st.integers(1, 20))
    def send(self, count: int) -> None:
        for _ in range(count):
            self.pair.register()

    @precondition(lambda self: self.pair.can_take_back)
    @rule()
    def take_back(self) -> None:
        self.pair.take_back()

    @rule(data=st.data(), verdict=st.sampled_from([CONFIRMED, NACKED]), multiple=st.booleans())
    def confirm(self, data: st.DataObject, verdict: Outcome, multiple: bool) -> None:  # noqa: FBT001
        tag = data.draw(st.integers(0, self.pair.model.last + 1))
        self.pair.confirm(tag, verdict, multiple=multiple)

    @rule(data=st.data())
    def acks(self, data: st.DataObject) -> None:
        known = sorted(self.pair.model.open) or [1]
        any_tag = st.sampled_from(known) | st.integers(0, self.pair.model.last + 1)
        self.pair.acks(data.draw(st.lists(any_tag, min_size=1, max_size=10)))

    @rule(data=st.data())
    def acks_up_to(self, data: st.DataObject) -> None:
        self.pair.acks_up_to(data.draw(st.integers(0, self.pair.model.last + 1)))

    @rule(data=st.data())
    def note_return(self, data: st.DataObject) -> None:
        self.pair.note_return(data.draw(st.integers(0, self.pair.model.last + 1)))

    @rule()
    def lose_the_channel(self) -> None:
        self.pair.close()

    @invariant()
    def both_say_the_same(self) -> None:
        self.pair.check()


TestLedgerMachine = LedgerMachine.TestCase


def one_random_event(pair: Pair, chance: random.Random) -> None:
    """Mostly what brokers do: a window of some tags, confirmed near its lower end."""
    last = pair.model.last
    low = min(pair.model.open, default=last)
    tag = min(low + int(chance.expovariate(0.2)), last + (chance.random() < 0.001))
    kinds = {"send": 50, "confirm": 30, "acks": 10, "return": 6, "take back": 2, "any tag": 2}
    match chance.choices([*kinds], [*kinds.values()]):
        case ["send"]:
            pair.register()
        case ["acks"]:
            pair.acks_up_to(tag)
        case ["confirm"]:
            verdict = NACKED if chance.random() < 0.1 else CONFIRMED
            pair.confirm(tag, verdict, multiple=chance.random() < 0.4)
        case ["return"]:
            pair.note_return(tag)
        case ["take back"] if pair.can_take_back:
            pair.take_back()
        case _:
            pair.confirm(chance.randint(0, last), CONFIRMED, multiple=chance.random() < 0.5)


@pytest.mark.parametrize(
    "events",
    [SHORT_RUN, pytest.param(SOAK_RUN, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
def test_a_long_random_run(events: int) -> None:
    chance = random.Random(20_240_601)
    pair = Pair()
    for event in range(events):
        if event % 5_000 == 0:  # a new epoch: the model must stay small enough to scan
            pair.close()
            pair.check()
            pair = Pair()
        one_random_event(pair, chance)
        if event % 16 == 0:
            pair.check()
