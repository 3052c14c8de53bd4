"""What a client sees that reads many frames at once.

It knows the events of the core. It must never know who says them.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

from reliablepub._core.events import Acked, AckedEach, Event


def in_runs(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with acks of single tags that follow each other on one channel as one."""

    def channel_acked_on(event: Event) -> int | None:
        return event.epoch if isinstance(event, Acked) and not event.multiple else None

    for epoch, run in groupby(events, channel_acked_on):
        if epoch is None:
            yield from run
        else:
            yield AckedEach(epoch, [event.tag for event in run if isinstance(event, Acked)])
