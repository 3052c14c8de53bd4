"""Whose turn it is, against an oracle that remembers every message there ever was."""

from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reliablepub._core.ordering import KeyOrder


def test_one_message_of_a_key_at_a_time() -> None:
    turns = KeyOrder()
    assert turns.admit("k", 1)
    assert not turns.admit("k", 2)
    assert turns.admit("other", 3)
    turns.leave("k", 1, is_settled=True)
    assert turns.next_wanted(9) == ["k"]
    assert turns.admit("k", 2)


def test_a_key_that_is_on_its_way_is_not_looked_for() -> None:
    turns = KeyOrder()
    turns.want("k")
    turns.want("k")
    assert len(turns.wanted) == 1
    assert turns.admit("k", 1)
    turns.want("k")
    assert turns.next_wanted(9) == []


def test_who_is_only_put_off_keeps_the_turn() -> None:
    turns = KeyOrder()
    turns.admit("k", 1)
    turns.leave("k", 1, is_settled=False)
    assert not turns.wanted
    assert turns.admit("k", 1)


def test_who_was_given_up_before_its_turn_takes_nobody_elses() -> None:
    turns = KeyOrder()
    turns.admit("k", 1)
    turns.leave("k", 2, is_settled=True)
    assert not turns.admit("k", 3)
    turns.leave("l", 4, is_settled=True)
    assert turns.next_wanted(9) == ["l"]


def test_an_earlier_one_that_was_put_back_goes_when_a_later_one_is_put_off() -> None:
    turns = KeyOrder()
    turns.admit("k", 2)
    assert not turns.admit("k", 1)
    assert turns.passed.keys() == {1}
    turns.leave("k", 2, is_settled=False)
    assert turns.passed.keys() == set()
    assert turns.next_wanted(9) == ["k"]
    assert turns.admit("k", 1)


def test_who_is_found_again_while_it_is_on_its_way_does_not_wait_for_itself() -> None:
    turns = KeyOrder()
    turns.admit("k", 1)
    assert not turns.admit("k", 1)
    assert turns.passed.keys() == {1}
    turns.leave("k", 1, is_settled=False)
    assert not turns.wanted
    assert turns.admit("k", 1)


def test_keys_are_looked_for_in_the_order_in_which_they_were_wanted() -> None:
    turns = KeyOrder()
    for key in "cab":
        turns.want(key)
    assert turns.next_wanted(0) == []
    assert turns.next_wanted(2) == ["c", "a"]
    assert len(turns.wanted) == 1
    assert turns.next_wanted(2) == ["b"]


KEYS = st.sampled_from(["a", "b", "c"])


class Store:
    """A naive store, and whoever asks it; it sees to it that nothing is sent out of turn."""

    def __init__(self) -> None:
        self.turns = KeyOrder()
        self.open: dict[str, list[int]] = defaultdict(list)
        self.on_the_way: dict[str, int] = {}
        self.postponed: set[str] = set()
        self.sent: dict[str, list[int]] = defaultdict(list)
        self.count = 0

    def put_in(self, key: str) -> None:
        self.count += 1
        self.open[key].append(self.count)
        self.turns.want(key)

    def look(self, limit: int) -> None:
        for key in self.turns.next_wanted(limit):
            if self.open[key] and key not in self.postponed:
                self.send(key)

    def send(self, key: str) -> None:
        first = self.open[key][0]
        if self.turns.admit(key, first):
            assert key not in self.on_the_way, "two of a key at once"
            self.on_the_way[key] = first
            self.sent[key].append(first)

    def settle(self, key: str) -> None:
        if key in self.on_the_way:
            number = self.on_the_way.pop(key)
            self.open[key].remove(number)
            self.turns.leave(key, number, is_settled=True)

    def postpone(self, key: str) -> None:
        if key in self.on_the_way:
            self.turns.leave(key, self.on_the_way.pop(key), is_settled=False)
            self.postponed.add(key)

    def fall_due(self, key: str) -> None:
        if key in self.postponed:
            self.postponed.discard(key)
            self.send(key)

    def give_up_a_later_one(self, key: str) -> None:
        if len(self.open[key]) > 1:
            self.turns.leave(key, self.open[key].pop(), is_settled=True)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just(Store.put_in), KEYS),
        st.tuples(st.just(Store.look), st.integers(0, 3)),
        st.tuples(st.just(Store.settle), KEYS),
        st.tuples(st.just(Store.postpone), KEYS),
        st.tuples(st.just(Store.fall_due), KEYS),
        st.tuples(st.just(Store.give_up_a_later_one), KEYS),
    ),
    max_size=60,
)


@given(STEPS)
def test_messages_of_a_key_go_in_their_order_and_none_is_forgotten(
    steps: list[tuple[Any, ...]],
) -> None:
    store = Store()
    for step, *arguments in steps:
        step(store, *arguments)
    for key in list(store.postponed):
        store.fall_due(key)
    for _ in range(store.count + 1):
        store.look(9)
        for key in list(store.on_the_way):
            store.settle(key)
    assert not any(store.open.values()), "a message is forgotten"
    for sent in store.sent.values():
        assert [n for i, n in enumerate(sent) if n not in sent[:i]] == sorted(set(sent))
    assert (len(store.turns.wanted), len(store.turns._admitted)) == (0, 0)
