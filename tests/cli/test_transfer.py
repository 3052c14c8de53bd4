"""Messages leave an outbox as lines, and come into another one unchanged."""

import errno
import gzip
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from reliablepub import Message, Outbox
from reliablepub.cli import main
from reliablepub.outbox.admin import transfer
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Changes, Entry
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.asking import fill
from tests.cli.conftest import Cli, refused
from tests.cli.trouble import make_trouble
from tests.sqlite import sql


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with closing(make_trouble(tmp_path / "o.db")) as store:
        mended = "UPDATE reliablepub_messages SET body = CAST('body 9' AS BLOB) WHERE id = 9"
        sql(store.path, mended)
        yield store.path


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Where another outbox is to be."""
    return tmp_path / "new.db"


def run(*arguments: object, **settings: Any) -> Result:
    return CliRunner().invoke(main, ["outbox", *map(str, arguments)], **settings)


def rows(path: Path) -> list[Any]:
    """Everything but the numbers of the rows."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        found = []
        for table in ("messages", "parked"):
            for row in connection.execute(f"SELECT * FROM reliablepub_{table} ORDER BY message_id"):
                values = dict(row)
                del values["id"]
                found.append(values)
        return found


@pytest.fixture
def lines(path: Path, tmp_path: Path) -> Path:
    target = tmp_path / "all.ndjson"
    result = run("export", "--to", target, "--outbox", path)
    assert (result.exit_code, result.stderr) == (0, f"8 messages written to {target}\n")
    assert target.stat().st_mode & 0o777 == 0o600
    return target


def test_a_pipe_is_read_once(path: Path, lines: Path, new: Path) -> None:
    """Such as /dev/stdin, which cannot be read from its beginning again."""
    reading, writing = os.pipe()
    os.write(writing, lines.read_bytes())
    os.close(writing)
    assert run("import", f"/dev/fd/{reading}", "--outbox", new).stdout == "8 messages stored\n"
    os.close(reading)
    assert len(rows(new)) == 8


def test_a_round_trip_changes_nothing(path: Path, lines: Path, new: Path) -> None:
    assert run("import", lines, "--outbox", new).stdout == "8 messages stored\n"
    sent = [row | {"uncertain": row["message_id"] == "m-6"} for row in rows(path)]
    assert rows(new) == sent, "what is on the wire may have arrived"
    assert run("audit", "--outbox", new).exit_code == 0
    again = run("export", "--outbox", new).stdout
    assert sorted(again.splitlines()) == sorted(lines.read_text().splitlines())


def test_a_key_that_was_skipped_is_not_held_again(tmp_path: Path) -> None:
    path, new = tmp_path / "o.db", tmp_path / "new.db"
    fill(path, *(Message(b"", ordering_key=key) for key in ("skipped", "held")))
    run("park", 1, 2, "--outbox", path)
    run("keys", "--skip", "skipped", "--outbox", path)
    text = run("export", "--outbox", path).stdout
    run("import", "-", "--outbox", new, input=text)
    assert [key.ordering_key for key in Outbox(new).held_keys()] == ["held"]
    without = [json.loads(line) for line in text.splitlines()]
    for line in without:
        del line["is_skipped"]
    before = tmp_path / "before.db"
    run("import", "-", "--outbox", before, input="\n".join(map(json.dumps, without)))
    assert len(Outbox(before).held_keys()) == 2


@pytest.mark.parametrize("names", [(), (3, 1, 2)])
def test_a_parked_message_holds_its_key_after_an_import(
    tmp_path: Path, names: tuple[int, ...]
) -> None:
    path, new = tmp_path / "o.db", tmp_path / "new.db"
    fill(path, *[Message(b"", ordering_key="k")] * 3)
    run("park", 1, "--outbox", path)
    text = run("export", *names, "--outbox", path).stdout
    run("import", "-", "--outbox", new, input=text)
    for each in (path, new):
        (held,) = Outbox(each).held_keys()
        assert (held.id, held.held_back) == (1, 2)


def test_importing_again_does_nothing(path: Path, lines: Path, new: Path) -> None:
    run("import", lines, "--outbox", new)
    again = run("import", lines, "--outbox", new)
    assert again.stdout == "0 messages stored; 8 were there already, or imported before\n"
    run("discard", "--all", "--yes", "--outbox", new)
    third = run("import", "-", "--outbox", new, "--json", input=lines.read_bytes())
    assert json.loads(third.stdout) == {"stored": 0, "known": 8}
    assert run("import", lines, "--outbox", path).stdout.startswith("0 messages stored; 8 were")


def test_what_was_discarded_again_is_imported_with_an_empty_line(path: Path, lines: Path) -> None:
    for discarding in range(2):
        run("discard", "--state", "expired", "--yes", "--outbox", path)
        stored = run("import", lines, "--outbox", path).stdout
        assert stored.startswith(f"{1 - discarding} message"), "a file is imported once"
    with lines.open("a") as file:
        file.write("\n")
    assert run("import", lines, "--outbox", path).stdout.startswith("1 message stored; 7 were")


def test_an_import_that_was_interrupted_goes_on(
    lines: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 3)
    text = lines.read_text().splitlines()
    begun = transfer.import_lines(outbox_at(new), text, "import x")
    assert next(begun).stored == 3
    begun.close()
    *_, last = transfer.import_lines(outbox_at(new), text, "import x")
    assert (last.stored, last.known) == (5, 3)
    assert len(rows(new)) == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row | {"routing_key": "other"}, "line 2: the checksum is"),
        (lambda row: row | {"body_base64": "???"}, "line 2 is not what `export` writes"),
        (lambda row: row | {"size": "1"}, "line 2: size is not what `export` writes"),
        (lambda row: row | {"state": "lost"}, "line 2: there is no state 'lost'"),
        (lambda row: {"a": 1}, "line 2 is not what `export` writes ('state')"),
        (lambda row: [row], "line 2 is not what `export` writes (list indices must be"),
        (lambda row: row | {"body_base64": None}, "line 2 is not what `export` writes (argument"),
        (lambda row: row | {"nacked": True}, "line 2: nacked is not what `export` writes"),
        (lambda row: row | {"due_at": "1"}, "line 2: due_at is not what `export` writes"),
        (lambda row: row | {"ordering_key": "k"}, "line 2: the checksum is"),
    ],
)
def test_a_line_that_was_changed_is_refused(
    lines: Path, tmp_path: Path, change: Callable[[Any], Any], words: str
) -> None:
    text = lines.read_text().splitlines()
    text[1] = json.dumps(change(json.loads(text[1])))
    result = run("import", "-", "--outbox", tmp_path / "new.db", input="\n".join(text))
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_lines_before_a_bad_one_are_stored(lines: Path, new: Path) -> None:
    text = lines.read_text().splitlines()
    cut = "\n".join([*text[:5], text[5][:50], *text[6:]])
    result = run("import", "-", "--outbox", new, input=cut)
    assert "line 6 is not what `export` writes" in result.stderr
    assert result.stderr.endswith("; the lines before it are stored\n")
    assert len(rows(new)) == 5
    assert run("import", lines, "--outbox", new).stdout == (
        "3 messages stored; 5 were there already, or imported before\n"
    )


def test_a_message_that_comes_twice_in_a_file_is_stored_once(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the exports of two states are put together."""
    text = lines.read_text()
    for chunk in (500, 3):
        monkeypatch.setattr(transfer, "CHUNK", chunk)
        new = tmp_path / f"{chunk}.db"
        result = run("import", "-", "--outbox", new, input=text + text)
        assert result.stdout == "8 messages stored; 8 were there already, or imported before\n"
        assert len(rows(new)) == 8


def test_messages_of_one_batch_under_one_id_are_told_apart(tmp_path: Path) -> None:
    path, new = tmp_path / "o.db", tmp_path / "new.db"
    entries = [Entry(Message(body, "x", "old", message_id="m"), 1.0) for body in (b"a", b"b")]
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=entries))
    text = run("export", "--outbox", path).stdout
    first, _ = text.splitlines(keepends=True)
    for source, count in ((first, 1), (text, 2)):
        run("import", "-", "--outbox", new, input=source)
        assert len(rows(new)) == count


@pytest.mark.parametrize("change", ["reroute", "rekey"])
def test_what_was_changed_since_its_export_is_stored_again(tmp_path: Path, change: str) -> None:
    """As the help of `import` says."""
    path, keys = tmp_path / "o.db", tmp_path / "keys"
    keys.write_text(f"one {bytes(32).hex()}")
    keys.chmod(0o600)
    fill(path, Message(b"", "x", "old"))
    text = run("export", "--outbox", path).stdout
    if change == "reroute":
        done = run("reroute", 1, "--to-routing-key", "new", "--outbox", path)
    else:
        done = run("rekey", "--accept-plaintext", "--outbox-keys", keys, "--outbox", path)
    assert done.exit_code == 0, done.stderr
    assert run("import", "-", "--outbox", path, input=text).stdout == "1 message stored\n"


def test_two_imports_of_the_same_lines_at_once_store_them_once(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, text = tmp_path / "new.db", lines.read_text().splitlines()
    Outbox(new).create()
    monkeypatch.setattr(transfer, "CHUNK", 3)
    slow = transfer.import_lines(outbox_at(new), text, "import x")
    assert next(slow).stored == 3
    *_, fast = transfer.import_lines(outbox_at(new), text[:5], "import x")
    assert (fast.stored, fast.known) == (2, 3)
    *_, last = slow
    assert (last.stored, last.known) == (6, 2)
    assert len(rows(new)) == 8
    *_, again = transfer.import_lines(outbox_at(new), text, "import x")
    assert (again.stored, again.known) == (0, 8)


def test_lines_that_are_blank_are_counted_and_skipped(lines: Path, new: Path) -> None:
    first, second, *_ = lines.read_text().splitlines()
    (brought,) = transfer.import_lines(outbox_at(new), [first, "", " \n", second], "x")
    assert (brought.stored, brought.known) == (2, 0)
    with pytest.raises(transfer.BadLine, match=r"^line 4 is not what"):
        list(transfer.import_lines(outbox_at(new), ["", first, "\n", "{"], "y"))


def test_each_piece_is_told_as_soon_as_it_is_stored(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 3)
    new, text = tmp_path / "new.db", lines.read_text().splitlines()
    told = [
        (b.stored, b.known, len(rows(new)))
        for b in transfer.import_lines(outbox_at(new), text[:6], "x")
    ]
    assert told == [(3, 0, 3), (6, 0, 6), (6, 0, 6)]
    told = [
        (b.stored, b.known, len(rows(new)))
        for b in transfer.import_lines(outbox_at(new), text, "y")
    ]
    assert told == [(0, 3, 6), (0, 6, 6), (2, 6, 8)], "known by what they are"
    other = tmp_path / "other.db"
    *_, brought = transfer.import_lines(outbox_at(other), text[1::2], "x")
    *_, brought = transfer.import_lines(outbox_at(other), text, "y")
    assert (brought.stored, brought.known) == (4, 4)


def test_long_lines_are_stored_in_small_pieces(
    lines: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 messages of 16 MiB would take 8 GiB of memory."""
    text = lines.read_text().splitlines()[:4]
    monkeypatch.setattr(transfer, "_PIECE_CHARS", 1)
    told = [brought.stored for brought in transfer.import_lines(outbox_at(new), text, "x")]
    assert told == [1, 2, 3, 4, 4]
    assert len(rows(new)) == 4


def test_lines_are_written_for_people_too(tmp_path: Path) -> None:
    path = tmp_path / "o.db"
    fill(path, *(Message(b"\xff\x00", "orders", key) for key in ("é", "gone", "x")))
    sql(path, "DELETE FROM reliablepub_messages WHERE id = 2")
    first, last = transfer.export_lines(outbox_at(path), [1, 2, 3])
    assert '"routing_key": "é"' in first
    assert json.loads(first)["body_base64"] == "/wA="
    assert json.loads(last)["routing_key"] == "x"


def test_what_is_exported_can_be_chosen(path: Path) -> None:
    chosen = run("export", "m-7", 3, "--outbox", path).stdout.splitlines()
    assert [json.loads(line)["message_id"] for line in chosen] == ["m-3", "m-7"]
    parked = run("export", "--state", "parked", "--outbox", path).stdout.splitlines()
    assert [json.loads(line)["message_id"] for line in parked] == ["m-3", "m-4"]
    assert run("export", 3, "--state", "parked", "--outbox", path).exit_code == 2
    assert run("export", "--to", path, "--outbox", path).exit_code == 2


def test_no_transaction_is_open_while_a_line_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pager that waits for its reader would keep SQLite's log from being reset."""
    monkeypatch.setattr(transfer, "CHUNK", 3)
    found, gone = [], list[int]()
    for line in transfer.export_lines(outbox_at(path), range(1, 12), [], gone):
        found.append(json.loads(line)["message_id"])
        [(is_busy, *_)] = sql(path, "PRAGMA wal_checkpoint(TRUNCATE)")
        assert not is_busy
    assert found == [f"m-{n}" for n in range(3, 11)]
    assert gone == [1, 2, 11]
    for chars in (1, 2_000):
        monkeypatch.setattr(transfer, "_PIECE_CHARS", chars)
        assert len(list(transfer.export_lines(outbox_at(path), range(1, 12)))) == 8


def test_a_message_that_an_id_names_and_that_is_gone_is_an_error(
    path: Path, tmp_path: Path
) -> None:
    run("discard", 3, "--yes", "--outbox", path)
    target = tmp_path / "some.ndjson"
    for to in ((), ("--to", target)):
        refused(
            run("export", 4, 3, *to, "--outbox", path),
            f"Error: message 3 left out: no longer in {path}\n",
        )
    assert len(target.read_text().splitlines()) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left")])
def test_no_part_of_a_file_is_left(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    """It could be taken for the whole, and the messages be discarded."""
    target = tmp_path / "all.ndjson"
    lines = transfer.export_lines

    def interrupted(*arguments: Any) -> Iterator[str]:
        yield from list(lines(*arguments))[:3]
        raise error

    monkeypatch.setattr("reliablepub.cli.outbox.transfer.export_lines", interrupted)
    result = run("export", "--to", target, "--outbox", path)
    words = "interrupted" if error is KeyboardInterrupt else f"cannot write {target}: No space left"
    assert result.exit_code == (3 if error is KeyboardInterrupt else 2)
    assert result.stderr.strip() == f"Error: {words}"
    assert not list(tmp_path.glob("all.ndjson*"))


def test_encrypted_messages_are_left_out_and_that_is_said(tmp_path: Path, new: Path) -> None:
    path = tmp_path / "sealed.db"
    fill(path, Message(b"plain", "orders", "key"))
    fill(path, Message(b"secret", "orders", "key"), keys=OutboxKeys({"one": bytes(32)}))
    target = tmp_path / "all.ndjson"
    for to in ((), ("--to", target)):
        refused(
            run("export", *to, "--outbox", path),
            "1 message left out: encrypted",
            "no other outbox can import them",
        )
    assert len(target.read_text().splitlines()) == 1
    assert run("import", target, "--outbox", new).stdout == "1 message stored\n"


def test_compressed_lines_are_recognized(lines: Path, tmp_path: Path) -> None:
    packed = tmp_path / "all.ndjson.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    refused(
        run("import", packed, "--outbox", tmp_path / "new.db"),
        "the input is compressed: pipe it through zcat, and read `-`",
    )


def test_a_line_that_is_not_utf_8_is_named(cli: Cli) -> None:
    file = cli.folder / "lines"
    file.write_bytes(b"\n\xff\n")
    assert cli("outbox", "import", file, "--outbox", "new.db").error == (
        "line 2 is not UTF-8 (byte 1); the lines before it are stored"
    )
