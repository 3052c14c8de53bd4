"""Receipts for tasks: `await` one to learn the outcome.

Knows: outcomes, and a bell that rings on the loop. Must never know: threads, how outcomes come
about.

A task that is cancelled while it waits is only no longer told. The message goes on being published,
and the receipt can be awaited again, by anybody in the same loop.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from reliablepub.front.bridge import Bell, Bridge
from reliablepub.front.receipt import (
    Counts,
    SettledMany,
    SettledOne,
    SingleOutcome,
    ended_first,
    still_open,
)
from reliablepub.outcome import Confirmed


class AsyncReceipt(SingleOutcome):
    """The promise of one message: it is stored, and its outcome will be known.

    Attributes:
        message_id: the AMQP ``message_id`` under which consumers see it, on every attempt.
        is_settled: whether the outcome is known.
    """

    __slots__ = ("_bell", "_bridge")
    _shown_as = "AsyncReceipt"

    def __init__(self, message_id: str, bridge: Bridge) -> None:
        super().__init__(message_id)
        self._bridge = bridge
        self._bell = Bell(bridge)

    def __await__(self) -> Generator[Any, None, Confirmed]:
        """``await receipt`` is ``await receipt.result()``."""
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> Confirmed:  # noqa: ASYNC109 - as `Receipt`
        """Wait for the outcome.

        Args:
            timeout: seconds, or None to wait as long as it takes.

        Returns:
            that it is confirmed.

        Raises:
            Unroutable: the broker returned it; no queue is bound.
            Nacked: the broker refused it, as often as the policy allows.
            Refused: the broker closed a channel because of it.
            Expired: its own deadline passed first.
            Damaged: its row in the outbox is not what was stored; it is parked.
            StillOpen: the wait ended first; it goes on being published.
            PublisherClosed: the publisher ended first; it is in the outbox, if there is one.
            WrongEventLoop: the publisher was opened in another event loop.
        """
        if not await self._bell.until(lambda: self.is_settled, timeout):
            what = f"message {self.message_id}"
            if self._bridge.is_ended:
                raise ended_first(what, self._bridge.failure)
            raise still_open(what, timeout, self._bridge.status())
        return self._known()

    def _tell(self) -> None:
        self._bell.ring()


class Issued(SettledOne, AsyncReceipt):
    """A receipt as a publisher makes it, and hands it to the relay."""

    __slots__ = ()


class AsyncBatchReceipt(Counts):
    """The promise of many messages, in constant memory.

    Attributes:
        stored: messages accepted so far.
        confirmed: of those, confirmed.
        failed: of those, given up.
        open: of those, without an outcome yet.
        is_settled: whether none is open.
        failures: the errors of the first 1 000 that were given up.
    """

    _shown_as = "AsyncBatchReceipt"

    def __init__(self, bridge: Bridge) -> None:
        super().__init__()
        self._bridge = bridge
        self._bell = Bell(bridge)

    def __await__(self) -> Generator[Any, None, AsyncBatchReceipt]:
        """``await receipt`` is ``await receipt.wait()``."""
        return self.wait().__await__()

    async def wait(self, timeout: float | None = None) -> AsyncBatchReceipt:  # noqa: ASYNC109
        """Wait until every message has its outcome; look at ``failures`` afterwards.

        Args:
            timeout: seconds, or None to wait as long as it takes.

        Raises:
            StillOpen: the wait ended first; they go on being published.
            PublisherClosed: the publisher ended first.
            WrongEventLoop: the publisher was opened in another event loop.
        """
        if not await self._bell.until(lambda: self.is_settled, timeout):
            what = "a batch"
            if self._bridge.is_ended:
                raise ended_first(what, self._bridge.failure)
            raise still_open(what, timeout, self._bridge.status())
        return self

    def _tell(self) -> None:
        self._bell.ring()


class IssuedBatch(SettledMany, AsyncBatchReceipt):
    """A receipt as a publisher makes it, and hands it to the relay."""
