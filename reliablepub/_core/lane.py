"""A lane: one channel at a time, the buffer of messages for it, and since when confirms are owed.

Knows: the ledger of the current epoch, sizes, and times it is given. Must never know: why a channel
is opened or closed (the session knows), or what a key means.

**Late.** A queue may confirm nothing for days, while others confirm at once. Its messages would
fill the window, time out, be sent again first, and fill the window again, so that no message to
another queue is ever sent. So a message whose confirm was overdue while newer ones were confirmed,
or for the second time, is *late*: late messages have a buffer of their own, and at first a quarter
of the window (`LATE_SHARE`). Each answer to a late message makes room for two more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum, auto
from itertools import accumulate, islice
from math import inf
from operator import attrgetter
from typing import Final, Generic, TypeVar

from reliablepub._core.confirms import ConfirmLedger, EpochUntrusted, Violation
from reliablepub._core.events import Batch, ConfirmedEach, Ended, Settlement
from reliablepub._core.window import Progress
from reliablepub.outcome import CONFIRMED, Outcome, OutcomeKind

K = TypeVar("K")

_first_tag: Final = attrgetter("first_tag")
LATE_SHARE: Final = 4
"""Late messages may at first take one `LATE_SHARE`-th of the window: a quarter."""

_OF_THE_CHANNEL: Final = (
    *("ledger", "state", "in_flight", "in_flight_bytes", "_opening_since", "_batches", "_leaving"),
    *("_lowest", "_lowest_since", "_late_tags", "_late_room"),
)


class ChannelState(Enum):
    """State of a lane's channel."""

    CLOSED = auto()
    OPENING = auto()
    OPEN = auto()


class Lane(Generic[K]):
    """A buffer of messages and the channel on which they are sent, one epoch after another."""

    __slots__ = ("_size_of", "_violations", "buffer", "late", *_OF_THE_CHANNEL)

    ledger: ConfirmLedger[K] | None  # of the current epoch; None if there is no channel
    in_flight: int  # messages that are written and not settled
    in_flight_bytes: int
    _opening_since: float | None
    _batches: deque[Batch[K]]  # from that of the lowest unsettled tag on
    _leaving: deque[tuple[int, float]]  # (first tag not gone, time of report)
    _lowest: int  # every lower tag is settled, as of the last call of `heard`
    _lowest_since: float
    _late_tags: list[int]  # of late messages in flight, and of some settled ones
    _late_room: int

    def __init__(self, violations: Counter[Violation], size_of: Callable[[K], int]) -> None:
        self._violations = violations  # of other lanes too
        self._size_of = size_of
        self.buffer: deque[K] = deque()  # not written yet, in order
        self.late: deque[K] = deque()  # not written again yet
        self.forget_channel()

    @property
    def epoch(self) -> int:
        """Number of the current epoch. There must be one."""
        assert self.ledger is not None
        return self.ledger.epoch

    @property
    def progress(self) -> Progress:
        """Progress of the current epoch, for the window."""
        ledger = self.ledger or ConfirmLedger(0)
        return Progress(ledger.epoch, ledger.last_tag, ledger.last_tag - self.in_flight)

    @property
    def suspects(self) -> list[K]:
        """Keys of the messages in flight that were not returned: one may close the channel."""
        return self.ledger.unreturned if self.ledger is not None else []

    @property
    def owed_since(self) -> float | None:
        """Since when the broker owes an answer to the channel's opening or to the oldest publish.

        For a publish, that is the latest of three times: when it was written, when it had left this
        host, and when it became the oldest. So neither a slow link nor a broker that confirms
        messages one after another causes a message to be sent twice.
        """
        if self.ledger is None or self.state is ChannelState.OPENING:
            return self._opening_since
        if not self._batches:
            return None
        since = max(self._batches[0].taken_at, self._lowest_since)
        leaving = self._leaving
        # Keep the latest report by which the oldest publish had not left.
        while len(leaving) > 1 and leaving[1][0] <= self._lowest:
            leaving.popleft()
        return max(since, leaving[0][1]) if leaving and leaving[0][0] <= self._lowest else since

    @property
    def leaving_until(self) -> float:
        """The last time at which bytes were known to be leaving this host; ``-inf`` if never."""
        return self._leaving[-1][1] if self._leaving else -inf

    def opening(self, epoch: int, now: float) -> None:
        """Begin an epoch: a channel was requested."""
        self.ledger = ConfirmLedger(epoch, self._violations)
        self.state = ChannelState.OPENING
        self._opening_since = now
        self._lowest, self._lowest_since = 1, now

    def opened(self) -> None:
        """Note that the channel is open."""
        self.state = ChannelState.OPEN

    def take_over(self, other: Lane[K]) -> None:
        """Take the channel of another lane, with what is in flight on it; the epoch continues."""
        for name in _OF_THE_CHANNEL:
            setattr(self, name, getattr(other, name))
        other.forget_channel()

    def still_leaving(self, tag: int, now: float) -> None:
        """Note that bytes are leaving this host, but not yet all of this publish or later ones."""
        if self.state is ChannelState.OPENING:
            self._opening_since = now
            return
        if self._leaving and self._leaving[-1][0] == tag:
            self._leaving.pop()
        self._leaving.append((tag, now))

    def heard(self, now: float) -> None:
        """Note that the broker has confirmed something."""
        assert self.ledger is not None
        lowest, batches = self.ledger.lowest_tag, self._batches
        if lowest != self._lowest:
            self._lowest, self._lowest_since = lowest, now
            while batches and batches[0].first_tag + len(batches[0].keys) <= lowest:
                batches.popleft()

    @property
    def has_settled_newer(self) -> bool:
        """Whether the broker has answered a publish that is newer than the oldest in flight."""
        assert self.ledger is not None
        return self.in_flight <= self.ledger.last_tag - self.ledger.lowest_tag

    @property
    def late_in_flight(self) -> int:
        """Number of late messages that are written and not settled, as of `transmit_late`."""
        return len(self._late_tags)

    def late_keys(self, before: float) -> set[K]:
        """Keys of the messages in flight that are late, or were written by this time."""
        if self.ledger is None:
            return set()
        tags = list(self._late_tags)
        for batch in self._batches:
            if batch.taken_at <= before:
                tags += range(batch.first_tag, batch.first_tag + len(batch.keys))
        return {key for key in map(self.ledger.key_of, tags) if key is not None}

    def newest_at(self) -> float:
        """When the newest message in flight that is not late was written; ``-inf`` for none."""
        assert self.ledger is not None
        for batch in reversed(self._batches):
            for tag in range(batch.first_tag + len(batch.keys) - 1, batch.first_tag - 1, -1):
                if self.ledger.key_of(tag) is not None and tag not in self._late_tags:
                    return batch.taken_at
        return -inf

    def transmit_late(
        self, *, window: int, room: int, room_bytes: int, is_alone: bool, now: float
    ) -> list[Batch[K]]:
        """Register the next late messages, as many as fit; return one batch, or none."""
        assert self.ledger is not None
        waiting = [tag for tag in self._late_tags if self.ledger.key_of(tag) is not None]
        self._late_room += 2 * (len(self._late_tags) - len(waiting))
        self._late_tags = waiting
        room = min(room, max(1, window // LATE_SHARE) + self._late_room - len(waiting))
        batches = self._transmit(self.late, room, room_bytes, now, is_alone=is_alone)
        for batch in batches:
            self._late_tags += range(batch.first_tag, batch.first_tag + len(batch.keys))
        if not self.late:
            self._late_room = 0
        return batches

    def transmit(self, *, room: int, room_bytes: int, is_alone: bool, now: float) -> list[Batch[K]]:
        """Register the next messages of the buffer, as many as fit; return one batch, or none."""
        return self._transmit(self.buffer, room, room_bytes, now, is_alone=is_alone)

    def _transmit(
        self, source: deque[K], room: int, room_bytes: int, now: float, *, is_alone: bool
    ) -> list[Batch[K]]:
        assert self.ledger is not None
        sizes = list(map(self._size_of, islice(source, max(0, room))))
        count, total = len(sizes), sum(sizes)
        if total > room_bytes:
            until = bisect_right(list(accumulate(sizes)), room_bytes)
            # With nothing in flight on any lane, the first message may be larger than the room.
            count = max(until, 1 if is_alone else 0)
            total = sum(sizes[:count])
        if not count:
            return []
        keys = [source.popleft() for _ in range(count)]
        first_tag = self.ledger.last_tag + 1
        self.ledger.register(keys)
        self.in_flight += count
        self.in_flight_bytes += total
        batch = Batch(self.ledger.epoch, first_tag, keys, count, now)
        self._batches.append(batch)
        return [batch]

    def confirm(self, tag: int, outcome: Outcome, *, multiple: bool) -> list[Ended[K]]:
        """Settle the publishes that an ack or nack covers; if this raises, nothing was settled."""
        assert self.ledger is not None
        if multiple and outcome is CONFIRMED:
            run = self.ledger.handle_acks_up_to(tag)
            if run is not None:
                return [self._confirmed(*run)]
        settled = self.ledger.handle_confirm(tag, outcome, multiple=multiple)
        self._landed([key for _, key, _ in settled])
        epoch = self.ledger.epoch
        return [
            ConfirmedEach(epoch, [at], [key], [(self._batch_of(at), 1)])
            if end is CONFIRMED
            else Settlement(key, epoch, at, end, self._batch_of(at))
            for at, key, end in settled
        ]

    def confirm_each(self, tags: Sequence[int]) -> ConfirmedEach[K] | None:
        """Settle a run of single acks.

        None if it needs `confirm` for each tag; then nothing was settled.
        """
        assert self.ledger is not None
        keys = self.ledger.handle_acks(tags)
        return None if keys is None else self._confirmed(list(tags), keys)

    def _confirmed(self, tags: list[int], keys: list[K]) -> ConfirmedEach[K]:
        assert self.ledger is not None
        self._landed(keys)
        return ConfirmedEach(self.ledger.epoch, tags, keys, self._batches_of(tags))

    def _landed(self, keys: Collection[K]) -> None:
        """Count messages that are no longer in flight."""
        self.in_flight -= len(keys)
        self.in_flight_bytes -= sum(map(self._size_of, keys))

    def _batch_of(self, tag: int) -> Batch[K]:
        """The batch of a tag that was not settled at the last call of `heard`."""
        return self._batches[bisect_right(self._batches, tag, key=_first_tag) - 1]

    def _batches_of(self, tags: Sequence[int]) -> list[tuple[Batch[K], int]]:
        """The batches of tags, each with the number of consecutive tags that belong to it."""
        if len(self._batches) == 1:
            return [(self._batches[0], len(tags))]
        found: list[tuple[Batch[K], int]] = []
        batch, inside, count = self._batches[0], range(0), 0
        for tag in tags:
            if tag not in inside:
                if count:
                    found.append((batch, count))
                batch, count = self._batch_of(tag), 0
                inside = range(batch.first_tag, batch.first_tag + len(batch.keys))
            count += 1
        return [*found, (batch, count)]

    def note_return(self, tag: int, reply_code: int, reply_text: str, body_bytes: int) -> None:
        """Note that a message was returned; its confirm will settle it as returned."""
        assert self.ledger is not None
        key = self.ledger.key_of(tag)
        if key is not None and body_bytes > self._size_of(key):
            self.ledger.violations[Violation.RETURN_TOO_LARGE] += 1
            msg = f"the broker returned {body_bytes} bytes of a message that has fewer"
            raise EpochUntrusted(msg)
        self.ledger.handle_return(tag, reply_code, reply_text)

    def buffered_keys(self) -> Iterator[K]:
        """Keys of the messages that are not in flight."""
        yield from self.buffer
        yield from self.late

    def withdraw(self, keys: Collection[K]) -> list[K]:
        """Remove the buffered messages of these keys; return those that were buffered."""
        withdrawn = [key for key in (*self.buffer, *self.late) if key in keys]
        self.buffer, self.late = without(keys, self.buffer), without(keys, self.late)
        return withdrawn

    def take_back(self, first_tag: int, count: int) -> None:
        """Undo the newest `transmit`."""
        assert self.ledger is not None
        tags = range(first_tag + count - 1, first_tag - 1, -1)
        keys = [self.ledger.take_back(tag) for tag in tags]
        (self.late if first_tag in self._late_tags else self.buffer).extendleft(keys)
        self._late_tags = [tag for tag in self._late_tags if tag < first_tag]
        self._landed(keys)
        self._batches.pop()

    def close(self, outcome: Outcome) -> tuple[list[Settlement[K]], list[K]]:
        """End the epoch; return what ended, and the keys of what is uncertain, in order."""
        settled = self.ledger.close(outcome) if self.ledger is not None else []
        settlements = [
            Settlement(key, self.epoch, tag, end, self._batch_of(tag)) for tag, key, end in settled
        ]
        uncertain = [key for _, key, end in settled if end.kind is OutcomeKind.UNCERTAIN]
        self.forget_channel()
        return settlements, uncertain

    def forget_channel(self) -> None:
        """Have no channel, and nothing in flight."""
        self.ledger, self.state = None, ChannelState.CLOSED
        self.in_flight = self.in_flight_bytes = 0
        self._opening_since = None
        self._batches, self._leaving = deque(), deque()
        self._lowest, self._lowest_since = 1, -inf
        self._late_tags, self._late_room = [], 0


def without(gone: Collection[K], keys: deque[K]) -> deque[K]:
    """The keys that are not among those gone, in order."""
    return deque(key for key in keys if key not in gone)
