"""What a report costs the driver at 100 000 tasks and 10 000 micro-batches: time, memory, files.

The figures are in docs/spark.md. Without Spark, which has costs of its own for each task.
"""

import pickle
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pytest

from spark_sink import report as reports
from spark_sink.report import Counts, Written
from tests.spark.test_report import OUTCOME

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1_800)]

TASKS = 100_000
BATCHES = 10_000
QUERY, RUN = str(uuid4()), str(uuid4())


@pytest.fixture
def folder(report: Path) -> str:
    reports.check(str(report), collects=True)
    return str(report)


@pytest.fixture
def a_row(folder: str) -> bytes:
    """A file with one collected row of 100 bytes."""
    kept = reports.FailedRows(folder, "one", 0, RUN)
    kept.add(pa.RecordBatch.from_pydict({"value": ["x" * 100]}), 0, OUTCOME)
    path = Path(str(kept.close()))
    content = path.read_bytes()
    path.unlink()
    return content


def message(folder: str, write: str, task: int, a_row: bytes = b"") -> Written:
    """The commit message of a task, which has kept a row or none."""
    file = None
    if a_row:
        run = reports._run_name(RUN)
        path = Path(folder, "failed", f".part-{write}-{task}-{run}-{uuid4().hex}.parquet")
        path.write_bytes(a_row)
        file = str(path)
    counts = Counts(rows=1_000, confirmed=1_000 - bool(a_row), unroutable=bool(a_row), waited_s=1.5)
    return Written(write, task, counts, file, RUN)


def committed_s(folder: str, messages: Iterable[Written], keep_days: int | None = None) -> float:
    found = list(messages)
    since = time.perf_counter()
    reports.commit(folder, found, 1_000, keep_days)
    return time.perf_counter() - since


def memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def files(folder: str) -> dict[str, int]:
    return {path.name: len([*path.iterdir()]) for path in sorted(Path(folder).iterdir())}


@pytest.mark.parametrize("collects", [False, True])
def test_a_hundred_thousand_tasks(folder: str, a_row: bytes, *, collects: bool) -> None:
    row = a_row if collects else b""
    sent = [pickle.dumps(message(folder, f"{QUERY}-0", n, row)) for n in range(TASKS)]
    before = memory_mb()
    messages = [pickle.loads(one) for one in sent]
    took = committed_s(folder, messages)
    print(
        f"\n{TASKS} tasks, a collected row in each: {collects}; {len(sent[0])} bytes a message, "
        f"{memory_mb() - before:.0f} MB in the process that commits, {took:.1f} s, {files(folder)}"
    )
    assert took < 60
    assert files(folder) == {"failed": TASKS if collects else 0, "writes": 1}


@pytest.mark.parametrize("collects", [False, True])
def test_ten_thousand_micro_batches(folder: str, a_row: bytes, *, collects: bool) -> None:
    row = a_row if collects else b""
    took = [committed_s(folder, [message(folder, f"{QUERY}-{n}", 0, row)]) for n in range(BATCHES)]
    first, last = (statistics.median(part) * 1e3 for part in (took[:100], took[-100:]))
    print(
        f"\n{BATCHES} micro-batches, a collected row in each: {collects}; a commit took "
        f"{first:.1f} ms at first and {last:.1f} ms at last, {files(folder)}"
    )
    assert files(folder)["writes"] < 2_000
    assert files(folder)["failed"] == (BATCHES if collects else 0)
