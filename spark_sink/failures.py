"""The errors of the sink.

Knows: rows by their number and key, and outcomes. Must never know: the body of a row.

Spark shows the text of an error in the driver's log, in its pages and in the event log, and sends
the error between processes. So every error can be pickled, and none holds a body or a credential.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

from reliablepub import ConfigurationError, ReliablePubError

_IN_A_WORKER: Final = "SPARK_AUTH_SOCKET_TIMEOUT"
"""A variable that Spark sets for the Python processes it starts."""
SAME_IDS: Final = (
    "a replay sends them again: under the same ids if these come from the data (idColumns, or a "
    "column 'message_id'), or if options and partitions stay the same, and for a batch write the "
    "writeId"
)
"""What an operator must know who corrects an option and starts again."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """Have Spark show a `ReliablePubError` without the traceback that it puts first.

    Spark reads SPARK_HIDE_TRACEBACK after the error; the process ends with the error, so the
    variable need not be unset.
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
    """A row of a partition was not confirmed; Spark retries the task, or fails the write.

    Attributes:
        partition: number of the partition.
        row: number of one such row within this attempt of the task, from 0. A report lists all that
            are known, in its directory ``fatal``.
        key: the row's values of ``idColumns``, or of its column ``message_id``; may be empty.
        message_id: id of the row's message; empty if the row cannot be an AMQP message.
        outcome: ``unroutable``, ``nacked``, ``refused`` or ``invalid``.
        reply_code: the broker's reply code, or 0.
        reply_text: the broker's reply text, or the sink's explanation if the broker sent none.
        others: number of further rows of the task known to have failed when this was raised.
    """

    remedy: ClassVar[dict[str, str]] = {
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
        where = f" {'These rows are' if others else 'The row is'} in {kept}." if kept else ""
        super().__init__(
            f"row {row} of partition {partition}{name} was not confirmed but {outcome}: "
            f"{reply_text}; {self.remedy[outcome]}.{more}{where} Other rows may have been sent; "
            f"{SAME_IDS}"
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
    """No row was settled within ``deliveryTimeout``: the broker is unavailable or does not confirm.

    Attributes:
        partition: number of the partition.
        confirmed: number of its rows that were confirmed.
        open: number of its rows that were handed over and have no outcome yet.
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
    """The broker or TLS refuses the connection: wrong credentials, vhost or certificate.

    Attributes:
        reason: error text of the broker or of TLS.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"no connection to the broker: {reason}. Correct the credentials, the vhost or the "
            "certificates of this write; trying again would not help"
        )
        self.reason = reason


class TasksNotHeard(ReliablePubError):
    """A commit lacks the commit message of a task: it is unknown whether its rows were sent.

    Attributes:
        missing: number of tasks without a commit message.
        tasks: number of all tasks.
    """

    def __init__(self, *, missing: int, tasks: int, batch: int | None) -> None:
        of = "this write" if batch is None else f"epoch {batch}"
        super().__init__(
            f"{missing} of {tasks} tasks of {of} did not report that they wrote their rows, so it "
            "is not committed. A continuous trigger never calls a sink in Python: use "
            "trigger(processingTime=...) or trigger(availableNow=True)"
        )
        self.missing = missing
        self.tasks = tasks


class RowsNotKept(ReliablePubError):
    """Rows that were not confirmed could not be kept in the report; Spark retries the task.

    Attributes:
        partition: number of the partition.
        reason: error text of the file system.
    """

    def __init__(self, *, partition: int, reason: str) -> None:
        super().__init__(
            f"rows of partition {partition} were not confirmed, and could not be kept in the "
            f"directory of option 'report': {reason}. Other rows may have been sent: a retry sends "
            "them again under the same ids. Make the directory writable, and free space on its disk"
        )
        self.partition = partition
        self.reason = reason


class ReportNotWritten(ReliablePubError):
    """The rows of a write are settled, but its report cannot be written.

    Attributes:
        rows: number of rows of the write.
        confirmed: number of those that the broker has confirmed.
        reason: error text of the file system.
    """

    def __init__(self, *, rows: int, confirmed: int, reason: str) -> None:
        super().__init__(
            f"all {rows} rows are settled, {confirmed} of them confirmed, but the report could not "
            f"be written: {reason}. The counts, or rows that were not confirmed, may be missing "
            "from it. Make the directory of option 'report' writable first: a rerun, or a "
            "restarted stream, sends every row again"
        )
        self.rows = rows
        self.confirmed = confirmed
        self.reason = reason
