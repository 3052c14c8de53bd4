"""A publisher killed with SIGKILL, at every named point and at random: nothing it promised is lost.

Afterwards another publisher drains the outbox, and what the broker has is compared with what the
callers were told (`account`).
"""

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reliablepub import Outbox, Publisher
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.admin.story import tell
from reliablepub.outbox.admin.transfer import export_lines
from reliablepub.outbox.opening import outbox_at
from reliablepub.testing import FakeBroker
from reliablepub.testing.faults import Nack
from tests.chaos.account import Account, Told, close_account
from tests.chaos.failpoints import NAMES
from tests.chaos.nursery import Nursery
from tests.chaos.victim import OPTIONS, WINDOW_MAX, Life, message

LIFE_S = 0.3
"""Within which a life is killed at random; it takes about that long to publish its messages."""
COUNT = 60
QUIET_S = 0.1


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.chaos.victim") as nursery:
        yield nursery


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        broker.declare_queue("q", durable=True)
        broker.declare_queue("limited", durable=True)
        broker.inject(Nack(routing_key="limited", share=0.5))
        yield broker


class Story:
    """Lives on one outbox, one after the other, and their account."""

    def __init__(self, nursery: Nursery, broker: FakeBroker, folder: Path) -> None:
        self._nursery = nursery
        self._broker = broker
        self.outbox = folder / "outbox.db"
        self._told = folder / "told"
        self._next = 1
        self.kills = 0

    def live(self, *, is_async: bool, **death: object) -> int:
        life = Life(
            is_async=is_async,
            url=self._broker.url,
            outbox=str(self.outbox),
            told=str(self._told),
            first=self._next,
            count=COUNT,
            **death,  # type: ignore[arg-type]
        )
        self._next += COUNT
        status = self._nursery.fork(life)
        assert status in (0, -signal.SIGKILL)
        self.kills += status != 0
        return status

    def arrived(self) -> set[str]:
        """Message ids that the broker has, once it has read what the killed life had sent."""
        ids, since = set[str](), time.monotonic()
        while time.monotonic() - since < QUIET_S:
            found = {
                m.properties.message_id or ""
                for queue in ("q", "limited")
                for m in self._broker.messages(queue)
            }
            if found != ids:
                ids, since = found, time.monotonic()
            time.sleep(0.01)
        return ids

    def close(self) -> Account:
        """Drain by a publisher that is not killed; then compare."""
        with Publisher(self._broker.url, outbox=self.outbox, **OPTIONS) as publisher:  # type: ignore[arg-type]
            assert publisher.flush(60).open == 0
        arrivals = [
            (m.body, m.properties.message_id or "")
            for queue in ("q", "limited")
            for m in self._broker.messages(queue)
        ]
        return close_account(
            Told.read(self._told),
            arrivals,
            self.outbox,
            message,
            duplicates_max=self._duplicates_max(),
        )

    def _duplicates_max(self) -> int:
        """Two windows for each kill, and one for each channel that a guilty message closed.

        A kill loses what is in flight, and confirms that are not on disk. A guilty message closes a
        channel for each halving of a window, until it is alone.
        """
        guilty = self._next // 20 + 1
        return (2 * self.kills + guilty * 7) * WINDOW_MAX


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
@pytest.mark.parametrize("failpoint", NAMES)
def test_killed_at_a_named_point(
    nursery: Nursery, broker: FakeBroker, tmp_path: Path, failpoint: str, *, is_async: bool
) -> None:
    story = Story(nursery, broker, tmp_path)
    if failpoint == "a backlog is read":  # there must be one
        story.live(is_async=is_async, failpoint="tags are recorded, nothing is written")
    assert story.live(is_async=is_async, failpoint=failpoint) == -signal.SIGKILL
    story.live(is_async=is_async, failpoint=failpoint, nth=3)
    assert story.close().wrong == []


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
@pytest.mark.parametrize("failpoint", NAMES)
def test_a_message_that_a_queue_has_is_never_called_not_written(
    nursery: Nursery, broker: FakeBroker, tmp_path: Path, failpoint: str, *, is_async: bool
) -> None:
    """Before the next relay has judged what the killed one left, and after a person discards it."""
    story = Story(nursery, broker, tmp_path)
    for nth in (3, 1):  # some points are met once in a life
        if failpoint == "a backlog is read":
            story.live(is_async=is_async, failpoint="tags are recorded, nothing is written")
        if status := story.live(is_async=is_async, failpoint=failpoint, nth=nth):
            break
    assert status == -signal.SIGKILL
    if not story.outbox.exists():
        return  # killed before there was one
    arrived = story.arrived()
    outbox = Outbox(story.outbox)
    rows = [row for view in ("open", "parked") for row in outbox.rows(view)]
    ids = {int(str(row["id"])): str(row["message_id"]) for row in rows}
    there = {id_ for id_, message_id in ids.items() if message_id in arrived}

    def said_not_written() -> set[int]:
        told = {id_: tell(outbox_at(story.outbox), id_).persistence for id_ in ids}
        return {id_ for id_, persistence in told.items() if persistence == "not written"}

    assert not said_not_written() & there
    exported = [json.loads(line) for line in export_lines(outbox_at(story.outbox), ids)]
    possible = {line["message_id"] for line in exported if line["uncertain"] or line["nacked"]}
    assert possible >= {ids[id_] for id_ in there}
    effect = intervene(outbox_at(story.outbox), list(ids), Intervention(Action.DISCARD))
    assert effect.changed == len(ids)
    assert set(effect.possible) >= there
    assert not said_not_written() & there
    assert said_not_written() == set(ids) - set(effect.possible)


def kill_at_random(story: Story, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    begun = time.monotonic()
    assert story.live(is_async=False) == 0
    life_s = max(LIFE_S, time.monotonic() - begun)  # on a busy machine it takes longer
    while story.kills < kills:
        story.live(is_async=rng.random() < 0.5, kill_after_s=rng.uniform(0.0, life_s))


def test_killed_at_random(nursery: Nursery, broker: FakeBroker, tmp_path: Path) -> None:
    story = Story(nursery, broker, tmp_path)
    kill_at_random(story, kills=20, seed=1)
    account = story.close()
    assert account.wrong == []
    assert account.promised > COUNT  # by others than the one that was not killed


@pytest.mark.soak
@pytest.mark.parametrize("part", range(50))
def test_killed_at_random_a_hundred_times(
    nursery: Nursery, broker: FakeBroker, tmp_path: Path, part: int
) -> None:
    story = Story(nursery, broker, tmp_path)
    kill_at_random(story, kills=100, seed=100 + part)
    account = story.close()
    print(f"\n{story.kills} kills: {account}")
    assert account.wrong == []
