"""Counts the outcomes of a run's messages, in memory that does not grow with their number.

Knows: receipts. Must never know: how messages are settled, or how the counts are shown.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from reliablepub.errors import Expired, Nacked, PublishError, Refused, Unroutable
from reliablepub.front.receipt import BatchReceipt
from reliablepub.outcome import OutcomeKind

FAILURES_SHOWN: Final = 10
_KINDS: Final[dict[type[PublishError], OutcomeKind]] = {
    Unroutable: OutcomeKind.RETURNED,
    Nacked: OutcomeKind.NACKED,
    Refused: OutcomeKind.REFUSED,
    Expired: OutcomeKind.EXPIRED,
}


@dataclass(slots=True)
class Tally:
    """Counts over all receipts of a run.

    Attributes:
        stored: number of messages stored (accepted, without an outbox).
        confirmed: number of those that are confirmed.
        given_up: number of those that were given up, by outcome.
        failures: the first ten that were given up.
    """

    stored: int = 0
    confirmed: int = 0
    given_up: Counter[OutcomeKind] = field(default_factory=Counter)
    failures: list[tuple[OutcomeKind, PublishError]] = field(default_factory=list)
    _open: list[tuple[BatchReceipt, int]] = field(default_factory=list)
    _confirmed_before: int = 0

    @property
    def parked(self) -> int:
        """Number of messages given up, for any reason."""
        return self.given_up.total()

    @property
    def open(self) -> int:
        """Number of messages without a final outcome."""
        return self.stored - self.confirmed - self.parked

    def add(self, receipt: BatchReceipt) -> None:
        """Add the messages of a receipt."""
        self.stored += receipt.stored
        self._open.append((receipt, 0))

    def gather(self) -> None:
        """Count the messages settled since the last call, and drop receipts that are complete.

        Counted failures are removed from their receipt, so a million failures need no memory.
        """
        still_open: list[tuple[BatchReceipt, int]] = []
        confirmed = 0
        for receipt, taken in self._open:
            seen = taken
            while receipt.failures:
                self._count(receipt.failures.pop(0))
                seen += 1
            # `confirmed` is read once: the relay's thread goes on counting.
            receipt_confirmed = receipt.confirmed
            if receipt_confirmed + seen == receipt.stored:
                self._confirmed_before += receipt_confirmed
            else:
                confirmed += receipt_confirmed
                still_open.append((receipt, seen))
        self._open = still_open
        self.confirmed = self._confirmed_before + confirmed

    def _count(self, failure: PublishError) -> None:
        kind = _KINDS[type(failure)]
        self.given_up[kind] += 1
        if len(self.failures) < FAILURES_SHOWN:
            self.failures.append((kind, failure))
