"""Large changes leave the write lock to others between their steps."""

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from reliablepub.outbox.admin import interventions
from reliablepub.outbox.admin.interventions import PAUSE, PAUSE_S_MAX, step_by_step
from reliablepub.outbox.database import Session
from reliablepub.outbox.opening import outbox_at


class Time:
    """Stands in for the module, and notes who sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_each_pause_is_a_part_of_the_step_before_it_up_to_a_limit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interventions, "time", time := Time())

    def step(_session: Session, takes_s: float) -> float:
        time.now += takes_s
        return takes_s

    with closing(outbox_at(path)) as database:
        lengths = (0.125, 0.0, 60.0, 0.0625)
        assert tuple(step_by_step(database, [partial(step, takes_s=s) for s in lengths])) == lengths
    assert time.slept == [0.0, 0.125 * PAUSE, 0.0, PAUSE_S_MAX]
