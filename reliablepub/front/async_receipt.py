"""Receipts for asyncio tasks: `await` one to learn the outcome.

Knows: outcomes, and a `Bell` that wakes tasks of the loop. Must never know: threads, how outcomes
come about.

Cancelling a task that awaits a receipt only ends its wait. The message is still published, and
any task of the same loop can await the receipt again.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from reliablepub.errors import PublisherClosed, StillOpen
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


class _Waiting(Bell):
    """Tasks that wait on a receipt."""

    __slots__ = ()

    def in_vain(self, what: str, timeout_s: float | None) -> StillOpen | PublisherClosed:
        """The error for a wait that ended before the receipt for ``what`` was settled."""
        if self._bridge.is_ended:
            return ended_first(what, self._bridge.failure)
        return still_open(what, timeout_s, self._bridge.status())


class AsyncReceipt(SingleOutcome):
    """The receipt of one stored message; ``await`` it for the outcome.

    Attributes:
        message_id: the AMQP ``message_id`` that consumers see on every attempt.
        is_settled: whether the outcome is known.
    """

    __slots__ = ()
    _shown_as = "AsyncReceipt"
    _waiting: _Waiting

    def __init__(self, message_id: str, bridge: Bridge) -> None:
        super().__init__(message_id, _Waiting(bridge))

    def __await__(self) -> Generator[Any, None, Confirmed]:
        """``await receipt`` is ``await receipt.result()``."""
        return self.result().__await__()

    async def result(self, timeout_s: float | None = None) -> Confirmed:
        """Wait for the outcome.

        Args:
            timeout_s: seconds, or None to wait without limit; a negative value counts as 0.

        Returns:
            the confirm.

        Raises:
            Unroutable: the broker returned the message; no queue is bound for it.
            Nacked: the broker nacked the message as often as the policy allows.
            Refused: the message made the broker close a channel or the connection, or cannot be
                encoded.
            Expired: the message's own deadline passed.
            Withdrawn: an operator parked or discarded the message.
            Damaged: the message's row in the outbox is damaged; it was parked.
            ConfigurationError: ``timeout_s`` is not a number.
            StillOpen: the wait timed out. The publisher keeps trying to publish the message.
            PublisherClosed: the publisher ended first. The message is in the outbox, if there is
                one.
            RelayHeldUp: an application callback is blocking the relay.
            WrongEventLoop: another event loop opened the publisher.
        """
        if not await self._waiting.until(lambda: self._result is not None, timeout_s):
            raise self._waiting.in_vain(f"message {self.message_id}", timeout_s)
        return self._known()


class Issued(SettledOne, AsyncReceipt):
    """An `AsyncReceipt` that the relay can settle."""

    __slots__ = ()


class AsyncBatchReceipt(Counts):
    """The receipt of many stored messages, in constant memory.

    Attributes:
        stored: number of messages stored so far.
        confirmed: number of stored messages that are confirmed.
        failed: number of stored messages that were given up.
        open: number of stored messages whose outcome is not known yet.
        is_settled: whether the outcomes of all stored messages are known.
        failures: the errors of the first 1 000 messages that were given up.
    """

    _shown_as = "AsyncBatchReceipt"
    _waiting: _Waiting

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(_Waiting(bridge))

    def __await__(self) -> Generator[Any, None, AsyncBatchReceipt]:
        """``await receipt`` is ``await receipt.wait()``."""
        return self.wait().__await__()

    async def wait(self, timeout_s: float | None = None) -> AsyncBatchReceipt:
        """Wait until every message has its outcome.

        Afterwards, ``failures`` holds the errors of the first 1 000 messages that were given up.

        Args:
            timeout_s: seconds, or None to wait without limit; a negative value counts as 0.

        Returns:
            this receipt.

        Raises:
            ConfigurationError: ``timeout_s`` is not a number.
            StillOpen: the wait timed out. The publisher keeps trying to publish the messages.
            PublisherClosed: the publisher ended first. Open messages are in the outbox, if there is
                one.
            RelayHeldUp: an application callback is blocking the relay.
            WrongEventLoop: another event loop opened the publisher.
        """
        if not await self._waiting.until(lambda: self.is_settled, timeout_s):
            raise self._waiting.in_vain("a batch", timeout_s)
        return self


class IssuedBatch(SettledMany, AsyncBatchReceipt):
    """An `AsyncBatchReceipt` that the relay can settle."""
