"""The folder of a report, without Spark: row groups, fatal rows, what is forgotten, what stays."""

import errno
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from reliablepub import ConfigurationError
from spark_sink import ReportNotWritten, RowsNotKept
from spark_sink import report as reports
from spark_sink.report import Counts, Written
from tests.between import before

OUTCOME = {
    "_outcome": "unroutable",
    "_reply_code": 312,
    "_reply_text": "NO_ROUTE",
    "_message_id": "x",
    "_partition": 0,
    "_row": 0,
}


def piece(rows: int, size: int = 200) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": [str(n).ljust(size) for n in range(rows)]})


def written(write: str, failed_file: str | None = None, run: str | None = None) -> Written:
    return Written(write, 0, Counts(rows=2, confirmed=2), failed_file, run)


def with_failed_row(folder: str, write: str, run: str | None = None) -> Written:
    """The commit message of a task that has kept a row."""
    kept = reports.FailedRows(folder, write, 0, run)
    kept.add(piece(1), 0, OUTCOME)
    return written(write, kept.close(), run)


def failed(folder: str) -> list[str]:
    """The writes that have kept rows in the report, by the names of their files."""
    names = [path.name for path in (Path(folder) / "failed").iterdir()]
    found = [re.fullmatch(r"part-(.*)-0-[0-9a-f]{8}-[0-9a-f]{32}\.parquet", name) for name in names]
    return sorted(one[1] if one else "?" for one in found)


class Disk:
    """The local disk; something happens before each call of one of its methods."""

    def __init__(self, method: str, before: Callable[[str], None]) -> None:
        self._method, self._before = method, before

    def __getattr__(self, name: str) -> Any:
        call = getattr(fs.LocalFileSystem(), name)
        if name != self._method:
            return call

        def called(path: str, *more: Any) -> Any:
            self._before(path)
            return call(path, *more)

        return called


def refuse_in(place: str) -> Callable[[str], None]:
    """Fail for what is in a folder of the report."""

    def refuse(path: str) -> None:
        if f"/{place}/" in path:
            raise PermissionError("not yours")

    return refuse


@pytest.fixture
def folder(report: Path) -> str:
    reports.check(str(report), collects=True)
    return str(report)


def test_many_failed_rows_are_a_few_row_groups(folder: str) -> None:
    """Each row group has a price: one for each row made a file of 26 MB out of 2."""
    rows = 10_001
    kept = reports.FailedRows(folder, "w", 0, None)
    whole = piece(rows)
    for row in range(rows):
        kept.add(whole, row, OUTCOME | {"_row": row})
    path = kept.close()
    assert path is not None
    file = pq.ParquetFile(path)
    assert file.metadata.num_row_groups == 3
    assert file.metadata.num_rows == rows
    assert file.read().column("_row").to_pylist() == list(range(rows))
    assert Path(path).stat().st_size < rows * 200
    file.close()


def test_large_rows_do_not_gather_in_memory(folder: str) -> None:
    kept = reports.FailedRows(folder, "w", 0, None)
    whole = piece(40, size=1024 * 1024)
    most = 0
    for row in range(40):
        kept.add(whole, row, OUTCOME)
        most = max(most, sum(batch.nbytes for batch in kept._rows))
    assert most < 20 * 1024 * 1024
    path = kept.close()
    with pq.ParquetFile(path) as file:
        assert file.metadata.num_row_groups == 3


def test_a_kept_row_does_not_hold_its_batch() -> None:
    assert reports._with_outcomes(piece(1_000, size=10_000), [5], [OUTCOME]).nbytes < 20_000


def test_an_attempt_that_fails_leaves_nothing(folder: str) -> None:
    kept = reports.FailedRows(folder, "w", 0, None)
    whole = piece(5_001)
    for row in range(5_001):
        kept.add(whole, row, OUTCOME)
    kept.discard()
    assert list((Path(folder) / "failed").iterdir()) == []


def test_an_attempt_that_fails_with_its_folder_keeps_its_own_error(folder: str) -> None:
    kept = reports.FailedRows(folder, "w", 0, None)
    whole = piece(5_001)
    for row in range(5_001):
        kept.add(whole, row, OUTCOME)
    shutil.rmtree(folder)
    kept.discard()


@pytest.mark.parametrize("method", ["write_table", "close"])
def test_rows_that_cannot_be_kept_name_the_folder_and_leave_no_file(
    folder: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    kept = reports.FailedRows(folder, "w", 7, None)
    kept.add(piece(1), 0, OUTCOME)
    with monkeypatch.context() as patch:
        patch.setattr(
            pq.ParquetWriter,
            method,
            Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")),
        )
        with pytest.raises(RowsNotKept, match=r"rows of partition 7 .*No space left.*free space"):
            kept.close()
    kept.discard()
    assert list((Path(folder) / "failed").iterdir()) == []
    error = RowsNotKept(partition=7, reason="no space")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_folder_that_is_not_shared_is_noticed_before_the_first_row(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="all hosts must share it"):
        reports.FailedRows(str(tmp_path / "elsewhere"), "w", 0, None)


@pytest.mark.parametrize("uri", ["no-such-disk://user:canary@host/report", f"/{'x' * 300}"])
def test_a_folder_that_a_host_cannot_open_is_named_before_the_first_row(uri: str) -> None:
    with pytest.raises(ConfigurationError, match="this host cannot open it") as caught:
        reports.FailedRows(uri, "w", 0, None)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("name", ["file/report", "no-such-disk://report"])
def test_a_folder_that_cannot_be_is_named_on_the_driver(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="nothing can be written there"):
        reports.check(name if "://" in name else str(tmp_path / name), collects=False)


@pytest.mark.parametrize("place", ["writes", "failed"])
def test_a_folder_in_which_nothing_can_be_renamed_is_named_on_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """As by the rules of an object store, or because a task of another user has made the folder.

    A commit would fail when all rows are settled.
    """
    disk = Disk("move", refuse_in(place))
    monkeypatch.setattr(reports, "_open", lambda report: (disk, report))
    with pytest.raises(ConfigurationError, match=r"nothing can be written there: not yours"):
        reports.check(str(tmp_path), collects=True)


@pytest.mark.parametrize("uri", ["ftp://user:canary@host/report", "s3://user:canary@b/a b"])
def test_a_uri_that_cannot_be_is_not_shown(uri: str) -> None:
    with pytest.raises(ConfigurationError, match="nothing can be written there") as caught:
        reports.check(uri, collects=False)
    assert "canary" not in str(caught.value)


def test_counts_are_forgotten_and_failed_rows_are_not(folder: str) -> None:
    for n in range(300):
        kept = reports.FailedRows(folder, f"w{n}", 0, None)
        kept.add(piece(1), 0, OUTCOME)
        reports.commit(folder, [written(f"w{n}", kept.close())], keep=20)
        path = Path(folder) / "writes" / f"w{n}.json"
        os.utime(path, (n, n))
    left = sorted(int(path.stem[1:]) for path in (Path(folder) / "writes").iterdir())
    assert 20 <= len(left) <= 40
    assert left == list(range(300 - len(left), 300))
    assert len(list((Path(folder) / "failed").iterdir())) == 300


@pytest.mark.parametrize("place", ["writes", "failed", "fatal"])
def test_what_killed_tasks_have_left_behind_is_deleted_after_a_week(
    folder: str, place: str
) -> None:
    kept = reports.FailedRows(folder, "w", 0, None)
    kept.add(piece(1), 0, OUTCOME)
    young, old = Path(str(kept.close())), Path(folder) / place / ".killed.parquet"
    old.parent.mkdir(exist_ok=True)
    old.write_bytes(b"PAR1")
    week_ago = time.time() - 8 * 86_400
    os.utime(old, (week_ago, week_ago))
    reports.prune(folder, keep=5)
    assert (young.exists(), old.exists()) == (True, False)


def test_rows_are_forgotten_after_the_days_that_an_operator_has_named(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    reports.commit(folder, [with_failed_row(folder, "old")], keep=5)
    reports.keep_fatal(folder, "old", 0, [(piece(1), 0, OUTCOME)])
    reports.commit(folder, [with_failed_row(folder, "young")], keep=5)
    days_ago = time.time() - 31 * 86_400
    for path in Path(folder).rglob("*old*"):
        os.utime(path, (days_ago, days_ago))
    for keep_days in (None, 32):
        reports.prune(folder, 5, keep_days)
        assert failed(folder) == ["old", "young"]
    assert not caplog.records
    reports.commit(folder, [written("next")], 1, keep_days=30)
    assert failed(folder) == ["young"]
    assert list(Path(folder, "fatal").iterdir()) == []
    assert (
        "2 files of rows that were not confirmed were older than reportKeepDays=30" in caplog.text
    )


def test_counts_can_be_asked_for(folder: str) -> None:
    assert reports.counts_of(folder, "w") is None
    reports.commit(folder, [written("w")], keep=5)
    found: dict[str, Any] = reports.counts_of(folder, "w") or {}
    assert (found["rows"], found["confirmed"], found["partitions"]) == (2, 2, 1)
    assert json.loads((Path(folder) / "writes" / "w.json").read_text()) == found


@pytest.mark.parametrize("trouble", ["none", "interrupted", "pruned"])
def test_a_replay_of_a_micro_batch_forgets_its_own_failed_rows_alone(
    folder: str, trouble: str
) -> None:
    for write in ("q-1", "q-1-0", "q-11"):
        reports.commit(folder, [with_failed_row(folder, write, "run")], keep=5)
    counts = Path(folder) / "writes" / "q-1.json"
    if trouble == "interrupted":  # before its last step
        counts.rename(counts.with_name(".interrupted.json"))
    if trouble == "pruned":  # by a write with a small reportKeep
        counts.unlink()
    reports.commit(folder, [written("q-1", run="next")], keep=5)
    assert failed(folder) == ["q-1-0", "q-11"]
    reports.commit(folder, [with_failed_row(folder, "q-11", "next")], keep=5)
    assert failed(folder) == ["q-1-0", "q-11"]


@pytest.mark.parametrize(("method", "left"), [("move", 1), ("delete_file", 2)])
def test_a_replay_that_fails_leaves_the_earlier_failed_rows(
    folder: str, monkeypatch: pytest.MonkeyPatch, method: str, left: int
) -> None:
    """Or the rows of both runs: until its next replay, they must be in a file."""
    reports.commit(folder, [with_failed_row(folder, "q-1", "run")], keep=5)
    [earlier] = Path(folder, "failed").iterdir()
    replayed = with_failed_row(folder, "q-1", "next")
    with monkeypatch.context() as patch:
        disk = Disk(method, refuse_in("failed"))
        patch.setattr(reports, "_open", lambda report: (disk, report))
        with pytest.raises(ReportNotWritten, match="not yours"):
            reports.commit(folder, [replayed], keep=5)
    reports.abort(folder, [replayed])
    assert earlier.exists()
    assert failed(folder) == ["q-1"] * left
    reports.commit(folder, [written("q-1", run="last")], keep=5)
    assert failed(folder) == []


def test_a_batch_with_a_name_that_is_used_again_adds_its_failed_rows(folder: str) -> None:
    """Its rows may be others."""
    for _ in range(2):
        reports.commit(folder, [with_failed_row(folder, "nightly")], keep=5)
    reports.commit(folder, [written("nightly")], keep=5)
    assert failed(folder) == ["nightly"] * 2


def test_two_writes_of_one_name_in_one_batch_add_their_failed_rows(folder: str) -> None:
    write = "q-1-orders"
    for message in (
        with_failed_row(folder, write, "run"),
        with_failed_row(folder, write, "run"),
        written(write, run="run"),
    ):
        reports.commit(folder, [message], keep=5)
    assert failed(folder) == [write] * 2
    for message in (with_failed_row(folder, write, "replay"), written(write, run="replay")):
        reports.commit(folder, [message], keep=5)
    assert failed(folder) == [write]


def test_two_commits_of_one_name_at_once_do_not_disturb_each_other(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of two drivers that write "nightly"."""
    first, *others = [with_failed_row(folder, "nightly") for _ in range(2)]

    def overtake(_: str) -> None:
        if others:
            reports.commit(folder, [others.pop()], keep=5)

    disk = Disk("move", overtake)
    monkeypatch.setattr(reports, "_open", lambda report: (disk, report))
    reports.commit(folder, [first], keep=5)
    assert failed(folder) == ["nightly"] * 2
    assert [path.name for path in Path(folder, "writes").iterdir()] == ["nightly.json"]


@pytest.mark.parametrize("place", ["failed", "writes"])
def test_two_drivers_that_commit_one_micro_batch_at_once_leave_its_failed_rows(
    folder: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A driver that was replaced, and runs on: each takes the files of the other for earlier."""
    replaced = with_failed_row(folder, "q-1", "run")
    replacing = [with_failed_row(folder, "q-1", "next")]

    def overtake(path: str) -> None:
        if replacing and f"/{place}/" in path:
            reports.commit(folder, [replacing.pop()], keep=5)

    disk = Disk("move", overtake)
    monkeypatch.setattr(reports, "_open", lambda report: (disk, report))
    reports.commit(folder, [replaced], keep=5)
    assert set(failed(folder)) == {"q-1"}


def test_failed_rows_that_the_driver_does_not_see_fail_the_write(folder: str) -> None:
    """A task on a host with a folder of its own: its rows would be skipped without a word."""
    seen, unseen = (with_failed_row(folder, "w") for _ in range(2))
    Path(str(unseen.failed_file)).rename(Path(folder) / "elsewhere.parquet")
    with pytest.raises(ConfigurationError, match="all hosts must share the directory"):
        reports.commit(folder, [seen, unseen], keep=5)
    assert reports.counts_of(folder, "w") is None
    assert list((Path(folder) / "writes").iterdir()) == []
    reports.abort(folder, [seen, unseen])
    assert list((Path(folder) / "failed").iterdir()) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_a_commit_that_fails_in_the_middle_leaves_no_failed_row(
    folder: str, *, is_first: bool
) -> None:
    """Its rows come again with the next run, under other names."""
    if not is_first:  # of this writeId
        reports.commit(folder, [written("w")], keep=5)
    first, second = (with_failed_row(folder, "w") for _ in range(2))
    name = str(second.failed_file).rpartition("/.")[2]
    Path(folder, "failed", name).mkdir()  # in the way
    with pytest.raises(ReportNotWritten):
        reports.commit(folder, [first, second], keep=5)
    Path(folder, "failed", name).rmdir()
    reports.abort(folder, [first, second])
    assert list(Path(folder, "failed").iterdir()) == []
    assert [path.name for path in Path(folder, "writes").iterdir() if path.name[0] == "."] == []


def test_collected_rows_are_on_disk_before_their_commit_is_complete(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure would leave an empty file: its rows nowhere, and the folder unreadable."""
    reports.commit(folder, [with_failed_row(folder, "q-1", "run")], keep=5)
    found: list[tuple[int, list[str]]] = []
    before(
        monkeypatch,
        os,
        "fsync",
        lambda descriptor: found.append((os.fstat(descriptor).st_ino, failed(folder))),
    )
    message = with_failed_row(folder, "q-1", "next")
    assert found == [(inode(str(message.failed_file)), ["?", "q-1"])]
    reports.commit(folder, [message], keep=5)
    assert found[1:] == [(inode(f"{folder}/failed"), ["q-1", "q-1"])]  # also the earlier one
    fatal = reports.keep_fatal(folder, "w", 0, [(piece(1), 0, OUTCOME)])
    assert [one for one, _ in found[2:]] == [inode(fatal)]
    reports.commit(folder, [written("clean")], keep=5)
    assert len(found) == 3


def test_a_disk_that_cannot_flush_a_folder_is_used_all_the_same(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux says EINVAL for the folders of some mounted file systems."""
    inodes = {inode(folder), *(inode(f"{folder}/{name}") for name in ("writes", "failed"))}

    def refuse(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino in inodes:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    reports.check(folder, collects=True)
    reports.commit(folder, [with_failed_row(folder, "w")], keep=5)
    assert failed(folder) == ["w"]


def inode(path: str) -> int:
    return Path(path).stat().st_ino


def test_a_file_that_cannot_be_deleted_keeps_no_other_failed_row(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They would stay in the report as rows of a write that has failed."""
    stuck, *others = [with_failed_row(folder, "w") for _ in range(3)]

    def refuse(path: str) -> None:
        if path == stuck.failed_file:
            raise PermissionError("not yours")

    disk = Disk("delete_file", refuse)
    monkeypatch.setattr(reports, "_open", lambda report: (disk, report))
    reports.abort(folder, [stuck, *others])
    assert [str(path) for path in Path(folder, "failed").iterdir()] == [stuck.failed_file]
    assert "1 of the files with rows of the failed write cannot be deleted" in caplog.text


def test_what_a_complete_commit_has_counted_stays(folder: str) -> None:
    """Its process may be killed before Spark hears of it."""
    message = with_failed_row(folder, "w")
    reports.commit(folder, [message], keep=5)
    reports.abort(folder, [message])
    assert failed(folder) == ["w"]


def test_a_report_that_cannot_be_written_leaves_no_doubt_about_the_rows(folder: str) -> None:
    shutil.rmtree(folder)
    Path(folder).touch()
    with pytest.raises(ReportNotWritten, match="all 2 rows are settled, 2 of them") as caught:
        reports.commit(folder, [written("w")], keep=5)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.rows, error.confirmed, str(error)) == (2, 2, str(caught.value))
    assert folder in error.reason


def test_a_report_that_is_complete_is_no_failure(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reports, "_forget_fatal", Mock(side_effect=PermissionError("not yours")))
    reports.commit(folder, [written("w")], keep=5)
    assert reports.counts_of(folder, "w") is not None
    assert "old files stay in the report: not yours" in caplog.text


def test_spark_sees_nothing_of_an_unfinished_file(folder: str) -> None:
    """Spark reads files whose name begins with "_" if it holds a "=", which a ``writeId`` may."""
    message = with_failed_row(folder, "a=b")
    assert Path(str(message.failed_file)).name.startswith(".")
    reports.commit(folder, [message], keep=5)
    assert failed(folder) == ["a=b"]


def test_fatal_rows_are_seen_when_they_are_complete(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is killed in the middle leaves what no reader can read."""

    def be_killed(_: pa.Table, path: str, filesystem: fs.FileSystem) -> None:
        with filesystem.open_output_stream(path) as stream:
            stream.write(b"PAR1")
        raise KeyboardInterrupt

    fatal = [(piece(1), 0, OUTCOME)]
    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", be_killed)
        with pytest.raises(KeyboardInterrupt):
            reports.keep_fatal(folder, "w", 0, fatal)
    assert list(Path(folder, "fatal").iterdir())
    for partition in (1, 1):
        reports.keep_fatal(folder, "w", partition, fatal)
    assert pq.read_table(f"{folder}/fatal").num_rows == 1


def test_a_commit_forgets_the_fatal_rows_of_its_write_alone(folder: str) -> None:
    """Of each partition: after a restart with other parallelism there may be fewer."""
    for write, partition in (("q-1", 0), ("q-1", 7), ("q-1-0", 0), ("q-11", 0)):
        reports.keep_fatal(folder, write, partition, [(piece(1), 0, OUTCOME)])
    reports.commit(folder, [written("q-1")], keep=5)
    left = sorted(path.name for path in Path(folder, "fatal").iterdir())
    assert left == ["part-q-1-0-0.parquet", "part-q-11-0.parquet"]


def test_rows_of_two_pieces_in_turn_keep_their_order(folder: str) -> None:
    kept = reports.FailedRows(folder, "w", 0, None)
    pieces = [piece(3), piece(3)]
    for row in range(3):
        for number, one in enumerate(pieces):
            kept.add(one, row, OUTCOME | {"_row": row, "_partition": number})
    found = pq.read_table(str(kept.close())).to_pylist()
    assert [(one["_row"], one["_partition"]) for one in found] == [
        (row, number) for row in range(3) for number in range(2)
    ]
    assert all(int(one["value"]) == one["_row"] for one in found)
