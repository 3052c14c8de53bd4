"""A session, a broker that could hardly be simpler, and the wire between them; virtual time.

The broker takes what is written in order and forgets nothing it has said, so that every verdict of
the session can be held against the truth. Nothing happens by itself: the test says what comes next.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Final

from reliablepub._core.events import (
    Acked,
    Batch,
    Blocked,
    ChannelClosed,
    ChannelOpened,
    CloseChannel,
    Connected,
    ConnectionClose,
    ConnectionLost,
    Disconnect,
    Event,
    Leaving,
    Nacked,
    NoChannel,
    OpenChannel,
    Returned,
    Settlement,
    Unblocked,
)
from reliablepub._core.session import Session
from reliablepub.outcome import Outcome, OutcomeKind
from tests.acks import in_runs, singly

CONFIRM_TIMEOUT_S: Final = 30.0
IMMEDIATE: Final = ConnectionClose(540, "NOT_IMPLEMENTED - immediate=true")
ONE_CHANNEL: Final = ConnectionClose(530, "NOT_ALLOWED - number of channels opened")
OF_A_CHANNEL = (Acked, Nacked, Returned, ChannelClosed, ChannelOpened, NoChannel)


@dataclass(frozen=True)
class Publish:
    """One message on the wire."""

    epoch: int
    tag: int
    key: int


@dataclass
class Channel:
    """How many publishes it has counted, and which of them are not confirmed."""

    count: int = 0
    is_mute: bool = False
    strips_headers: bool = False
    unconfirmed: list[int] = field(default_factory=list)


class NaiveBroker:
    """Its inbox and outbox are the two directions of the wire."""

    def __init__(self) -> None:
        self.poison: set[int] = set()  # closes the channel, which names its exchange: 404
        self.unfit: set[int] = set()  # closes the channel, which names nothing: 406
        self.hard: set[int] = set()  # closes the channel by a hard error: 541
        self.fatal: set[int] = set()  # closes the connection, with words
        self.deadly: set[int] = set()  # ends the connection, without
        self.unroutable: set[int] = set()
        self.inbox: deque[Publish | OpenChannel | CloseChannel] = deque()
        self.outbox: deque[Event] = deque()
        self.channels: dict[int, Channel] = {}
        self.is_connected = False
        self.is_blocked = False
        self.refuses_all = False  # closes every channel: 406
        self.is_deaf_to_opening = False
        self.has_one_channel = False  # and closes the connection over a second one
        self.has_one_number = False  # the client library knows, and does not ask for a second one
        self.arrivals: Counter[int] = Counter()
        self.acked: set[tuple[int, int]] = set()
        self.nacked: set[tuple[int, int]] = set()
        self.returned: set[tuple[int, int]] = set()
        self.refused: set[tuple[int, int]] = set()  # each over its own message
        self.said: list[Event] = []
        self.connects = 0
        self.channels_opened = 0
        self.channels_closed = 0

    def receive(self, item: Publish | OpenChannel | CloseChannel) -> None:
        """What is written to a connection that is gone goes nowhere, heard of it or not."""
        if not any(isinstance(event, ConnectionLost) for event in self.outbox):
            self.inbox.append(item)

    def work(self) -> None:
        """Read one thing off the wire."""
        match self.inbox.popleft():
            case OpenChannel(epoch):
                if self.channels and self.has_one_channel:
                    self.close_connection(ONE_CHANNEL)
                elif self.channels and self.has_one_number:
                    self._say(NoChannel(epoch))
                elif not self.is_deaf_to_opening:
                    self.channels[epoch] = Channel()
                    self.channels_opened += 1
                    self._say(ChannelOpened(epoch))
            case CloseChannel(epoch):
                self.channels.pop(epoch, None)
            case Publish(epoch, tag, key) if channel := self.channels.get(epoch):
                channel.count += 1
                assert tag == channel.count, "I7: the k-th publish of an epoch has tag k"
                self._take(channel, epoch, tag, key)

    def _take(self, channel: Channel, epoch: int, tag: int, key: int) -> None:
        if key in self.poison | self.unfit:
            self.refused.add((epoch, tag))
        if key in self.poison:
            self.close_channel(epoch, 404, by_publish=True)
            return
        if key in self.unfit or self.refuses_all:
            self.close_channel(epoch, 406, by_publish=True)
            return
        if key in self.hard:
            self.close_channel(epoch, 541, by_publish=True)
            return
        if key in self.fatal:
            self.close_connection(IMMEDIATE)
            return
        if key in self.deadly:
            self.drop()
            return
        if key in self.unroutable:
            self.returned.add((epoch, tag))
            named = 0 if channel.strips_headers else tag
            self._say(Returned(epoch, named, 312, "NO_ROUTE"))
        else:
            self.arrivals[key] += 1
        channel.unconfirmed.append(tag)

    def confirm(self, epoch: int, tag: int, *, multiple: bool, ack: bool = True) -> None:
        """Ack or nack one, or all up to it.

        With 0 for a tag it means all that it has seen, which is not all that is under way.
        """
        if self.channels[epoch].is_mute:
            return
        unconfirmed = self.channels[epoch].unconfirmed
        covered = [t for t in unconfirmed if t == tag or (multiple and t <= tag) or tag == 0]
        for covered_tag in covered:
            unconfirmed.remove(covered_tag)
            (self.acked if ack else self.nacked).add((epoch, covered_tag))
        if covered:
            self._say((Acked if ack else Nacked)(epoch, tag, multiple))

    def owes(self, epoch: int) -> bool:
        """Whether confirms are to come."""
        channel = self.channels[epoch]
        return bool(channel.unconfirmed) and not channel.is_mute

    def close_channel(self, epoch: int, code: int, *, by_publish: bool) -> None:
        """As RabbitMQ does: everything unconfirmed there is forgotten."""
        del self.channels[epoch]
        self.channels_closed += 1
        self._say(ChannelClosed(epoch, code, "no", by_publish=by_publish))

    def connect(self) -> None:
        """Accept a connection."""
        self.is_connected = True
        self.connects += 1
        self._say(Connected())

    def close_connection(self, close: ConnectionClose) -> None:
        """With a reason; what was said before is heard."""
        self.is_connected = self.is_blocked = False
        self.channels.clear()
        self.inbox.clear()
        self._say(ConnectionLost(f"{close.reply_code} {close.reply_text}", close))

    def drop(self, *, with_late_words: bool = False) -> None:
        """Lose the connection; what was already said of channels may still be heard, too late."""
        late = [event for event in self.outbox if isinstance(event, OF_A_CHANNEL)]
        self.is_connected = self.is_blocked = False
        self.channels.clear()
        self.inbox.clear()
        self.outbox.clear()
        self._say(ConnectionLost("dropped"))
        self.outbox.extend(late if with_late_words else ())

    def block(self) -> None:
        """Raise an alarm."""
        self.is_blocked = True
        self._say(Blocked("low on disk"))

    def unblock(self) -> None:
        """End the alarm."""
        self.is_blocked = False
        self._say(Unblocked())

    def say_again(self, index: int) -> None:
        """Repeat something about a channel, whether or not that still exists."""
        events = [event for event in self.said if isinstance(event, Acked | Nacked | Returned)]
        if events and self.is_connected:
            self.outbox.append(events[index % len(events)])

    def confirm_what_was_never_sent(self, epoch: int) -> None:
        """Ack a tag beyond the last."""
        self._say(Acked(epoch, self.channels[epoch].count + 1_000_000, multiple=True))

    def return_what_was_never_sent(self, epoch: int) -> None:
        """Return a tag beyond the last."""
        self._say(Returned(epoch, self.channels[epoch].count + 1_000_000, 312, "NO_ROUTE"))

    def _say(self, event: Event) -> None:
        self.said.append(event)
        self.outbox.append(event)


class Rig:
    """A session at the broker; every step is checked against what the broker knows."""

    def __init__(
        self,
        *,
        window_max: int = 8,
        window_bytes_max: int = 1_000,
        window_min: int | None = None,
        is_named: Callable[[int, str], bool] = lambda _key, _words: False,
        place_of: Callable[[int], Hashable] = lambda _key: None,
        is_weighed: bool = True,
    ) -> None:
        self.window_max, self.window_bytes_max = window_max, window_bytes_max
        self.sizes: dict[int, int] = {}
        self.session: Session[int] = Session(
            self.sizes.__getitem__,
            window_max=window_max,
            window_bytes_max=window_bytes_max,
            confirm_timeout_s=CONFIRM_TIMEOUT_S,
            window_min=window_min,
            is_named=is_named,
            place_of=place_of,
            is_weighed=is_weighed,
        )
        self.broker = NaiveBroker()
        self.now = 1_000.0
        self.waiting: set[int] = set()
        self.live: dict[int, tuple[int, int]] = {}
        self.settling: dict[int, Outcome] = {}
        self.sent: Counter[int] = Counter()
        self.uncertain: Counter[int] = Counter()

    # ---------------------------------------------------------------- what the relay would do

    def submit(self, size: int = 1, *, kind: str = "good", is_alone: bool = False) -> int:
        """Hand over the next message: good, unroutable, poison, unfit, hard, fatal, deadly."""
        key = len(self.sizes)
        self.sizes[key] = size
        if kind != "good":
            getattr(self.broker, kind).add(key)
        self.waiting.add(key)
        if is_alone:
            self.session.submit_alone(key, self.now)
            self._settle_and_obey()
        else:
            self.session.submit(key)
        return key

    def submit_many(
        self, count: int, *, guilty: Collection[int] = (), kind: str = "poison"
    ) -> list[int]:
        """Hand over messages, those at the named positions of the kind."""
        return [
            self.submit(kind=kind if position in guilty else "good") for position in range(count)
        ]

    def withdraw(self, keys: set[int]) -> None:
        """Change one's mind."""
        assert set(self.session.withdraw(keys)) == keys
        self.waiting -= keys
        self._settle_and_obey()

    def write(self) -> list[Batch[int]]:
        """Write what the window allows."""
        batches = self.session.poll_transmit(self.now)
        assert not (batches and self.session.blocked_reason), "nothing is sent into an alarm"
        for batch in batches:
            for tag, key in enumerate(batch.keys, batch.first_tag):
                self._note_sent(batch.epoch, tag, key)
                self.broker.receive(Publish(batch.epoch, tag, key))
        self._check_window()
        return batches

    def fail_to_write(self) -> None:
        """Take it back instead."""
        buffered = self.session.buffered
        self.session.take_back(self.session.poll_transmit(self.now))
        assert self.session.buffered == buffered

    def report_what_leaves(self) -> None:
        """Say what the broker has not received: bytes of it move."""
        first: dict[int, int] = {}
        for one in self.broker.inbox:
            match one:
                case Publish(epoch, tag):
                    first.setdefault(epoch, tag)
                case OpenChannel(epoch):
                    first.setdefault(epoch, 0)
        for epoch, tag in first.items():
            self.session.handle(Leaving(epoch, tag), self.now)

    def hear(self, count: int = 1) -> None:
        """Read events off the wire, all of them before anything is done about them."""
        said = self.broker.outbox
        for event in in_runs([said.popleft() for _ in range(min(count, len(said)))]):
            self.session.handle(event, self.now)
        self._settle_and_obey()

    def advance(self, seconds: float) -> None:
        """Let time pass, and the timer fire if it is due."""
        self.now += seconds
        due = self.session.poll_timeout()
        if due is not None and due <= self.now:
            self.session.handle_timeout(self.now)
            later = self.session.poll_timeout()
            assert later is None or later > self.now, "a timer that fires is no longer due"
            self._settle_and_obey()

    def _settle_and_obey(self) -> None:
        for settlement in singly(self.session.poll_settlements()):
            self._check_verdict(settlement)
        commands = list(self.session.poll_commands())
        assert not any(isinstance(command, Disconnect) for command in commands[:-1])
        for command in commands:
            if isinstance(command, Disconnect):
                self.broker.drop()
            else:
                self.broker.receive(command)

    @property
    def is_anything_under_way(self) -> bool:
        """Whether either direction of the wire holds anything."""
        return bool(self.broker.inbox or self.broker.outbox)

    # ---------------------------------------------------------------- what must hold

    def _note_sent(self, epoch: int, tag: int, key: int) -> None:
        assert key not in self.live, "I9: in flight in one epoch only"
        self.waiting.remove(key)  # and so neither settled nor withdrawn
        self.live[key] = (epoch, tag)
        self.sent[key] += 1
        assert self.sent[key] <= 1 + self.uncertain[key], "I6: twice only after an uncertain end"

    def _check_window(self) -> None:
        in_flight_bytes = sum(self.sizes[key] for key in self.live)
        assert len(self.live) <= self.window_max, "I10: messages"
        assert in_flight_bytes <= self.window_bytes_max or len(self.live) == 1, "I10: bytes"
        assert self.session.in_flight == len(self.live)
        assert self.session.in_flight_bytes == in_flight_bytes

    def _check_verdict(self, settlement: Settlement[int]) -> None:
        key, attempt = settlement.key, (settlement.epoch, settlement.tag)
        broker = self.broker
        assert self.live.pop(key) == attempt
        match settlement.outcome.kind:
            case OutcomeKind.UNCERTAIN:
                self.uncertain[key] += 1
                self.waiting.add(key)
                return
            case OutcomeKind.CONFIRMED:
                assert attempt in broker.acked - broker.returned, "I4: no false confirm"
                assert broker.arrivals[key] > 0
            case OutcomeKind.NACKED:
                assert attempt in broker.nacked - broker.returned
            case OutcomeKind.RETURNED:
                assert attempt in broker.returned
            case kind:
                assert kind is OutcomeKind.REFUSED
                # What it said counts: by now the message may be fit.
                is_guilty = attempt in broker.refused
                assert is_guilty or settlement.outcome.shown, "a message or its place"
        assert key not in self.settling, "I3: one final verdict"
        self.settling[key] = settlement.outcome

    def check(self) -> None:
        """Every message is in exactly one place."""
        self._check_window()
        assert self.session.buffered == len(self.waiting)
        assert sorted(self.session.buffered_keys()) == sorted(self.waiting)

    # ---------------------------------------------------------------- a broker in good health

    def step(self) -> bool:
        """What a healthy broker and an eager client would do next; False if there is nothing."""
        broker = self.broker
        self.write()
        if broker.inbox:
            broker.work()
        elif broker.outbox:
            self.hear()
        elif not broker.is_connected:
            broker.connect()
        elif broker.is_blocked:
            broker.unblock()
        elif epochs := [epoch for epoch in broker.channels if broker.owes(epoch)]:
            for epoch in epochs:
                broker.confirm(epoch, broker.channels[epoch].unconfirmed[-1], multiple=True)
        elif (due := self.session.poll_timeout()) is not None:
            self.advance(max(0.0, due - self.now))
        else:
            return False
        return True

    def run_until_idle(self) -> None:
        """I12: with a healthy broker everything comes to an end, in a bounded number of steps."""
        self.broker.is_deaf_to_opening = False
        for _ in range(500 + 200 * len(self.sizes)):
            if not self.step():
                break
        else:
            raise AssertionError("no end")
        self.check()
        assert not self.waiting
        assert not self.live
        assert len(self.broker.channels) == 1, "no channel is left behind"


def refused(rig: Rig) -> list[int]:
    """The keys of the messages that have ended so."""
    return [key for key, outcome in rig.settling.items() if outcome.kind is OutcomeKind.REFUSED]
