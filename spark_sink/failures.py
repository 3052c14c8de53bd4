"""What can go wrong with a write, in words a person can act on.

Knows: rows by their number, and outcomes. Must never know: what is in a row.

Spark shows the text of an error in the driver's log, in its pages and in the event log, and carries
it between processes; so all of them can be pickled, and none holds a body or a credential.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

from reliablepub import ConfigurationError, ReliablePubError

_IN_A_WORKER: Final = "SPARK_AUTH_SOCKET_TIMEOUT"
"""A variable that Spark sets for the Pythons it starts."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """Have Spark show an error of ours without the traceback that it puts first.

    It asks this variable when the process ends because of the error, which is the end of both.
    """
    try:
        yield
    except ReliablePubError:
        if _IN_A_WORKER in os.environ:
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


class SchemaError(ConfigurationError):
    """The DataFrame's columns cannot be published as they are; nothing was sent."""


class RowsNotConfirmed(ReliablePubError):
    """Rows of a partition were not confirmed; Spark tries the task again, or fails the write.

    Attributes:
        partition: number of the partition.
        row: number of the first such row within this attempt of the task, from 0.
        key: what to look it up by: the columns of ``idColumns``, or its ``message_id``; may be
            empty.
        message_id: its message's id; empty where it is no AMQP message at all.
        outcome: ``unroutable``, ``nacked``, ``refused`` or ``invalid``.
        reply_code: the broker's, or 0.
        reply_text: the broker's words, or ours where the broker said nothing.
        others: further rows of the task that were known to have failed at that moment.
    """

    remedy: ClassVar = {
        "unroutable": "bind a queue or correct the routing key, or set unroutable=collect",
        "nacked": "look at the queue's limits and the broker's log, or set refused=collect",
        "refused": "correct what the broker names, or set refused=collect",
        "invalid": "correct the row, or set invalid=collect",
    }

    def __init__(
        self,
        *,
        partition: int,
        row: int,
        message_id: str,
        outcome: str,
        reply_code: int,
        reply_text: str,
        key: str = "",
        kept: str = "",
        others: int = 0,
    ) -> None:
        names = [name for name in (key, message_id and f"message {message_id}") if name]
        name = f" ({', '.join(names)})" if names else ""
        more = f" {others} more rows of this task are known to have failed." if others else ""
        where = f" The row is in {kept}{', and so are they' if others else ''}." if kept else ""
        super().__init__(
            f"row {row} of partition {partition}{name} was not confirmed but {outcome}: "
            f"{reply_text}; {self.remedy[outcome]}.{more}{where} Other rows may have been sent: "
            "replayed, they come with the same ids"
        )
        self.partition = partition
        self.row = row
        self.key = key
        self.message_id = message_id
        self.outcome = outcome
        self.reply_code = reply_code
        self.reply_text = reply_text
        self.others = others


class PartitionStalled(ReliablePubError):
    """No row was settled for too long: the broker is away, or does not confirm.

    Attributes:
        partition: number of the partition.
        confirmed: rows of it that were confirmed.
        open: rows of it that were handed over, and whose outcome is not known.
    """

    retryable = True

    def __init__(
        self, *, partition: int, confirmed: int, open_: int, timeout_s: float, reason: str
    ) -> None:
        super().__init__(
            f"partition {partition}: no row was settled for {timeout_s:g} s ({reason}); "
            f"{confirmed} rows were confirmed, {open_} more may have been sent. Look at the "
            "broker, or raise deliveryTimeout"
        )
        self.partition = partition
        self.confirmed = confirmed
        self.open = open_


class BrokerRefused(ReliablePubError):
    """The broker, or TLS, lets nobody in: credentials, vhost or certificate are wrong.

    Attributes:
        reason: the words of the broker or of TLS.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"no connection to the broker: {reason}. Correct the credentials, the vhost or the "
            "certificates of this write; trying again would not help"
        )
        self.reason = reason


class TasksNotHeard(ReliablePubError):
    """A commit without the word of every task: nobody knows whether their rows were sent.

    Attributes:
        missing: tasks that said nothing.
        tasks: all of them.
    """

    def __init__(self, *, missing: int, tasks: int, batch: int | None) -> None:
        of = "this write" if batch is None else f"epoch {batch}"
        super().__init__(
            f"{missing} of {tasks} tasks of {of} never told that they have written their rows, so "
            "it is not committed. A continuous trigger never calls a sink in Python: use "
            "trigger(processingTime=...) or trigger(availableNow=True)"
        )
        self.missing = missing
        self.tasks = tasks
