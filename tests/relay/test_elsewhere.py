"""When a relay looks for what other processes have written: by the clock, and when a bell rings."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from reliablepub import Message
from reliablepub._core.events import Connected
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.relay.elsewhere import POLL_S, QUICK_S, REST_S, SOON_S, Elsewhere
from reliablepub.relay.relay import LOOK_S
from tests.relay.scripted import World, connected


class ScriptedBell:
    """Rings when the test says so."""

    rings_early = True

    def __init__(self) -> None:
        self.is_armed = False
        self.is_broken = False
        self.armings = 0
        self._has_rung = False

    def fileno(self) -> int:
        return 0

    def arm(self) -> None:
        self.armings += 1
        self.is_armed = not self.is_broken

    def ring(self) -> None:
        """Another process writes."""
        self._has_rung, self.is_armed = self._has_rung or self.is_armed, self.is_armed

    def has_rung(self) -> bool:
        has_rung, self._has_rung = self._has_rung, False
        self.is_armed = self.is_armed and not has_rung
        return has_rung


@pytest.fixture
def bell() -> ScriptedBell:
    return ScriptedBell()


def looks(elsewhere: Elsewhere, since: float, until: float) -> list[float]:
    """When it looks in that time, and finds nothing; seconds after the beginning."""
    now, found = since, []
    while now <= until:
        if elsewhere.is_due(now):
            elsewhere.found_nothing(now)
            found.append(round(now - since, 4))
        now = elsewhere.look_at
    return found


def test_without_a_bell_it_looks_20_times_a_second() -> None:
    assert looks(Elsewhere(None, 5.0), 5.0, 6.0) == pytest.approx([n / 20 for n in range(21)])


def test_a_store_on_a_network_is_asked_less_and_less_often() -> None:
    elsewhere = Elsewhere(None, 0.0, rest_s=0.5)
    found = looks(elsewhere, 0.0, 120.0)
    assert len([at for at in found if at < 5.0]) == 101 - 1, "none is missed at first"
    assert max(later - at for at, later in pairwise(found) if at < 20) <= 0.2
    assert len([at for at in found if 60 <= at < 120]) == 120


def test_what_a_bell_tells_that_does_not_ring_early_is_looked_at_once(bell: ScriptedBell) -> None:
    bell.rings_early = False
    elsewhere = Elsewhere(bell, 0.0, rest_s=0.5)
    looks(elsewhere, 0.0, 4.0)
    bell.ring()
    assert elsewhere.is_due(4.0) or elsewhere.look_at == pytest.approx(4.0 + QUICK_S)
    elsewhere.found(4.001, is_urgent=True)
    assert elsewhere.look_at == pytest.approx(4.001 + POLL_S)


def test_with_a_bell_it_looks_less_and_less_often(bell: ScriptedBell) -> None:
    assert looks(Elsewhere(bell, 0.0), 0.0, 2.0) == pytest.approx([0, 0.1, 0.3, 0.7, 1.2, 1.7])
    assert bell.armings == 1


def test_a_ring_has_it_look_until_the_commit_is_visible(bell: ScriptedBell) -> None:
    elsewhere = Elsewhere(bell, 0.0)
    looks(elsewhere, 0.0, 4.0)
    bell.ring()
    assert not elsewhere.is_due(4.0), "the writer has yet to sync"
    found = looks(elsewhere, 4.0, 4.4)
    assert found == pytest.approx([(2**n - 1) / 1000 for n in range(1, 9)])
    assert found[0] == QUICK_S
    assert bell.is_armed, "armed again, at the first look"


def test_what_it_finds_for_the_outbox_has_it_look_again_at_once(bell: ScriptedBell) -> None:
    elsewhere = Elsewhere(bell, 0.0)
    looks(elsewhere, 0.0, 4.0)
    elsewhere.found(4.0, is_urgent=True)
    assert looks(elsewhere, 4.0, 4.01)[:3] == pytest.approx([0.001, 0.003, 0.007])


def test_writes_to_other_tables_cost_20_looks_a_second_at_most(bell: ScriptedBell) -> None:
    elsewhere = Elsewhere(bell, 0.0)
    now, found = 0.0, 0
    while now < 10.0:
        bell.ring()
        if elsewhere.is_due(now):
            elsewhere.found(now, is_urgent=False)
            found += 1
        now += 0.0005
    assert found <= 202
    assert bell.armings <= 202


def test_a_commit_of_its_own_may_have_hidden_a_ring(bell: ScriptedBell) -> None:
    elsewhere = Elsewhere(bell, 0.0)
    looks(elsewhere, 0.0, 4.0)
    elsewhere.committed(4.0)
    assert looks(elsewhere, 4.0, 4.3)[:4] == pytest.approx([SOON_S, 0.015, 0.035, 0.075])


def test_a_bell_that_cannot_be_armed_is_none(bell: ScriptedBell) -> None:
    bell.is_broken = True
    assert looks(Elsewhere(bell, 5.0), 5.0, 6.0) == pytest.approx([n / 20 for n in range(21)])


@pytest.fixture
def rung(sqlite: SqliteStore, bell: ScriptedBell) -> World:
    """A relay at rest, that listens for a bell."""
    w = connected(sqlite, bell=bell).turned()
    rest(w)
    return w


def rest(w: World) -> None:
    """Nothing happens for some seconds."""
    for _ in range(60):
        wait_s = w.relay.idle_s()
        w.time.now += 0.05 if wait_s is None else wait_s
        if wait_s is None:
            w.turn()


def test_an_idle_relay_with_a_bell_hardly_looks(rung: World) -> None:
    before, since = rung.relay.turns, rung.time.now
    rest(rung)
    assert rung.relay.turns - before <= 1.3 * (rung.time.now - since) * (1 / REST_S + 1 / LOOK_S)


def test_what_another_process_enqueues_is_sent_when_the_bell_has_rung(
    rung: World, bell: ScriptedBell, outbox: Outbox
) -> None:
    rung.turn(after_s=LOOK_S)
    assert rung.relay.idle_s() == pytest.approx(REST_S)
    outbox.enqueue(Message(b"", message_id="other"))
    bell.ring()
    assert rung.relay.idle_s() == pytest.approx(QUICK_S)
    rung.time.now += QUICK_S
    assert rung.relay.idle_s() is None
    rung.turn()
    assert rung.sent == ["other"]


def test_a_bell_that_rings_while_the_relay_is_busy_is_heard(
    rung: World, bell: ScriptedBell, outbox: Outbox
) -> None:
    rung.hand_over("own")
    rung.turn()
    outbox.enqueue(Message(b"", message_id="other"))
    bell.ring()
    rung.hand_over("more")
    rung.turn()
    rung.turn(after_s=SOON_S)
    assert rung.sent == ["own", "more", "other"]


def test_what_is_enqueued_during_an_outage_costs_20_looks_a_second_at_most(
    rung: World, bell: ScriptedBell, outbox: Outbox
) -> None:
    rung.lose_connection()
    rung.turn()
    turns = 0
    for number in range(200):
        outbox.enqueue(Message(b"", message_id=f"m-{number}"))
        bell.ring()
        if rung.relay.idle_s() is None:
            rung.turn()
            turns += 1
        rung.time.now += 0.005
    assert turns <= 25, "a few of them to connect"
    rung.relay.handle([Connected()])
    rung.open_channel()
    rung.turn()
    assert len(rung.sent) == 100, "the window"


def test_what_does_not_ring_is_found_all_the_same(rung: World, outbox: Outbox) -> None:
    outbox.enqueue(Message(b"", message_id="other"))
    since = rung.time.now
    while not rung.sent:
        wait_s = rung.relay.idle_s()
        if wait_s is None:
            rung.turn()
        else:
            rung.time.now += wait_s
    assert rung.time.now - since <= REST_S


def test_two_commits_of_others_are_found_one_soon_after_the_other(
    rung: World, bell: ScriptedBell, outbox: Outbox
) -> None:
    for name in "ab":
        outbox.enqueue(Message(b"", message_id=name))
        bell.ring()
        rung.turn()
        rung.turn(after_s=POLL_S / 10)
    assert rung.sent == ["a", "b"]


@pytest.fixture
def outbox(sqlite: SqliteStore) -> Iterator[Outbox]:
    """The same outbox, as another process has it."""
    with Outbox(sqlite.path) as outbox:
        yield outbox
