"""What is known of one message, from the disk and from what the relay shows."""

import os
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from reliablepub._core.events import Batch
from reliablepub.outbox.admin.interventions import Action, Intervention, change
from reliablepub.outbox.admin.story import Next, Story, resolve, tell
from reliablepub.outbox.entry import Attempt, Changes, Entry, Store
from reliablepub.outbox.opening import outbox_at
from reliablepub.outcome import CONFIRMED, NACKED, Outcome, OutcomeKind
from tests.asking import stored
from tests.outbox.conftest import Make
from tests.outcomes import RETURNED
from tests.stores import Where, open_store

CUT = Outcome(OutcomeKind.UNCERTAIN, 0, "connection lost")


@pytest.fixture
def store(where: Where) -> Iterator[Store]:
    store = open_store(where)
    yield store
    store.close()


@pytest.fixture
def new(store: Store, entry: Make) -> list[Entry]:
    """Five messages, of ids 1 to 5."""
    return stored(store, *(entry() for _ in range(5)))


def following(where: Where, id_: int) -> tuple[Next, float | None]:
    story = tell(outbox_at(where), id_)
    return story.next, story.next_at


def step_in(where: Where, action: Action, *ids: int) -> None:
    what = Intervention(action, person="me")
    with closing(outbox_at(where)) as database:
        database.write(lambda session: change(session, list(ids), what, 50.0))


def test_of_a_message_that_was_never_tried_little_is_to_be_told(
    store: Store, new: list[Entry], where: Where
) -> None:
    story = tell(outbox_at(where), 3)
    message = story.message
    assert (message["id"], message["message_id"], message["stored_at"]) == (3, "m-3", 1003.0)
    assert story == Story(
        id=3,
        message_id="m-3",
        state="ready",
        message=message,
        attempts=[],
        interventions=[],
        in_flight=None,
        persistence="not written",
        next=Next.SENT,
        next_at=None,
        held_by=None,
        before=2,
        relay_pid=os.getpid(),
        relay={},
    )


def test_what_was_sent_is_answered_next(store: Store, new: list[Entry], where: Where) -> None:
    store.commit(Changes(sent=[Batch(1, 7, new[:2])]))
    story = tell(outbox_at(where), 2)
    assert story.in_flight is not None
    assert (story.in_flight["epoch"], story.in_flight["tag"]) == ("1-1", 8)
    assert (story.state, story.persistence) == ("in flight", "possibly persisted")
    assert (story.next, story.before) == (Next.ANSWER, None)
    assert tell(outbox_at(where), 3).in_flight is None
    store.close()
    later = tell(outbox_at(where), 2)
    assert later.in_flight == story.in_flight
    assert (later.state, later.persistence) == ("ready", "possibly persisted")
    assert tell(outbox_at(where), 3).persistence == "not written"
    assert (later.next, later.relay_pid, later.before) == (Next.RELAYED, None, None)


def test_of_what_was_in_flight_and_is_parked_the_tag_says_nothing(
    store: Store, new: list[Entry], where: Where
) -> None:
    store.commit(Changes(sent=[Batch(1, 1, new[:2])]))
    parked = [Attempt(new[0], "1-1", 1, RETURNED, 9.0)]
    store.commit(Changes(parked=parked, attempts=parked))
    story = tell(outbox_at(where), 1)
    assert (story.state, story.in_flight, story.next) == ("parked", None, Next.DECIDED)
    assert [(a["at"], a["epoch"], a["tag"], a["outcome"]) for a in story.attempts] == [
        (9.0, "1-1", 1, "returned")
    ]


@pytest.mark.parametrize(
    ("said", "persistence"),
    [
        ([RETURNED], "not written"),
        ([RETURNED, NACKED, RETURNED], "possibly persisted"),
        ([CUT, RETURNED], "possibly persisted"),
        ([CUT, CONFIRMED], "persisted"),
        ([CONFIRMED, CUT], "persisted"),
    ],
)
def test_persistence_is_the_most_that_was_ever_said(
    store: Store, new: list[Entry], where: Where, said: list[Outcome], persistence: str
) -> None:
    attempts = [Attempt(new[0], "1-1", n, outcome, 9.0) for n, outcome in enumerate(said, 1)]
    store.commit(Changes(rescheduled=[new[0]], attempts=attempts))
    assert tell(outbox_at(where), 1).persistence == persistence
    assert [attempt["tag"] for attempt in tell(outbox_at(where), 1).attempts] == list(
        range(1, len(said) + 1)
    )


def test_the_end_is_told_as_far_as_it_was_written_down(
    store: Store, new: list[Entry], where: Where
) -> None:
    store.commit(Changes(rescheduled=[new[1]], attempts=[Attempt(new[1], "1-1", 2, CUT, 9.0)]))
    late = [Attempt(new[1], "1-2", 1, CONFIRMED, 10.0)]
    store.commit(Changes(confirmed=new[:2], attempts=late))
    step_in(where, Action.DISCARD, 3)
    step_in(where, Action.PARK, 4)
    store.touched()
    expired = [Attempt(new[4], "1-1", 5, Outcome(OutcomeKind.EXPIRED), 11.0)]
    store.commit(Changes(parked=expired, attempts=expired))
    told = {n: tell(outbox_at(where), n) for n in (1, 2, 3, 4, 5)}
    assert {n: (s.state, s.persistence, s.next, s.message_id) for n, s in told.items()} == {
        1: ("gone", None, Next.NOTHING, None),
        2: ("confirmed", "persisted", Next.NOTHING, "m-2"),
        3: ("discarded", "not written", Next.NOTHING, "m-3"),
        4: ("parked", "not written", Next.DECIDED, "m-4"),
        5: ("expired", "possibly persisted", Next.DECIDED, "m-5"),
    }
    assert [line["action"] for line in told[4].interventions] == ["park"]
    assert told[1].message == told[2].message == {}


def test_a_time_that_is_due_is_waited_for(
    store: Store, new: list[Entry], where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    new[1].due_at = 2_000.0
    store.commit(Changes(rescheduled=[new[1]]))
    for now, expected in ((1_999.0, (Next.SENT_LATER, 2_000.0)), (2_000.0, (Next.SENT, None))):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert tell(outbox_at(where), 2).state == "waiting"
        assert following(where, 2) == expected
    store.close()
    assert following(where, 2) == (Next.RELAYED, 2_000.0)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("disconnected", Next.CONNECTED),
        ("blocked", Next.UNBLOCKED),
        ("connected", Next.SENT),
        ("", Next.SENT),
    ],
)
def test_the_connection_is_waited_for(
    store: Store, new: list[Entry], where: Where, link: str, expected: Next
) -> None:
    store.show({"link": link})
    story = tell(outbox_at(where), 5)
    assert (story.next, story.next_at) == (expected, None)
    assert story.before == (4 if expected is Next.SENT else None)
    assert story.relay["link"] == link


def test_a_key_is_waited_for_and_a_destination(store: Store, where: Where, entry: Make) -> None:
    first, second, third = (entry(ordering_key="k") for _ in range(3))
    paused, other = entry(), entry(ordering_key="other")
    store.commit(Changes(new=[first, second, third, paused, other]))
    paused.due_at = float("inf")
    store.commit(Changes(rescheduled=[paused]))
    assert [tell(outbox_at(where), n).held_by for n in range(1, 6)] == [None, 1, 1, None, None]
    assert following(where, 2) == (Next.HELD, None)
    assert following(where, 4) == (Next.PAUSED, None)
    parked = [Attempt(first, "1-1", 1, RETURNED, 9.0)]
    store.commit(Changes(parked=parked, attempts=parked))
    assert (tell(outbox_at(where), 1).held_by, tell(outbox_at(where), 2).held_by) == (None, 1)
    step_in(where, Action.PARK, 2)
    assert tell(outbox_at(where), 2).held_by is None, "it waits for a person"
    step_in(where, Action.RETRY, 2)
    assert tell(outbox_at(where), 2).held_by == 1
    step_in(where, Action.SKIP, 1)
    assert tell(outbox_at(where), 2).held_by is None


@pytest.mark.parametrize("name", ["7e6b", 'a "quoted" id', "naïve", "100%_*?"])
def test_a_name_may_be_a_correlation_id(store: Store, where: Where, entry: Make, name: str) -> None:
    new = [
        entry(correlation_id=name),
        entry(),
        entry(correlation_id=name + "x"),
        entry(app_id=name),
    ]
    store.commit(Changes(new=[*new, entry(correlation_id=name, headers={"n": 1})]))
    assert resolve(outbox_at(where), name) == [1, 5]
    parked = [Attempt(new[0], "1-1", 1, RETURNED, 9.0)]
    store.commit(Changes(parked=parked, attempts=parked))
    assert resolve(outbox_at(where), name) == [1, 5]
    assert resolve(outbox_at(where), name[:-1]) == []


def test_a_name_is_a_number_an_id_or_a_key(store: Store, where: Where, entry: Make) -> None:
    again = {"message_id": "twice"}
    new = [entry(**again), entry(), entry(**again), entry(message_id="2"), entry(message_id="99")]
    store.commit(Changes(new=new))
    assert resolve(outbox_at(where), "twice") == [1, 3], "the lowest first"
    assert resolve(outbox_at(where), "2") == [2], "a row goes before a message_id"
    assert resolve(outbox_at(where), "5") == [5]
    assert resolve(outbox_at(where), "99") == [5], "there was never such a row"
    store.commit(Changes(new=[padded := entry(message_id="0002")]))
    assert resolve(outbox_at(where), "0002") == [padded.id], "no row is shown like this"
    assert (
        resolve(outbox_at(where), "7")
        == resolve(outbox_at(where), "0")
        == resolve(outbox_at(where), "²")
        == []
    )
    parked = [Attempt(new[0], "1-1", 1, RETURNED, 9.0)]
    store.commit(Changes(parked=parked, attempts=parked, confirmed=[new[1]]))
    assert resolve(outbox_at(where), "twice") == [1, 3]
    assert resolve(outbox_at(where), "m-1") == [], "of what was confirmed at once nothing is left"
    assert resolve(outbox_at(where), "2") == [2]
