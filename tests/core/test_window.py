"""The window at brokers made of two numbers: it finds a good size, and follows when it moves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reliablepub._core.window import GAIN, GLANCE_S, LOOK_S, REST_S, Progress, Window

FIXED = [10, 30, 100, 300, 1_000, 3_000, 10_000]
CONFIRM_TIMEOUT_S = 30.0


@dataclass
class Broker:
    """Confirms a full window at a time: after a way there and back, and its work on each message.

    Attributes:
        a_second: the most it can do.
        way_s: how long a message is under way, there and back.
        noise: the scatter of all that, as a share.
    """

    a_second: float
    way_s: float
    noise: float = 0.0
    window: Window = field(default_factory=lambda: Window(32, 10_000))
    now: float = 100.0
    settled: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def latency_s(self, size: int) -> float:
        return self.way_s + size / self.a_second

    def best_fixed(self) -> float:
        """The rate with the best of some fixed windows."""
        return max(size / self.latency_s(size) for size in FIXED)

    def round(self) -> None:
        """One window full of messages, and what becomes of them."""
        size = self.window.size
        self.window.sent(self.at(size), self.now, is_held_up=True)
        self.now += self.latency_s(size) * self.rng.lognormvariate(0, self.noise)
        self.settled += size
        self.window.heard(self.at(0), self.now)

    def at(self, in_flight: int) -> Progress:
        return Progress(1, self.settled + in_flight, self.settled)

    def go_on(self, seconds: float) -> float:
        """For so long.

        Returns:
            confirmed messages a second.
        """
        since, before = self.now, self.settled
        while self.now < since + seconds:
            self.round()
        return (self.settled - before) / (self.now - since)


@settings(max_examples=50, deadline=None)
@given(
    a_second=st.floats(1_000, 30_000),
    way_s=st.floats(0.002, 0.1),
    noise=st.floats(0, 0.1),
    seed=st.integers(0, 1_000),
)
def test_a_fast_broker_is_used(a_second: float, way_s: float, noise: float, seed: int) -> None:
    broker = Broker(a_second, way_s, noise, rng=random.Random(seed))
    broker.go_on(30)
    assert broker.go_on(100) > 0.8 * broker.best_fixed()


@pytest.mark.parametrize(("a_second", "way_s"), [(6_000, 0.003), (15_000, 0.002)])
def test_a_broker_nearby_is_not_given_a_queue_for_nothing(a_second: float, way_s: float) -> None:
    broker = Broker(a_second, way_s, noise=0.05)
    broker.go_on(200)
    assert broker.window.size <= 2_048


@pytest.mark.parametrize("a_second", [20, 100, 500])
def test_at_a_slow_broker_no_confirm_is_overdue(a_second: float) -> None:
    broker = Broker(a_second, 0.001, noise=0.05)
    for _ in range(100):
        broker.round()
        assert broker.latency_s(broker.window.size) < CONFIRM_TIMEOUT_S


def test_it_shrinks_when_latency_climbs_and_grows_when_the_broker_is_far() -> None:
    broker = Broker(20_000, 0.05, noise=0.02)
    broker.go_on(30)
    far = broker.window.size
    broker.a_second = 500  # the disk is busy: all that grows now is the queue
    broker.go_on(600)
    assert broker.window.size <= far / 4
    broker.a_second = 20_000
    broker.go_on(60)
    assert broker.window.size >= far / 2


def test_it_doubles_with_each_round_in_the_beginning() -> None:
    broker = Broker(1_000_000, 1.0)  # a latency that stays flat
    sizes = []
    for _ in range(10):
        sizes.append(broker.window.size)
        broker.round()
    assert sizes == [32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 10_000]


def test_a_window_between_equal_bounds_is_fixed() -> None:
    broker = Broker(10_000, 0.01, window=Window(50, 50))
    broker.go_on(10)
    broker.window.halve()
    assert broker.window.size == 50


def test_the_lower_bound_is_never_above_the_upper() -> None:
    assert Window(32, 5).size == 5


# -------------------------------------------------------------------- how the size is chosen


def look(window: Window, rate: float, seconds: float = LOOK_S) -> int:
    """A round of the whole window, in which so many a second are settled.

    Returns:
        the size that was looked at.
    """
    size = window.size
    window.sent(Progress(1, size, 0), 0.0, is_held_up=True)
    settled = round(rate * seconds)
    window.heard(Progress(1, max(size, settled), settled), seconds)
    return size


@pytest.mark.parametrize(
    ("rates", "sizes"),
    [
        pytest.param([1, 2, 4], [32, 64, 128, 256], id="each gains: doubled"),
        pytest.param([1, 1, 1], [32, 64, 128, 32], id="two gain nothing: as it was"),
        pytest.param([1, 2, 2, 2], [32, 64, 128, 256, 64], id="that of the last gain"),
        pytest.param([1, 1, 2, 2, 2], [32, 64, 128, 256, 512, 128], id="one may gain nothing"),
        pytest.param([1, 1.07, 1.07], [32, 64, 128, 32], id="less than a gain"),
        pytest.param([1, 1.08, 1.08, 1.08], [32, 64, 128, 256, 64], id="just a gain"),
        pytest.param([1, 1.06, 1.12, 1, 1], [32, 64, 128, 256, 512, 128], id="together a gain"),
        pytest.param([1, 0.5, 1.06], [32, 64, 128, 32], id="of the last gain, not the last look"),
        pytest.param(
            [2**n for n in range(6)], [32, 64, 128, 256, 512, 600, 600], id="to the bound"
        ),
        pytest.param([1, 2, 4, 8, 16, 16], [32, 64, 128, 256, 512, 600, 512], id="it is too much"),
    ],
)
def test_it_doubles_until_that_gains_nothing(rates: Sequence[float], sizes: list[int]) -> None:
    window = Window(32, 600)
    assert [*(look(window, 10_000 * rate) for rate in rates), window.size] == sizes


def resting(size: int = 128) -> Window:
    """A window between 32 and 600 that rests at a size."""
    window = Window(32, 600)
    for rate in (1, 2, 4, 8, 16)[: (size // 32).bit_length()]:
        look(window, 10_000 * rate)
    while window.size != size:
        look(window, 10_000)
    return window


@pytest.mark.parametrize(
    ("rates", "sizes"),
    [
        pytest.param([1, 2, 2, 2], [64, 128, 256, 512, 128], id="half is less: as it was"),
        pytest.param([1, 1, 1], [64, 128, 256, 64], id="half does as well"),
        pytest.param([1, 2, 4, 8, 8], [64, 128, 256, 512, 600, 512], id="more gains"),
    ],
)
def test_after_a_rest_it_is_halved_and_grows(rates: Sequence[float], sizes: list[int]) -> None:
    window = resting(128)
    assert look(window, 10_000, REST_S - 1) == look(window, 10, 40) == 128
    assert [*(look(window, 10_000 * rate) for rate in rates), window.size] == sizes
    assert look(window, 10_000 * 100) == window.size == sizes[-1], "it rests"


@pytest.mark.parametrize(("size", "half"), [(128, 64), (32, 32)])
def test_an_overdue_confirm_halves_it_and_then_it_rests(size: int, half: int) -> None:
    window = resting(size)
    window.halve()
    assert [look(window, 10_000 * rate) for rate in (1, 2, 4)] == [half] * 3


def test_a_new_connection_begins_at_the_least() -> None:
    window = resting(128)
    window.reset()
    assert [look(window, 10_000 * rate, GLANCE_S) for rate in (1, 2, 4)] == [32, 64, 128]


def test_half_of_an_odd_window_is_a_number_of_messages() -> None:
    window = Window(10, 25)
    assert [look(window, 1_000 * rate) for rate in (1, 2, 4)] == [10, 20, 25]
    window.halve()
    assert repr(window.size) == "12"


@pytest.mark.parametrize(
    ("is_new", "rate", "lasts_s", "is_over"),
    [
        pytest.param(True, 2 * GAIN, GLANCE_S, True, id="a gain is seen at a glance"),
        pytest.param(True, 2 * GAIN, 0.9 * GLANCE_S, False, id="no shorter one"),
        pytest.param(True, 1, 0.9 * LOOK_S, False, id="no gain, only by a whole look"),
        pytest.param(True, 1, LOOK_S, True, id="which is over then"),
        pytest.param(False, 2 * GAIN, 0.9 * LOOK_S, False, id="a glance is for a new connection"),
        pytest.param(False, 2 * GAIN, LOOK_S, True, id="on another a whole look"),
    ],
)
def test_how_long_a_look_is(is_new: bool, rate: float, lasts_s: float, is_over: bool) -> None:  # noqa: FBT001
    window = Window(32, 600) if is_new else resting(64)
    if not is_new:
        look(window, 10_000, REST_S)
    look(window, 100_000)
    look(window, 100_000 * rate, lasts_s)
    assert window.size == (128 if is_over else 64)


@pytest.mark.parametrize("seconds", [1.0, 200.0])
def test_a_look_counts_what_was_settled_in_it_however_slow(seconds: float) -> None:
    window = Window(1, 8)  # one message too many, and 15 would be no gain over 14
    sizes = [look(window, settled / seconds, seconds) for settled in (14, 15, 14, 14)]
    assert [*sizes, window.size] == [1, 2, 4, 8, 2]


def test_short_rounds_are_taken_together() -> None:
    window = Window(32, 600)
    sizes = [look(window, 100_000, LOOK_S / 4) for _ in range(6)]
    assert sizes == [32, 64, 64, 64, 64, 128]


# -------------------------------------------------------------------- what proves nothing


def lasting(window: Window, *, now: float = 100.0) -> None:
    """Begin a round of the whole window."""
    window.sent(Progress(1, window.size, 0), now, is_held_up=True)


def test_a_round_is_over_when_as_many_are_settled_as_were_in_flight() -> None:
    """Whichever they are: a queue may confirm nothing for days."""
    window = Window(32, 100)
    lasting(window)
    window.heard(Progress(1, 62, 31), 100.5)
    assert window.size == 32
    window.heard(Progress(1, 62, 32), 101.0)
    assert window.size == 64


def test_a_round_that_takes_no_time_is_not_over() -> None:
    window = Window(32, 100)
    lasting(window, now=100.0)
    window.heard(Progress(1, 32, 32), 100.0)
    assert window.size == 32
    window.heard(Progress(1, 32, 32), 101.0)
    assert window.size == 64


@pytest.mark.parametrize(
    ("in_flight", "is_held_up"),
    [
        pytest.param(32, False, id="nothing waits for room"),
        pytest.param(31, True, id="something else holds it up: bytes"),
    ],
)
def test_a_window_that_does_not_limit_learns_nothing(in_flight: int, is_held_up: bool) -> None:  # noqa: FBT001
    window = Window(32, 100)
    lasting(window)
    window.sent(Progress(1, in_flight, 0), 100.5, is_held_up=is_held_up)
    window.heard(Progress(1, 32, 32), 101.0)
    assert window.size == 32


def test_a_round_of_an_epoch_that_is_over_is_forgotten() -> None:
    window = Window(32, 100)
    lasting(window)
    window.heard(Progress(2, 32, 32), 101.0)
    lasting(window, now=102.0)
    window.heard(Progress(1, 32, 32), 102.0 + GLANCE_S / 2)
    assert window.size == 32, "the look begins with the new epoch"


def test_a_smaller_window_is_measured_when_what_is_too_much_is_settled() -> None:
    window = resting(128)
    window.sent(Progress(1, 256, 0), 0.0, is_held_up=True)
    window.heard(Progress(1, 256, 256), REST_S)
    assert window.size == 128, "what was in flight of the larger one says nothing of it"


# -------------------------------------------------------------------- whatever happens


@given(
    least=st.integers(1, 200),
    most=st.integers(1, 200),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["sent", "heard", "forget", "halve", "reset"]),
            st.integers(0, 250),
            st.floats(0, 2),
            st.booleans(),
        ),
        max_size=200,
    ),
)
@example(least=5, most=5, steps=[("sent", 5, 0.0, True), ("heard", 5, 1.0, True)])
def test_whatever_it_is_told_it_stays_between_its_bounds(
    least: int, most: int, steps: list[tuple[str, int, float, bool]]
) -> None:
    window, now = Window(least, most), 0.0
    last, settled, epoch = 0, 0, 1
    for what, count, passed, flag in steps:
        now += passed
        if what == "sent":
            last = max(last, settled + min(count, window.size))
            window.sent(Progress(epoch, last, settled), now, is_held_up=flag)
        elif what == "heard":
            settled = min(last, settled + count)
            window.heard(Progress(epoch, last, settled), now)
        elif what == "forget":
            window.forget_round()
        elif what == "halve":
            window.halve()
        else:
            window.reset()
            last, settled, epoch = 0, 0, epoch + 1
        assert min(least, most) <= window.size <= most
