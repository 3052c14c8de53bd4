"""Counts of rows by outcome: made in each task, summed by the commit.

Knows: numbers and names. Must never know: rows, brokers, files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from pyspark.sql.datasource import WriterCommitMessage


@dataclass
class Counts:
    """Rows of a partition, or of a whole write, by outcome.

    Attributes:
        rows: all rows: confirmed, unroutable, nacked, refused and invalid ones.
        confirmed: the broker has taken responsibility.
        unroutable: collected: no queue is bound.
        nacked: collected: a queue refused the message.
        refused: collected: the broker closed the channel because of the message.
        invalid: collected: the row cannot be an AMQP message.
        bytes: sum of the sizes of the published bodies.
        duplicates_risked: rows that may have been sent more than once, under one id: rows whose
            confirm was lost, and all rows of a retried task attempt. A replay after a restart does
            not know what was sent before it, and counts none.
        waited_s: seconds in which tasks waited for confirms, summed.
    """

    rows: int = 0
    confirmed: int = 0
    unroutable: int = 0
    nacked: int = 0
    refused: int = 0
    invalid: int = 0
    bytes: int = 0
    duplicates_risked: int = 0
    waited_s: float = 0.0

    @property
    def failed(self) -> int:
        """Rows that were collected."""
        return self.unroutable + self.nacked + self.refused + self.invalid

    def count(self, outcome: str, more: float = 1) -> None:
        """Add to a field of this class, such as rows of one outcome."""
        setattr(self, outcome, getattr(self, outcome) + more)

    @classmethod
    def total(cls, parts: Iterable[Self]) -> Self:
        """The sum of counts."""
        total = cls()
        for part in parts:
            for field in fields(cls):
                total.count(field.name, getattr(part, field.name))
        return total

    def as_dict(self) -> dict[str, Any]:
        """The counts as the report writes them; ``waited_s`` rounded to milliseconds."""
        return asdict(self) | {"waited_s": round(self.waited_s, 3)}


@dataclass
class Written(WriterCommitMessage):
    """The commit message of a task.

    Attributes:
        write: identity of the write; for a stream, made of the query's and the batch's ids.
        partition: number of the partition.
        attempt: number of the attempt, from 0.
        counts: of the attempt.
        failed_file: path of the file with its collected rows, which the commit renames; or None.
        seconds: how long the attempt took.
    """

    write: str
    partition: int
    attempt: int
    counts: Counts
    failed_file: str | None
    seconds: float
