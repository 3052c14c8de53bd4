"""Circuit breakers: the table, and random histories against the simplest account of them."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reliablepub._core.breaker import AT_ONCE_MAX, Breakers, Pause


def breakers(destinations_max: int = 10) -> Breakers[str, str]:
    """The n-th pause lasts n seconds."""
    return Breakers(destinations_max=destinations_max, pause_s=float)


def refuse(b: Breakers[str, str], name: str, now: float, *, refusals_max: int = 3) -> bool:
    return b.refused(name, now, why="full", refusals_max=refusals_max)


def rooms(b: Breakers[str, str], now: float) -> list[tuple[str, int]]:
    """Where more messages may go, and how many."""
    return [(room.destination, room.count) for room in b.poll_room(now)]


def opened(now: float = 0.0) -> Breakers[str, str]:
    b = breakers()
    assert [refuse(b, "a", now) for _ in range(3)] == [False, False, True]
    return b


def recovering() -> Breakers[str, str]:
    """It was probed at 1.0, and the probe was confirmed at once."""
    b = opened()
    assert rooms(b, 1.0) == [("a", 1)]
    assert b.admits("a")
    b.confirmed("a", 1.0)
    return b


def test_nothing_is_remembered_of_who_never_refused() -> None:
    b = breakers()
    b.confirmed("a", 0.0)
    assert not b.tracked
    assert len(b) == 0
    assert b.admits("a")
    assert b.poll_timeout() is None
    assert b.pause("a") is None


def test_so_many_refusals_in_a_row_open_it() -> None:
    b = opened()
    assert b.is_paused("a")
    assert not b.admits("a")
    assert b.admits("b")
    assert list(b.pauses) == [Pause("a", 3, 1.0, "full")] == [b.pause("a")]
    assert b.poll_timeout() == 1.0


def test_where_one_refusal_is_proof_one_opens_it() -> None:
    b = breakers()
    assert refuse(b, "a", 0.0, refusals_max=1)
    assert b.is_paused("a")


def test_the_last_words_are_kept() -> None:
    b = opened()
    b.refused("a", 0.5, why="gone", refusals_max=3)
    assert [pause.why for pause in b.pauses] == ["gone"]


def test_a_confirm_in_between_begins_the_count_anew() -> None:
    b = breakers()
    for _ in range(5):
        assert not refuse(b, "a", 0)
        assert not refuse(b, "a", 0)
        b.confirmed("a", 0)
    assert not b.tracked


def test_what_was_sent_before_does_not_prolong_the_pause() -> None:
    b = opened()
    assert not refuse(b, "a", 0.9)
    assert b.poll_timeout() == 1.0


def test_after_the_pause_one_message_goes_and_no_second_one() -> None:
    b = opened()
    assert rooms(b, 0.9) == []
    assert rooms(b, 1.0) == [("a", 1)]
    assert rooms(b, 1.0) == []
    assert b.is_paused("a")
    assert [b.admits("a") for _ in range(3)] == [True, False, False]


def test_a_probe_that_is_refused_pauses_it_for_longer() -> None:
    b = opened()
    for n, at in [(2, 1.0), (3, 3.0), (4, 6.0)]:
        assert rooms(b, at) == [("a", 2 ** (n - 2))], "twice as many"
        assert b.admits("a")
        assert refuse(b, "a", at)
        assert not b.admits("a")
        assert b.poll_timeout() == at + n


def test_fresh_messages_are_probes_at_least_once_a_minute_and_others_after_the_pause() -> None:
    b: Breakers[str, str] = Breakers(destinations_max=9, pause_s=lambda n: 100.0 * n)
    refuse(b, "a", 0.0, refusals_max=1)
    found: list[tuple[float, bool, bool]] = []
    now = b.poll_timeout()
    while now is not None and len(found) < 6:
        found += [(now, room.are_probes, room.may_repeat) for room in b.poll_room(now)]
        now = b.poll_timeout()
    assert found == [
        (60.0, True, False),
        (100.0, True, True),
        *((at, True, True) for at in (160.0, 220.0, 280.0, 340.0)),
    ]
    assert refuse(b, "a", 350.0, refusals_max=5), "one refused probe is enough"
    assert b.poll_timeout() == 410.0
    [room] = b.poll_room(410.0)
    assert (room.count, room.may_repeat) == (2, False)


def test_of_each_that_is_confirmed_two_more_may_go() -> None:
    b = recovering()
    assert b.is_paused("a")
    assert b.poll_timeout() == float("-inf")
    assert rooms(b, 1.0) == [("a", 2)]
    assert [b.admits("a") for _ in range(3)] == [True, True, False]
    b.confirmed("a", 1.1)
    b.confirmed("a", 1.1)
    assert rooms(b, 1.1) == [("a", 4)]


def test_it_is_well_when_fewer_wait_than_may_go() -> None:
    b = recovering()
    b.poll_room(1.0)
    assert b.no_more_wait("a")
    assert not b.tracked
    assert b.admits("a")
    assert [refuse(b, "a", 9.0) for _ in range(3)] == [False, False, True]
    assert b.poll_timeout() == 10.0


def test_a_refusal_while_it_recovers_pauses_it_again_and_not_for_long() -> None:
    b = recovering()
    b.poll_room(1.0)
    assert [refuse(b, "a", 2.0) for _ in range(3)] == [False, False, True]
    assert not b.admits("a")
    assert b.poll_timeout() == 3.0
    assert not b.no_more_wait("a"), "it has refused something since"
    assert b.is_paused("a")


def test_a_confirm_of_what_was_sent_before_lets_it_recover() -> None:
    b = opened()
    b.confirmed("a", 0.5)
    assert rooms(b, 0.5) == [("a", 2)]
    assert b.poll_timeout() == 1.5


def test_a_confirm_ends_the_pause_however_long_it_was_to_be() -> None:
    b = opened()
    b.poll_room(1.0)
    assert refuse(b, "a", 1.0)  # until 3.0
    b.confirmed("a", 1.5)
    assert rooms(b, 2.5) == [("a", 2)]
    assert b.poll_timeout() == 3.5


def test_what_is_not_heard_of_is_followed_by_one_more() -> None:
    b = opened()
    b.poll_room(1.0)
    assert b.admits("a")
    assert rooms(b, 1.9) == []
    assert rooms(b, 2.0) == [("a", 1)]
    assert b.admits("a")
    b = recovering()
    b.poll_room(1.0)
    assert rooms(b, 2.0) == [("a", 1)], "the two may be gone: a person has taken them"


def test_so_many_may_go_between_two_confirms_and_no_more() -> None:
    b = recovering()
    for _ in range(AT_ONCE_MAX):
        b.confirmed("a", 1.0)
    assert rooms(b, 1.0) == [("a", AT_ONCE_MAX)]
    b.confirmed("a", 1.0)
    assert rooms(b, 1.0) == []


def test_a_probe_that_nobody_took_is_no_longer_there_after_a_refusal() -> None:
    b = opened()
    b.poll_room(1.0)
    assert refuse(b, "a", 1.0)  # of something that was sent before
    assert not b.admits("a")


def test_who_is_forgotten_begins_anew() -> None:
    b = opened()
    b.forget("a")
    b.forget("unknown")
    assert b.admits("a")
    assert not b.tracked
    assert not refuse(b, "a", 0)
    assert b.poll_timeout() is None
    assert not b.no_more_wait("a")


def test_a_probe_that_nobody_waits_for_is_the_end_of_the_pause() -> None:
    b = opened()
    b.poll_room(1.0)
    assert not b.no_more_wait("a"), "nobody knows whether it is well"
    assert not b.tracked


def test_where_messages_wait_from_an_earlier_time_one_goes_at_once() -> None:
    b = breakers(destinations_max=1)
    assert b.suspect("a", 5.0, why="unknown")
    assert not b.suspect("b", 5.0, why="unknown")
    assert not b.admits("a")
    assert rooms(b, 5.0) == [("a", 1)]
    assert b.admits("a")
    assert refuse(b, "a", 5.0, refusals_max=1)
    assert b.poll_timeout() == 6.0


def test_pauses_without_length_are_still_one_probe_each_look() -> None:
    b: Breakers[str, str] = Breakers(destinations_max=9, pause_s=lambda _: 0.0)
    refuse(b, "a", 0.0, refusals_max=1)
    assert [rooms(b, 0.0) for _ in range(2)] == [[("a", 1)]] * 2


def test_the_closed_one_that_refused_longest_ago_gives_way() -> None:
    b = breakers(destinations_max=3)
    for name in "abc":
        refuse(b, name, 0, refusals_max=2)
    refuse(b, "a", 0, refusals_max=2)  # open, and newer than b
    refuse(b, "d", 0, refusals_max=2)  # b gives way
    assert not refuse(b, "b", 0, refusals_max=2), "one of b's was forgotten; c gave way"
    assert refuse(b, "b", 0, refusals_max=2)
    assert refuse(b, "d", 0, refusals_max=2)
    assert [pause.destination for pause in b.pauses] == ["a", "b", "d"]


def test_when_all_are_open_more_are_left_alone() -> None:
    b = breakers(destinations_max=2)
    assert refuse(b, "a", 0, refusals_max=1)
    assert refuse(b, "b", 0, refusals_max=1)
    for _ in range(5):
        assert not refuse(b, "c", 0, refusals_max=1)
    assert b.admits("c")


class BreakersMachine(RuleBasedStateMachine):
    """Against plain dicts."""

    DESTINATIONS = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self.real = breakers(destinations_max=4)
        self.now = 0.0
        self.in_a_row: dict[str, int] = {}
        self.openings: dict[str, int] = {}
        self.until: dict[str, float] = {}
        self.state: dict[str, str] = {}
        self.room: dict[str, int] = {}
        self.asked: dict[str, int] = {}

    @rule(name=DESTINATIONS, is_proof=st.booleans())
    def refuse(self, name: str, is_proof: bool) -> None:  # noqa: FBT001
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1
        limit = 1 if is_proof else 3
        state = self.state.get(name)
        opens = state == "probing" or (state != "open" and self.in_a_row[name] >= limit)
        if opens:
            self.openings[name] = self.openings.get(name, 0) + 1
            self.until[name] = self.now + self.openings[name]
            self.state[name] = "open"
            self.room[name] = self.asked[name] = 0
        assert refuse(self.real, name, self.now, refusals_max=limit) == opens

    @rule(name=DESTINATIONS)
    def confirm(self, name: str) -> None:
        self.real.confirmed(name, self.now)
        self.openings.pop(name, None)
        if name not in self.state:
            self.in_a_row.pop(name, None)
            return
        self.in_a_row[name] = 0
        self.state[name] = "recovering"
        self.until[name] = self.now + 1
        self.room[name] += 2
        self.asked[name] += 2

    @rule(name=DESTINATIONS)
    def forget(self, name: str) -> None:
        self.real.forget(name)
        self._gone(name)

    @rule(name=DESTINATIONS)
    def no_more_wait(self, name: str) -> None:
        state = self.state.get(name)
        assert self.real.no_more_wait(name) == (state == "recovering")
        if state in {"probing", "recovering"}:
            self._gone(name)

    def _gone(self, name: str) -> None:
        for facts in (self.in_a_row, self.openings, self.until, self.state):
            facts.pop(name, None)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        for name, until in self.until.items():
            if until <= self.now:
                self.until[name] = self.now + max(1, self.openings.get(name, 0))
                self.state[name] = {"open": "probing"}.get(self.state[name], self.state[name])
                count = min(2 ** max(0, self.openings.get(name, 0) - 1), AT_ONCE_MAX)
                count = 1 if self.state[name] == "recovering" else count
                self.room[name] = max(count, self.room[name])
                self.asked[name] = max(count, self.asked[name])
        asked = {name: count for name, count in self.asked.items() if count and name in self.state}
        assert dict(rooms(self.real, self.now)) == asked
        self.asked = dict.fromkeys(self.asked, 0)

    @precondition(lambda self: self.state)
    @rule(name=DESTINATIONS)
    def send(self, name: str) -> None:
        is_closed = name not in self.state
        assert self.real.admits(name) == (is_closed or self.room[name] > 0)
        if not is_closed:
            self.room[name] = max(0, self.room[name] - 1)

    @invariant()
    def the_same_are_paused(self) -> None:
        found = {pause.destination: pause for pause in self.real.pauses}
        assert {name: pause.until for name, pause in found.items()} == self.until
        assert {name: pause.refusals for name, pause in found.items()} == {
            name: self.in_a_row[name] for name in self.until
        }
        is_due = any(self.asked[name] for name in self.state)
        at = float("-inf") if is_due else min(self.until.values(), default=None)
        assert self.real.poll_timeout() == at
        assert bool(self.real.tracked) == bool(self.in_a_row)
        assert len(self.real) == len(self.state)


TestBreakers = BreakersMachine.TestCase


def test_memory_is_bounded() -> None:
    b = breakers(destinations_max=5)
    for n in range(1_000):
        refuse(b, str(n), 0)
    assert len(b._circuits) == 5
    for n in range(1_000):
        refuse(b, "a", n * 100.0, refusals_max=1)
        b.poll_room(n * 100.0 + 50)
        b.confirmed("a", n * 100.0 + 50)
        b.poll_timeout()
        if n % 7 == 0:
            b.forget("a")
    assert len(b._alarms) <= 10
