"""The counts of a write, and its report: a folder with the counts and the failed rows.

Knows: numbers, and files on a file system that the hosts share. Must never know: brokers.

::

    <report>/writes/<write>.json                                      one line: the counts
    <report>/failed/part-<write>-<partition>-<run>-<uuid>.parquet     collected rows, with the reply
    <report>/fatal/part-<write>-<partition>.parquet                   rows that failed a write, too

A task writes under a name that begins with a dot, which the readers of Spark and pyarrow skip. The
commit renames the files of the successful attempts; a task renames its fatal rows itself. A commit
never overwrites collected rows, because two writes may have one ``writeId``. The commit of a
replayed micro-batch deletes the rows that earlier runs of the query have collected for it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self
from uuid import uuid4
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql.datasource import WriterCommitMessage

from reliablepub import ConfigurationError
from spark_sink.failures import ReportNotWritten, RowsNotKept

LOGGER: Final = logging.getLogger("reliablepub.spark")

_GROUP_ROWS: Final = 5_000
_GROUP_BYTES: Final = 16 * 1024 * 1024
"""Size of a Parquet row group in memory, in bytes."""
_PRUNED_PARTS: Final = 10
"""One write in ``keep / 10`` prunes the counts, so that few commits list them."""
_LEFT_OVER: Final = timedelta(days=7)
_NOT_SHARED: Final = (
    "this host does not have the directory that the driver has; all hosts must share it"
)

OUTCOME: Final = pa.schema(
    [
        ("_outcome", pa.string()),
        ("_reply_code", pa.int32()),
        ("_reply_text", pa.string()),
        ("_message_id", pa.string()),
        ("_partition", pa.int32()),
        ("_row", pa.int64()),
    ]
)
"""The columns that are added to a failed row."""


@dataclass
class Counts:
    """Rows of a partition, or of a whole write, by outcome.

    Attributes:
        rows: all rows: confirmed, unroutable, nacked, refused and invalid ones.
        confirmed: rows for which the broker has taken responsibility.
        unroutable: rows for which no queue is bound, collected.
        nacked: rows that a queue refused, collected.
        refused: rows for which the broker closed the channel, collected.
        invalid: rows that cannot be an AMQP message, collected.
        bytes: sum of the sizes of the published bodies.
        duplicates_risked: rows that this write knows it may have sent more than once, under one id:
            rows whose confirm was lost, and all rows of a retried task attempt. A replay after a
            restart does not know what was sent before it, and counts none. The same holds for a
            stage that Spark runs again, whose attempts begin at 0, and for a first attempt that
            wins a race.
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
        """Number of collected rows."""
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
        counts: rows of the attempt by outcome.
        failed_file: path of the file with its collected rows, which the commit renames; or None.
        run: the run of the streaming query, also in `foreachBatch`; None outside of one.
    """

    write: str
    partition: int
    counts: Counts
    failed_file: str | None
    run: str | None = None


class FailedRows:
    """The failed rows of one task attempt; the file is created with the first group of rows.

    Args:
        report: the folder.
        write: identity of the write.
        partition: number of the partition.
        run: the run of the streaming query; None outside of one.

    Raises:
        ConfigurationError: this host does not have the folder that the driver has checked, or
            cannot open it.
    """

    def __init__(self, report: str, write: str, partition: int, run: str | None) -> None:
        self._report, self._partition = report, partition
        try:
            self._files, root = _open(report)
            is_shared = _is_shared(self._files, root)
        except (OSError, pa.ArrowException) as error:  # no row was sent yet
            raise ConfigurationError(
                f"option 'report': this host cannot open it: {_reason(report, error)}"
            ) from None
        if not is_shared:
            raise ConfigurationError(f"option 'report': {_NOT_SHARED}")
        self._folder = f"{root}/failed"
        name = f"part-{write}-{partition}-{_run_name(run)}-{uuid4().hex}.parquet"
        self.path: Final = f"{self._folder}/.{name}"
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[pa.RecordBatch] = []
        self._count = self._bytes = 0
        self._piece: pa.RecordBatch | None = None
        self._indices: list[int] = []
        self._outcomes: list[dict[str, Any]] = []

    def add(self, piece: pa.RecordBatch, row: int, outcome: dict[str, Any]) -> None:
        """Keep one row.

        Args:
            piece: a piece of a batch.
            row: index of the row in the piece.
            outcome: a value for each column of `OUTCOME`.
        """
        if piece is not self._piece:
            self._take()
            self._piece = piece
        self._indices.append(row)
        self._outcomes.append(outcome)
        row_bytes = piece.nbytes // piece.num_rows
        rows = self._count + len(self._indices)
        size = self._bytes + row_bytes * len(self._indices)
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            self._write()

    def close(self) -> str | None:
        """Finish the file; returns its path, or None if there is none."""
        self._take()
        if self._rows:
            self._write()
        if self._writer is None:
            return None
        with self._explained():
            self._writer.close()
            _sync(self._files, self.path)  # here: the host of the driver cannot flush it
        return self.path

    def discard(self) -> None:
        """Delete the file of an attempt that has failed; never raise, which would hide its error.

        A file that cannot be deleted is one that a killed task leaves: `prune` deletes it.
        """
        self._rows = []
        if self._writer is not None:
            with suppress(OSError, pa.ArrowException):
                self._writer.close()
        with suppress(OSError):  # also a file that was made, and could not be written
            self._files.delete_file(self.path)

    def _take(self) -> None:
        """Copy the rows of the last piece, all at once: one by one took 0.2 ms a row."""
        if self._piece is None:
            return
        batch = _with_outcomes(self._piece, self._indices, self._outcomes)
        self._rows.append(batch)
        self._count += batch.num_rows
        self._bytes += batch.nbytes
        self._piece, self._indices, self._outcomes = None, [], []

    def _write(self) -> None:
        """Write one row group; each costs space in the file and time in the reader."""
        self._take()
        table = pa.Table.from_batches(self._rows).combine_chunks()
        self._rows, self._count, self._bytes = [], 0, 0
        with self._explained():
            if self._writer is None:
                self._files.create_dir(self._folder, recursive=True)
                self._writer = pq.ParquetWriter(self.path, table.schema, filesystem=self._files)
            self._writer.write_table(table)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            reason = _reason(self._report, error)
            raise RowsNotKept(partition=self._partition, reason=reason) from None


def keep_fatal(
    report: str,
    write: str,
    partition: int,
    rows: Sequence[tuple[pa.RecordBatch, int, dict[str, Any]]],
) -> str:
    """Keep the rows that fail a write; returns the file's path. The next attempt overwrites it.

    Args:
        report: the folder.
        write: identity of the write.
        partition: number of the partition.
        rows: the piece that holds each row, its index there, and its value for each column of
            `OUTCOME`.

    Raises:
        OSError: the file cannot be written, or this host does not have the folder that the driver
            has checked; an operator would not find the file here.
        pa.ArrowException: the file cannot be written.
    """
    files, root = _open(report)
    if not _is_shared(files, root):
        raise OSError(_NOT_SHARED)
    files.create_dir(f"{root}/fatal", recursive=True)
    name = f"part-{write}-{partition}.parquet"
    hidden, path = f"{root}/fatal/.{uuid4().hex}-{name}", f"{root}/fatal/{name}"
    table = pa.Table.from_batches(
        [_with_outcomes(piece, [row], [outcome]) for piece, row, outcome in rows]
    ).combine_chunks()
    # One truncated file, which a killed task or a power failure leaves, makes the whole folder
    # unreadable.
    pq.write_table(table, hidden, filesystem=files)
    _sync(files, hidden)
    files.move(hidden, path)
    return path


def _with_outcomes(
    piece: pa.RecordBatch, rows: list[int], outcomes: list[dict[str, Any]]
) -> pa.RecordBatch:
    """Rows of a piece with their outcomes, copied, so that they do not hold the piece in memory."""
    added = [pa.array([one[field.name] for one in outcomes], field.type) for field in OUTCOME]
    kept = piece.take(pa.array(rows, pa.int64()))
    return pa.RecordBatch.from_arrays(
        [*kept.columns, *added], schema=pa.schema([*piece.schema, *OUTCOME])
    )


def check(report: str, *, collects: bool) -> None:
    """Create, rename and delete a file in the report, on the driver before the first row.

    Args:
        report: the folder.
        collects: whether rows are collected, so that the commit renames files of tasks, too.

    Raises:
        ConfigurationError: the report cannot be written.
    """
    try:
        files, root = _open(report)
        # A task would create "failed" otherwise, and its user need not be that of the driver.
        for folder in ("writes", "failed") if collects else ("writes",):
            files.create_dir(f"{root}/{folder}", recursive=True)
            probe = f"{root}/{folder}/.probe-{uuid4().hex}"
            with files.open_output_stream(probe) as stream:
                stream.write(b"\n")
            moved = f"{probe}-moved"
            files.move(probe, moved)  # the last steps of a commit, when all rows are settled
            _sync(files, f"{root}/{folder}")
            files.delete_file(moved)
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"option 'report': nothing can be written there: {_reason(report, error)}"
        ) from None


def _is_shared(files: fs.FileSystem, root: str) -> bool:
    """Whether this host has the folder in which `check` has created another."""
    return bool(files.get_file_info(f"{root}/writes").type == fs.FileType.Directory)


def _reason(report: str, error: Exception) -> str:
    """The text of an error, without the URI, which may hold a secret."""
    return str(error).replace(report, "the URI") if "://" in report else str(error)


def commit(
    report: str, messages: Sequence[Written], keep: int, keep_days: int | None = None
) -> None:
    """Write the counts of a write, and rename the files of its failed rows to their final names.

    Args:
        report: the folder.
        messages: commit messages of all tasks.
        keep: number of writes whose counts are kept; older counts are deleted.
        keep_days: for how many days files of rows are kept; None until an operator deletes them.

    Raises:
        ConfigurationError: a task's file of failed rows is not in the folder that this host sees.
        ReportNotWritten: the folder cannot be written.
    """
    total = Counts.total(message.counts for message in messages)
    try:
        files, root = _open(report)
        _commit(files, root, messages, total)
    except (OSError, pa.ArrowException) as error:
        raise ReportNotWritten(
            rows=total.rows, confirmed=total.confirmed, reason=_reason(report, error)
        ) from None
    try:
        _forget_fatal(files, root, messages[0].write)
        if crc32(messages[0].write.encode()) % max(1, keep // _PRUNED_PARTS) == 0:
            prune(report, keep, keep_days)
    except (OSError, pa.ArrowException) as error:
        LOGGER.warning("old files stay in the report: %s", _reason(report, error))


def _commit(files: fs.FileSystem, root: str, messages: Sequence[Written], total: Counts) -> None:
    write, run = messages[0].write, messages[0].run
    for message in messages:
        _check_failed(files, message)
    # Before the first rename: a driver that was replaced may still run and commit the same batch,
    # and two commits that each saw the files of the other would delete both.
    earlier = _earlier_failed(files, root, write, run) if run is not None else []
    line = {
        "write": write,
        "run": run,
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "partitions": len(messages),
        **total.as_dict(),
    }
    files.create_dir(f"{root}/writes", recursive=True)
    failed_files = _failed_files(messages)
    path, final = _unfinished(root, failed_files), f"{root}/writes/{write}.json"
    with files.open_output_stream(path) as stream:
        stream.write(json.dumps(line).encode() + b"\n")
    for kept in failed_files:
        files.move(kept, _final_name(root, kept))
    if failed_files:
        _sync(files, f"{root}/failed")
    files.move(path, final)
    # Last: a failure before leaves the earlier rows; one here leaves both, because `abort` finds
    # the commit complete. Spark then replays the batch, whose commit deletes both.
    for path in earlier:
        _delete(files, path)


def _failed_files(messages: Sequence[Written]) -> list[str]:
    return [message.failed_file for message in messages if message.failed_file is not None]


def _unfinished(root: str, failed_files: Sequence[str]) -> str:
    """Return the name of a write's counts until its commit is complete.

    No other commit has this name, because two writes may have one ``writeId``. `abort` makes it
    again from the first file of failed rows; without one it has nothing to remove.
    """
    name = next(iter(failed_files), uuid4().hex).rpartition("/.")[2]
    return f"{root}/writes/.{name}.json"


def _final_name(root: str, failed_file: str) -> str:
    """Return the name that the commit gives to a task's file of failed rows."""
    return f"{root}/failed/{failed_file.rpartition('/.')[2]}"


def _check_failed(files: fs.FileSystem, message: Written) -> None:
    """Check that this host sees a task's file of failed rows.

    Without it the write must fail: its rows would be neither confirmed nor in the report.
    """
    path = message.failed_file
    if path is not None and not _exists(files, path):
        raise ConfigurationError(
            f"option 'report': partition {message.partition} has {message.counts.failed} rows that "
            f"were not confirmed, and their file {path} is not on the host of the driver: all "
            "hosts must share the directory"
        )


def counts_of(report: str, write: str) -> dict[str, Any] | None:
    """The counts of a write; None if it is not committed, or its counts were deleted."""
    files, root = _open(report)
    path = f"{root}/writes/{write}.json"
    if not _exists(files, path):
        return None
    with files.open_input_stream(path) as stream:
        found: dict[str, Any] = json.loads(stream.read())
    return found


def prune(report: str, keep: int, keep_days: int | None = None) -> None:
    """Delete the counts of all but the newest writes, and files that killed tasks left behind.

    Without `keep_days`, files of rows stay: an operator has to correct these rows.
    """
    files, root = _open(report)
    listed = {name: _listed(files, f"{root}/{name}") for name in ("writes", "failed", "fatal")}
    now = datetime.now(UTC)
    everything = [info for infos in listed.values() for info in infos]
    left = [info for info in everything if _is_hidden(info) and info.mtime < now - _LEFT_OVER]
    counts = [info for info in listed["writes"] if not _is_hidden(info)]
    counts.sort(key=lambda info: info.mtime_ns)
    overdue = []
    if keep_days is not None:
        since = now - timedelta(days=keep_days)
        rows = [info for info in (*listed["failed"], *listed["fatal"]) if not _is_hidden(info)]
        overdue = [info for info in rows if info.mtime < since]
    for info in [*counts[: max(0, len(counts) - keep)], *left, *overdue]:
        _delete(files, info.path)
    if overdue:
        LOGGER.warning(
            "%d files of rows that were not confirmed were older than reportKeepDays=%d and are "
            "deleted from the report",
            len(overdue),
            keep_days,
        )


def _forget_fatal(files: fs.FileSystem, root: str, write: str) -> None:
    """Delete the fatal rows of earlier attempts: they are confirmed now, or in ``failed``.

    Of every partition, because a replay may have fewer.
    """
    part = re.compile(re.escape(f"part-{write}-") + r"\d+\.parquet")
    for info in _listed(files, f"{root}/fatal"):
        if part.fullmatch(info.base_name):
            _delete(files, info.path)


def _earlier_failed(files: fs.FileSystem, root: str, write: str, run: str) -> list[str]:
    """The files of rows that earlier runs of the query collected for this write, which is a replay.

    The replay has confirmed them, or collected them again. Two writes of one name in one run are no
    replay: a function of `foreachBatch` has given both the same ``writeId``. The whole name is
    matched, because the name of one write can be the beginning of another's.
    """
    part = re.compile(re.escape(f"part-{write}-") + r"\d+-([0-9a-f]{8})-[0-9a-f]{32}\.parquet")
    named = [
        (info.path, part.fullmatch(info.base_name)) for info in _listed(files, f"{root}/failed")
    ]
    return [path for path, found in named if found is not None and found[1] != _run_name(run)]


def _run_name(run: str | None) -> str:
    return f"{crc32((run or '').encode()):08x}"


def _listed(files: fs.FileSystem, folder: str) -> list[fs.FileInfo]:
    selector = fs.FileSelector(folder, allow_not_found=True)
    return [info for info in files.get_file_info(selector) if info.type == fs.FileType.File]


def _is_hidden(info: fs.FileInfo) -> bool:
    return bool(info.base_name.startswith("."))


def _delete(files: fs.FileSystem, path: str) -> None:
    """Delete a file, unless another write that shares the folder has deleted it."""
    with suppress(FileNotFoundError):
        files.delete_file(path)


def abort(report: str, messages: Sequence[Written]) -> None:
    """Remove the files of collected rows that finished tasks wrote.

    Also those that a commit has renamed before it failed; if it was complete, they are counted.
    """
    files, root = _open(report)
    paths = _failed_files(messages)
    unfinished = _unfinished(root, paths)
    if _exists(files, unfinished):  # its rename completes a commit
        paths += [*(_final_name(root, path) for path in paths), unfinished]
    reasons = []
    for path in paths:
        try:
            if _exists(files, path):
                files.delete_file(path)
        except (OSError, pa.ArrowException) as error:
            reasons.append(_reason(report, error))
    if reasons:
        LOGGER.error(
            "%d of the files with rows of the failed write cannot be deleted from the report: %s",
            len(reasons),
            reasons[-1],
        )


def _sync(files: fs.FileSystem, path: str) -> None:
    """Flush a file or a folder to the disk, so that a power failure leaves it whole.

    Of a disk that this host has mounted only: an object store has flushed what it has accepted.
    """
    if not isinstance(files, fs.LocalFileSystem):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if sys.platform == "darwin":  # whose fsync leaves the data in the drive's cache
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot flush a folder: what is renamed there may be lost with the power.
        if not (Path(path).is_dir() and error.errno in {errno.EINVAL, errno.ENOTSUP}):
            raise
    finally:
        os.close(descriptor)


def _exists(files: fs.FileSystem, path: str) -> bool:
    return bool(files.get_file_info(path).type == fs.FileType.File)


def _open(report: str) -> tuple[fs.FileSystem, str]:
    files, root = fs.FileSystem.from_uri(report)
    return files, root.rstrip("/")
