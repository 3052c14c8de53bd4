"""A RabbitMQ in virtual time: it routes, keeps, returns, confirms and refuses as the real one does.

It knows the rules of RabbitMQ's channel process (docs/confirms.md describes them),
and a few sins no broker should commit: a confirm twice, for a tag that was never sent, for none at
all. It never lies about a message: what it acks, it keeps. It must never know the relay.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from reliablepub._core.events import (
    Acked,
    ChannelClosed,
    ChannelOpened,
    ConnectionClose,
    Nacked,
    Returned,
)
from reliablepub.message import Message
from tests.simulation.agenda import Agenda, Note
from tests.simulation.wire import Wire

NO_ROUTE = (312, "NO_ROUTE")
ONE_CHANNEL = "NOT_ALLOWED - number of channels opened (1) has reached the maximum allowed limit"
GUILTY = {
    "missing": (404, "NOT_FOUND - no exchange 'missing' in vhost '/'"),
    "forbidden": (403, "ACCESS_REFUSED - write access to exchange 'forbidden' refused"),
    "oversized": (406, "PRECONDITION_FAILED - message size is larger than configured"),
}
"""Exchanges at which a publish closes its channel; the test may declare the first one. At the last
one only every second message does."""
REFUSES_ALL = (406, "PRECONDITION_FAILED - Server low on disk space")
FATAL = {
    "fatal": (540, "NOT_IMPLEMENTED - immediate=true"),
    "garbled": (501, "FRAME_ERROR - cannot decode"),
}
"""Exchanges at which a publish costs the connection, and the broker says so."""


class Fate(StrEnum):
    """What the broker has decided about a publish; the last three are waiting to be confirmed."""

    BEING_KEPT = "being kept"
    KEPT = "kept"
    RETURNED = "returned"
    NACKED = "nacked"


@dataclass
class Kept:
    """A message in a queue; what is not yet on disk dies with the broker."""

    message: Message
    is_on_disk: bool = False


@dataclass
class Channel:
    """One channel of one connection, in confirm mode.

    Attributes:
        fates: of each publish that was read; the n-th has tag n. None once it is confirmed.
        is_mute: it owes confirms, and gives none.
    """

    epoch: int
    fates: list[Fate | None] = field(default_factory=list)
    is_mute: bool = False
    is_confirming: bool = False

    def owed(self) -> list[int]:
        """Tags that can be confirmed now."""
        return [n for n, fate in enumerate(self.fates, 1) if fate not in (None, Fate.BEING_KEPT)]


class SimBroker:
    """One node, its queues, and whoever is connected to it.

    Args:
        agenda: the time.
        rng: chance.
        note: called with the name of whatever happens, to be counted.

    Attributes:
        is_up: whether it takes connections.
        is_alarmed: whether it blocks whoever publishes.
        is_declared: whether the exchange ``missing`` exists after all.
        is_bound: whether the routing key ``unbound`` leads to a queue.
        is_fragile: whether a publish may cost the connection, or its channel for being too large.
        refuses_all: whether each publish costs its channel, whatever it is.
        is_full: whether the queue ``limited`` refuses more.
        stuck: routing key of the queue that confirms nothing; None if each does.
        opens_slowly: whether ``channel.open`` is answered after a long time.
        has_one_channel: whether the user may have one channel only; a second costs the connection.
        keeps: what is in the queues.
        accepted: every message a queue took, in order.
        pace_s: mean time between receiving a message and having it on disk.
        confirms_s: mean time between two confirms.
    """

    def __init__(self, agenda: Agenda, rng: random.Random, note: Note) -> None:
        self._agenda = agenda
        self._rng = rng
        self._note = note
        self.is_up = True
        self.is_alarmed = False
        self.is_declared = False
        self.is_bound = False
        self.is_full = False
        self.is_fragile = True
        self.refuses_all = False
        self.stuck: str | None = None
        self._stuck: list[Callable[[], None]] = []
        self.opens_slowly = False
        self.has_one_channel = False
        self.keeps: list[Kept] = []
        self.accepted: list[Message] = []
        self.wires: list[Wire] = []
        self.pace_s = 0.005
        self.confirms_s = 0.005

    # ------------------------------------------------------------------ what the client does

    def opened(self, wire: Wire, epoch: int) -> None:
        """``channel.open`` and ``confirm.select``."""
        if self.has_one_channel and len(wire.channels) + wire.counted_out:
            self._note("connection closed: 530")
            wire.cut(ONE_CHANNEL, ConnectionClose(530, ONE_CHANNEL), by_broker=True)
            return
        delay_s = self._rng.uniform(0.2, 8.0) if self.opens_slowly else 0.0
        wire.channels[epoch] = Channel(epoch)
        self._agenda.after(delay_s, lambda: wire.to_client(ChannelOpened(epoch)))

    def published(self, wire: Wire, epoch: int, tag: int, message: Message) -> None:
        """``basic.publish``, with ``mandatory``."""
        channel = wire.channels.get(epoch)
        if channel is None:
            self._note("publish to a channel that is gone")
            return
        assert tag == len(channel.fates) + 1, f"the counts of tags differ: {tag}"
        exchange = message.exchange
        if self.refuses_all:
            self._note("every message is refused")
            wire.guilty[epoch] = message
            self.close_channel(wire, epoch, *REFUSES_ALL, by_publish=True)
            return
        if exchange in GUILTY and not self._is_taken(message):
            self._note(f"channel closed: {GUILTY[exchange][0]}")
            wire.guilty[epoch] = message
            self.close_channel(wire, epoch, *GUILTY[exchange], by_publish=True)
            return
        if exchange in FATAL and self.is_fragile:
            code, text = FATAL[exchange]
            self._note(f"connection closed: {code}")
            wire.cut(text, ConnectionClose(code, text), by_broker=True)
            return
        if exchange == "crushing" and self.is_fragile:
            self._note("connection lost over a message")
            wire.cut("reset by peer", by_broker=True)
            return
        channel.fates.append(self._route(wire, epoch, tag, message))
        self._confirm_later(wire, channel)

    def _is_taken(self, message: Message) -> bool:
        """Whether an exchange that closes channels takes this message all the same."""
        if message.exchange == "oversized":
            is_small = zlib.crc32((message.message_id or "").encode()) % 2 == 0
            return is_small or not self.is_fragile
        return message.exchange == "missing" and self.is_declared

    def _route(self, wire: Wire, epoch: int, tag: int, message: Message) -> Fate:
        if message.routing_key == "unbound" and not self.is_bound:
            is_recognizable = not self._rng.random() < wire.faults.strips_headers
            self._note("returned" if is_recognizable else "returned without our header")
            wire.to_client(Returned(epoch, tag if is_recognizable else 0, *NO_ROUTE))
            return Fate.RETURNED
        if message.routing_key == "limited" and self.is_full:
            self._note("nacked")
            return Fate.NACKED
        kept = Kept(message)
        self.accepted.append(message)
        self.keeps.append(kept)
        if message.routing_key == "mirrored" and self.is_full:
            self._note("nacked by one queue, kept by another")
            kept.is_on_disk = True
            return Fate.NACKED
        delay_s = self._rng.expovariate(1 / self.pace_s)
        if message.routing_key == self.stuck:
            self._note("kept by a queue that confirms nothing")
            self._stuck.append(lambda: self._on_disk(wire, epoch, tag, kept))
        else:
            self._agenda.after(delay_s, lambda: self._on_disk(wire, epoch, tag, kept))
        return Fate.BEING_KEPT

    def release(self) -> None:
        """The queue that was stuck goes on."""
        self.stuck, stuck, self._stuck = None, self._stuck, []
        for on_disk in stuck:
            on_disk()

    def _on_disk(self, wire: Wire, epoch: int, tag: int, kept: Kept) -> None:
        if kept not in self.keeps:
            return  # lost in a crash meanwhile
        kept.is_on_disk = True
        channel = wire.channels.get(epoch)
        if channel is not None:
            channel.fates[tag - 1] = Fate.KEPT
            self._confirm_later(wire, channel)

    def closed(self, wire: Wire, epoch: int) -> None:
        """``channel.close``; what was read there stays in the queues, and is never confirmed."""
        wire.channels.pop(epoch, None)

    def alarm(self) -> None:
        """Block whoever is connected, and read nothing more."""
        self.is_alarmed = True
        for wire in self.wires:
            wire.block()

    def calm(self) -> None:
        self.is_alarmed = False
        for wire in list(self.wires):
            wire.unblock()

    # ------------------------------------------------------------------ confirms

    def _confirm_later(self, wire: Wire, channel: Channel) -> None:
        if not channel.is_confirming:
            channel.is_confirming = True
            self._agenda.after(
                self._rng.expovariate(1 / self.confirms_s), lambda: self._confirm(wire, channel)
            )

    def _confirm(self, wire: Wire, channel: Channel) -> None:
        """Confirm what can be, coalesced or one by one, in any order, some of it later."""
        channel.is_confirming = False
        if wire.channels.get(channel.epoch) is not channel or channel.is_mute:
            return
        owed = channel.owed()
        if self._rng.random() < 0.5:
            self._confirm_run(wire, channel)
            owed = channel.owed()
        if self._rng.random() < 0.5:
            self._rng.shuffle(owed)
            owed = owed[: self._rng.randint(0, len(owed))]
        for tag in owed:
            self._settle(wire, channel, [tag], multiple=self._is_lowest(channel, tag))
        if self._rng.random() < wire.faults.sins:
            self._sin(wire, channel)
        if channel.owed():
            self._confirm_later(wire, channel)

    def _confirm_run(self, wire: Wire, channel: Channel) -> None:
        """As RabbitMQ coalesces: one confirm for all up to the first that must still wait."""
        run: list[int] = []
        for tag, fate in enumerate(channel.fates, 1):
            if fate is None:
                continue
            is_nack = fate is Fate.NACKED
            starts_nack = bool(run) and channel.fates[run[0] - 1] is Fate.NACKED
            if fate is Fate.BEING_KEPT or (run and is_nack != starts_nack):
                break
            run.append(tag)
        if run:
            self._note("multiple" if len(run) > 1 else "multiple of one")
            self._settle(wire, channel, run, multiple=True)

    def _is_lowest(self, channel: Channel, tag: int) -> bool:
        """Whether ``multiple`` would say the same as without it; then chance decides."""
        lower = channel.fates[: tag - 1]
        if any(fate is not None for fate in lower):
            self._note("out of order")
            return False
        return self._rng.random() < 0.2

    def _settle(self, wire: Wire, channel: Channel, tags: list[int], *, multiple: bool) -> None:
        is_nack = channel.fates[tags[-1] - 1] is Fate.NACKED
        for tag in tags:
            channel.fates[tag - 1] = None
        kind = Nacked if is_nack else Acked
        wire.to_client(kind(channel.epoch, tags[-1], multiple))

    def _sin(self, wire: Wire, channel: Channel) -> None:
        """Say something that no broker should say."""
        confirmed = [tag for tag, fate in enumerate(channel.fates, 1) if fate is None]
        last = len(channel.fates)
        epoch = channel.epoch
        kind = self._rng.choice(["duplicate", "duplicate", "duplicate", "beyond", "zero", "return"])
        if kind == "duplicate" and confirmed:
            self._note("confirm twice")
            tag = self._rng.choice(confirmed)
            is_ack = self._rng.random() < 0.5
            wire.to_client((Acked if is_ack else Nacked)(epoch, tag, multiple=False))
        elif kind == "beyond":
            self._note("confirm beyond the last tag")
            wire.to_client(Acked(epoch, last + self._rng.randint(1_000, 2_000), multiple=True))
        elif kind == "zero":
            self._note("confirm of tag 0")
            wire.to_client(Acked(epoch, 0, multiple=True))
        elif kind == "return" and confirmed:
            self._note("return after the confirm")
            wire.to_client(Returned(epoch, self._rng.choice(confirmed), *NO_ROUTE))

    # ------------------------------------------------------------------ what the broker does

    def close_channel(
        self, wire: Wire, epoch: int, code: int, text: str, *, by_publish: bool
    ) -> None:
        """``channel.close``: what it owed there is never said."""
        del wire.channels[epoch]
        if self.has_one_channel and by_publish:
            wire.count_out_later()
        wire.to_client(ChannelClosed(epoch, code, text, by_publish))

    def crash(self) -> None:
        """Die: what is not on disk may be lost, and every connection is."""
        self.is_up = False
        survivors = [k for k in self.keeps if k.is_on_disk or self._rng.random() < 0.3]
        if len(survivors) < len(self.keeps):
            self._note("broker lost what it had not confirmed")
        for kept in survivors:
            kept.is_on_disk = True
        self.keeps = survivors
        for wire in list(self.wires):
            wire.cut("broker crashed")
        self.is_alarmed = False

    def restart(self) -> None:
        """Take connections again."""
        self.is_up = True

    def mute(self, wire: Wire, channel: Channel, for_s: float) -> None:
        """Owe confirms for a while."""
        channel.is_mute = True

        def speak() -> None:
            channel.is_mute = False
            self._confirm_later(wire, channel)

        self._agenda.after(for_s, speak)
