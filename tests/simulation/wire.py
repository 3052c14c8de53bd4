"""A connection in virtual time, and the transport that a relay sees of it.

Two pipes, each in order and each with a delay of its own; either end may learn late that the other
is gone. So what was written may or may not have arrived when it breaks, and nobody is told which.
It must never know what a broker does with what arrives.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliablepub._core.events import (
    Blocked,
    ChannelClosed,
    Connected,
    ConnectionClose,
    ConnectionLost,
    Event,
    Leaving,
    Unblocked,
)
from reliablepub.message import Message
from reliablepub.transport.base import CannotEncode
from tests.acks import in_runs
from tests.simulation.agenda import Action, Agenda, Note

if TYPE_CHECKING:
    from tests.simulation.broker import Channel, SimBroker
    from tests.simulation.checker import Checker

UNENCODABLE = "its header is too large for this broker"
COUNTED_OUT_MAX_S = 0.08
FRAMES_BYTES = 60
DEPARTURES_S = 0.1
"""How often the transport looks what has left the host."""


@dataclass
class LinkFaults:
    """How bad the links and what comes over them are.

    Attributes:
        latency_s: mean delay of a frame.
        notice_max_s: how long an end may take to notice that the other is gone.
        strips_headers: share of returns that come without our header.
        sins: share of confirms followed by nonsense.
        refuses: share of connection attempts that fail.
        bytes_per_s: how fast bytes leave the publisher's host; 0 for at once.
    """

    latency_s: float = 0.001
    notice_max_s: float = 0.0
    strips_headers: float = 0.0
    sins: float = 0.0
    refuses: float = 0.0
    bytes_per_s: float = 0.0


class Wire:
    """One connection, from its first frame to its end at both ends."""

    def __init__(
        self,
        *,
        broker: SimBroker,
        agenda: Agenda,
        rng: random.Random,
        faults: LinkFaults,
        deliver: Callable[[Event], None],
        note: Note,
    ) -> None:
        self.faults = faults
        self.channels: dict[int, Channel] = {}
        self.guilty: dict[int, Message] = {}
        self._broker = broker
        self._agenda = agenda
        self._rng = rng
        self._deliver = deliver
        self._note = note
        self._is_cut = False
        self._client_listens = True
        self._broker_listens = True
        self._up_at = self._down_at = self.left_at = agenda.now
        self.counted_out = 0
        self._unread: deque[Action] = deque()

    @property
    def is_open(self) -> bool:
        """Whether the client may believe that it is there."""
        return self._client_listens

    # ------------------------------------------------------------------ both directions

    def count_out_later(self) -> None:
        """A channel that the broker has closed still counts for a moment."""
        self.counted_out += 1

        def counted_out() -> None:
            self.counted_out -= 1

        self._agenda.after(self._rng.uniform(0.0, COUNTED_OUT_MAX_S), counted_out)

    def to_broker(self, action: Action, size: int = 0) -> None:
        """A frame on its way; the broker does this when it arrives, if it still listens.

        Args:
            action: what the broker does.
            size: bytes that have to leave the host, one after the other.
        """
        if self.faults.bytes_per_s:
            self.left_at = max(self.left_at, self._agenda.now) + size / self.faults.bytes_per_s
        if self._is_cut or not self._client_listens:
            self._note("written to a dead connection")
            return
        leaves_at = max(self.left_at, self._agenda.now)
        self._up_at = max(self._up_at, leaves_at + self._delay_s())
        self._agenda.at(self._up_at, lambda: self._arrived(action))

    def _arrived(self, action: Action) -> None:
        if not self._broker_listens:
            return
        if self._unread or self._broker.is_alarmed:
            self._unread.append(action)
        else:
            action()

    def to_client(self, event: Event) -> None:
        """A frame on its way back."""
        if self._is_cut or not self._broker_listens:
            return
        self._down_at = max(self._down_at, self._agenda.now + self._delay_s())
        self._agenda.at(self._down_at, lambda: self._heard(event))

    def _heard(self, event: Event) -> None:
        if self._client_listens:
            self._deliver(event)

    def _delay_s(self) -> float:
        return self._rng.expovariate(1 / self.faults.latency_s) if self.faults.latency_s else 0.0

    # ------------------------------------------------------------------ alarms

    def block(self) -> None:
        self.to_client(Blocked("low on memory"))

    def unblock(self) -> None:
        self.to_client(Unblocked())
        while self._unread and self._broker_listens:
            self._unread.popleft()()

    # ------------------------------------------------------------------ ends

    def cut(
        self, reason: str, close: ConnectionClose | None = None, *, by_broker: bool = False
    ) -> None:
        """Break it: frames in the air arrive or not, and each end notices in its own time.

        Args:
            reason: for people.
            close: the broker's last words, if it has any.
            by_broker: it reads nothing more.
        """
        if by_broker:
            self._forget()
        if self._is_cut:
            return
        self._is_cut = True
        if not by_broker:
            self._end_at_broker()
        lost_at = self._agenda.now + self._rng.uniform(0, self.faults.notice_max_s)
        if close is not None or self._rng.random() < 0.5:
            lost_at = max(lost_at, self._down_at)  # all that was said is still heard
        self._agenda.at(lost_at, lambda: self._lost(ConnectionLost(reason, close)))

    def _lost(self, event: ConnectionLost) -> None:
        if self._client_listens:
            self._client_listens = False
            self._deliver(event)

    def drop(self) -> None:
        """The client's end is gone, by its own will or with its process."""
        self._client_listens = False
        if not self._is_cut:
            self._is_cut = True
            self._end_at_broker()

    def _end_at_broker(self) -> None:
        """The broker reads what is in the air, some of it, or nothing; a crashed one nothing."""
        if not self._broker.is_up or self._rng.random() < 0.4:
            self._forget()
            return
        self._note("the broker took what was in the air")
        self._agenda.at(self._rng.uniform(self._agenda.now, self._up_at), self._forget)

    def _forget(self) -> None:
        self._broker_listens = False
        self._unread.clear()
        self.channels.clear()
        if self in self._broker.wires:
            self._broker.wires.remove(self)


class SimTransport:
    """The `Transport` of one publisher process.

    Args:
        broker: what it connects to.
        agenda: the time.
        rng: chance.
        faults: of its connections.
        checker: told what is written, and what is heard.
        step: called before and after each request: the process may die there.
        wake: called when there is something to listen to.
        note: told of whatever happens.
    """

    hooks_off = ""
    trying = ""
    certificate_ends_at = None

    def __init__(
        self,
        *,
        broker: SimBroker,
        agenda: Agenda,
        rng: random.Random,
        faults: LinkFaults,
        checker: Checker,
        step: Callable[[str], None],
        wake: Callable[[], None],
        note: Note,
    ) -> None:
        self._broker = broker
        self._agenda = agenda
        self._rng = rng
        self._faults = faults
        self._checker = checker
        self._step = step
        self._wake = wake
        self._note = note
        self._wire: Wire | None = None
        self._is_connecting = False
        self._is_dead = False
        self._events: deque[Event] = deque()
        self._under_way: list[tuple[float, int, int]] = []
        self._looks_at_departures = False

    # ------------------------------------------------------------------ the protocol

    def connect(self) -> None:
        assert self._wire is None, "it is connected"
        assert not self._is_connecting, "it is connecting already"
        self._is_connecting = True
        self._agenda.after(self._rng.choice([0.0, 0.002, 0.5]), self._connected)

    def _connected(self) -> None:
        self._is_connecting = False
        if self._is_dead:
            return
        if not self._broker.is_up or self._rng.random() < self._faults.refuses:
            self._note("connection refused")
            self._deliver(ConnectionLost("connection refused"))
            return
        self._wire = Wire(
            broker=self._broker,
            agenda=self._agenda,
            rng=self._rng,
            faults=self._faults,
            deliver=self._deliver,
            note=self._note,
        )
        self._broker.wires.append(self._wire)
        self._deliver(Connected())
        if self._broker.is_alarmed:
            self._wire.block()

    def disconnect(self, reason: str) -> None:
        self._note("disconnected on purpose")
        if self._wire is not None and self._wire.is_open:
            self._wire.drop()
            self._deliver(ConnectionLost(reason))

    def open_channel(self, epoch: int) -> None:
        self._step("before channel.open")
        self._checker.asked_for(epoch)
        wire = self._wire
        if wire is not None:
            wire.to_broker(lambda: self._broker.opened(wire, epoch), FRAMES_BYTES)
            self._leaves(wire, epoch, 0)

    def close_channel(self, epoch: int) -> None:
        self._note("channel closed by us")
        self._checker.gave_up(epoch)
        wire = self._wire
        if wire is not None:
            wire.to_broker(lambda: self._broker.closed(wire, epoch))

    def send(self, epoch: int, first_tag: int, messages: Sequence[Message]) -> None:
        self._step("before the write")
        for index, message in enumerate(messages):
            if message.routing_key == "unencodable":
                self._note("unencodable")
                self._checker.unencodable(message, UNENCODABLE)
                raise CannotEncode(index, UNENCODABLE)
        self._checker.sent(epoch, first_tag, messages)
        wire = self._wire
        for tag, message in enumerate(messages, first_tag):
            if wire is not None:
                size = message.size + FRAMES_BYTES
                wire.to_broker(self._publish(wire, epoch, tag, message), size)
                self._leaves(wire, epoch, tag)
                self._checker.leaves(epoch, tag, wire.left_at)
            self._step("within the write")
        self._step("after the write")

    def _publish(self, wire: Wire, epoch: int, tag: int, message: Message) -> Action:
        return lambda: self._broker.published(wire, epoch, tag, message)

    def _leaves(self, wire: Wire, epoch: int, tag: int) -> None:
        """Look for what has left the host, from now on, until all has."""
        if wire.left_at <= self._agenda.now:
            return
        self._under_way.append((wire.left_at, epoch, tag))
        if not self._looks_at_departures:
            self._looks_at_departures = True
            self._agenda.after(DEPARTURES_S, self._look_at_departures)

    def _look_at_departures(self) -> None:
        self._looks_at_departures = False
        self._under_way = [one for one in self._under_way if one[0] > self._agenda.now]
        if self._wire is None or not self._wire.is_open:
            self._under_way.clear()
        first: dict[int, int] = {}
        for _, epoch, tag in self._under_way:
            first.setdefault(epoch, tag)
        for epoch, tag in first.items():
            self._note("leaving")
            self._deliver(Leaving(epoch, tag))
        if first and not self._is_dead:
            self._looks_at_departures = True
            self._agenda.after(DEPARTURES_S, self._look_at_departures)

    def listen(self, timeout_s: float | None) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        for event in events:
            guilty = None
            if isinstance(event, ChannelClosed) and self._wire is not None:
                guilty = self._wire.guilty.get(event.epoch)
            if isinstance(event, ConnectionLost) and self._wire is not None:
                self._wire = None
            self._checker.heard(event, guilty)
        return list(in_runs(events))

    def watch(self, fd: int) -> bool:
        return False

    def wake(self) -> None:
        self._wake()

    def close(self) -> None:
        self.die()

    # ------------------------------------------------------------------ the simulation's side

    def _deliver(self, event: Event) -> None:
        if not self._is_dead:
            self._events.append(event)
            self._wake()

    def die(self) -> None:
        """The process is gone: its end of the connection with it."""
        self._is_dead = True
        self._events.clear()
        if self._wire is not None:
            self._wire.drop()
