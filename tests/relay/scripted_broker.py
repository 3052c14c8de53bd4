"""A broker that the relay reaches through its transport, and that remembers what it really did.

It is honest (RabbitMQ's rules) and unkind: it confirms when it is told to, refuses poison by
closing the channel, and dies with messages accepted and not confirmed. Whatever the relay does
wrong on the wire is noticed here at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reliablepub._core.events import (
    Acked,
    ChannelClosed,
    ChannelOpened,
    Connected,
    ConnectionLost,
    Event,
    Nacked,
    Returned,
)
from reliablepub.message import Message
from reliablepub.transport.base import CannotEncode


@dataclass
class Publish:
    """One publish on one channel."""

    id: str
    fate: str = "unread"  # then accepted, returned or nacked; finally confirmed


@dataclass
class BrokerChannel:
    """One epoch."""

    is_open: bool = False
    publishes: list[Publish] = field(default_factory=list)
    read: int = 0


class ScriptedBroker:
    """The transport's side of a broker; the test moves it step by step.

    Args:
        is_stored: whether a message is on disk; nothing else may ever be sent.
    """

    def __init__(self, is_stored: Callable[[str], bool]) -> None:
        self._is_stored = is_stored
        self.is_asked_to_connect = False
        self.is_connected = False
        self.channels: dict[int, BrokerChannel] = {}
        self.events: list[Event] = []
        self.live: dict[str, Publish] = {}
        self.accepted: list[str] = []
        self.acked: set[str] = set()
        self.refused: dict[str, int] = {}

    # ------------------------------------------------------------------ the transport

    def connect(self) -> None:
        assert not self.is_connected
        assert not self.is_asked_to_connect
        self.is_asked_to_connect = True

    def disconnect(self, reason: str) -> None:
        self.drop(reason)

    def open_channel(self, epoch: int) -> None:
        if self.is_connected:
            assert epoch not in self.channels
            self.channels[epoch] = BrokerChannel()

    def close_channel(self, epoch: int) -> None:
        self._forget(self.channels.pop(epoch, None))

    def send(self, epoch: int, first_tag: int, messages: Sequence[Message]) -> None:
        for index, message in enumerate(messages):
            if (message.message_id or "").startswith("huge"):
                raise CannotEncode(index, "its header is too large")
        channel = self.channels.get(epoch)
        if channel is None:
            assert self.events, "sent on a channel that is long gone"
            return
        assert channel.is_open, "sent on a channel that is not open"
        assert first_tag == len(channel.publishes) + 1, "the two counts of tags differ"
        for message in messages:
            id_ = message.message_id or ""
            assert self._is_stored(id_), f"{id_} was sent and is not on disk"
            assert id_ not in self.live, f"{id_} is in flight twice"
            publish = self.live[id_] = Publish(id_)
            channel.publishes.append(publish)

    def listen(self, timeout_s: float | None) -> list[Event]:
        events, self.events = self.events, []
        return events

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass

    # ------------------------------------------------------------------ what the test may do

    def accept(self) -> None:
        """Let the connection succeed that the relay asks for."""
        if self.is_asked_to_connect:
            self.is_asked_to_connect, self.is_connected = False, True
            self.events.append(Connected())

    def refuse(self) -> None:
        if self.is_asked_to_connect:
            self.is_asked_to_connect = False
            self.events.append(ConnectionLost("refused"))

    def open_channels(self) -> None:
        for epoch, channel in self.channels.items():
            if not channel.is_open:
                channel.is_open = True
                self.events.append(ChannelOpened(epoch))

    def read(self, count: int) -> None:
        """Take publishes from the socket: route, return, refuse, or die of poison."""
        for epoch, channel in list(self.channels.items()):
            for publish in channel.publishes[channel.read : channel.read + count]:
                channel.read += 1
                if publish.id.startswith("poison"):
                    self.refused[publish.id] = self.refused.get(publish.id, 0) + 1
                    self._forget(self.channels.pop(epoch))
                    self.events.append(ChannelClosed(epoch, 404, "NOT_FOUND", by_publish=True))
                    break
                self._route(epoch, channel.read, publish)

    def _route(self, epoch: int, tag: int, publish: Publish) -> None:
        if publish.id.startswith("lost"):
            publish.fate = "returned"
            self.events.append(Returned(epoch, tag, 312, "NO_ROUTE"))
        elif publish.id.startswith("full"):
            publish.fate = "nacked"
        else:
            publish.fate = "accepted"
            self.accepted.append(publish.id)

    def confirm(self, pick: Callable[[list[int]], list[int]], *, multiple: bool) -> None:
        """Confirm some of what has been read; with ``multiple`` the longest run of one verdict."""
        for epoch, channel in self.channels.items():
            owed = [
                tag
                for tag, publish in enumerate(channel.publishes[: channel.read], 1)
                if publish.fate != "confirmed"
            ]
            if not owed:
                continue
            if not multiple:
                for tag in pick(owed):
                    self._confirm(epoch, tag, [tag], multiple=False)
                continue
            is_nack = channel.publishes[owed[0] - 1].fate == "nacked"
            run: list[int] = []
            for tag in owed:
                if (channel.publishes[tag - 1].fate == "nacked") != is_nack:
                    break
                run.append(tag)
            self._confirm(epoch, run[-1], run, multiple=True)

    def _confirm(self, epoch: int, tag: int, covered: list[int], *, multiple: bool) -> None:
        publishes = self.channels[epoch].publishes
        is_nack = publishes[tag - 1].fate == "nacked"
        for one in covered:
            publish = publishes[one - 1]
            if publish.fate == "accepted":
                self.acked.add(publish.id)
            elif publish.fate != "confirmed":
                self.refused[publish.id] = self.refused.get(publish.id, 0) + 1
            publish.fate = "confirmed"
            self.live.pop(publish.id)
        self.events.append((Nacked if is_nack else Acked)(epoch, tag, multiple))

    def drop(self, reason: str) -> None:
        """Lose the connection; what was read stays accepted, what was not is gone."""
        if self.is_connected:
            self.is_connected = False
            for channel in self.channels.values():
                self._forget(channel)
            self.channels.clear()
            self.events.append(ConnectionLost(reason))

    def _forget(self, channel: BrokerChannel | None) -> None:
        for publish in channel.publishes if channel is not None else ():
            if publish.fate != "confirmed":
                del self.live[publish.id]
