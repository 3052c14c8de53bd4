"""A caller that publishes numbered messages without end, and records what it is told.

It knows the public interface of the publisher; it must never know brokers or faults.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from tenacity import stop_never, wait_fixed

from reliablepub import (
    BatchReceipt,
    Message,
    OutboxDiskFull,
    OutboxFull,
    Publisher,
    Retries,
    RetryPolicy,
)
from tests.chaos.account import Told
from tests.waiting import until

PIECE: Final = 20
WINDOW_MAX: Final = 500
RATE_PER_S: Final = 600.0
KEYS: Final = ("classic", "quorum")
PATIENT: Final = Retries(stop_never, wait_fixed(0.5))
OPTIONS: Final = {
    "window_max": WINDOW_MAX,
    "confirm_timeout_s": 4.0,
    "heartbeat_s": 2,
    "retry": RetryPolicy(nacked=PATIENT, returned=PATIENT, refused=PATIENT),
}
"""No refusal is final: whatever goes wrong in these scenarios is mended in the end."""


def message(exchange: str, number: int) -> Message:
    """The n-th message, for one queue or the other; some are too large for a queue's index."""
    body = b"%d " % number * (1 + number % 40) * (40 if number % 50 == 0 else 1)
    return Message(body, exchange, KEYS[number % len(KEYS)], message_id=f"n{number}")


class Load:
    """A thread that publishes at a steady rate until it is stopped.

    Args:
        publisher: whose `publish_many` is called.
        message_of: makes the message of a number.
        rate_per_s: messages a second.

    Attributes:
        told: what it was told.
        turned_away: how many messages were not accepted.
    """

    def __init__(
        self,
        publisher: Publisher,
        message_of: Callable[[int], Message],
        rate_per_s: float = RATE_PER_S,
    ) -> None:
        self._publisher = publisher
        self._pause_s = PIECE / rate_per_s
        self._message_of = message_of
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self._receipts: list[tuple[range, BatchReceipt]] = []
        self._next = 1
        self._error: BaseException | None = None
        self.told = Told()
        self.turned_away = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Publish nothing more."""
        self._is_over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def settle(self) -> Told:
        """What was told in the end; every receipt must know its outcome."""
        for numbers, receipt in self._receipts:
            receipt.wait(60)
            failed = {int(error.message_id.removeprefix("n")) for error in receipt.failures}
            self.told.failed |= failed
            self.told.confirmed |= set(numbers) - failed
        return self.told

    def wait_until_it_flows(self, timeout_s: float) -> float:
        """Wait until messages of each key, handed over from now on, are confirmed; the seconds."""
        began, before = time.monotonic(), len(self._receipts)
        until(lambda: len(self._receipts) > before, timeout_s, what="another stored message")
        self._receipts[before][1].wait(began + timeout_s - time.monotonic())
        return time.monotonic() - began

    @property
    def counts(self) -> tuple[int, int]:
        """Messages stored and confirmed so far."""
        counters = self._publisher.status.counters
        return counters.stored, counters.confirmed

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._pause_s):
                self._publish()
        except BaseException as error:  # noqa: BLE001 - the test must learn of it
            self._error = error

    def _publish(self) -> None:
        numbers = range(self._next, self._next + PIECE)
        self._next += PIECE
        try:
            receipt = self._publisher.publish_many(map(self._message_of, numbers))
        except (OutboxDiskFull, OutboxFull):
            self.turned_away += PIECE
            self.told.refused |= set(numbers)  # a piece is one commit
            time.sleep(0.05)
            return
        self.told.stored |= set(numbers)
        self._receipts.append((numbers, receipt))
