"""Whatever is damaged, what is intact is found; and an audit says that something is wrong."""

import errno
import os
import random
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from zlib import crc32

import pytest

from reliablepub.errors import NotAnOutbox, OutboxDiskFailed, OutboxError, OutboxInUse
from reliablepub.message import Message
from reliablepub.outbox.admin import integrity
from reliablepub.outbox.admin.integrity import Audit
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.database import NO_VALUES
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import salvage as salvage_module
from reliablepub.outbox.sqlite.database import SqliteSession
from reliablepub.outbox.sqlite.failures import page_damage
from reliablepub.outbox.sqlite.space import PAGE_BYTES
from reliablepub.outbox.sqlite.sql import QUERIES, schema
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import Outcome, OutcomeKind
from tests.between import before
from tests.outbox.conftest import Make
from tests.outcomes import REFUSED
from tests.sqlite import overwrite, sql


def fill(path: Path, count: int = 300) -> dict[int, bytes]:
    """Messages of all sizes, some parked, many confirmed; the bodies of those that are left."""
    chance = random.Random(5)
    with closing(SqliteStore(path)) as store:
        entries = [
            Entry(
                Message(
                    bytes(chance.randrange(256) for _ in range(chance.choice((0, 20, 200, 9000)))),
                    "orders",
                    f"key.{n}",
                    message_id=f"m-{n}",
                    headers={"n": n, "text": "é"} if n % 3 else None,
                    ordering_key=f"k{n}" if n % 5 == 0 else None,
                ),
                stored_at=float(n),
            )
            for n in range(count)
        ]
        store.commit(Changes(new=entries, sources={"file": 7}))
        confirmed = entries[50:150]
        parked = [Attempt(entry, "1-1", 1, REFUSED, 9.0) for entry in entries[:20]]
        store.commit(Changes(confirmed=confirmed, parked=parked, attempts=parked))
    return {e.id: e.message.body for e in entries if e not in confirmed}


def contents(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    return {
        table: sql(path, f"SELECT * FROM reliablepub_{table} ORDER BY id")
        for table in ("messages", "parked")
    }


def bodies(path: Path) -> dict[int, bytes]:
    tables = ("messages", "parked")
    query = " UNION ALL ".join(f"SELECT id, body FROM reliablepub_{table}" for table in tables)
    return dict(sql(path, query))


def test_of_a_file_that_is_not_damaged_everything_is_copied(path: Path) -> None:
    fill(path)
    sql(path, "CREATE TABLE other (a)")  # something freed, and reused
    new = path.with_name("new.db")
    found = Outbox(new).salvage(path)
    assert (found.open, found.parked, found.broken, found.has_sources) == (180, 20, (), True)
    sql(path, "UPDATE reliablepub_messages SET uncertain = 1")  # perhaps they were sent
    assert contents(new) == contents(path)
    assert Outbox(new).position("file") == 7
    audit = Outbox(new).audit()
    assert audit.is_right
    assert audit.rows == 200
    with closing(SqliteStore(new)) as store:
        assert len(store.read_ready(1, 999, limit=999, bytes_max=10**9)[0]) == 180


def test_a_file_may_have_more_bytes_than_an_int_of_c_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    monkeypatch.setattr(salvage_module.Pages, "total_bytes", 3 << 30)
    new = path.with_name("new.db")
    assert Outbox(new).salvage(path).has_sources
    assert Outbox(new).position("file") == 7


def test_a_new_message_gets_no_id_of_a_parked_one(path: Path) -> None:
    with Outbox(path) as outbox:
        for _ in range(3):
            outbox.enqueue(Message(b"x"))
        intervene(outbox_at(path), [2, 3], Intervention(Action.PARK))
    new = Outbox(path.with_name("new.db"))
    assert new.salvage(path).parked == 2
    new.enqueue(Message(b"new"))
    assert [row["id"] for row in new.rows("open")] == [1, 4]
    intervene(outbox_at(new.path), [1], Intervention(Action.DISCARD))
    again = Outbox(path.with_name("again.db"))
    intervene(outbox_at(new.path), [4], Intervention(Action.PARK))
    assert again.salvage(new.path).parked == 3, "and none is open"
    again.enqueue(Message(b"new"))
    assert [row["id"] for row in again.rows("open")] == [5]
    assert again.retry() == 3


def test_the_log_counts_too(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[entry() for _ in range(30)]))
        store.commit(Changes(new=[kept := entry()]))
        crashed = path.with_name("crashed.db")
        shutil.copy(path, crashed)
        shutil.copy(path.with_name("outbox.db-wal"), path.with_name("crashed.db-wal"))
    for cut, count in ((0, 31), (100, 30)):  # of a commit that was cut off, nothing is there
        log = path.with_name("crashed.db-wal")
        os.truncate(log, log.stat().st_size - cut)
        new = path.with_name(f"new-{cut}.db")
        assert Outbox(new).salvage(crashed).open == count
        assert (kept.id in bodies(new)) is (cut == 0)
        with closing(sqlite3.connect(f"file:{crashed}?mode=ro", uri=True)) as connection:
            rows = connection.execute("SELECT count(*) FROM reliablepub_messages").fetchone()
        assert rows == (count,), "SQLite sees the same"


@pytest.fixture
def read_only(path: Path) -> Iterator[Path]:
    """The directory of the outbox, mounted read-only somewhere else."""
    folder = path.parent / "read-only"
    folder.mkdir()
    mount = ["mount", "--bind", "-o", "ro", str(path.parent), str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a directory needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_file_can_be_read_only(path: Path, entry: Make, read_only: Path) -> None:
    new = path.with_name("new.db")
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[entry()]))
        with pytest.raises(OutboxInUse, match=f"is relayed by process {os.getpid()}"):
            Outbox(new).salvage(read_only / path.name)
    assert Outbox(new).salvage(read_only / path.name).open == 1


@pytest.fixture(scope="module", params=[200, pytest.param(600, marks=pytest.mark.soak)])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, bytes]]:
    path = tmp_path_factory.mktemp("whole") / "outbox.db"
    return path, fill(path, request.param)


def pages_of(path: Path) -> dict[int, set[int]]:
    """Which rows have bytes on which pages: a row and the pages its body goes on."""
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT pageno, path, pagetype FROM dbstat WHERE name = ? ORDER BY path"
        lost: dict[int, set[int]] = {}
        for table in ("reliablepub_messages", "reliablepub_parked"):
            ids = [row[0] for row in connection.execute(f"SELECT id FROM {table} ORDER BY id")]
            rows = connection.execute(query, (table,)).fetchall()
            leaves = [(path, page) for page, path, kind in rows if kind == "leaf"]
            cells = dict(
                connection.execute("SELECT pageno, ncell FROM dbstat WHERE name = ?", (table,))
            )
            position = {}
            for leaf, page in sorted(leaves):
                position[leaf] = ids[: cells[page]]
                lost[page] = set(ids[: cells[page]])
                del ids[: cells[page]]
            for page, way, kind in rows:
                if kind == "overflow":
                    leaf, _, rest = way.rpartition("/")
                    cell = int(rest.partition("+")[0], 16)
                    lost[page] = {position[leaf + "/"][cell]}
        return lost


def test_one_damaged_page_costs_its_own_rows_only(
    whole: tuple[Path, dict[int, bytes]], tmp_path: Path
) -> None:
    """Every page of the file in turn, the root and the header among them."""
    original, expected = whole
    data = original.read_bytes()
    lost = pages_of(original)
    used = {page for (page,) in sql(original, "SELECT pageno FROM dbstat")} - {1}
    hidden = 0
    for number in range(1, len(data) // PAGE_BYTES + 1):
        damaged = tmp_path / f"{number}.db"
        page = bytes(byte ^ 0xA5 for byte in data[(number - 1) * PAGE_BYTES : number * PAGE_BYTES])
        damaged.write_bytes(data[: (number - 1) * PAGE_BYTES] + page + data[number * PAGE_BYTES :])
        new = tmp_path / f"new-{number}.db"
        Outbox(new).salvage(damaged)
        found = bodies(new)
        left = expected.keys() - lost.get(number, set())
        assert {id_: found.get(id_) for id_ in left} == {id_: expected[id_] for id_ in left}
        if number in used:  # the others list the free ones: without them, what was deleted is found
            assert found.keys() == left
        hidden += number not in lost
        for file in (damaged, new):
            for suffix in ("", "-wal", "-shm", ".lock"):
                file.with_name(file.name + suffix).unlink(missing_ok=True)
    assert hidden > 5
    assert len(lost) > 25


SECTOR_BYTES = 4_096


def break_sector(disk: pytest.MonkeyPatch, file: Path, at: int, code: int = errno.EIO) -> None:
    """Reads end before the sector that begins there, and fail at it."""

    def pread(fd: int, count: int, offset: int) -> bytes:
        is_hit = offset < at + SECTOR_BYTES and at < offset + count
        if not is_hit or not os.path.samestat(os.fstat(fd), file.stat()):
            return os.pread(fd, count, offset)
        if offset >= at:
            raise OSError(code, os.strerror(code))
        return os.pread(fd, at - offset, offset)

    disk.setattr(salvage_module, "os", SimpleNamespace(**vars(os) | {"pread": pread}))


@pytest.mark.parametrize("at", [0, SECTOR_BYTES])
def test_a_sector_that_cannot_be_read_costs_the_rows_of_its_page_only(
    whole: tuple[Path, dict[int, bytes]], tmp_path: Path, at: int
) -> None:
    original, expected = whole
    lost = pages_of(original)
    of_its_page = 0
    for number in (1, *list(lost)[::5]):
        new = tmp_path / f"{number}.db"
        with pytest.MonkeyPatch.context() as disk:
            break_sector(disk, original, (number - 1) * PAGE_BYTES + at)
            found = Outbox(new).salvage(original)
        assert found.unreadable == (f"page {number}",)
        left = expected.keys() - lost.get(number, set())
        assert bodies(new).items() >= {(id_, expected[id_]) for id_ in left}
        of_its_page += len(bodies(new)) - len(left)
    assert of_its_page > 0 or at == 0, "those in the sectors before"


def test_of_a_log_that_cannot_be_read_to_its_end_the_commits_before_are_there(
    path: Path, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = path.with_name("crashed.db-wal")
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[entry() for _ in range(30)]))
        store.commit(Changes(new=[entry()]))
        shutil.copy(path, crashed := path.with_name("crashed.db"))
        shutil.copy(path.with_name("outbox.db-wal"), log)
    break_sector(monkeypatch, log, log.stat().st_size - 100)
    found = Outbox(path.with_name("new.db")).salvage(crashed)
    assert found.open == 30
    [part] = found.unreadable
    assert part.startswith("the log from byte ")
    break_sector(monkeypatch, log, 0)
    assert Outbox(path.with_name("newer.db")).salvage(crashed).unreadable == ("the log",)


def test_a_disk_that_reads_nothing_is_not_taken_for_a_file_that_is_no_outbox(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, 200)

    def pread(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(salvage_module, "os", SimpleNamespace(**vars(os) | {"pread": pread}))
    monkeypatch.setattr(salvage_module, "_copy_sources", lambda *_: False)
    with pytest.raises(OutboxDiskFailed, match=r"the disk cannot read \d+ of its parts \(page 1, "):
        Outbox(path.with_name("new.db")).salvage(path)
    assert not [*path.parent.glob("new.db*")]


def test_another_error_of_the_disk_ends_the_copy(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, 200)
    break_sector(monkeypatch, path, 3 * PAGE_BYTES, errno.ESTALE)
    with pytest.raises(OutboxError, match=f"^outbox {path} cannot be used: "):
        Outbox(path.with_name("new.db")).salvage(path)


@pytest.mark.parametrize("bit", [0x01, 0x80], ids=["another-letter", "not-utf-8"])
def test_a_flipped_bit_is_listed_and_not_copied(path: Path, bit: int) -> None:
    fill(path, 200)
    data = bytearray(path.read_bytes())
    at = data.find(b"key.170")
    data[at + 6] ^= bit
    path.write_bytes(data)
    audit = Outbox(path).audit()
    assert not audit.is_right
    assert audit.structure == ()
    assert audit.differences == {}
    ((id_, reason),) = audit.damaged.items()
    assert id_ == 171
    assert "checksum" in reason
    new = path.with_name("new.db")
    found = Outbox(new).salvage(path)
    assert [(row.id, row.message_id) for row in found.broken] == [(171, "m-170")]
    assert 171 not in bodies(new)
    assert Outbox(new).audit().is_right


def test_rows_from_before_a_column_was_added_are_known(path: Path) -> None:
    """They have fewer columns: `ALTER TABLE ... ADD COLUMN` does not rewrite the rows."""
    with closing(sqlite3.connect(path)) as connection:
        added = (
            ("messages", "expires_at REAL"),
            ("messages", "ordering_key TEXT"),
            ("messages", "refused_at REAL"),
            ("parked", "expires_at REAL"),
            ("parked", "ordering_key TEXT"),
            ("parked", "is_skipped INTEGER NOT NULL DEFAULT 0"),
        )
        for table in ("messages", "parked"):
            (whole,) = (s for s in schema() if f"TABLE reliablepub_{table} (" in s)
            for _, column in added:
                whole = whole.replace(f",\n    {column}", "")
            connection.execute(whole)
        checksum = crc32(b"body", crc32(b"m\0x\0k\0{}\0"))
        connection.execute(
            "INSERT INTO reliablepub_messages VALUES (5, 'm', 'x', 'k', '{}', 1, NULL, 0, 0, 0, 0,"
            " 9, ?, ?)",
            (checksum, b"body"),
        )
        connection.execute(
            "INSERT INTO reliablepub_parked VALUES (6, 'm', 'x', 'k', '{}', 1, 2, 'parked', "
            "'nacked', 0, 'why', 3, 0, 0, 0, 9, ?, ?)",
            (checksum, b"body"),
        )
        for table, column in added:
            connection.execute(f"ALTER TABLE reliablepub_{table} ADD COLUMN {column}")
        connection.commit()
    new = path.with_name("new.db")
    found = Outbox(new).salvage(path)
    assert (found.open, found.parked, found.broken) == (1, 1, ())
    with closing(SqliteStore(new)) as store:
        (entry,) = store.read_ready(1, 9, limit=9, bytes_max=99)[0]
        assert (entry.id, entry.message.body, entry.stored_at) == (5, b"body", 1.0)


def test_no_column_is_left_behind(path: Path) -> None:
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        for kind in ("open", "parked"):
            names = {name for name, _ in connection.execute(QUERIES[f"{kind}_columns"])}
            assert names == set(re.findall(r":(\w+)", QUERIES[f"salvage_{kind}"]))


def test_nothing_is_mixed_or_taken_from_a_relay_and_the_lease_is_given_back(path: Path) -> None:
    new = Outbox(path.with_name("new.db"))
    with pytest.raises(OutboxError, match=f"^there is no file {path} to salvage$"):
        new.salvage(path)
    store = SqliteStore(path)
    with pytest.raises(OutboxInUse):
        new.salvage(path)
    store.close()
    with pytest.raises(OutboxError, match="exists already; name a file that does not"):
        Outbox(path).salvage(path)
    assert not new.path.exists()
    fill(path, 3)
    new.salvage(path)
    SqliteStore(path).close()


def test_what_the_system_refuses_is_told_in_its_words(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SqliteStore(path).close()
    monkeypatch.setattr(
        salvage_module,
        "Pages",
        Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")),
    )
    with pytest.raises(OutboxError, match=f"^outbox {path} cannot be used: Permission denied;"):
        Outbox(path.with_name("new.db")).salvage(path)
    SqliteStore(path).close()  # the relay lock was released


def write_garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(PAGE_BYTES * 20))


def write_database(path: Path) -> None:
    sql(path, "CREATE TABLE orders (id)", "INSERT INTO orders VALUES (1)")


@pytest.mark.parametrize("write", [write_garbage, write_database, Path.touch])
def test_what_is_no_outbox_is_refused(path: Path, write: Callable[[Path], None]) -> None:
    write(path)
    with pytest.raises(NotAnOutbox, match=f"^{path} has no message of an outbox"):
        Outbox(path.with_name("new.db")).salvage(path)
    assert {file.name for file in path.parent.iterdir()} <= {path.name, f"{path.name}.lock"}


def test_an_outbox_without_messages_is_one(path: Path) -> None:
    SqliteStore(path).close()
    found = Outbox(path.with_name("new.db")).salvage(path)
    assert (found.open, found.parked, found.broken, found.has_sources) == (0, 0, (), True)


def test_an_audit_finds_what_was_changed_by_hand(path: Path) -> None:
    fill(path, 200)
    assert Outbox(path).audit().is_right
    sql(
        path,
        "DELETE FROM reliablepub_messages WHERE id = 171",
        "UPDATE reliablepub_parked SET state = 'expired' WHERE id = 1",
    )
    audit = Outbox(path).audit()
    assert not audit.is_right
    differences = dict(audit.differences)
    assert differences.pop("open_bytes") > 0
    assert differences == {"open": 1, "parked": 1, "expired": -1}


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_an_audit_reads_each_row_once_and_a_piece_at_a_time(
    path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, 20)
    whole = Outbox(path).audit()
    asked: list[int] = []

    def note(_: SqliteSession, __: str, values: Any = NO_VALUES) -> None:
        asked.append(values.get("limit", 0))

    before(monkeypatch, SqliteSession, "run", note)
    monkeypatch.setattr(integrity, "PIECE_ROWS", rows)
    assert Outbox(path).audit() == whole
    assert whole.rows
    assert asked.count(rows) >= whole.rows / rows


def test_an_audit_finds_a_damaged_page(path: Path) -> None:
    fill(path, 200)
    overwrite(path, (min(pages_of(path)) - 1) * PAGE_BYTES, b"\xa5" * 8)
    audit = Outbox(path).audit()
    assert not audit.is_right
    assert audit.structure
    assert audit == Audit(0, {}, {}, audit.structure), "nothing is counted in such a file"


def test_damage_that_sqlite_gives_up_on_is_told_in_its_words(path: Path) -> None:
    fill(path, 200)
    overwrite(path, 100, b"\xa5" * 8)  # the head of the schema's own page
    with closing(sqlite3.connect(path)) as connection:
        assert page_damage(connection) == ["database disk image is malformed"]


# ------------------------------------------------------------------------------ rows like ours


def like_ours(path: Path, **changes: str) -> None:
    """Another table, whose rows are those of the open messages but for some columns (SQL)."""
    with closing(sqlite3.connect(path)) as connection, connection:
        names = [name for name, _ in connection.execute(QUERIES["open_columns"])]
        values = ("NULL", *(changes.get(name, name) for name in names[1:]))
        connection.execute(f"CREATE TABLE IF NOT EXISTS other ({', '.join(names)})")
        connection.execute(
            f"INSERT INTO other (rowid, {', '.join(names)}) SELECT id + "
            f"{changes.get('plus', '0')}, {', '.join(values)} FROM reliablepub_messages"
        )


def store_behind(path: Path) -> None:
    """Four messages, of which most are on pages behind all that there are."""
    with Outbox(path) as outbox:
        for _ in range(4):
            outbox.enqueue(Message(bytes(3_000)))


@pytest.fixture
def three(path: Path, entry: Make) -> Path:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[entry(), entry(ordering_key="k"), entry()]))
    return path


def test_a_row_that_is_found_twice_is_copied_once(three: Path) -> None:
    like_ours(three)
    store_behind(three)
    found = Outbox(three.with_name("new.db")).salvage(three)
    assert (found.open, found.parked, found.broken) == (7, 0, ())
    assert Outbox(three.with_name("new.db")).audit().is_right


def test_what_is_intact_elsewhere_is_not_broken(three: Path) -> None:
    like_ours(three, body="x'00'")
    found = Outbox(three.with_name("new.db")).salvage(three)
    assert (found.open, found.broken) == (3, ())


@pytest.mark.parametrize("id_", [0, -5, 2**63 - 1])
def test_a_row_whose_number_is_damaged_is_named(three: Path, id_: int) -> None:
    sql(three, f"UPDATE reliablepub_messages SET id = {id_} WHERE id = 2")
    found = Outbox(three.with_name("new.db")).salvage(three)
    assert found.open == 2
    assert [(row.id, row.message_id) for row in found.broken] == [(id_, "m-2")]
    assert found.broken[0].reason == "the number of the row is damaged"


def test_every_broken_row_is_named_with_its_reason(three: Path) -> None:
    like_ours(three, body="x'00'", plus="10")
    found = Outbox(three.with_name("new.db")).salvage(three)
    assert found.open == 3
    assert [(row.id, row.message_id) for row in found.broken] == [
        *((11, "m-1"), (12, "m-2"), (13, "m-3"))
    ]
    assert {row.reason.partition(" is ")[0] for row in found.broken} == {"the checksum"}


@pytest.mark.parametrize("name", ["message_id", "routing_key", "ordering_key"])
def test_a_row_without_a_checksum_must_be_utf_8(three: Path, name: str) -> None:
    like_ours(three, plus="10", checksum="-1", **{name: "CAST(x'61ff' AS TEXT)"})
    found = Outbox(three.with_name("new.db")).salvage(three)
    assert (found.open, [row.id for row in found.broken]) == (3, [11, 12, 13])
    assert found.broken[0].reason == "a text is not UTF-8: invalid start byte"
    assert found.broken[0].message_id == ("a\ufffd" if name == "message_id" else "m-1")


@pytest.mark.parametrize(
    "changes",
    [
        *({name: "7"} for name in ("message_id", "exchange", "routing_key", "properties")),
        {"message_id": "NULL"},
        *({"ordering_key": value} for value in ("7", "x'00'")),
        *({"checksum": value} for value in ("'text'", "NULL")),
        *({"body": value} for value in ("'text'", "NULL")),
        *({"size": value} for value in ("'text'", "NULL")),
    ],
)
def test_what_cannot_be_a_message_is_not_taken_for_one(
    three: Path, changes: dict[str, str]
) -> None:
    like_ours(three, plus="10", **changes)
    found = Outbox(three.with_name("new.db")).salvage(three)
    assert (found.open, found.broken) == (3, ())


@pytest.mark.parametrize("columns", [1, 7, 8, 40])
@pytest.mark.parametrize("value", ["'parked'", "'x'", "1"])
def test_other_tables_are_no_hindrance(three: Path, columns: int, value: str) -> None:
    sql(
        three,
        f"CREATE TABLE other ({', '.join(f'c{n}' for n in range(columns))})",
        f"INSERT INTO other VALUES ({', '.join([value] * columns)})",
    )
    store_behind(three)
    found = Outbox(three.with_name("new.db")).salvage(three)
    assert (found.open, found.parked, found.broken) == (7, 0, ())


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_it_is_written_in_pieces(
    path: Path, entry: Make, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=(new := [entry() for _ in range(6)])))
        expired = Outcome(OutcomeKind.EXPIRED)
        given_up = [Attempt(new[0], "1-1", 1, REFUSED, 9.0), Attempt(new[1], "1-1", 2, expired, 9)]
        store.commit(Changes(parked=given_up, attempts=given_up))
    monkeypatch.setattr(salvage_module, "_BATCH", batch)
    outbox = Outbox(path.with_name("new.db"))
    found = outbox.salvage(path)
    assert (found.open, found.parked) == (4, 2)
    assert outbox.audit().is_right
    status = outbox.status()
    assert (status.stored, status.open, status.parked, status.expired) == (6, 4, 1, 1)


def test_a_schema_that_is_no_text_any_more_is_damage(three: Path) -> None:
    """SQLite quotes it in its words, of which Python makes no error."""
    at = three.read_bytes().index(b"CREATE TABLE reliablepub_messages")
    overwrite(three, at + 7, b"\xeb")
    for look in (Outbox(three).status, Outbox(three).audit, lambda: SqliteStore(three)):
        with pytest.raises(OutboxError, match=r"is damaged, .*; stop every process that uses it"):
            look()
    found = Outbox(three.with_name("new.db")).salvage(three)
    assert (found.open, found.broken, found.has_sources) == (3, (), False)


def test_a_backup_beside_the_log_of_the_former_file_names_the_log(path: Path) -> None:
    """SQLite reads that log as the backup's: what it hides is back once the log is gone."""
    log, later, backup = (path.with_name(name) for name in (f"{path.name}-wal", "later", "backup"))
    entries = [Entry(Message(b"x" * 3_000, "q", "k", message_id=str(n)), 1.0) for n in range(500)]
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=entries))
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(backup)) as copy:
            source.backup(copy)
        store.commit(Changes(confirmed=entries))
    sql(path, "VACUUM")
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[Entry(Message(b"late", "q", "k", message_id="late"), 2.0)]))
        shutil.copy(log, later)  # as if the host had failed now
    shutil.copy(backup, path)
    shutil.copy(later, log)
    with pytest.raises(OutboxError, match="if a backup was put in its place, move the former"):
        Outbox(path).status()
    log.unlink()
    assert Outbox(path).status().open == len(entries)
    assert Outbox(path).audit().is_right


def test_a_request_that_is_repeated_is_known_in_the_new_one(path: Path) -> None:
    with Outbox(path) as outbox:
        ids = {key: outbox.enqueue(b"x", key=key) for key in ("gone", "open")}
    with closing(SqliteStore(path)) as store:
        first, *_ = store.read_ready(1, 9, limit=1, bytes_max=10**9)[0]
        store.commit(Changes(confirmed=[first]))
    sql(path, "UPDATE reliablepub_keys SET id = 9 WHERE key = 'gone'")
    new = path.with_name("new.db")
    assert Outbox(new).salvage(path).has_sources
    with Outbox(new) as outbox:
        for key, id_ in ids.items():
            assert outbox.enqueue(b"again", key=key) == id_
        assert outbox.status().stored == 1
        while outbox.status().stored < 9:
            outbox.enqueue(b"another")
    query = "SELECT id FROM reliablepub_keys ORDER BY key"
    assert sql(new, query) == [(0,), (2,)], "the other number is that of another message by now"


def test_keys_are_copied_page_by_page(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(salvage_module, "_BATCH", 3)
    with Outbox(path) as outbox:
        for number in range(10):
            outbox.enqueue(b"x", key=f"k{number}")
    new = path.with_name("new.db")
    assert Outbox(new).salvage(path).has_sources
    query = "SELECT key, id FROM reliablepub_keys ORDER BY key"
    assert sql(new, query) == sql(path, query)
