"""tx.select, tx.commit and tx.rollback on one channel.

This module knows what a transaction holds back: publishes that passed their checks, and
acknowledgments. commit-ok waits until the messages are on disk, as a confirm does.
It must never know how a message is routed or a delivery settled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pamqp import commands

from reliablepub.testing.replies import AmqpError

if TYPE_CHECKING:
    from reliablepub.testing.channel_base import ChannelBase
    from reliablepub.testing.consumers import Delivery
    from reliablepub.testing.consuming import Consuming
    from reliablepub.testing.history import Publish
    from reliablepub.testing.publishing import Publishing


class Transaction:
    """The open transaction of a channel; a commit or rollback begins the next one."""

    def __init__(self, channel: ChannelBase, publishing: Publishing, consuming: Consuming) -> None:
        self._channel = channel
        self._publishing = publishing
        self._consuming = consuming
        self._publishes: list[Publish] = []
        self._settlements: list[tuple[dict[int, Delivery], bool | None]] = []
        self._committing: set[Publish] = set()
        self._has_failed = False

    def add_publish(self, publish: Publish) -> None:
        """Hold a publish until the commit."""
        self._publishes.append(publish)

    def add_settlement(self, deliveries: dict[int, Delivery], requeue: bool | None) -> None:  # noqa: FBT001
        """Hold back the settlement of deliveries until the commit.

        Args:
            deliveries: Deliveries by tag.
            requeue: None acks them, True requeues them, False drops them.
        """
        self._settlements.append((deliveries, requeue))

    def commit(self) -> None:
        """tx.commit."""
        publishes, self._publishes = self._publishes, []
        settlements, self._settlements = self._settlements, []
        self._has_failed = False
        self._committing = set(publishes)
        for publish in publishes:
            self._publishing.take(publish)
        for deliveries, requeue in settlements:
            self._consuming.settle(deliveries, requeue)
        if not publishes:
            self._complete()

    def rollback(self) -> None:
        """tx.rollback: drop the publishes; the deliveries are unacknowledged again."""
        for publish in self._publishes:
            publish.mark_lost()
        self._publishes = []
        settlements, self._settlements = self._settlements, []
        for deliveries, _ in settlements:
            self._consuming.reopen(deliveries)
        self._channel.reply(commands.Tx.RollbackOk())

    def release(self) -> None:
        """The channel is gone: roll back."""
        for publish in self._publishes:
            publish.mark_lost()
        for deliveries, _ in self._settlements:
            self._consuming.reopen(deliveries)
        self._publishes, self._settlements = [], []

    def handle_settled(self, publish: Publish) -> None:
        """A publish of the commit is on disk, or a queue has refused it."""
        if publish not in self._committing:
            return
        self._committing.discard(publish)
        self._has_failed = self._has_failed or publish.rejected
        if not self._committing:
            self._complete()

    def _complete(self) -> None:
        if self._has_failed:
            error = AmqpError(406, "partial tx completion")
            self._channel.close(error.code, error.reply_text, (90, 20))
        else:
            self._channel.reply(commands.Tx.CommitOk())
