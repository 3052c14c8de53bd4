"""Publisher confirms of one channel: which delivery tags are open, and how verdicts are written.

PURE: this module knows rabbit_channel's coalescing and the order of what leaves. A tag stays
*unconfirmed* until its verdict is ready; `poll` turns the verdicts that came together into as few
confirms as RabbitMQ would. It must never know messages, queues, frames or faults.
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
    verdicts: list[int], opposite: list[int], lowest_unconfirmed: int | None, *, nack: bool
) -> list[Confirm]:
    """The confirms for tags with one verdict (rabbit_channel:coalesce_and_send).

    Everything below the lowest tag that is still unconfirmed or has the opposite verdict is one
    confirm with `multiple`, at the highest such tag; the rest go singly. A lone ack is never
    `multiple`; a lone nack may be (rabbit_channel:send_confirms has the special case, send_nacks
    has not).
    """
    if len(verdicts) == 1 and not nack:
        return [Confirm(verdicts[0])]
    tags = sorted(verdicts)
    limits = opposite if lowest_unconfirmed is None else [lowest_unconfirmed, *opposite]
    cutoff = min(limits, default=tags[-1] + 1)
    below = [tag for tag in tags if tag < cutoff]
    covered = [Confirm(below[-1], multiple=True, nack=nack)] if below else []
    return covered + [Confirm(tag, nack=nack) for tag in tags[len(below) :]]


class ConfirmLedger:
    """The delivery tags of one channel in confirm mode."""

    def __init__(self) -> None:
        self.last_tag = 0
        self._unconfirmed: dict[int, None] = {}  # ascending: tags are opened in order
        self._acked: list[int] = []
        self._nacked: list[int] = []
        self._shuffled: list[Confirm] = []
        self._extra: list[Confirm] = []

    def open_tag(self) -> int:
        """The next delivery tag, from 1."""
        self.last_tag += 1
        self._unconfirmed[self.last_tag] = None
        return self.last_tag

    def settle(self, tag: int, *, nack: bool) -> None:
        """The verdict on a tag; it is written with the next `poll`."""
        del self._unconfirmed[tag]
        (self._nacked if nack else self._acked).append(tag)

    def settle_shuffled(self, tag: int, *, nack: bool) -> None:
        """As `settle`, but written singly and in random order among its like."""
        del self._unconfirmed[tag]
        self._shuffled.append(Confirm(tag, nack=nack))

    def add_extra(self, confirm: Confirm) -> None:
        """A confirm that RabbitMQ would not send, written after the honest ones."""
        self._extra.append(confirm)

    def poll(self, random: Random) -> list[Confirm]:
        """The confirms due now: acks, then nacks, as rabbit_channel:send_confirms_and_nacks."""
        acked, nacked, extra, shuffled = self._acked, self._nacked, self._extra, self._shuffled
        self._acked, self._nacked, self._extra, self._shuffled = [], [], [], []
        # A shuffled tag is not written yet when the multiple acks are: it holds them back too.
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
