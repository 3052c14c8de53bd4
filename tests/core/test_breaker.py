"""Circuit breakers: the table, and random histories against the simplest account of them."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reliablepub._core.breaker import Breakers, Pause


def breakers(refusals_max: int = 3, destinations_max: int = 10) -> Breakers[str]:
    """The n-th pause lasts n seconds."""
    return Breakers(refusals_max=refusals_max, destinations_max=destinations_max, pause_s=float)


def opened(now: float = 0.0) -> Breakers[str]:
    b = breakers()
    assert [b.refused("a", now) for _ in range(3)] == [False, False, True]
    return b


def test_nothing_is_remembered_of_who_never_refused() -> None:
    b = breakers()
    assert not b.confirmed("a")
    assert not b
    assert b.admits("a")
    assert b.poll_timeout() is None


def test_so_many_refusals_in_a_row_open_it() -> None:
    b = opened()
    assert b.is_paused("a")
    assert not b.admits("a")
    assert b.admits("b")
    assert list(b.pauses) == [Pause("a", 3, 1.0)]
    assert (b.refusals("a"), b.refusals("b")) == (3, 0)
    assert b.poll_timeout() == 1.0


def test_a_confirm_in_between_begins_the_count_anew() -> None:
    b = breakers()
    for _ in range(5):
        assert not b.refused("a", 0)
        assert not b.refused("a", 0)
        assert not b.confirmed("a")
    assert not b


def test_what_was_sent_before_does_not_prolong_the_pause() -> None:
    b = opened()
    assert not b.refused("a", 0.9)
    assert b.poll_timeout() == 1.0


def test_a_confirm_of_what_was_sent_before_closes_it() -> None:
    b = opened()
    assert b.confirmed("a")
    assert b.admits("a")
    assert not b


def test_after_the_pause_one_message_goes_and_no_second_one() -> None:
    b = opened()
    assert b.poll_probes(0.9) == []
    assert b.poll_probes(1.0) == ["a"]
    assert b.is_paused("a")
    assert [b.admits("a") for _ in range(3)] == [True, False, False]


def test_a_probe_that_is_refused_pauses_it_for_longer() -> None:
    b = opened()
    for n, at in [(2, 1.0), (3, 3.0), (4, 6.0)]:
        assert b.poll_probes(at) == ["a"]
        assert b.admits("a")
        assert b.refused("a", at)
        assert not b.admits("a")
        assert b.poll_timeout() == at + n


def test_a_probe_that_is_confirmed_closes_it_and_the_next_pause_is_short_again() -> None:
    b = opened()
    b.poll_probes(1.0)
    b.refused("a", 1.0)
    b.poll_probes(3.0)
    assert b.confirmed("a")
    assert [b.refused("a", 9.0) for _ in range(3)] == [False, False, True]
    assert b.poll_timeout() == 10.0


def test_a_probe_of_which_nothing_is_heard_is_followed_by_another() -> None:
    b = opened()
    b.poll_probes(1.0)
    assert b.admits("a")
    assert b.poll_probes(1.9) == []
    assert b.poll_probes(2.0) == ["a"]
    assert b.admits("a")


def test_a_probe_that_nobody_took_is_no_longer_there_after_a_refusal() -> None:
    b = opened()
    b.poll_probes(1.0)
    assert b.refused("a", 1.0)  # of something that was sent before
    assert not b.admits("a")


def test_who_is_forgotten_begins_anew() -> None:
    b = opened()
    b.forget("a")
    b.forget("unknown")
    assert b.admits("a")
    assert not b
    assert not b.refused("a", 0)


def test_the_closed_one_that_refused_longest_ago_gives_way() -> None:
    b = breakers(refusals_max=2, destinations_max=3)
    for name in "abc":
        b.refused(name, 0)
    b.refused("a", 0)  # open, and newer than b
    b.refused("d", 0)  # b gives way
    assert not b.refused("b", 0), "one of b's was forgotten; c gave way"
    assert b.refused("b", 0)
    assert b.refused("d", 0)
    assert {pause.destination for pause in b.pauses} == {"a", "b", "d"}


def test_when_all_are_open_more_are_left_alone() -> None:
    b = breakers(refusals_max=1, destinations_max=2)
    assert b.refused("a", 0)
    assert b.refused("b", 0)
    for _ in range(5):
        assert not b.refused("c", 0)
    assert b.admits("c")


class BreakersMachine(RuleBasedStateMachine):
    """Against three plain dicts."""

    DESTINATIONS = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self.real = breakers(refusals_max=3, destinations_max=4)
        self.now = 0.0
        self.in_a_row: dict[str, int] = {}
        self.openings: dict[str, int] = {}
        self.until: dict[str, float] = {}
        self.probing: set[str] = set()
        self.may_go: set[str] = set()

    @rule(name=DESTINATIONS)
    def refuse(self, name: str) -> None:
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1
        is_open = name in self.until and name not in self.probing
        opens = not is_open and self.in_a_row[name] >= 3
        if opens:
            self.openings[name] = self.openings.get(name, 0) + 1
            self.until[name] = self.now + self.openings[name]
            self.probing.discard(name)
            self.may_go.discard(name)
        assert self.real.refused(name, self.now) == opens

    @rule(name=DESTINATIONS, is_forgotten=st.booleans())
    def confirm(self, name: str, is_forgotten: bool) -> None:  # noqa: FBT001
        was_paused = self.until.pop(name, None) is not None
        self.in_a_row.pop(name, None)
        self.openings.pop(name, None)
        self.probing.discard(name)
        self.may_go.discard(name)
        if is_forgotten:
            self.real.forget(name)
        else:
            assert self.real.confirmed(name) == was_paused

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = {name for name, until in self.until.items() if until <= self.now}
        assert set(self.real.poll_probes(self.now)) == due
        for name in due:
            self.until[name] = self.now + self.openings[name]
        self.probing |= due
        self.may_go |= due

    @precondition(lambda self: self.until)
    @rule(name=DESTINATIONS)
    def send(self, name: str) -> None:
        assert self.real.admits(name) == (name not in self.until or name in self.may_go)
        self.may_go.discard(name)

    @invariant()
    def the_same_are_paused(self) -> None:
        assert {pause.destination: pause.until for pause in self.real.pauses} == self.until
        assert self.real.poll_timeout() == min(self.until.values(), default=None)
        assert bool(self.real) == bool(self.in_a_row)


TestBreakers = BreakersMachine.TestCase


def test_memory_is_bounded() -> None:
    b = breakers(destinations_max=5)
    for n in range(1_000):
        b.refused(str(n), 0)
    assert len(b._circuits) == 5
