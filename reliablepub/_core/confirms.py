"""The delivery tags of one channel epoch: which are outstanding, and what each confirm settles.

Knows: tags, keys, and the table below. Must never know: time, windows, other channels.

A delivery tag is the number of a publish on its channel since ``confirm.select``. Client and broker
count independently. So a tag is registered before its publish is written, a tag whose publish was
not written is taken back before the next is registered, and each new channel has a new ledger.

The broker confirms in any order: single tags, ``multiple`` (all outstanding tags up to this one),
and both mixed, as in 37, 39, then 36 with ``multiple`` (RabbitMQ
rabbit_channel:coalesce_and_send). A ``basic.return`` precedes the confirm of its message and
carries no tag; the transport finds the tag in the attempt header.

The states of one publish:

    =========  ========  =========  ==============  ===========  ============
    state      sent      return     ack             nack         channel gone
    =========  ========  =========  ==============  ===========  ============
    in flight  bug       returned   **confirmed**   **nacked**   **uncertain**
    returned   bug       violation  **returned**    **returned** **returned**
    settled    bug       violation  violation       violation    no change
    =========  ========  =========  ==============  ===========  ============

A *bug* is an error of this client: it raises and changes nothing. A *violation* is an error of the
broker: it is counted and changes nothing (`Status.violations`). Four of them also raise
`EpochUntrusted`, and the session ends the epoch, because any other reaction would be a guess:

- a tag beyond the last one sent: the two counts differ;
- tag 0, "all outstanding": it is unknown which publishes the broker had received by then;
- a return that matches no publish: the next ack would confirm an unroutable message;
- a return of more bytes than the publish had: it is of another message (`Lane.note_return`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from reliablepub.outcome import Outcome, OutcomeKind

K = TypeVar("K")


class Violation(StrEnum):
    """What a correct broker never sends."""

    TAG_BEYOND_LAST = "confirm for a tag that was never sent"
    TAG_ZERO = "confirm that names no tag"
    TAG_NOT_OUTSTANDING = "confirm for a tag that is not outstanding"
    RETURN_NOT_OUTSTANDING = "return for a tag that is not outstanding"
    RETURN_UNKNOWN = "return of a message that was never sent on this channel"
    RETURN_REPEATED = "second return for one tag"
    RETURN_TOO_LARGE = "return of more than was sent"


class EpochUntrusted(Exception):
    """What the broker sent does not match what was published: the epoch must end."""


class ConfirmLedger(Generic[K]):
    """The outstanding tags of one channel epoch."""

    __slots__ = ("_lowest", "_outstanding", "_returned", "epoch", "last_tag", "violations")

    def __init__(self, epoch: int, violations: Counter[Violation] | None = None) -> None:
        self.epoch: int = epoch
        self.violations: Counter[Violation] = Counter() if violations is None else violations
        self._outstanding: dict[int, K] = {}
        self._returned: dict[int, Outcome] = {}
        self.last_tag: int = 0  # the highest registered
        self._lowest = 1  # every lower tag is settled, so `multiple` starts here

    @property
    def outstanding(self) -> int:
        """Number of tags that are not settled."""
        return len(self._outstanding)

    @property
    def unreturned(self) -> list[K]:
        """Keys of the outstanding publishes that were not returned."""
        return [key for tag, key in self._outstanding.items() if tag not in self._returned]

    @property
    def lowest_tag(self) -> int:
        """The lowest tag that is not settled; `last_tag` + 1 if all are settled."""
        lowest, last, outstanding = self._lowest, self.last_tag, self._outstanding
        while lowest <= last and lowest not in outstanding:
            lowest += 1
        self._lowest = lowest
        return lowest

    def key_of(self, tag: int) -> K | None:
        """The key of an outstanding tag; None if the tag is not outstanding."""
        return self._outstanding.get(tag)

    def register(self, keys: Collection[K]) -> int:
        """Assign the next tags to publishes that are about to be written; return the last tag."""
        self._outstanding.update(enumerate(keys, self.last_tag + 1))
        self.last_tag += len(keys)
        return self.last_tag

    def take_back(self, tag: int) -> K:
        """Remove the newest tag, whose publish was not written; return its key."""
        if tag != self.last_tag or tag not in self._outstanding or tag in self._returned:
            msg = f"tag {tag} cannot be taken back: the newest is {self.last_tag}"
            raise ValueError(msg)
        self.last_tag -= 1  # the broker has not counted it
        return self._outstanding.pop(tag)

    def handle_return(self, tag: int, reply_code: int, reply_text: str) -> None:
        """Note that a message was returned; its confirm will settle it as returned."""
        if not 0 < tag <= self.last_tag:
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
        self, tag: int, outcome: Outcome, *, multiple: bool
    ) -> list[tuple[int, K, Outcome]]:
        """Settle the publishes that an ack or nack covers; return them in the order of tags.

        If this raises, nothing was settled.
        """
        if tag == 0:
            self.violations[Violation.TAG_ZERO] += 1
            msg = "the broker confirmed without naming a tag"
            raise EpochUntrusted(msg)
        if tag > self.last_tag:
            self.violations[Violation.TAG_BEYOND_LAST] += 1
            msg = f"the broker confirmed tag {tag}, the last one sent is {self.last_tag}"
            raise EpochUntrusted(msg)
        tags = self._covered(tag) if multiple else [tag]
        outstanding, returned = self._outstanding, self._returned
        settled = [
            (t, outstanding.pop(t), returned.pop(t, outcome) if returned else outcome)
            for t in tags
            if t in outstanding
        ]
        if not settled:
            self.violations[Violation.TAG_NOT_OUTSTANDING] += 1
        return settled

    def handle_acks(self, tags: Sequence[int]) -> list[K] | None:
        """Settle single tags as confirmed, all at once: the fast path for most confirms.

        None if it is a case for `handle_confirm`; then nothing was settled.
        """
        distinct = set(tags)
        is_plain = len(distinct) == len(tags) and not self._returned
        if not is_plain or not self._outstanding.keys() >= distinct:
            return None
        return list(map(self._outstanding.pop, tags))

    def handle_acks_up_to(self, tag: int) -> tuple[list[int], list[K]] | None:
        """Settle all outstanding tags up to this one as confirmed (``multiple``): a fast path.

        None if it is a case for `handle_confirm`; then nothing was settled.
        """
        if self._returned or not 0 < tag <= self.last_tag:
            return None
        tags = self._covered(tag)
        return (tags, list(map(self._outstanding.pop, tags))) if tags else None

    def _covered(self, tag: int) -> list[int]:
        """The outstanding tags up to this one. The caller must settle them."""
        tags = [t for t in range(self._lowest, tag + 1) if t in self._outstanding]
        self._lowest = max(self._lowest, tag + 1)
        return tags

    def close(self, outcome: Outcome) -> list[tuple[int, K, Outcome]]:
        """Settle all outstanding publishes; what was not returned has this outcome."""
        settled = [
            (tag, key, self._returned.get(tag, outcome)) for tag, key in self._outstanding.items()
        ]
        self._outstanding.clear()
        self._returned.clear()
        return settled
