"""How a session's window adapts, and what it is not misled by."""

from __future__ import annotations

from itertools import count

from reliablepub._core.events import (
    Acked,
    Batch,
    Blocked,
    ChannelClosed,
    ChannelOpened,
    Connected,
    ConnectionLost,
    Event,
    Unblocked,
)
from reliablepub._core.session import Session
from reliablepub._core.window import GLANCE_S, Progress

TIMEOUT_S = 30.0


class Sender:
    """A session with messages without end, at a broker that takes a second for a confirm."""

    def __init__(self, *, window_bytes_max: int = 10_000) -> None:
        self.session: Session[int] = Session(
            lambda _: 1,
            window_min=2,
            window_max=64,
            window_bytes_max=window_bytes_max,
            confirm_timeout_s=TIMEOUT_S,
        )
        self.now = 100.0
        self.keys = count()
        self.epoch = 0
        self.connect()

    def connect(self) -> None:
        self.hears(Connected())
        self.open()

    def open(self) -> None:
        self.epoch += 1
        self.hears(ChannelOpened(self.epoch))

    def hears(self, event: Event) -> None:
        self.session.handle(event, self.now)
        self.session.poll_settlements()
        self.session.poll_commands()

    def writes(self, messages: int = 200) -> list[Batch[int]]:
        """Keep so many messages waiting, and send what may be sent."""
        for _ in range(messages - self.session.buffered):
            self.session.submit(next(self.keys))
        return self.session.poll_transmit(self.now)

    def confirms(self, batches: list[Batch[int]]) -> None:
        """A second later."""
        self.now += 1.0
        for batch in batches:
            self.hears(Acked(batch.epoch, batch.first_tag + len(batch.keys) - 1, multiple=True))

    @property
    def window(self) -> int:
        return self.session.window.size


def test_how_far_a_session_is_is_told_of_the_channel_it_has() -> None:
    session: Session[int] = Session(
        lambda _: 1, window_max=1, window_bytes_max=1, confirm_timeout_s=TIMEOUT_S
    )
    assert session._main.progress == Progress(0, 0, 0)
    sender = Sender()
    sender.writes()
    assert sender.session._main.progress == Progress(1, 2, 0)


def grown() -> Sender:
    sender = Sender()
    for _ in range(8):
        sender.confirms(sender.writes())
    assert sender.window == 64
    return sender


def test_it_doubles_with_every_round_trip_while_latency_is_flat() -> None:
    sender = Sender()
    sizes = []
    for _ in range(6):
        sizes.append(sender.window)
        sender.confirms(sender.writes())
    assert sizes == [2, 2, 4, 8, 16, 32]
    sender.writes()
    assert sender.session.in_flight == sender.window == 64


def test_it_does_not_grow_when_nobody_waits_for_it() -> None:
    sender = Sender()
    for _ in range(10):
        sender.confirms(sender.writes(2))
    assert sender.window == 2


def test_it_does_not_grow_when_bytes_are_the_limit() -> None:
    sender = Sender(window_bytes_max=1)
    for _ in range(10):
        batches = sender.writes()
        assert [len(batch.keys) for batch in batches] == [1]
        sender.confirms(batches)
    assert sender.window == 2


def test_an_alarm_is_no_latency() -> None:
    sender = Sender()
    (batch,) = sender.writes()
    sender.hears(Blocked("memory"))
    assert not sender.writes()
    sender.now += 600.0
    sender.hears(Acked(batch.epoch, 2, multiple=True))
    sender.hears(Unblocked())
    sender.writes()
    assert sender.window == 2, "that round is forgotten"
    sender.now += 1.0
    sender.hears(Acked(batch.epoch, 4, multiple=True))
    sender.writes()
    assert sender.window == 4


def test_a_write_that_is_taken_back_was_no_round() -> None:
    sender = Sender()
    sender.session.take_back(sender.writes())
    sender.now += 1.0
    (batch,) = sender.writes()
    assert batch.first_tag == 1
    sender.now += GLANCE_S / 2
    sender.hears(Acked(batch.epoch, 2, multiple=True))
    sender.writes()
    assert sender.window == 2, "the round began with the second write"


def test_suspects_in_flight_are_no_measure() -> None:
    sender = Sender()
    sender.writes()
    sender.hears(ChannelClosed(sender.epoch, 404, "NOT_FOUND", by_publish=True))
    main, suspects = sender.epoch + 1, sender.epoch + 2
    sender.hears(ChannelOpened(main))
    sender.hears(ChannelOpened(suspects))
    first, second = sender.writes()
    assert (first.epoch, second.epoch) == (suspects, main)
    sender.now += 1.0
    sender.hears(Acked(main, 1, multiple=True))
    sender.writes()
    assert sender.window == 2


def test_a_new_channel_goes_on_with_the_window_there_was() -> None:
    sender = grown()
    sender.writes()
    sender.hears(ChannelClosed(sender.epoch, 404, "NOT_FOUND", by_publish=True))
    assert sender.window == 64


def test_a_new_connection_begins_anew() -> None:
    sender = grown()
    sender.writes()
    sender.hears(ConnectionLost("reset"))
    sender.connect()
    assert sender.window == 2
    assert [len(batch.keys) for batch in sender.writes()] == [2]


def test_an_overdue_confirm_halves_it() -> None:
    sender = grown()
    sender.writes()
    sender.now += TIMEOUT_S
    sender.session.handle_timeout(sender.now)
    sender.open()
    assert sender.window == 32
    assert [len(batch.keys) for batch in sender.writes()] == [32]
