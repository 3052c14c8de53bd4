"""Publisher confirms of one channel: the open delivery tags, and the confirms to send.

Knows: the coalescing of rabbit_channel, the order of the confirms. Must never know: messages,
queues, frames, faults.

A tag is *unconfirmed* until it is settled as acked or nacked. `poll` coalesces the tags settled
since the last call into as few confirms as RabbitMQ sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


@dataclass(frozen=True, slots=True)
class Confirm:
    """One basic.ack or basic.nack."""

    delivery_tag: int
    multiple: bool = False
    nack: bool = False


def coalesce(
    settled: list[int], opposite: list[int], lowest_unconfirmed: int | None, *, nack: bool
) -> list[Confirm]:
    """Return the confirms for tags of one kind (rabbit_channel:coalesce_and_send).

    All tags below the lowest one that is unconfirmed, or settled the opposite way, become one
    confirm with `multiple` at the highest of them; the others are confirmed singly. A single ack is
    never `multiple`. A single nack may be: rabbit_channel:send_confirms has this special case,
    send_nacks does not.
    """
    if len(settled) == 1 and not nack:
        return [Confirm(settled[0])]
    tags = sorted(settled)
    limits = opposite if lowest_unconfirmed is None else [lowest_unconfirmed, *opposite]
    cutoff = min(limits, default=tags[-1] + 1)
    below = [tag for tag in tags if tag < cutoff]
    covered = [Confirm(below[-1], multiple=True, nack=nack)] if below else []
    return covered + [Confirm(tag, nack=nack) for tag in tags[len(below) :]]


class ConfirmLedger:
    """The delivery tags of one channel in confirm mode."""

    def __init__(self) -> None:
        self.last_tag: int = 0
        self._unconfirmed: dict[int, None] = {}  # ascending: tags are opened in order
        self._acked: list[int] = []
        self._nacked: list[int] = []
        self._shuffled: list[Confirm] = []
        self._extra: list[Confirm] = []

    def open_tag(self) -> int:
        """Return the next delivery tag, from 1."""
        self.last_tag += 1
        self._unconfirmed[self.last_tag] = None
        return self.last_tag

    def settle(self, tag: int, *, nack: bool) -> None:
        """Settle a tag; the next `poll` returns its confirm."""
        del self._unconfirmed[tag]
        (self._nacked if nack else self._acked).append(tag)

    def settle_shuffled(self, tag: int, *, nack: bool) -> None:
        """Settle a tag; `poll` shuffles such tags, and confirms each singly."""
        del self._unconfirmed[tag]
        self._shuffled.append(Confirm(tag, nack=nack))

    def add_extra(self, confirm: Confirm) -> None:
        """Add a confirm that RabbitMQ would not send; `poll` returns it last."""
        self._extra.append(confirm)

    def poll(self, random: Random) -> list[Confirm]:
        """Return the confirms to send, acks first (rabbit_channel:send_confirms_and_nacks)."""
        acked, nacked, extra, shuffled = self._acked, self._nacked, self._extra, self._shuffled
        self._acked, self._nacked, self._extra, self._shuffled = [], [], [], []
        # Shuffled confirms follow the multiple acks, which must therefore not cover their tags.
        waiting = [confirm.delivery_tag for confirm in shuffled]
        waiting += [next(iter(self._unconfirmed))] if self._unconfirmed else []
        lowest = min(waiting, default=None)
        confirms = []
        if acked:
            confirms += coalesce(acked, nacked, lowest, nack=False)
        if nacked:
            confirms += coalesce(nacked, acked, lowest, nack=True)
        random.shuffle(shuffled)
        return confirms + shuffled + extra
