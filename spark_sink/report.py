"""The report of a write: a folder with its counts, and the rows that were not confirmed.

Knows: files, on whatever the hosts share. Must never know: brokers.

::

    <report>/writes/<write>.json                      one line: the counts
    <report>/failed/part-<write>-<partition>.parquet  rows, with what the broker said

A task writes under a name that Spark's readers skip (it begins with ``_``); the commit gives the
files of the attempts that count their names. Committing twice, as a restarted stream does, ends in
the same files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from spark_sink.counts import Counts, Written

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
"""What is added to the columns of a failed row."""


class FailedRows:
    """The failed rows of one attempt of a task; no file before the first of them.

    Args:
        report: the folder.
        name: of the attempt, different from all others.
    """

    def __init__(self, report: str, name: str) -> None:
        self._files, root = _open(report)
        self._folder = f"{root}/failed"
        self.path = f"{self._folder}/_{name}.parquet"
        self._writer: pq.ParquetWriter | None = None

    def add(self, row: pa.RecordBatch, outcome: dict[str, Any]) -> None:
        """Keep one row.

        Args:
            row: a batch of one.
            outcome: a value for each column of `OUTCOME`.
        """
        added = [pa.array([outcome[field.name]], field.type) for field in OUTCOME]
        table = pa.Table.from_arrays(
            [*row.columns, *added], schema=pa.schema([*row.schema, *OUTCOME])
        )
        if self._writer is None:
            self._files.create_dir(self._folder, recursive=True)
            self._writer = pq.ParquetWriter(self.path, table.schema, filesystem=self._files)
        self._writer.write_table(table)

    def close(self) -> str | None:
        """Finish the file, and name it if there is one."""
        if self._writer is None:
            return None
        self._writer.close()
        return self.path

    def discard(self) -> None:
        """The attempt has failed: its file is of no use."""
        if self._writer is not None:
            self._writer.close()
            self._files.delete_file(self.path)


def commit(report: str, messages: Sequence[Written]) -> None:
    """Write the counts of a write, and give its failed rows their names."""
    files, root = _open(report)
    for message in messages:
        if message.failed_file is not None:
            name = f"part-{message.write}-{message.partition}.parquet"
            _rename(files, message.failed_file, f"{root}/failed/{name}")
    write = messages[0].write
    line = {
        "write": write,
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "partitions": len(messages),
        **Counts.total(message.counts for message in messages).as_dict(),
    }
    files.create_dir(f"{root}/writes", recursive=True)
    path = f"{root}/writes/_{write}.json"
    with files.open_output_stream(path) as stream:
        stream.write(json.dumps(line).encode() + b"\n")
    files.move(path, f"{root}/writes/{write}.json")


def abort(report: str, messages: Sequence[Written]) -> None:
    """Remove what finished tasks had kept."""
    files, _ = _open(report)
    for message in messages:
        if message.failed_file is not None and _exists(files, message.failed_file):
            files.delete_file(message.failed_file)


def _rename(files: fs.FileSystem, old: str, new: str) -> None:
    """Rename; a commit that was interrupted has done so before."""
    if _exists(files, old):
        files.move(old, new)


def _exists(files: fs.FileSystem, path: str) -> bool:
    return bool(files.get_file_info(path).type == fs.FileType.File)


def _open(report: str) -> tuple[fs.FileSystem, str]:
    files, root = fs.FileSystem.from_uri(report)
    return files, root.rstrip("/")
