"""How many messages a second: a table, any history, and a session that keeps to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reliablepub._core.events import Acked, ChannelOpened, Connected
from reliablepub._core.rate import Rate
from reliablepub._core.session import Session


def test_without_a_rate_there_is_no_limit_but_the_window() -> None:
    session = opened(None)
    assert session.rate_max is None
    for tag in (1, 11, 21):
        session.submit(*"abcdefghij")
        [batch] = session.poll_transmit(0.0)
        assert len(batch.keys) == 10
        session.handle(Acked(batch.epoch, tag + 9, multiple=True), 0.0)
    assert session.poll_timeout() is None


def test_after_a_rest_a_burst_and_then_one_by_one() -> None:
    rate = Rate(2.0, 3)
    assert rate.room(100.0) == 3
    rate.spend(3)
    assert (rate.room(100.0), rate.next_at) == (0, 100.5)
    assert rate.room(100.5) == 1
    rate.spend(1)
    rate.spend(-1)  # it was not written
    assert (rate.room(100.5), rate.next_at) == (1, None)
    assert rate.room(1_000.0) == 3


def test_at_high_rates_messages_gather() -> None:
    rate = Rate(1_000.0, 1_000)
    rate.spend(int(rate.room(0.0)))
    assert rate.room(0.049) == 0
    assert rate.next_at == 0.05
    assert rate.room(0.05) == 50


@given(
    st.floats(0.1, 1e4),
    st.integers(1, 100),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 50)), max_size=50),
)
def test_it_is_never_exceeded(per_s: float, burst: int, steps: list[tuple[float, int]]) -> None:
    rate, now, written = Rate(per_s, burst), 0.0, 0
    for wait_s, wanted in steps:
        now += wait_s
        count = int(min(wanted, rate.room(now)))
        rate.spend(count)
        written += count
        assert written <= burst + now * per_s + 0.01


def opened(rate: Rate | None) -> Session[str]:
    session: Session[str] = Session(
        lambda _: 1,
        window_max=100,
        window_min=10,
        window_bytes_max=10**6,
        confirm_timeout_s=30,
        rate=rate,
    )
    session.handle(Connected("broker"), 0.0)
    [command] = session.poll_commands()
    session.handle(ChannelOpened(command.epoch), 0.0)  # type: ignore[union-attr]
    return session


def test_a_session_writes_no_more_and_says_when_it_will() -> None:
    session = opened(Rate(2.0, 3))
    assert session.rate_max == 2.0
    session.submit(*"abcdef")
    [batch] = session.poll_transmit(0.0)
    assert batch.keys == ["a", "b", "c"]
    assert session.poll_transmit(0.1) == []
    assert session.poll_timeout() == 0.5
    [batch] = session.poll_transmit(0.5)
    assert batch.keys == ["d"]
    session.take_back([batch])
    [batch] = session.poll_transmit(0.5)
    assert batch.keys == ["d"]
    session.handle(Acked(batch.epoch, 4, multiple=True), 0.6)
    assert session.window.size == 10, "the window learns nothing from what the rate held up"
    assert [one.keys for one in session.poll_transmit(1.5)] == [["e", "f"]]
