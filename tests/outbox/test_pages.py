"""What is read straight from a file's pages is what SQLite reads from them."""

import shutil
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest

from reliablepub.outbox.sqlite.salvage import Pages, Value
from tests.sqlite import overwrite, sql

NUMBERS = [
    *(0, 1, -1, 2, 127, -128, 128, -129, 32_767, -32_768, 32_768, 8_388_607, -8_388_608, 8_388_608),
    *(2**31 - 1, -(2**31), 2**31, 2**47 - 1, -(2**47), 2**47, 2**63 - 1, -(2**63)),
]
VALUES: list[Value] = [
    *NUMBERS,
    None,
    0.5,
    -1e300,
    "",
    "é",
    "x" * 200,
    b"",
    b"\x00\xff",
    b"y" * 200,
]
ROWIDS = [1, 127, 128, 16_384, 2**31, 2**48, 2**55, 2**56 - 1, 2**56, 2**63 - 1, -1, -(2**63)]


def make(path: Path, *, page_bytes: int = 4_096, journal: str = "DELETE") -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA page_size = {page_bytes}")
    connection.execute(f"PRAGMA journal_mode = {journal}")
    connection.execute("CREATE TABLE t (a, b, c)")
    return connection


def rows(path: Path) -> dict[int, list[Value]]:
    """The rows that are not those of the schema."""
    with closing(Pages(path)) as pages:
        found = [row for row in pages.rows() if row[1][:1] != ["table"]]
    assert len(dict(found)) == len(found), "each once"
    return dict(found)


def tables(path: Path) -> list[Value]:
    """The names in the rows of the schema, which are on the first page, behind the header."""
    with closing(Pages(path)) as pages:
        return [values[1] for _, values in pages.rows() if values[:1] == ["table"]]


def by_sqlite(path: Path) -> dict[int, list[Value]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return {id_: values for id_, *values in connection.execute("SELECT rowid, * FROM t")}


def test_values_of_every_kind_are_read(path: Path) -> None:
    with closing(make(path)) as connection:
        connection.executemany("INSERT INTO t VALUES (?, 7, ?)", [(v, v) for v in VALUES])
    found = rows(path)
    assert list(found.values()) == [[value, 7, value] for value in VALUES]
    assert [type(a) for a, *_ in found.values()] == [type(value) for value in VALUES]


def test_rowids_of_every_length_are_read(path: Path) -> None:
    with closing(make(path)) as connection:
        connection.executemany("INSERT INTO t (rowid, a) VALUES (?, 'x')", [(n,) for n in ROWIDS])
    assert list(rows(path)) == sorted(ROWIDS)


@pytest.mark.parametrize("page_bytes", [512, 1_024, 4_096, 8_192, 65_536])
def test_what_goes_on_to_other_pages_is_read(path: Path, page_bytes: int) -> None:
    """Lengths about every border: of what stays on the page, and of one and two pages more."""
    usable = page_bytes
    least = (usable - 12) * 32 // 255 - 23
    borders = [n * (usable - 4) + start for n in (0, 1, 2) for start in (usable - 35, least)]
    lengths = sorted({border + n for border in borders for n in range(-8, 3) if border + n > 0})
    with closing(make(path, page_bytes=page_bytes)) as connection:
        bodies = [(n.to_bytes(2, "big") * length)[:length] for n, length in enumerate(lengths)]
        connection.executemany("INSERT INTO t (a) VALUES (?)", [(body,) for body in bodies])
    assert [a for a, *_ in rows(path).values()] == bodies


def test_bytes_that_are_reserved_on_every_page_are_left_out(path: Path) -> None:
    """SQLite lets extensions have them, from the first page on, which is empty here."""
    sql(path, "PRAGMA user_version = 1")
    overwrite(path, 20, b"\x04")
    overwrite(path, 100 + 5, (4_096 - 4).to_bytes(2, "big"))  # where cells would begin
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (a, b, c)")
        for length in (9, *range(4_078, 4_094), 9_000, 20_000):
            body = bytes(n % 251 for n in range(length))
            connection.execute("INSERT INTO t (a) VALUES (?)", (body,))
    assert rows(path) == by_sqlite(path)


def test_what_was_deleted_is_not_read(path: Path) -> None:
    with closing(make(path, page_bytes=512)) as connection:
        connection.executemany("INSERT INTO t (a) VALUES (?)", [(b"x" * 300,)] * 400)
        connection.execute("DELETE FROM t WHERE rowid > 10")
        (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    assert free > 2 * 512 // 4, "more than one page has numbers of free ones"
    assert len(rows(path)) == 10
    assert rows(path) == by_sqlite(path)


def with_free_pages(path: Path, numbers: list[int], following: int = 0) -> None:
    """A row on the second page, another copy of it on the third; the fourth lists free pages."""
    with closing(make(path)) as connection:
        connection.execute("INSERT INTO t (a) VALUES ('kept')")
    raw = bytearray(path.read_bytes())
    assert len(raw) == 2 * 4_096
    raw[32:36] = (4).to_bytes(4, "big")
    trunk = struct.pack(f">II{len(numbers)}I", following, len(numbers), *numbers)
    path.write_bytes(raw + raw[4_096:] + trunk.ljust(4_096, b"\0")[:4_096])


@pytest.mark.parametrize("following", [0, 1, 3, 4])
@pytest.mark.parametrize("numbers", [[3], [*range(100, 1_121), 3]])
def test_pages_on_the_list_of_free_ones_are_left_out(
    path: Path, numbers: list[int], following: int
) -> None:
    with_free_pages(path, numbers, following)
    assert [a for a, *_ in rows(path).values()] == ["kept"]
    assert tables(path) == ["t"]


@pytest.mark.parametrize(
    ("numbers", "following", "header"),
    [
        ([3], 5, None),
        ([3], 2**32 - 1, None),
        ([3, *range(100, 1_122)], 0, None),
        ([], 2, None),  # the second page can be none: it begins as leaves do
        *(([3], 0, (32, first.to_bytes(4, "big"))) for first in (5, 2**24 + 4, 1, 2)),
        ([3], 0, (0, bytes(32))),
    ],
)
def test_what_is_no_list_of_free_pages_hides_nothing(
    path: Path, numbers: list[int], following: int, header: tuple[int, bytes] | None
) -> None:
    """Nor does one that begins nowhere, or of which a damaged header tells."""
    with_free_pages(path, numbers, following)
    if header is not None:
        overwrite(path, *header)
    with closing(Pages(path)) as pages:
        assert [values[0] for _, values in pages.rows()] == ["table", "kept", "kept"]


@pytest.mark.parametrize("page_bytes", [4_096, 8_192])
@pytest.mark.parametrize("damage", [b"\xff" * 100, b"SQLite format 4\0\x02\0\1\1\x09" + b"\2" * 79])
def test_without_a_header_pages_are_of_the_usual_size(
    path: Path, damage: bytes, page_bytes: int
) -> None:
    with closing(make(path, page_bytes=page_bytes)) as connection:
        values = [(b"x" * length,) for length in (3_000, 4_059, 4_062, 9_000, 20_000)]
        connection.executemany("INSERT INTO t (a) VALUES (?)", values)
    expected = by_sqlite(path)
    overwrite(path, 0, damage)
    assert rows(path) == expected
    assert tables(path) == ["t"]


@pytest.mark.parametrize("size", [b"\x01\x00", b"\x10\x01", b"\0\0"])
def test_a_size_that_no_page_can_have_is_not_believed(path: Path, size: bytes) -> None:
    with closing(make(path)) as connection:
        connection.executemany("INSERT INTO t (a) VALUES (?)", [(b"x" * 3_000,)] * 9)
    expected = by_sqlite(path)
    overwrite(path, 16, size)
    assert rows(path) == expected


@pytest.mark.parametrize("page_bytes", [512, 4_096])
def test_a_number_of_rows_that_is_too_large_costs_none(path: Path, page_bytes: int) -> None:
    with closing(make(path, page_bytes=page_bytes)) as connection:
        connection.executemany("INSERT INTO t (a) VALUES (?)", [("x",)] * 3)
    for start in (100, page_bytes):
        overwrite(path, start + 3, b"\xff\xff")
    found = rows(path)
    assert [found[id_] for id_ in (1, 2, 3)] == [["x", None, None]] * 3
    assert tables(path) == ["t"]


@pytest.mark.parametrize("following", [0, 99])
def test_a_body_whose_rest_cannot_be_found_is_none(path: Path, following: int) -> None:
    with closing(make(path, page_bytes=512)) as connection:
        connection.executemany("INSERT INTO t (a) VALUES (?)", [(bytes(2_000),), ("x",)])
    raw = bytearray(path.read_bytes())
    (start,) = struct.unpack_from(">H", raw, 512 + 8)
    at = raw.index((4).to_bytes(4, "big"), 512 + start)  # the number of the page that goes on
    raw[at : at + 4] = following.to_bytes(4, "big")
    path.write_bytes(raw)
    assert rows(path) == {2: ["x", None, None]}


def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(crashed: Path) -> None:
    """The log says how many pages there are."""
    whole = rows(crashed)
    with crashed.open("r+b") as file:
        file.truncate(700)
    assert rows(crashed) == whole, "the log has them all"


# ------------------------------------------------------------------------------------ the log


def checksums(words: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """As SQLite's file format has them."""
    one, two = sums
    for first, second in struct.iter_unpack(f"{words}II", data):
        one = (one + first + two) % 2**32
        two = (two + second + one) % 2**32
    return one, two


def written_by_another_machine(log: bytes, words: str, page_bytes: int) -> bytes:
    """The log, with checksums over words of the other order."""
    magic = struct.pack(">I", 0x377F0682 | (words == ">"))
    head = magic + log[4:24]
    sums = checksums(words, head, (0, 0))
    parts = [head, struct.pack(">II", *sums)]
    for at in range(32, len(log), 24 + page_bytes):
        page = log[at + 24 : at + 24 + page_bytes]
        sums = checksums(words, page, checksums(words, log[at : at + 8], sums))
        parts += [log[at : at + 16], struct.pack(">II", *sums), page]
    return b"".join(parts)


@pytest.fixture
def crashed(path: Path, tmp_path: Path) -> Path:
    """A database with one commit for each row in its log, and one that changes every other."""
    copy = tmp_path / "crashed.db"
    with closing(make(path, page_bytes=512, journal="WAL")) as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        for name in ("one", "two"):
            connection.executemany("INSERT INTO t (a) VALUES (?)", [(name * 90,)] * 5)
        connection.execute("UPDATE t SET a = 'new' WHERE rowid % 2")
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    return copy


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


@pytest.mark.parametrize("words", ["<", ">"])
def test_the_log_of_any_machine_lies_over_the_file(crashed: Path, words: str) -> None:
    log = log_of(crashed)
    log.write_bytes(written_by_another_machine(log.read_bytes(), words, 512))
    found = rows(crashed)
    assert found == by_sqlite(crashed)
    assert [a == "new" for a, *_ in found.values()] == [True, False] * 5


def test_the_log_counts_up_to_its_last_whole_commit(crashed: Path, tmp_path: Path) -> None:
    whole = log_of(crashed).read_bytes()
    frame = 24 + 512
    ends = set(range(32, len(whole) + 1, frame))
    assert max(ends) == len(whole)
    seen = set()
    for length in sorted({0, 31} | {end + n for end in ends for n in (-1, 0, 1)}):
        copy = tmp_path / f"cut-{length}.db"
        shutil.copy(crashed, copy)
        log_of(copy).write_bytes(whole[:length])
        found = rows(copy)
        shutil.copy(copy, tmp_path / "looked.db")
        log_of(tmp_path / "looked.db").write_bytes(whole[:length])
        try:
            expected = by_sqlite(tmp_path / "looked.db")
        except sqlite3.OperationalError:  # there is no table yet
            expected = {}
        assert found == expected, length
        seen.add(len(found))
    assert seen == set(range(11))


@pytest.mark.parametrize("at", [0, 8, 16, 20, 32 + 3, 32 + 8, 32 + 12, 32 + 16, 32 + 24 + 100])
def test_a_log_that_was_changed_is_of_no_use(crashed: Path, at: int) -> None:
    log = log_of(crashed)
    raw = bytearray(log.read_bytes())
    raw[at + 3] ^= 2
    log.write_bytes(raw)
    assert rows(crashed) == {}


def test_frames_of_an_earlier_round_of_the_log_do_not_count(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "crashed.db"
    with closing(make(path, journal="WAL")) as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.executemany("INSERT INTO t (a) VALUES (?)", [(b"x" * 3_000,)] * 5)
        connection.execute("PRAGMA wal_checkpoint(RESTART)")
        connection.execute("UPDATE t SET a = 'new' WHERE rowid = 1")
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    assert log_of(copy).stat().st_size > 5 * 4_096
    found = rows(copy)
    assert found == by_sqlite(copy)
    assert found[1][0] == "new"


def test_the_log_of_another_database_is_left_alone(path: Path, crashed: Path) -> None:
    other = path.with_name("other.db")
    with closing(make(other)) as connection:
        connection.executemany("INSERT INTO t (a) VALUES (?)", [("x",)] * 3)
    shutil.copy(log_of(crashed), log_of(other))
    assert [a for a, *_ in rows(other).values()] == ["x"] * 3


def test_nothing_is_left_open_and_nothing_is_changed(crashed: Path) -> None:
    before = {file: file.read_bytes() for file in (crashed, log_of(crashed))}
    crashed.chmod(0o400)
    rows(crashed)
    assert {file: file.read_bytes() for file in before} == before
