"""One channel at a time, with what waits to be written on it and since when confirms are owed.

Knows: the ledger of the current epoch, sizes, and times it is told. Must never know: why a channel
is opened or closed (the session's), what a key means.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from enum import Enum, auto
from itertools import islice
from math import inf
from typing import Generic, TypeVar

from reliablepub._core.confirms import ConfirmLedger, EpochUntrusted, Violation
from reliablepub._core.events import Batch, ConfirmedEach, Ended, Settlement
from reliablepub._core.window import Progress
from reliablepub.outcome import CONFIRMED, Outcome, OutcomeKind

K = TypeVar("K")


class ChannelState(Enum):
    """Where a lane's channel stands."""

    CLOSED = auto()
    OPENING = auto()
    OPEN = auto()


class Lane(Generic[K]):
    """A buffer of messages and the channel they leave by; the epochs follow each other.

    Attributes:
        buffer: key and size of each message not yet written, in order.
        state: of the channel.
        ledger: of the current epoch, while there is one.
        in_flight_bytes: size of what is written and not settled.
    """

    __slots__ = (
        "_advanced",
        "_leaving",
        "_opening_since",
        "_sent",
        "buffer",
        "in_flight_bytes",
        "ledger",
        "state",
    )

    def __init__(self) -> None:
        self.buffer: deque[tuple[K, int]] = deque()
        self.state = ChannelState.CLOSED
        self.ledger: ConfirmLedger[tuple[K, int]] | None = None
        self.in_flight_bytes = 0
        self._opening_since: float | None = None
        self._sent: deque[tuple[int, float]] = deque()  # last tag of each batch, and when
        self._leaving: deque[tuple[int, float]] = deque()  # first tag not gone, and when last seen
        self._advanced = (1, -inf)  # the lowest tag that is not settled, and since when it is

    @property
    def epoch(self) -> int:
        """The current epoch, where there is one."""
        assert self.ledger is not None
        return self.ledger.epoch

    @property
    def in_flight(self) -> int:
        """Messages written and not settled."""
        return self.ledger.outstanding if self.ledger is not None else 0

    @property
    def progress(self) -> Progress:
        """How far the current epoch is."""
        ledger = self.ledger or ConfirmLedger(0)
        settled = ledger.last_tag - ledger.outstanding
        return Progress(ledger.epoch, ledger.last_tag, ledger.lowest_tag, settled)

    @property
    def suspects(self) -> int:
        """Those of them that the broker may still find fault with: not the returned ones."""
        return self.in_flight - (self.ledger.returned if self.ledger is not None else 0)

    @property
    def violations(self) -> Counter[Violation]:
        """Of the current epoch."""
        return self.ledger.violations if self.ledger is not None else Counter()

    @property
    def waiting_since(self) -> float | None:
        """Since when an answer is owed: to the channel's opening, or to its oldest publish.

        To a publish it is owed from the moment it was written, has left this host and was the
        oldest one, whichever came last: a slow link and a broker that confirms one message after
        the other are no reason to send anything twice.
        """
        if self.ledger is None or self.state is ChannelState.OPENING:
            return self._opening_since
        lowest, sent, leaving = self.ledger.lowest_tag, self._sent, self._leaving
        while sent and sent[0][0] < lowest:
            sent.popleft()
        if not sent:
            return None
        since = max(sent[0][1], self._advanced[1])
        while len(leaving) > 1 and leaving[1][0] <= lowest:
            leaving.popleft()
        return max(since, leaving[0][1]) if leaving and leaving[0][0] <= lowest else since

    def opening(self, epoch: int, now: float) -> None:
        """A channel has been asked for."""
        self.ledger = ConfirmLedger(epoch)
        self.state = ChannelState.OPENING
        self._opening_since = now
        self._advanced = (1, now)

    def opened(self) -> None:
        """The channel is there."""
        self.state = ChannelState.OPEN

    def take_over(self, other: Lane[K]) -> None:
        """The open channel of another lane is this one's from now on; nothing is in flight on it.

        The epoch goes on, and with it the tags.
        """
        self.ledger = other.hand_over()
        self.state = ChannelState.OPEN
        self._advanced = (self.ledger.lowest_tag, -inf)

    def hand_over(self) -> ConfirmLedger[tuple[K, int]]:
        """Give the channel away, with what it has counted."""
        ledger, self.ledger = self.ledger, None
        assert ledger is not None
        assert not ledger.outstanding
        self.state = ChannelState.CLOSED
        self._forget_times()
        return ledger

    def still_leaving(self, tag: int, now: float) -> None:
        """Bytes leave, and this publish and those behind it have not left entirely."""
        if self.state is ChannelState.OPENING:
            self._opening_since = now
            return
        if self._leaving and self._leaving[-1][0] == tag:
            self._leaving.pop()
        self._leaving.append((tag, now))

    def heard(self, now: float) -> None:
        """The broker has confirmed something."""
        assert self.ledger is not None
        lowest = self.ledger.lowest_tag
        if lowest != self._advanced[0]:
            self._advanced = (lowest, now)

    def transmit(self, *, room: int, room_bytes: int, is_alone: bool, now: float) -> list[Batch[K]]:
        """Register the next messages, as many as there is room for: one batch, if there is any.

        Args:
            room: messages.
            room_bytes: bytes.
            is_alone: nothing is in flight anywhere, so the first one may exceed ``room_bytes``.
            now: on the session's active clock.
        """
        assert self.ledger is not None
        count = total = 0
        for _, size in islice(self.buffer, max(0, room)):
            if total + size > room_bytes and not (is_alone and not count):
                break
            total += size
            count += 1
        if not count:
            return []
        items = [self.buffer.popleft() for _ in range(count)]
        first_tag = self.ledger.last_tag + 1
        self._sent.append((self.ledger.register(*items), now))
        self.in_flight_bytes += total
        return [Batch(self.ledger.epoch, first_tag, [key for key, _ in items])]

    def confirm(self, tag: int, verdict: Outcome, *, multiple: bool) -> list[Ended[K]]:
        """Settle what one confirm covers.

        Raises:
            EpochUntrusted: nothing was settled.
        """
        assert self.ledger is not None
        if multiple and verdict is CONFIRMED:
            run = self.ledger.handle_acks_up_to(tag)
            if run is not None:
                return [self._confirmed(*run)]
        settled = self.ledger.handle_confirm(tag, verdict, multiple=multiple)
        self.in_flight_bytes -= sum([size for _, (_, size), _ in settled])
        epoch = self.ledger.epoch
        return [
            ConfirmedEach(epoch, [tag], [key])
            if outcome is CONFIRMED
            else Settlement(key, epoch, tag, outcome)
            for tag, (key, _), outcome in settled
        ]

    def confirm_each(self, tags: Sequence[int]) -> ConfirmedEach[K] | None:
        """Settle what a run of single acks covers; None, and nothing is settled, if one is odd."""
        assert self.ledger is not None
        items = self.ledger.handle_acks(tags)
        return None if items is None else self._confirmed(list(tags), items)

    def _confirmed(self, tags: list[int], items: Sequence[tuple[K, int]]) -> ConfirmedEach[K]:
        self.in_flight_bytes -= sum([size for _, size in items])
        return ConfirmedEach(self.epoch, tags, [key for key, _ in items])

    def note_return(self, tag: int, reply_code: int, reply_text: str, body_bytes: int) -> None:
        """A message was unroutable; its confirm will say so.

        Raises:
            EpochUntrusted: which one it was cannot be known, or it has grown.
        """
        assert self.ledger is not None
        item = self.ledger.key_of(tag)
        if item is not None and body_bytes > item[1]:
            self.ledger.violations[Violation.RETURN_TOO_LARGE] += 1
            msg = f"the broker returned {body_bytes} bytes of a message that has fewer"
            raise EpochUntrusted(msg)
        self.ledger.handle_return(tag, reply_code, reply_text)

    def waiting_keys(self) -> Iterator[K]:
        """What is not in flight."""
        return (key for key, _ in self.buffer)

    def withdraw(self, keys: Collection[K]) -> list[K]:
        """Forget buffered messages, and tell which."""
        withdrawn = [key for key, _ in self.buffer if key in keys]
        self.buffer = without(keys, self.buffer)
        return withdrawn

    def take_back(self, first_tag: int, count: int) -> None:
        """Undo the newest `transmit`."""
        assert self.ledger is not None
        for tag in range(first_tag + count - 1, first_tag - 1, -1):
            item = self.ledger.take_back(tag)
            self.in_flight_bytes -= item[1]
            self.buffer.appendleft(item)
        self._sent.pop()

    def close(self, outcome: Outcome) -> tuple[list[Settlement[K]], list[tuple[K, int]]]:
        """End the epoch; what was outstanding ends as returned, or as given.

        Returns:
            all that has ended by it, and key and size of what is uncertain, in order.
        """
        settled = self.ledger.close(outcome) if self.ledger is not None else []
        settlements = [Settlement(key, self.epoch, tag, end) for tag, (key, _), end in settled]
        uncertain = [item for _, item, end in settled if end.kind is OutcomeKind.UNCERTAIN]
        self.ledger = None
        self.state = ChannelState.CLOSED
        self.in_flight_bytes = 0
        self._forget_times()
        return settlements, uncertain

    def _forget_times(self) -> None:
        self._opening_since = None
        self._sent.clear()
        self._leaving.clear()


def without(keys: Collection[K], items: deque[tuple[K, int]]) -> deque[tuple[K, int]]:
    """The items that are not of these keys, in order."""
    return deque(item for item in items if item[0] not in keys)
