"""The publishing session: window, confirm deadlines, blocking, epochs, quarantine and drain.

Knows: keys and sizes of messages, channels by epoch, and the time it is given. Must never know:
what a message is, how bytes travel, or where messages are stored.

The states of a message in a session::

    submit -> buffered -> in flight -> settled (confirmed, returned, nacked, refused)
                 ^            |
                 +-uncertain--+   channel or connection gone, or the confirm deadline passed

A *buffered* message was not written, so it cannot cause a duplicate; a message *in flight* was. An
uncertain attempt is reported like any other, and the session itself sends the message again in a
new epoch. A late confirm of the old epoch is recognized by the epoch's number and ignored. A
confirm or return that cannot be matched with what was sent ends the epoch too.

**A queue that confirms nothing.** When the oldest confirm is overdue although the broker has
answered newer publishes, the channel is *retiring*: new messages get another channel, and what is
not overdue yet may still be confirmed on the old one. It is closed once only overdue messages are
left, which are late from then on (`reliablepub._core.lane`). So messages to other queues are not
sent twice. If the broker has answered nothing newer, the channel is closed at once.

**Quarantine.** When the broker closes a channel because of a publish, the suspects go to a second
channel (`reliablepub._core.quarantine`), while the main channel reopens at once and carries fresh
messages. While a broker seems to refuse every message, one message at a time is sent, each on a
new connection. `reliablepub._core.evidence` has the table of verdicts, and
`reliablepub._core.aftermath` that of ends and their effects.

**One channel.** A user may be limited to one channel, or the connection to one channel number. The
next channel is then refused, by the broker or the client library, once, and the lanes share one
channel from then on. Whenever nothing is in flight on it, it goes to the suspects if there are any
to try, otherwise to the main lane.

**Blocked.** During an alarm nothing is sent and nothing times out: a `StoppableClock` is stopped.

**A slow link.** The time for a confirm starts when the publish has left this host (the transport
reports with `Leaving` what has not), and restarts when an older publish is confirmed. So a message
may be under way for as long as its bytes move, while a broker that accepts no bytes, or confirms
nothing that it has received, is given up within ``confirm_timeout_s``. Bytes that a proxy holds
cannot be seen. So the time is doubled each time it was too short, up to `PATIENCE_MAX` times its
length, until a confirm arrives within ``confirm_timeout_s``. This bounds the number of repetitions.

**A mute broker.** A node that its cluster has lost takes publishes and confirms none, while its
heartbeats go on. After `OVERDUE_MAX` times in a row without any confirm, the connection is given
up as well: the next one may reach another node.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from math import inf
from typing import Any, ClassVar, Final, Generic

from reliablepub._core.aftermath import Aftermath
from reliablepub._core.confirms import EpochUntrusted, Violation
from reliablepub._core.events import (
    Acked,
    AckedEach,
    Batch,
    Blocked,
    ChannelClosed,
    ChannelEvent,
    ChannelOpened,
    CloseChannel,
    Command,
    ConfirmedEach,
    Connected,
    ConnectionLost,
    Disconnect,
    Ended,
    Event,
    K,
    Leaving,
    Nacked,
    NoChannel,
    OpenChannel,
    Returned,
    Unblocked,
)
from reliablepub._core.evidence import Evidence, Verdict, is_soft
from reliablepub._core.lane import ChannelState, Lane
from reliablepub._core.quarantine import Quarantine
from reliablepub._core.rate import Rate
from reliablepub._core.window import Window
from reliablepub.outcome import CONFIRMED, NACKED, Outcome, OutcomeKind

_NOT_ALLOWED: Final = 530
COUNTED_OUT_S: Final = 0.1
"""Seconds for which RabbitMQ may still count a closed channel against a user's channel limit."""
PATIENCE_MAX: Final = 16
"""Longest wait for a confirm, as a multiple of ``confirm_timeout_s``."""
OVERDUE_MAX: Final = 3
"""Waits for a confirm in a row, each twice as long as the one before, on a broker that confirms
nothing. After two of them new messages may go before the late ones, and show whether it is one
queue that is stuck."""


class StoppableClock:
    """The caller's clock (``now``), minus the time during which this clock was stopped.

    A broker that blocks publishers withholds confirms while its alarm lasts. Confirm deadlines are
    measured on this clock, which is stopped during the alarm: no confirm times out in an alarm, and
    after it every deadline has as much time left as before.
    """

    __slots__ = ("_paused_s", "_stopped_at")

    def __init__(self) -> None:
        self._stopped_at: float | None = None
        self._paused_s = 0.0

    def stop(self, now: float) -> None:
        """Stop the clock. No effect if it is stopped."""
        if self._stopped_at is None:
            self._stopped_at = now

    def start(self, now: float) -> None:
        """Start the clock again. No effect if it is running."""
        if self._stopped_at is not None:
            self._paused_s += now - self._stopped_at
            self._stopped_at = None

    def reading(self, now: float) -> float:
        """This clock's reading at the caller's ``now``."""
        return (now if self._stopped_at is None else self._stopped_at) - self._paused_s

    def due_at(self, reading: float) -> float:
        """The caller's time at which this clock shows ``reading``, unless it is stopped before."""
        return reading + self._paused_s


class Session(Generic[K]):
    """The state machine between a publisher's messages and one broker.

    The caller polls `poll_commands`, `poll_settlements` and `poll_timeout` after every input and
    command, and `poll_transmit` when it can write.

    Args:
        size_of: the size in bytes of a key's message.
        window_max: maximum number of messages in flight.
        window_bytes_max: maximum number of bytes in flight; a message that is alone may exceed it.
        confirm_timeout_s: seconds for which the broker may owe the oldest confirm before the
            channel is retired.
        window_min: lower bound of an adaptive window, whose upper bound is ``window_max``; None for
            a fixed window.
        is_named: whether the broker's reply text, when it closes a channel or the connection, names
            the message of a key (by its exchange, for example). Such messages are suspected first.
        place_of: where a key's message goes, such as its exchange; evidence is kept by place.
        is_weighed: whether refusals are judged by evidence (`reliablepub._core.evidence`).
        rate: limits how many messages are written; None for no limit.

    Attributes:
        window: the current limit of messages in flight.
        rate_max: most messages per second that are written; None for no limit.
        is_connected: whether there is a connection that has not been given up.
        violations: the broker's violations, over all epochs.
        blocked_reason: the broker's reason for blocking this connection; None if it does not.
        stale: number of ignored events of epochs that are over.
    """

    def __init__(
        self,
        size_of: Callable[[K], int],
        *,
        window_max: int,
        window_bytes_max: int,
        confirm_timeout_s: float,
        window_min: int | None = None,
        is_named: Callable[[K, str], bool] = lambda _key, _words: False,
        place_of: Callable[[K], Hashable] = lambda _key: None,
        is_weighed: bool = True,
        rate: Rate | None = None,
    ) -> None:
        self._rate = rate
        self.rate_max: Final = None if rate is None else rate.per_s
        self.window: Window = Window(window_min or window_max, window_max)
        self._window_bytes_max = window_bytes_max
        self._confirm_timeout_s = confirm_timeout_s
        self._patience = 1
        self.is_connected: bool = False
        self._is_draining = False
        self._is_sharing = False  # both lanes use one channel
        self._may_open_at: float | None = None  # earliest time to reopen the shared channel
        self._last_epoch = 0
        self.violations: Counter[Violation] = Counter()
        self._main: Lane[K] = Lane(self.violations, size_of)
        self._quarantine: Quarantine[K] = Quarantine(self.violations, size_of)
        self._retiring: Lane[K] = Lane(self.violations, size_of)  # without a buffer
        self._late_before, self._retired_for = -inf, ""
        self._lanes = (self._main, self._quarantine, self._retiring)
        self._evidence = Evidence(place_of, is_weighed=is_weighed)
        self._aftermath = Aftermath(self._main, self._quarantine, self._evidence, is_named)
        self.blocked_reason: str | None = None
        self._clock = StoppableClock()
        self.stale: int = 0
        self._commands: deque[Command] = deque()

    # ------------------------------------------------------------------ getters

    @property
    def is_ready(self) -> bool:
        """Whether the main channel is open, and the broker does not block publishes."""
        return self._can_write and self._main.state is ChannelState.OPEN

    @property
    def buffered(self) -> int:
        """Number of messages waiting to be written, including suspects."""
        suspects = 0 if self._quarantine.is_unused else self._quarantine.waiting
        return len(self._main.buffer) + len(self._main.late) + suspects

    def buffered_keys(self) -> Iterator[K]:
        """Keys of the messages waiting to be written, including suspects."""
        yield from self._main.buffered_keys()
        yield from self._quarantine.buffered_keys()

    @property
    def in_flight(self) -> int:
        """Number of messages that are written and not settled."""
        return self._main.in_flight + self._quarantine.in_flight + self._retiring.in_flight

    @property
    def in_flight_bytes(self) -> int:
        """Size of the messages that are written and not settled."""
        in_flight = self._main.in_flight_bytes + self._quarantine.in_flight_bytes
        return in_flight + self._retiring.in_flight_bytes

    @property
    def aside(self) -> int:
        """Number of messages set aside: channels or connections ended while each was alone."""
        return len(self._quarantine.aside)

    @property
    def why_aside(self) -> str:
        """Why the last message was set aside; empty if none is."""
        return self._quarantine.why if self._quarantine.aside else ""

    @property
    def refuses_all(self) -> str:
        """The reply by which the broker refuses every message; empty if it does not."""
        doubt = self._evidence.doubt
        if doubt is None:
            return ""
        return f"the broker refuses every message: {doubt.reply_code} {doubt.reply_text}"

    # ------------------------------------------------------------------ inputs

    def handle(self, event: Event, now: float) -> None:
        """Process one event of the connection.

        Args:
            event: the event.
            now: monotonic seconds.
        """
        if not isinstance(event, ChannelEvent):
            self._OF_THE_CONNECTION[type(event)](self, event, now)
            return
        lane = self._lane(event.epoch)
        if lane is None:
            if not isinstance(event, Leaving):  # which is no answer of the broker
                self.stale += len(event.tags) if isinstance(event, AckedEach) else 1
            return
        try:
            self._OF_A_CHANNEL[type(event)](self, lane, event, now)
        except EpochUntrusted as violation:
            self._begin_anew(lane, str(violation))

    def handle_timeout(self, now: float) -> None:
        """Act on what is due: overdue answers, messages set aside, a channel to reopen.

        A channel whose oldest confirm is overdue is retired; if the opening of a channel is
        overdue, the connection is given up.
        """
        self._recall(now)
        for lane in self._lanes:
            due = self._due(lane)
            if due is None or due > now:
                continue
            within = f"within {self._confirm_timeout_s * self._patience:g} s"
            if lane.state is ChannelState.OPENING:
                self._disconnect(f"no channel {within}")
            elif lane is self._retiring:
                self._end_retiring()
            else:
                self._retire(lane, f"no confirm {within}", now)

    def _connected(self, event: Connected, now: float) -> None:
        self.is_connected = True
        self._may_open_at = None
        self.window.reset()
        self._evidence.connected()
        self._unblocked(event, now)  # a new connection is not blocked until the broker says so
        self._open_lanes(now)

    def _connection_lost(self, event: ConnectionLost, now: float) -> None:
        states = [lane.state for lane in self._lanes if lane.state is not ChannelState.CLOSED]
        if event.close is not None and event.close.reply_code == _NOT_ALLOWED:
            # The broker closes the connection for a channel beyond the user's limit.
            is_second = ChannelState.OPENING in states and len(states) > 1
            self._is_sharing = self._is_sharing or is_second
        self.is_connected = False
        self._commands.clear()  # they were meant for the lost connection
        self._unblocked(event, now)
        reason = f"connection lost: {event.reason}"
        lanes = (self._quarantine, self._main, self._retiring)
        self._aftermath.lost(lanes, reason, self._clock.reading(now))

    def _channel_opened(self, lane: Lane[K], _event: ChannelOpened, _now: float) -> None:
        if lane.state is ChannelState.OPENING:
            lane.opened()
        else:
            self.stale += 1

    def _no_channel(self, lane: Lane[K], _event: NoChannel, now: float) -> None:
        others = [one for one in self._lanes if one is not lane and one.ledger is not None]
        self._is_sharing = self._is_sharing or bool(others)
        if not others or self._retiring in others:
            self._disconnect("the connection has no number left for a channel")
            return
        self._aftermath.close(lane, Outcome(OutcomeKind.UNCERTAIN))
        self._open_lanes(now)

    def _channel_closed(self, lane: Lane[K], event: ChannelClosed, now: float) -> None:
        reason = f"channel closed: {event.reply_code} {event.reply_text}"
        if not event.by_publish:
            self._begin_anew(lane, reason)
        elif not is_soft(event.reply_code):
            self._aftermath.lost((lane,), reason, self._clock.reading(now))
            self._disconnect(reason)
        elif self._aftermath.refused(lane, event, self._clock.reading(now)) is Verdict.BROKER:
            self._disconnect(self.refuses_all)
        else:
            self._may_open_at = now + COUNTED_OUT_S if self._is_sharing else None
            self._open_lanes(now)

    def _confirmed(self, lane: Lane[K], event: Acked | Nacked, now: float) -> None:
        outcome = CONFIRMED if isinstance(event, Acked) else NACKED
        if self._patience > 1:
            self._be_less_patient(lane, now)
        self._evidence.heard()
        ended = lane.confirm(event.tag, outcome, multiple=event.multiple)
        self._answered(lane, ended, now)

    def _acked_each(self, lane: Lane[K], event: AckedEach, now: float) -> None:
        if self._patience > 1:
            self._be_less_patient(lane, now)
        # In quarantine each confirm is handled alone: it may let the next group of suspects go.
        run = lane.confirm_each(event.tags) if lane is not self._quarantine else None
        if run is not None:
            self._evidence.heard()
            self._answered(lane, [run], now)
            return
        for tag in event.tags:
            self.handle(Acked(event.epoch, tag, multiple=False), now)

    def _answered(self, lane: Lane[K], ended: Sequence[Ended[K]], now: float) -> None:
        for one in ended:
            self._aftermath.ended(one)
        lane.heard(self._clock.reading(now))
        if self._is_gathering:
            self._passed(ended, now)
        if lane is self._quarantine:
            self._next_suspects()

    def _returned(self, lane: Lane[K], event: Returned, _now: float) -> None:
        self._evidence.heard()
        lane.note_return(event.tag, event.reply_code, event.reply_text, event.body_bytes)

    def _leaving(self, lane: Lane[K], event: Leaving, now: float) -> None:
        lane.still_leaving(event.tag, self._clock.reading(now))

    def _blocked(self, event: Blocked, now: float) -> None:
        self._clock.stop(now)
        self.blocked_reason = event.reason

    def _unblocked(self, _event: Event, now: float) -> None:
        self._clock.start(now)
        self.blocked_reason = None

    def submit(self, *keys: K) -> None:
        """Buffer messages, in their order; they are written when the window has room.

        Raises:
            RuntimeError: the session is draining.
        """
        self._check_takes_more()
        self._main.buffer += keys

    def submit_alone(self, key: K, now: float) -> None:
        """Buffer a message that is likely to close its channel; it is sent alone, in quarantine.

        Args:
            key: the caller's key of the message.
            now: monotonic seconds.

        Raises:
            RuntimeError: the session is draining.
        """
        self._check_takes_more()
        self._evidence.sent_alone(key)
        self._quarantine.expect(key)
        self._open_lanes(now)

    def _check_takes_more(self) -> None:
        if self._is_draining:
            raise RuntimeError("a draining session takes no more messages")

    def take_back(self, batches: Sequence[Batch[K]]) -> None:
        """Undo `poll_transmit`: nothing of these batches was written.

        Must be called before any other input or command.

        Raises:
            ValueError: another call came first: a bug of the caller.
        """
        for batch in reversed(batches):
            lane = self._lane(batch.epoch)
            if lane is None:
                raise ValueError(f"epoch {batch.epoch} is over; its batch cannot be taken back")
            self.window.forget_round()
            lane.take_back(batch.first_tag, len(batch.keys))
            if self._rate is not None:
                self._rate.spend(-len(batch.keys))

    def withdraw(self, keys: Collection[K]) -> list[K]:
        """Remove buffered messages, including suspects, as if they had never been submitted.

        Args:
            keys: preferably a set; keys that are not buffered are ignored.

        Returns:
            The keys that were buffered.
        """
        withdrawn = self._quarantine.withdraw(keys) + self._main.withdraw(keys)
        self._next_suspects()  # the group under trial may be empty now
        return withdrawn

    def drain(self) -> None:
        """Send nothing more. Messages in flight are still settled."""
        self._is_draining = True

    # ------------------------------------------------------------------ outputs

    def poll_transmit(self, now: float) -> list[Batch[K]]:
        """Take the messages that the window allows, with delivery tags assigned.

        The caller must write all of them, or call `take_back`. Suspects go first, since they are
        few and old. While a suspect does not fit, fresh messages wait: otherwise they would take
        every byte that becomes free, and a large suspect would never be sent.
        """
        if not self._can_write or self._is_draining:
            self.window.forget_round()
            return []
        is_empty = not (self._main.buffer or self._main.late)
        if is_empty and self._quarantine.is_unused and self.window.round is None:
            return []  # as in most turns
        if self._is_sharing or self._evidence.doubt is not None:
            self._open_lanes(now)
        room = inf if self._rate is None else self._rate.room(now)
        lanes = self._lanes_to_write()
        now = self._clock.reading(now)
        self.window.heard(self._main.progress, now)
        before = self.in_flight
        limit = int(min(self.window.size, before + room))
        batches: list[Batch[K]] = []
        for lane in lanes:
            may_be_late = self.window.size > 1 or not lane.buffer  # else it would have all of it
            if lane.state is ChannelState.OPEN and lane.late and may_be_late:
                batches += self._transmit_late(lane, now, limit)
                if lane.late and not lane.late_in_flight:
                    break  # it waits for bytes, which others would take
            if lane.state is ChannelState.OPEN and lane.buffer:
                in_flight = self.in_flight
                batches += lane.transmit(
                    room=limit - in_flight,
                    room_bytes=self._window_bytes_max - self.in_flight_bytes,
                    is_alone=in_flight == 0,
                    now=now,
                )
                if lane.buffer:
                    break
        in_flight = self.in_flight
        if self._rate is not None:
            self._rate.spend(in_flight - before)
        is_held_up = bool(self._main.buffer) and in_flight == self._main.in_flight
        is_held_up = is_held_up and limit == self.window.size  # and not by the rate
        self.window.sent(self._main.progress, now, is_held_up=is_held_up)
        return batches

    def _transmit_late(self, lane: Lane[K], now: float, limit: int) -> list[Batch[K]]:
        return lane.transmit_late(
            window=self.window.size,
            room=limit - self.in_flight,
            room_bytes=self._window_bytes_max - self.in_flight_bytes,
            is_alone=self.in_flight == 0,
            now=now,
        )

    def _lanes_to_write(self) -> Sequence[Lane[K]]:
        """The lanes that may write now, suspects first."""
        lanes: Sequence[Lane[K]] = (self._quarantine, self._main)
        if self._is_sharing:
            lanes = self._sharing[:1]
            if self._quarantine in lanes:
                self.window.forget_round()
        if self._quarantine.is_alone or self._evidence.doubt is not None:
            is_alone = self.in_flight == self._quarantine.in_flight
            lanes = (self._quarantine,) if is_alone else ()
            if not self.in_flight:
                self._evidence.nothing_heard()
        return lanes

    def poll_commands(self) -> Iterable[Command]:
        """Take the commands for the transport, in order."""
        while self._commands:
            yield self._commands.popleft()

    def poll_settlements(self) -> list[Ended[K]]:
        """Take the attempts that have ended since the last call, in order."""
        settlements, self._aftermath.settlements = self._aftermath.settlements, []
        return settlements

    @property
    def has_output(self) -> bool:
        """Whether `poll_commands` or `poll_settlements` would return anything."""
        return bool(self._commands or self._aftermath.settlements)

    def poll_timeout(self) -> float | None:
        """When the caller must call `handle_timeout` (monotonic seconds); None if never."""
        due = self._due(self._main)
        next_at = None if self._rate is None else self._next_at(self._rate)
        is_single = self._quarantine.is_unused and self._retiring.ledger is None
        if is_single and self._may_open_at is None and next_at is None:
            return due
        dues = (
            *(due, self._due(self._quarantine), self._due(self._retiring), next_at),
            *(self._due_aside(), self._may_open_at if self.is_connected else None),
        )
        return min((due for due in dues if due is not None), default=None)

    # ------------------------------------------------------------------ inside

    @property
    def _can_write(self) -> bool:
        return self.is_connected and self.blocked_reason is None

    def _next_at(self, rate: Rate) -> float | None:
        """When the rate lets the next message be written; None if it holds none up."""
        return rate.next_at if self._can_write and self.buffered else None

    def _due(self, lane: Lane[K]) -> float | None:
        """When the lane's oldest answer will be overdue, unless the broker blocks us first."""
        is_retiring = lane is self._retiring and lane.ledger is not None
        if is_retiring and lane.newest_at() <= self._late_before:
            return -inf  # only late ones are left; further confirms may have arrived by now
        since = lane.owed_since
        if since is None or not self._can_write:
            return None
        if is_retiring:  # its oldest is overdue already
            since = max(lane.newest_at(), lane.leaving_until)
        return self._clock.due_at(since + self._confirm_timeout_s * self._patience)

    def _be_less_patient(self, lane: Lane[K], now: float) -> None:
        """Reset the patience if this confirm came within ``confirm_timeout_s``."""
        since = lane.owed_since
        waited_s = 0.0 if since is None else self._clock.reading(now) - since
        if waited_s < self._confirm_timeout_s:
            self._patience = 1

    def _due_aside(self) -> float | None:
        """When the next message that was set aside is due; None if nothing can be sent."""
        due = self._quarantine.due
        return self._clock.due_at(due) if due is not None and self._can_write else None

    def _lane(self, epoch: int) -> Lane[K] | None:
        """The lane of a current epoch; None if the epoch is over."""
        for lane in self._lanes:
            if lane.ledger is not None and lane.ledger.epoch == epoch:
                return lane
        return None

    def _open_lanes(self, now: float) -> None:
        """Open a channel for every lane that needs one."""
        if not self.is_connected:
            return
        self._next_suspects()
        if self._is_sharing:
            lane, other = self._sharing
            if other.state is ChannelState.OPEN and not other.in_flight:
                lane.take_over(other)
            elif other.state is ChannelState.CLOSED and now >= (self._may_open_at or now):
                self._may_open_at = None
                self._open(lane, now)
            return
        self._open(self._main, now)
        if self._quarantine.buffer:
            self._open(self._quarantine, now)

    @property
    def _sharing(self) -> tuple[Lane[K], Lane[K]]:
        """The lane that uses the shared channel next, and the other lane."""
        is_trying = self._quarantine.buffer or self._quarantine.in_flight
        lanes: tuple[Lane[K], Lane[K]] = (self._quarantine, self._main)
        return lanes if is_trying else (lanes[1], lanes[0])

    def _open(self, lane: Lane[K], now: float) -> None:
        if lane.state is ChannelState.CLOSED:
            self._last_epoch += 1
            lane.opening(self._last_epoch, self._clock.reading(now))
            self._order(OpenChannel(self._last_epoch))

    def _order(self, command: Command) -> None:
        """Queue a command for the transport, unless the connection has been given up."""
        if self.is_connected:
            self._commands.append(command)

    def _disconnect(self, reason: str) -> None:
        """Give the connection up; a `ConnectionLost` follows."""
        self._order(Disconnect(reason))
        self.is_connected = False

    @property
    def _is_gathering(self) -> bool:
        """Whether evidence is needed: there are suspects, or a place that refuses messages."""
        return not self._quarantine.is_unused or self._evidence.has_runs

    def _passed(self, ended: Iterable[Ended[K]], now: float) -> None:
        """Note the messages that the broker has answered; judge those set aside by them."""
        for one in ended:
            self._evidence.passed(one.keys if isinstance(one, ConfirmedEach) else (one.key,))
        self._recall(now)

    def _recall(self, now: float) -> None:
        if self._quarantine.aside:
            self._quarantine.recall(self._clock.reading(now), self._evidence.judges())
        self._open_lanes(now)

    def _choose_probe(self) -> None:
        """Choose what goes next while the broker refuses every message.

        A message to a place that has not refused any shows whether it is the whole broker. Else the
        newest one that is no suspect: the next ones may be unfit like those that were refused. If
        there is none, the suspects take turns.
        """
        buffered = self.buffered_keys()
        key = next((key for key in buffered if not self._evidence.is_refusing(key)), None)
        if key is None:
            key = next(reversed([*self._main.buffered_keys()]), None)
        if key is not None:
            self._main.withdraw((key,))
            self._quarantine.withdraw((key,))
            self._evidence.sent_alone(key)
            self._quarantine.expect(key, is_next=True)

    def _next_suspects(self) -> None:
        """Go on to the next group of suspects; close the quarantine channel after the last."""
        lane = self._quarantine
        is_single = self._evidence.doubt is not None
        if is_single and not (lane.buffer or lane.in_flight):
            self._choose_probe()
        if (
            not lane.advance(is_single=is_single)
            and lane.state is not ChannelState.CLOSED
            and not self._is_sharing
        ):
            self._order(CloseChannel(lane.epoch, "quarantine is empty"))
            # Nothing is in flight, so no attempt gets this outcome.
            self._aftermath.close(lane, Outcome(OutcomeKind.UNCERTAIN))

    def _retire(self, lane: Lane[K], reason: str, now: float) -> None:
        """Give up a channel whose confirms are overdue, at once or when only those are left."""
        is_of_queue = lane.has_settled_newer
        is_late = self.window.size > 1 and (is_of_queue or self._patience > 1)
        is_mute = not is_of_queue and self._patience >= 2 ** (OVERDUE_MAX - 1)
        self._patience = min(2 * self._patience, PATIENCE_MAX)
        if is_of_queue:  # the broker as a whole is not too slow for the window
            self.window.forget_round()
        else:
            self.window.halve()
        late_before = self._clock.reading(now) - self._confirm_timeout_s if is_late else -inf
        is_retiring = is_of_queue and lane is self._main and not self._is_sharing
        if is_retiring and lane.newest_at() > late_before:
            self._end_retiring()
            self._retiring.take_over(lane)
            self._late_before, self._retired_for = late_before, reason
        else:
            self._order(CloseChannel(lane.epoch, reason))
            self._aftermath.overdue(lane, reason, late_before=late_before)
            # If shared, a new channel might exceed the limit while this one still counts.
            if self._is_sharing or is_mute:
                self._disconnect(reason)
        self._open_lanes(now)

    def _end_retiring(self) -> None:
        """Close the retiring channel, if there is one; all that it has in flight is late."""
        if self._retiring.ledger is not None:
            self._order(CloseChannel(self._retiring.epoch, self._retired_for))
            self._aftermath.overdue(self._retiring, self._retired_for, late_before=inf)

    def _begin_anew(self, lane: Lane[K], reason: str) -> None:
        """Reconnect: no publish is the cause, so a new channel may end the same way.

        Only reconnecting waits between attempts.
        """
        self._aftermath.send_again(lane, reason)
        self._disconnect(reason)

    _OF_THE_CONNECTION: ClassVar[dict[type[Any], Callable[[Any, Any, float], None]]] = {
        Connected: _connected,
        ConnectionLost: _connection_lost,
        Blocked: _blocked,
        Unblocked: _unblocked,
    }
    _OF_A_CHANNEL: ClassVar[dict[type[Any], Callable[[Any, Lane[Any], Any, float], None]]] = {
        ChannelOpened: _channel_opened,
        NoChannel: _no_channel,
        ChannelClosed: _channel_closed,
        Acked: _confirmed,
        AckedEach: _acked_each,
        Nacked: _confirmed,
        Returned: _returned,
        Leaving: _leaving,
    }
