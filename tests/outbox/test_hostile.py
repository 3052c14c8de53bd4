"""Files that were damaged or made up: nothing hangs, grows without a bound, or ends a relay."""

import json
import sqlite3
import struct
import time
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from reliablepub import Publisher
from reliablepub.cli.output import age, ago
from reliablepub.errors import NotAnOutbox, OutboxError
from reliablepub.message import Message
from reliablepub.outbox.admin.transfer import BadLine, export_lines, import_lines
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.rows import COUNT_MAX, ID_MAX, SIZE_MAX, TIME_MAX, checksum_of, misfits
from reliablepub.outbox.sqlite.salvage import Pages, Value, _checksum
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.testing import FakeBroker
from tests.asking import fill, park, stored
from tests.outbox.conftest import Make
from tests.sqlite import sql

PAGE = 4_096
HEADER = (b"SQLite format 3\0" + struct.pack(">H", PAGE)).ljust(100, b"\0")
FIRST = HEADER.ljust(PAGE, b"\0")


def rows(path: Path) -> list[tuple[int, list[Value]]]:
    with closing(Pages(path)) as pages:
        return list(pages.rows())


# ---------------------------------------------------------------------------------------- salvage


def varint(number: int) -> bytes:
    parts = [number & 0x7F]
    while number := number >> 7:
        parts.append(number & 0x7F | 0x80)
    return bytes(reversed(parts))


def leaf(cells: list[bytes], pointers: list[int] | None = None) -> bytes:
    """A page with cells from its end, and pointers to them, or to anything."""
    page = bytearray(PAGE)
    at, found = PAGE, []
    for cell in cells:
        at -= len(cell)
        page[at : at + len(cell)] = cell
        found.append(at)
    found = found if pointers is None else pointers
    page[:5] = struct.pack(">BHH", 13, 0, len(found))
    page[8 : 8 + 2 * len(found)] = struct.pack(f">{len(found)}H", *found)
    return bytes(page)


def local_part(length: int) -> int:
    """How much of a long row is on its own page."""
    least = (PAGE - 12) * 32 // 255 - 23
    local = least + (length - least) % (PAGE - 4)
    return local if local <= PAGE - 35 else least


def goes_on(length: int, following: int) -> bytes:
    """A cell that claims to be so long, and to go on at that page."""
    head = varint(length) + varint(1)
    return head + bytes(local_part(length)) + struct.pack(">I", following)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 18, 20, 21, 99, 100])
def test_a_file_that_ends_in_its_header_has_no_rows(path: Path, length: int) -> None:
    path.write_bytes(HEADER[:length])
    assert rows(path) == []
    with pytest.raises(NotAnOutbox, match="has no message of an outbox"):
        Outbox(path.with_name("new.db")).salvage(path)


@pytest.mark.parametrize("length", [10**6, 2**31, 2**50, 2**63 - 1])
@pytest.mark.parametrize("following", [3, 2, 1, 0, 4, 2**32 - 1])
def test_a_row_that_goes_on_to_itself_has_an_end(path: Path, length: int, following: int) -> None:
    over = struct.pack(">I", following).ljust(PAGE, b"\0")
    path.write_bytes(FIRST + leaf([goes_on(length, 3)]) + over)
    begun = time.process_time()
    assert rows(path) == []
    assert time.process_time() - begun < 5


def test_rows_that_share_all_pages_cost_no_more_than_the_file(path: Path) -> None:
    """Each of many cells claims the same long chain."""
    count = 500
    chain = [struct.pack(">I", n + 1).ljust(PAGE, b"\0") for n in range(12, 12 + count)]
    cells = leaf([goes_on(count * (PAGE - 4), 12)])
    start = PAGE - len(goes_on(count * (PAGE - 4), 12))
    many = leaf([goes_on(count * (PAGE - 4), 12)], [start] * 2_000)
    path.write_bytes(FIRST + cells + many * 9 + b"".join(chain))
    reads = 0

    class Counting(Pages):
        def _page(self, number: int) -> bytes:
            nonlocal reads
            reads += 1
            return super()._page(number)

    with closing(Counting(path)) as pages:
        assert list(pages.rows()) == []
    assert reads < 6 * (count + 12)


def test_cells_that_lie_over_each_other_are_not_all_decoded(path: Path) -> None:
    """Two thousand pointers to one row of two thousand columns, on each page."""
    record = varint(2_002) + bytes(2_000)
    cell = varint(len(record)) + varint(7) + record
    at = PAGE - len(cell)
    path.write_bytes(FIRST + leaf([cell], [at] * 1_000))
    assert 1 < len(rows(path)) < 12


def test_a_row_of_more_columns_than_any_table_has_is_none(path: Path) -> None:
    for columns, is_one in ((32_767, True), (32_768, False)):
        record = varint(columns + 3) + bytes(columns)
        local = local_part(len(record))
        head = varint(len(record)) + varint(7) + record[:local] + struct.pack(">I", 3)
        rest, number = record[local:], 3
        pages = []
        while rest:
            part, rest = rest[: PAGE - 4], rest[PAGE - 4 :]
            number += 1
            pages.append((struct.pack(">I", number if rest else 0) + part).ljust(PAGE, b"\0"))
        path.write_bytes(FIRST + leaf([head]) + b"".join(pages))
        assert [len(values) for _, values in rows(path)] == [columns] * is_one


def log(frames: list[tuple[int, int, bytes]]) -> bytes:
    """A write-ahead log with checksums that are right."""
    head = struct.pack(">IIIIII", 0x377F0683, 3_007_000, PAGE, 0, 1, 2)
    sums = _checksum(">", head, (0, 0))
    parts = [head, struct.pack(">II", *sums)]
    for number, commit, page in frames:
        numbers = struct.pack(">II", number, commit)
        sums = _checksum(">", page, _checksum(">", numbers, sums))
        parts += [numbers, struct.pack(">IIII", 1, 2, *sums), page]
    return b"".join(parts)


@pytest.mark.parametrize("number", [1, 7, 2**32 - 1])
def test_a_log_that_claims_all_pages_there_can_be_has_its_own(path: Path, number: int) -> None:
    path.write_bytes(FIRST)
    page = leaf([varint(4) + varint(7) + varint(2) + varint(17) + b"ab"])  # one text
    if number == 1:
        page = FIRST
    path.with_name("outbox.db-wal").write_bytes(log([(number, 2**32 - 1, page)]))
    begun = time.process_time()
    assert rows(path) == ([] if number == 1 else [(7, ["ab"])])
    assert time.process_time() - begun < 5


def test_a_log_is_not_held_in_memory(path: Path) -> None:
    path.write_bytes(FIRST)
    data = log([(2, 2, FIRST)])
    with path.with_name("outbox.db-wal").open("wb") as file:
        file.write(data)
        file.truncate(1 << 40)
    path.with_name("outbox.db-wal").chmod(0o600)
    assert rows(path) == []


BAD: dict[str, list[object]] = {
    "stored_at": [-1.0, 1e300, float("inf"), -float("inf"), TIME_MAX * 1.01],
    "due_at": [-1.0, -float("inf"), 1e300],
    "expires_at": [-1.0, float("inf"), 1e300],
    "refused_at": [float("inf")],
    "nacked": [-1, 2**63 - 1, -(2**63), COUNT_MAX + 1],
    "returned": [-1, 2**63 - 1],
    "refused": [-1, 2**63 - 1],
    "uncertain": [-1, 2**63 - 1],
    "size": [-1, 2**63 - 1, -(2**63), SIZE_MAX + 1],
}
OF_PARKED: dict[str, list[object]] = {
    "parked_at": [-1.0, float("inf")],
    "outcome": ["", "x" * 100, "\x1b[2J"],
    "reply_code": [-1, 2**63 - 1],
    "reply_text": ["x" * 10_001],
    "is_skipped": [-1, 2, 2**63 - 1],
}


def cases(*tables: dict[str, list[object]]) -> list[tuple[str, object]]:
    return [(name, value) for table in tables for name, values in table.items() for value in values]


@pytest.fixture
def open_and_parked(path: Path, entry: Make) -> Path:
    with closing(SqliteStore(path)) as store:
        entries = stored(store, entry(), entry(), entry())
        park(store, entries[2], at=9.0)
    return path


def edit(path: Path, table: str, name: str, value: object) -> None:
    sql(path, f"UPDATE reliablepub_{table} SET {name} = ? WHERE id IN (1, 3)", values=(value,))


@pytest.mark.parametrize(
    ("table", "name", "value"),
    [
        *(("messages", *case) for case in cases(BAD)),
        *(
            ("parked", *case)
            for case in cases(BAD, OF_PARKED)
            if case[0] not in ("due_at", "refused_at")
        ),
    ],
)
def test_bookkeeping_that_cannot_be_right_is_made_good_by_salvage(
    open_and_parked: Path, table: str, name: str, value: object
) -> None:
    edit(open_and_parked, table, name, value)
    outbox = Outbox(open_and_parked.with_name("new.db"))
    found = outbox.salvage(open_and_parked)
    assert (found.open, found.parked, found.broken) == (2, 1, ())
    assert outbox.audit().is_right
    if table == "parked":
        assert outbox.retry() == 1
        assert outbox.audit().is_right
        return
    outbox.enqueue(Message(b"x"))
    with closing(SqliteStore(outbox.path)) as store:
        bodies = {e.message.body for e in store.read_ready(1, 9, limit=9, bytes_max=10**9)[0]}
        due, _ = store.read_due(1e11, limit=9, bytes_max=10**9, loaded=())
        assert bodies | {e.message.body for e in due} == {b"body 1", b"body 2", b"x"}


@pytest.mark.parametrize("id_", [-1, 0, ID_MAX + 1, 2**63 - 1])
def test_a_number_after_which_there_are_none_is_not_copied(open_and_parked: Path, id_: int) -> None:
    sql(open_and_parked, "UPDATE reliablepub_messages SET id = ? WHERE id = 1", values=(id_,))
    outbox = Outbox(open_and_parked.with_name("new.db"))
    assert outbox.salvage(open_and_parked).open == 1
    outbox.enqueue(Message(b"x"))


def test_large_bodies_are_salvaged_a_few_at_a_time(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        for _ in range(3):
            store.commit(Changes(new=[entry(body=bytes(9 << 20))]))
    assert Outbox(path.with_name("new.db")).salvage(path).open == 3


KEPT = "3e9 AS kept_until"
ENDLESS = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("sources", f"{ENDLESS} SELECT printf('%d', x) AS name, x AS position FROM n"),
        ("sources", f"{ENDLESS} SELECT 'n' AS name, x AS position FROM n WHERE x < 0"),
        ("sources", f"{ENDLESS} SELECT 'n' AS name, x AS position FROM n ORDER BY x DESC"),
        ("sources", "SELECT printf('%.900000000c', 'n') AS name, 1 AS position"),
        (
            "keys",
            f"{ENDLESS} SELECT printf('%09d', x) AS key, x AS id, 'm' AS message_id, {KEPT} FROM n",
        ),
    ],
)
def test_a_table_that_is_a_view_without_an_end_is_left(
    path: Path, entry: Make, table: str, columns: str
) -> None:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[entry()]))
    sql(path, f"DROP TABLE reliablepub_{table}")
    sql(path, f"CREATE VIEW reliablepub_{table} AS {columns}")
    begun = time.process_time()
    found = Outbox(path.with_name("new.db")).salvage(path)
    assert time.process_time() - begun < 10
    assert (found.open, found.has_sources) == (1, False)
    assert Outbox(path.with_name("new.db")).audit().is_right
    assert path.with_name("new.db").stat().st_size < 16 << 20


# ------------------------------------------------------------------------------------------ import


def line_of(path: Path, id_: int, **changes: object) -> str:
    (line,) = export_lines(outbox_at(path), [id_])
    return json.dumps(json.loads(line) | changes)


def bring(path: Path, line: str) -> str:
    """Why a line is not brought in; what is brought in must do no harm."""
    new = path.with_name("new.db")
    try:
        for _ in import_lines(outbox_at(new), [line], "test"):
            pass
    except BadLine as error:
        return str(error)
    outbox = Outbox(new)
    assert outbox.audit().is_right
    outbox.enqueue(Message(b"x"))
    assert outbox.audit().is_right
    return ""


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_bookkeeping_that_cannot_be_right_is_not_brought_in(
    open_and_parked: Path, name: str, value: object
) -> None:
    words = bring(open_and_parked, line_of(open_and_parked, 1, **{name: value}))
    if isinstance(value, float) and abs(value) == float("inf"):
        assert words.endswith("is not a JSON number)")
    else:
        assert words == f"line 1: {name} is not what `export` writes"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((n, v) for n, v in cases(OF_PARKED) if n != "is_skipped" and v != float("inf")),
        *((n, None) for n in OF_PARKED if n != "is_skipped"),
        ("reply_text", "\ud800"),
        ("reply_text", 7),
        ("outcome", []),
        ("checksum", -2),
        ("checksum", 2**32),
        ("nacked", True),
        ("nacked", 1.0),
        ("message_id", None),
        ("ordering_key", 7),
        ("state", "confirmed"),
        ("state", []),
    ],
)
def test_nor_that_of_a_parked_one(open_and_parked: Path, name: str, value: object) -> None:
    words = bring(open_and_parked, line_of(open_and_parked, 3, **{name: value}))
    assert words.startswith("line 1: ")


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"state":' * 50_000,
        '{"state": ' + "1" * 5_000 + "}",
        '{"state": NaN}',
        '{"state": "\\ud800"}',
        "7",
        "null",
        "[]",
        '"x"',
        "{}",
        "{",
        "\x00",
    ],
    ids=range(12),
)
def test_what_is_no_line_of_ours_is_told_in_one_line(path: Path, line: str) -> None:
    assert bring(path, line).startswith("line 1 is not what `export` writes")


@pytest.mark.parametrize(
    "line",
    ['{"state":[' + "{}," * 1_000_000 + "0]}", "{" + "".join(f'"{n}":1,' for n in range(300_000))],
    ids=["values in a value", "many values"],
)
def test_a_line_takes_no_more_memory_than_its_length(path: Path, line: str) -> None:
    tracemalloc.start()
    try:
        assert "not one flat JSON object" in bring(path, line)
        assert tracemalloc.get_traced_memory()[1] < len(line)
    finally:
        tracemalloc.stop()


def test_a_line_may_have_any_text(path: Path) -> None:
    body = '{"[]}\\"' * 100_000
    message = Message(body.encode(), routing_key='"{[\\]}"', headers={"a": {'"[{': ["\\", {}]}})
    Outbox(path).enqueue(message)
    assert bring(path, line_of(path, 1)) == ""


@pytest.mark.parametrize(
    "name", ["message_id", "exchange", "routing_key", "properties", "ordering_key"]
)
def test_half_a_surrogate_pair_is_no_text(open_and_parked: Path, name: str) -> None:
    words = bring(open_and_parked, line_of(open_and_parked, 1, **{name: "a\ud800"}))
    assert words == "line 1: a text cannot be encoded as UTF-8 (surrogates not allowed)"


def test_a_number_of_any_size_is_refused(open_and_parked: Path) -> None:
    (line,) = export_lines(outbox_at(open_and_parked), [1])
    for name in ("stored_at", "nacked", "size", "checksum"):
        value = json.loads(line)[name]
        huge = line.replace(f'"{name}": {value}', f'"{name}": 1{"0" * 400}')
        assert huge != line
        assert bring(open_and_parked, huge) == f"line 1: {name} is not what `export` writes"
    infinite = line.replace('"stored_at": ', '"stored_at": 1e999, "x": ')
    assert bring(open_and_parked, infinite) == "line 1: stored_at is not what `export` writes"


def test_a_size_is_not_believed(open_and_parked: Path) -> None:
    size = json.loads(line_of(open_and_parked, 1))["size"]
    assert bring(open_and_parked, line_of(open_and_parked, 1, size=SIZE_MAX)) == ""
    query = "SELECT size FROM reliablepub_messages WHERE id = 1"
    assert sql(open_and_parked.with_name("new.db"), query) == [(size,)]


# ------------------------------------------------------------------------------------------- relay


def plant(path: Path, **columns: Any) -> None:
    """A row as an intruder writes it: the checksum fits."""
    fill(path, Message(b"planted", routing_key="all", message_id="m"))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for name, value in columns.items():
            connection.execute(f"UPDATE reliablepub_messages SET {name} = ?", (value,))
        found = connection.execute(
            "SELECT message_id, exchange, routing_key, properties, body FROM reliablepub_messages"
        ).fetchone()
        *texts, body = (v.encode() if isinstance(v, str) else v for v in found)
        checksum = checksum_of((texts[0], texts[1], texts[2], texts[3], None), body)
        connection.execute("UPDATE reliablepub_messages SET checksum = ?", (checksum,))


def nested(depth: int, inside: str = "1") -> str:
    return '{"a":' * depth + inside + "}" * depth


HOSTILE: dict[str, dict[str, object]] = {
    "headers 33 deep": {"properties": f'{{"headers":{nested(33)}}}'},
    "headers 900 deep": {"properties": f'{{"headers":{nested(900)}}}'},
    "tagged headers 900 deep": {"properties": '{"headers":' + nested(900, '{"$bytes":""}') + "}"},
    "tables 900 deep": {"properties": '{"headers":' + '{"$table":' * 900 + "{}" + "}" * 900 + "}"},
    "lists 900 deep": {"properties": '{"headers":{"$a":' + "[" * 900 + "]" * 900 + "}}"},
    "headers 99999 deep": {"properties": f'{{"headers":{nested(99_999)}}}'},
    "a number of 5000 digits": {"properties": '{"headers":{"a":' + "1" * 5_000 + "}}"},
    "a decimal beyond all": {"properties": '{"headers":{"a":{"$decimal":"1e999999999"}}}'},
    "a decimal that is none": {"properties": '{"headers":{"a":{"$decimal":[1]}}}'},
    "a tag that is none": {"properties": '{"headers":{"a":{"$table":7}}}'},
    "headers that are none": {"properties": '{"headers":7}'},
    "a property that is none": {"properties": '{"nonsense":7}'},
    "a body that is a property": {"properties": '{"body":"eA=="}'},
    "a year that is none": {"properties": '{"timestamp":"99999-01-01T00:00:00"}'},
    "a time that is none": {"properties": '{"timestamp":{}}'},
    "infinity": {"properties": '{"headers":{"a":Infinity}}'},
    "half a surrogate pair": {"properties": '{"app_id":"\\ud800"}'},
    "counts of 2^63": {"nacked": 2**63 - 1, "refused": 2**63 - 1},
    "counts below zero": {"uncertain": -1},
    "a time without end": {"stored_at": float("inf")},
    "a time before all": {"stored_at": -float("inf")},
    "a deadline before all": {"expires_at": -float("inf")},
    "a refusal before all": {"refused_at": -float("inf")},
    "an id that is too long": {"message_id": "m" * 300},
}


@pytest.mark.parametrize("columns", HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_sent_is_parked_and_the_relay_goes_on(
    path: Path, columns: dict[str, object]
) -> None:
    plant(path, **columns)
    fill(path, Message(b"fine", routing_key="all"))
    with FakeBroker() as broker:
        broker.declare_queue("all")
        for _ in range(2):
            with Publisher(broker.url, outbox=path) as publisher:
                publisher.publish(b"new", routing_key="all").result(30)
                publisher.flush(30)
        bodies = {bytes(m.body) for m in broker.messages("all")}
    assert bodies - {b"planted"} == {b"fine", b"new"}
    status = Outbox(path).status()
    assert status.open == 0
    assert b"planted" in bodies or status.parked + status.expired == 1, "it may not just go"


INF = float("inf")
EDITED: list[tuple[str, Any]] = [
    *(("size", size) for size in (2**63 - 1, 2**62, SIZE_MAX + 1, -1, -(2**63))),
    *((name, n) for name in ("nacked", "uncertain") for n in (2**63 - 1, 2**31, -1, -(2**63))),
    *(("stored_at", at) for at in (INF, -INF, 1e300, -1.0)),
    *(("due_at", at) for at in (-INF, 1e300, -1e300, TIME_MAX * 2)),
    *((name, at) for name in ("expires_at", "refused_at") for at in (INF, -INF, 1e300, -1.0)),
    *(("id", number) for number in (-5, 0, 2**63 - 1)),
]


def edited(path: Path, table: str, name: str, values: list[Any]) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for id_, value in enumerate(values, 1):
            connection.execute(
                f"UPDATE reliablepub_{table} SET {name} = ? WHERE id = ?", (value, id_)
            )


@pytest.mark.parametrize(("name", "value"), EDITED)
def test_what_was_edited_beside_a_message_is_named_and_parked(
    path: Path, name: str, value: object
) -> None:
    """Two rows, so that sums over them have to hold out too; the second key of a row is its own."""
    with Outbox(path, open_messages_max=9, open_bytes_max=10**6) as outbox:
        for n in range(3):
            outbox.enqueue(Message(b"edited", routing_key="all", message_id=f"m{n}"))
        edited(path, "messages", name, [value] if name == "id" else [value] * 2)
        count = 1 if name == "id" else 2
        outbox.enqueue(Message(b"new", routing_key="all"))
        audit = outbox.audit()
        assert len(audit.damaged) == count
        assert all(name in words for words in audit.damaged.values())
        assert set(audit.differences) <= {"open_bytes"}
        with FakeBroker() as broker:
            broker.declare_queue("all")
            with Publisher(broker.url, outbox=path) as publisher:
                publisher.publish(b"new", routing_key="all").result(30)
                publisher.flush(30)
            arrived = [bytes(m.body) for m in broker.messages("all")]
        assert sorted(arrived) == [b"edited"] * (3 - count) + [b"new"] * 2
        status = outbox.status()
        assert (status.open, status.parked) == (0, count)
        assert set(outbox.audit().differences) == set()
        reasons = [message.reply_text for message in outbox.parked()]
        assert all("not a value that this library writes" in reason for reason in reasons)
        outbox.enqueue(Message(b"new", routing_key="all"))
        assert outbox.audit().differences == {}
        due = 0 if name == "id" else count  # a row whose id no row can have stays where it is
        assert outbox.retry(audit.damaged) == due
        assert outbox.status().open == 1 + due


@pytest.mark.parametrize(
    ("name", "value"), [e for e in EDITED if e[0] not in ("due_at", "refused_at")]
)
def test_so_is_what_was_edited_beside_a_parked_one(
    open_and_parked: Path, name: str, value: Any
) -> None:
    with Outbox(open_and_parked) as outbox:
        [parked] = [message.id for message in outbox.parked()]
        sql(open_and_parked, f"UPDATE reliablepub_parked SET {name} = ?", values=(value,))
        number = value if name == "id" else parked
        assert [*outbox.audit().damaged] == [number]
        outbox.retry([number])
        outbox.enqueue(Message(b"new", routing_key="all"))
        assert outbox.audit().damaged.keys() <= {number}


@pytest.mark.parametrize("size", [0, 3, SIZE_MAX])
def test_a_size_that_might_be_never_stops_the_relay(path: Path, size: int) -> None:
    """It is not known to be wrong; what it did to the ledger, an audit says."""
    with Outbox(path) as outbox:
        for n in range(3):
            outbox.enqueue(Message(b"edited", routing_key="all", message_id=f"m{n}"))
        edited(path, "messages", "size", [size] * 3)
        assert outbox.audit().differences
        with FakeBroker() as broker:
            broker.declare_queue("all")
            with Publisher(broker.url, outbox=path) as publisher:
                publisher.flush(30)
            assert len(broker.messages("all")) == 3
        assert outbox.status().open == 0


@pytest.mark.parametrize("is_theirs", [False, True])
def test_nothing_is_stored_without_a_ledger_to_count_it(path: Path, *, is_theirs: bool) -> None:
    outbox = Outbox(path)
    outbox.enqueue(Message(b"a", routing_key="q"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM reliablepub_ledger")
        connection.commit()
        with pytest.raises(OutboxError, match="its ledger has no row, so nothing was stored"):
            outbox.enqueue(
                Message(b"b", routing_key="q"), connection=connection if is_theirs else None
            )
        assert not connection.in_transaction
        found = connection.execute("SELECT body FROM reliablepub_messages").fetchall()
    assert found == [(b"a",)]


@pytest.mark.parametrize("seconds", [float("inf"), -float("inf"), float("nan"), 1e300, 1e12])
def test_a_time_of_any_kind_can_be_shown(seconds: float) -> None:
    assert age(seconds) == "ages"
    assert "ages" in ago(seconds, 0.0)


def test_what_the_store_writes_fits(open_and_parked: Path) -> None:
    with closing(sqlite3.connect(open_and_parked)) as connection:
        connection.row_factory = sqlite3.Row
        for table in ("messages", "parked"):
            for row in connection.execute(f"SELECT * FROM reliablepub_{table}"):
                assert list(misfits(dict(row))) == []
