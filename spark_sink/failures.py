"""What can go wrong with a write, in words a person can act on.

Knows: rows by their number, and outcomes. Must never know: what is in a row.

Spark shows the text of an error in the driver's log, in its pages and in the event log, and carries
it between processes; so all of them can be pickled, and none holds a body or a credential.
"""

from __future__ import annotations

from typing import ClassVar

from reliablepub import ConfigurationError, ReliablePubError


class SchemaError(ConfigurationError):
    """The DataFrame's columns cannot be published as they are; nothing was sent."""


class RowsNotConfirmed(ReliablePubError):
    """Rows of a partition were not confirmed; Spark tries the task again, or fails the write.

    Attributes:
        partition: number of the partition.
        row: number of the first such row within this attempt of the task, from 0.
        message_id: its message's id; empty where it is no AMQP message at all.
        outcome: ``unroutable``, ``nacked``, ``refused`` or ``invalid``.
        reply_text: the broker's words, or ours where the broker said nothing.
    """

    remedy: ClassVar = {
        "unroutable": "bind a queue or correct the routing key, or set unroutable=collect",
        "nacked": "look at the queue's limits and the broker's log, or set refused=collect",
        "refused": "correct what the broker names, or set refused=collect",
        "invalid": "correct the row, or set invalid=collect",
    }

    def __init__(
        self, *, partition: int, row: int, message_id: str, outcome: str, reply_text: str
    ) -> None:
        name = f" (message {message_id})" if message_id else ""
        super().__init__(
            f"row {row} of partition {partition}{name} was not confirmed but {outcome}: "
            f"{reply_text}; {self.remedy[outcome]}. Other rows may have been sent: replayed, they "
            "come with the same ids"
        )
        self.partition = partition
        self.row = row
        self.message_id = message_id
        self.outcome = outcome
        self.reply_text = reply_text


class PartitionStalled(ReliablePubError):
    """No row was settled for too long: the broker is away, or does not confirm.

    Attributes:
        partition: number of the partition.
        confirmed: rows of it that were confirmed.
    """

    retryable = True

    def __init__(self, *, partition: int, confirmed: int, timeout_s: float, reason: str) -> None:
        super().__init__(
            f"partition {partition}: no row was settled for {timeout_s:g} s ({reason}); "
            f"{confirmed} rows were confirmed, others may have been sent. Look at the broker, or "
            "raise deliveryTimeout"
        )
        self.partition = partition
        self.confirmed = confirmed
