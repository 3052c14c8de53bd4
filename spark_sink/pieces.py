"""The rows of a task attempt that are not settled yet, kept for errors and for the report.

Knows: pieces of batches, failures, the report. Must never know: publishers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import pyarrow as pa

from spark_sink import report
from spark_sink.failures import RowsNotConfirmed
from spark_sink.rows import key_column
from spark_sink.schema import Columns, Key
from spark_sink.task import Failure
from spark_sink.zones import readable

LOGGER: Final = logging.getLogger("reliablepub.spark")
_SHOWN_MAX: Final = 80


class Pieces:
    """Pieces of batches whose rows may still fail.

    Args:
        partition: number of the task's partition.
        kept: file of the collected rows; None if no rows are collected.
    """

    def __init__(self, partition: int, kept: report.FailedRows | None) -> None:
        self._partition = partition
        self._kept = kept
        self._pieces: dict[int, pa.RecordBatch] = {}

    def add(self, first_row: int, piece: pa.RecordBatch) -> None:
        """Remember a piece, by the number of its first row."""
        self._pieces[first_row] = piece

    def forget(self, before: int) -> None:
        """Drop the pieces that end before this row."""
        for first, piece in list(self._pieces.items()):
            if first + piece.num_rows > before:
                return
            del self._pieces[first]

    def keep(self, failure: Failure) -> None:
        """Put a collected row into the report."""
        assert self._kept is not None, "'collect' needs 'report'"
        piece, row = self._find(failure.row)
        self._kept.add(piece, row, self._outcome(failure))

    def named(
        self,
        error: RowsNotConfirmed,
        columns: Columns,
        folder: str | None,
        write: str,
        fatal: Sequence[Failure],
    ) -> RowsNotConfirmed:
        """Return the error with the row's key in the data, and the file that holds the row.

        Args:
            error: the error of a row in these pieces.
            columns: columns of the DataFrame, with those that are the key.
            folder: folder of the report; None without a report.
            write: identity of the write.
            fatal: the failure of this row, and those of all other rows known to have failed.
        """
        piece, row = self._find(error.row)
        keys = [key for key in columns.keys if key.name != "value"]
        if not keys and "message_id" in columns.positions and not error.message_id:
            keys = [Key("message_id", columns.positions["message_id"], "string")]
        shown = ", ".join(f"{key.name}={_shown(key_column(key, piece), row)}" for key in keys)
        kept = ""
        if folder is not None:
            rows = [(*self._find(one.row), self._outcome(one)) for one in fatal]
            try:
                kept = report.keep_fatal(folder, write, self._partition, rows)
            except (OSError, pa.ArrowException):
                LOGGER.exception("the rows that fail the write could not be kept")
        (failure,) = (one for one in fatal if one.row == error.row)
        others = len(fatal) - 1
        return RowsNotConfirmed(
            partition=self._partition, key=shown, kept=kept, others=others, **asdict(failure)
        )

    def _find(self, row: int) -> tuple[pa.RecordBatch, int]:
        """The piece that holds a row, and the row's index in it."""
        for first, piece in self._pieces.items():
            if first <= row < first + piece.num_rows:
                return piece, row - first
        raise AssertionError(f"row {row} is not under way")

    def _outcome(self, failure: Failure) -> dict[str, Any]:
        """The report's columns for a failure."""
        return {
            "_outcome": failure.outcome,
            "_reply_code": failure.reply_code,
            "_reply_text": failure.reply_text,
            "_message_id": failure.message_id or None,
            "_partition": self._partition,
            "_row": failure.row,
        }


def _shown(column: pa.Array, row: int) -> str:
    """A value for an error text, cut at 80 characters; a placeholder if Python cannot hold it."""
    try:
        text = repr(readable(column.slice(row, 1))[0].as_py())
    except (ValueError, OverflowError):
        return "(unreadable)"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
