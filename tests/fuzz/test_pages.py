"""Pages of SQLite files that were bent: `salvage` finds what is intact, and nothing stops it."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reliablepub.errors import OutboxError
from reliablepub.message import Message
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.salvage import Pages, _checksum
from tests.fuzz.bending import bent
from tests.fuzz.bounds import bounded, for_long, short

PAGE = 512


@cache
def samples() -> tuple[tuple[bytes, bytes], ...]:
    """Small databases with long rows, free pages, and a log; the file and the log of each."""
    found = []
    with TemporaryDirectory() as folder:
        for number, wal in enumerate((False, True)):
            path = Path(folder) / f"{number}.db"
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute(f"PRAGMA page_size = {PAGE}")
                connection.execute(f"PRAGMA journal_mode = {'WAL' if wal else 'DELETE'}")
                connection.execute("PRAGMA wal_autocheckpoint = 0")
                connection.execute("CREATE TABLE t (a, b, c)")
                rows = [(n, "x" * (n * 97 % 1_500), bytes(n)) for n in range(30)]
                connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
                connection.execute("DELETE FROM t WHERE a % 3 = 0")
                log = path.with_name(f"{number}.db-wal")
                found.append((path.read_bytes(), log.read_bytes() if wal else b""))
        path = Path(folder) / "outbox.db"
        with Outbox(path) as outbox:
            for n in range(12):
                message = Message(bytes(n * 900), "e", f"k{n}", message_id=f"m{n}")
                outbox.enqueue(message)
            log = path.with_name("outbox.db-wal")
            found.append((path.read_bytes(), log.read_bytes()))
    return tuple(found)


def with_sums(log: bytes) -> bytes:
    """The log with checksums that are right, so that what was bent is believed."""
    if len(log) < 32:
        return log
    size = int.from_bytes(log[8:12], "big")
    if not 512 <= size <= 65_536:
        return log
    words = ">" if log[3] & 1 else "<"
    sums = _checksum(words, log[:24], (0, 0))
    parts = [log[:24], sums[0].to_bytes(4, "big"), sums[1].to_bytes(4, "big")]
    for at in range(32, len(log) - size - 24 + 1, 24 + size):
        head, page = log[at : at + 8], log[at + 24 : at + 24 + size]
        sums = _checksum(words, head, sums)
        sums = _checksum(words, page[: len(page) // 8 * 8], sums)
        parts += [head, log[16:24], sums[0].to_bytes(4, "big"), sums[1].to_bytes(4, "big"), page]
    return b"".join(parts)


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A file and its log."""
    file, log = draw(st.sampled_from(samples()))
    file, log = draw(bent(file)), draw(bent(log))
    return file, with_sums(log) if draw(st.booleans()) else log


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


def put(folder: Path, file: bytes, log: bytes) -> Path:
    path = folder / "bent.db"
    for name, data in (("bent.db", file), ("bent.db-wal", log)):
        (folder / name).touch(0o600)
        (folder / name).write_bytes(data)
    return path


def rows_are_read(folder: Path, file: bytes, log: bytes) -> None:
    path = put(folder, file, log)
    size = len(file) + len(log)
    with bounded(1 << 20 | 64 * size), closing(Pages(path)) as pages:
        count = sum(1 for _ in pages.rows())
    assert count <= 4 * size // 2 + 4


def what_is_intact_is_salvaged(folder: Path, file: bytes, log: bytes) -> None:
    path = put(folder, file, log)
    (folder / "new").mkdir()
    refused = ""
    try:
        outbox = Outbox(folder / "new" / "new.db")
        with bounded(4 << 20 | 64 * (len(file) + len(log))):
            found = outbox.salvage(path)
        audit = outbox.audit()
        assert audit.is_right
        assert audit.rows == found.open + found.parked
        outbox.enqueue(Message(b"x"))
        outbox.close()
    except OutboxError as error:
        refused = str(error)
    finally:
        shutil.rmtree(folder / "new")
    assert "new.db" not in refused


def test_rows_of_bent_pages(folder: Path) -> None:
    some = settings(short, max_examples=40)
    some(given(files())(lambda pair: rows_are_read(folder, *pair)))()


def test_an_outbox_that_is_not_bent_is_salvaged_whole(folder: Path) -> None:
    """Of bent ones some are refused: that not all are, nothing else says."""
    path = put(folder, *samples()[-1])
    (folder / "whole").mkdir()
    with Outbox(folder / "whole" / "new.db") as outbox:
        found = outbox.salvage(path)
        assert (found.open, found.parked) == (12, 0)
        assert {str(row["message_id"]) for row in outbox.rows("open")} == {
            f"m{n}" for n in range(12)
        }
    with closing(Pages(path)) as pages:
        assert sum(1 for _ in pages.rows()) >= 12


def test_bent_outboxes_are_salvaged(folder: Path) -> None:
    few = settings(short, max_examples=8)
    few(given(files())(lambda pair: what_is_intact_is_salvaged(folder, *pair)))()


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_bent_pages_for_long(folder: Path) -> None:
    def both(pair: tuple[bytes, bytes]) -> None:
        rows_are_read(folder, *pair)
        if pair[0][16:18] == samples()[-1][0][16:18]:
            what_is_intact_is_salvaged(folder, *pair)

    for_long(given(files())(both))
