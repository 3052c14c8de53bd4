"""The delivery tags of one channel epoch: what is outstanding, and what each confirm settles.

Knows: tags, keys, and the table below. Must never know: time, windows, other channels.

A delivery tag is nothing but a count of publishes on one channel since ``confirm.select``; both
sides count on their own. So a tag is registered before its publish is written, one that was not
written is taken back before the next is registered, and a new channel gets a new ledger.

The broker confirms in any order and shape: one by one, ``multiple`` for all outstanding tags up to
one, and both mixed: 37, 39, then 36 with multiple (RabbitMQ rabbit_channel:coalesce_and_send). A
``basic.return`` precedes the confirm of its message and carries no tag; whoever calls
`handle_return` found it by our header.

What happens to one publish:

    =========  ========  =========  ==============  ===========  ============
    state      sent      return     ack             nack         channel gone
    =========  ========  =========  ==============  ===========  ============
    in flight  bug       returned   **confirmed**   **nacked**   **uncertain**
    returned   bug       violation  **returned**    **returned** **returned**
    settled    bug       violation  violation       violation    no change
    =========  ========  =========  ==============  ===========  ============

A *bug* is ours: it raises and changes nothing. A *violation* is the broker's: it is counted and
changes nothing. Three of them also raise `EpochUntrusted`, for the session to end the epoch, since
going on would mean to guess: a tag beyond the last one sent (the two counts differ); tag 0, "all
outstanding" (which of ours had the broker seen when it said so?); and a return that cannot be
recognized (the next ack would confirm an unroutable message).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from reliablepub.outcome import Outcome, OutcomeKind

K = TypeVar("K")


class Violation(StrEnum):
    """What a broker should never say."""

    TAG_BEYOND_LAST = "confirm for a tag that was never sent"
    TAG_ZERO = "confirm that names no tag"
    TAG_NOT_OUTSTANDING = "confirm for a tag that is not outstanding"
    RETURN_NOT_OUTSTANDING = "return for a tag that is not outstanding"
    RETURN_UNKNOWN = "return of a message that was never sent on this channel"
    RETURN_REPEATED = "second return for one tag"
    RETURN_TOO_LARGE = "return of more than was sent"


class EpochUntrusted(Exception):
    """What the broker says cannot be matched with what was sent: the epoch must end."""


class ConfirmLedger(Generic[K]):
    """The outstanding tags of one channel epoch.

    Attributes:
        epoch: the number of the epoch.
        violations: what the broker said out of turn, counted.
    """

    __slots__ = ("_last", "_lowest", "_outstanding", "_returned", "epoch", "violations")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.violations: Counter[Violation] = Counter()
        self._outstanding: dict[int, K] = {}
        self._returned: dict[int, Outcome] = {}
        self._last = 0
        self._lowest = 1  # every tag below is settled: `multiple` counts up from here

    @property
    def outstanding(self) -> int:
        """How many tags are not settled."""
        return len(self._outstanding)

    @property
    def returned(self) -> int:
        """How many of them have been returned, and wait for their confirm."""
        return len(self._returned)

    @property
    def last_tag(self) -> int:
        """The highest tag registered, 0 before the first."""
        return self._last

    @property
    def lowest_tag(self) -> int:
        """The lowest tag that is not settled, or one beyond the last."""
        lowest, last, outstanding = self._lowest, self._last, self._outstanding
        while lowest <= last and lowest not in outstanding:
            lowest += 1
        self._lowest = lowest
        return lowest

    def key_of(self, tag: int) -> K | None:
        """Whose tag it is, while it is not settled."""
        return self._outstanding.get(tag)

    def register(self, *keys: K) -> int:
        """Give the next tags to publishes that are about to be written; the last one of them."""
        self._outstanding.update(enumerate(keys, self._last + 1))
        self._last += len(keys)
        return self._last

    def take_back(self, tag: int) -> K:
        """Forget the newest tag: its publish was not written, so the broker has not counted it.

        Raises:
            ValueError: the tag is not the newest one, or is settled: a bug of ours.
        """
        if tag != self._last or tag not in self._outstanding or tag in self._returned:
            msg = f"tag {tag} cannot be taken back: the newest is {self._last}"
            raise ValueError(msg)
        self._last -= 1
        return self._outstanding.pop(tag)

    def handle_return(self, tag: int, reply_code: int, reply_text: str) -> None:
        """Note that a message was unroutable; its confirm will settle it as returned.

        Raises:
            EpochUntrusted: some message in flight was returned, and which one cannot be known.
        """
        if not 0 < tag <= self._last:
            self.violations[Violation.RETURN_UNKNOWN] += 1
            msg = f"the broker returned an unknown message ({reply_code} {reply_text})"
            raise EpochUntrusted(msg)
        if tag not in self._outstanding:
            self.violations[Violation.RETURN_NOT_OUTSTANDING] += 1
        elif tag in self._returned:
            self.violations[Violation.RETURN_REPEATED] += 1
        else:
            self._returned[tag] = Outcome(OutcomeKind.RETURNED, reply_code, reply_text)

    def handle_confirm(
        self, tag: int, verdict: Outcome, *, multiple: bool
    ) -> list[tuple[int, K, Outcome]]:
        """Settle what ``basic.ack`` or ``basic.nack`` covers.

        Args:
            tag: as the broker sent it.
            verdict: `CONFIRMED` or `NACKED`, for those that were not returned.
            multiple: as the broker sent it: all outstanding tags up to this one.

        Returns:
            tag, key and outcome of each publish settled by it, in the order of their tags.

        Raises:
            EpochUntrusted: nothing was settled.
        """
        if tag == 0:
            self.violations[Violation.TAG_ZERO] += 1
            msg = "the broker confirmed without naming a tag"
            raise EpochUntrusted(msg)
        if tag > self._last:
            self.violations[Violation.TAG_BEYOND_LAST] += 1
            msg = f"the broker confirmed tag {tag}, the last one sent is {self._last}"
            raise EpochUntrusted(msg)
        tags = self._covered(tag) if multiple else [tag]
        outstanding, returned = self._outstanding, self._returned
        settled = [
            (t, outstanding.pop(t), returned.pop(t, verdict) if returned else verdict)
            for t in tags
            if t in outstanding
        ]
        if not settled:
            self.violations[Violation.TAG_NOT_OUTSTANDING] += 1
        return settled

    def handle_acks(self, tags: Sequence[int]) -> list[K] | None:
        """Settle single tags as confirmed, all at once: most confirms are like that.

        Returns:
            their keys; or None, and nothing was settled, where one of them needs a closer look: it
            is not outstanding, or one of those outstanding was returned.
        """
        distinct = set(tags)
        is_plain = len(distinct) == len(tags) and not self._returned
        if not is_plain or not self._outstanding.keys() >= distinct:
            return None
        return list(map(self._outstanding.pop, tags))

    def handle_acks_up_to(self, tag: int) -> tuple[list[int], list[K]] | None:
        """Settle all outstanding tags up to this one as confirmed (``multiple``).

        Returns:
            they and their keys; or None, and nothing was settled, where that needs a closer look.
        """
        if self._returned or not 0 < tag <= self._last:
            return None
        tags = self._covered(tag)
        return (tags, list(map(self._outstanding.pop, tags))) if tags else None

    def _covered(self, tag: int) -> list[int]:
        """The outstanding tags up to this one, which are about to be settled."""
        tags = [t for t in range(self._lowest, tag + 1) if t in self._outstanding]
        self._lowest = max(self._lowest, tag + 1)
        return tags

    def close(self, outcome: Outcome) -> list[tuple[int, K, Outcome]]:
        """Settle all that is outstanding, the channel being gone: returned, else as given."""
        settled = [
            (tag, key, self._returned.get(tag, outcome)) for tag, key in self._outstanding.items()
        ]
        self._outstanding.clear()
        self._returned.clear()
        return settled
