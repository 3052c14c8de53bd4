"""What a client sees that reads many frames at once, and what it is told of them.

It knows the events of the core. It must never know who says them.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TypeVar

from reliablepub._core.events import Acked, AckedEach, ConfirmedEach, Ended, Event, Settlement

K = TypeVar("K")


def in_runs(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with acks of single tags that follow each other on one channel as one."""

    def channel_acked_on(event: Event) -> int | None:
        return event.epoch if isinstance(event, Acked) and not event.multiple else None

    for epoch, run in groupby(events, channel_acked_on):
        if epoch is None:
            yield from run
        else:
            yield AckedEach(epoch, [event.tag for event in run if isinstance(event, Acked)])


def singly(ended: Iterable[Ended[K]]) -> Iterator[Settlement[K]]:
    """Attempts that have ended, each by itself."""
    for one in ended:
        if isinstance(one, ConfirmedEach):
            yield from one.each()
        else:
            yield one
