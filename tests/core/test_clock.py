"""The clock that can be stopped."""

from __future__ import annotations

from reliablepub._core.session import StoppableClock


def test_it_reads_like_the_other_one_until_it_is_stopped() -> None:
    clock = StoppableClock()
    assert (clock.reading(100.0), clock.due_at(130.0)) == (100.0, 130.0)


def test_it_stands_still_from_the_first_stop_to_the_first_start() -> None:
    clock = StoppableClock()
    clock.stop(110.0)
    clock.stop(120.0)
    assert clock.reading(150.0) == 110.0
    clock.start(160.0)
    clock.start(165.0)
    assert clock.reading(170.0) == 120.0
    assert clock.due_at(130.0) == 180.0


def test_each_stop_adds_to_those_before() -> None:
    clock = StoppableClock()
    for stopped_at, started_at in ((10.0, 15.0), (20.0, 40.0)):
        clock.stop(stopped_at)
        clock.start(started_at)
    assert clock.reading(50.0) == 25.0
    assert clock.due_at(25.0) == 50.0
