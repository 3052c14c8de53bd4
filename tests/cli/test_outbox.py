"""`reliablepub outbox`: looking changes nothing, and parking can be undone."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from reliablepub import Message, Publisher, RetryPolicy, Unroutable
from reliablepub.errors import OutboxDiskFull
from reliablepub.outbox.sqlite.space import PAGE_BYTES
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.conftest import Run, parsed, refused
from tests.sqlite import overwrite, sql

EVERY_COMMAND = [
    *(("status",), ("list",), ("show", "1"), ("explain", "1"), ("in-flight",), ("duplicates",)),
    *(("stats",), ("keys",), ("export",), ("audit",)),
    *(("retry", "1"), ("park", "1"), ("discard", "1", "--yes")),
    ("reroute", "1", "--to-exchange", "x"),
]
EQUATION = ("open", "confirmed", "parked", "expired", "discarded")


@pytest.fixture
def outbox(path: Path, fake: FakeBroker) -> Path:
    """Two confirmed, two parked, one open."""
    with Publisher(fake.url, outbox=path, retry=RetryPolicy.prompt()) as publisher:
        for _ in range(2):
            publisher.publish(b"secret", routing_key="all").result(60)
        for _ in range(2):
            with pytest.raises(Unroutable):
                publisher.publish(b"secret", routing_key="nowhere").result(60)
    fill(path, Message(b"secret", routing_key="all"))
    return path


def test_status_adds_up(run: Run, outbox: Path) -> None:
    status = parsed(run("status", "--json"))
    assert status["stored"] == sum(status[name] for name in EQUATION) == 5
    assert (status["open"], status["confirmed"], status["parked"]) == (1, 2, 2)
    assert (status["in_flight"], status["relay_pid"]) == (0, None)
    assert 0 <= status["oldest_open_age_s"] < 60
    assert status["bytes_on_disk"] > 0


def test_status_names_the_relay(run: Run, outbox: Path, fake: FakeBroker) -> None:
    with Publisher(fake.url, outbox=outbox):
        assert "relay        process " in run("status").stdout


def test_status_for_people_is_a_table(run: Run, outbox: Path) -> None:
    lines = run("status").stdout.splitlines()
    assert lines[0].split() == ["stored", "5"]
    assert any(line.startswith("oldest open  0 s old") for line in lines)


def test_parking_is_undone(run: Run, outbox: Path) -> None:
    def parked() -> list[int]:
        listed = run("list", "--state", "parked", "--json")
        return [message["id"] for message in parsed(listed)]

    first, second = parked()
    assert run("retry", first).stdout == "1 message put back\n"
    assert parked() == [second]
    assert run("retry", "--all", "--yes").stdout == "1 message put back\n"
    assert parked() == []
    status = parsed(run("status", "--json"))
    assert (status["open"], status["parked"]) == (3, 0)


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_a_missing_outbox_is_not_created_and_a_text_file_is_none(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    refused(run(*command, "--outbox", tmp_path / "o.db"), "Error: there is no outbox ", code=4)
    assert list(tmp_path.iterdir()) == []
    text = tmp_path / "notes.txt"
    text.write_text("dear diary\n" * 100)
    assert refused(run(*command, "--outbox", text), code=4).stderr.count("\n") == 1
    assert text.read_text() == "dear diary\n" * 100


def test_an_audit_says_by_its_exit_code_whether_it_adds_up(run: Run, outbox: Path) -> None:
    assert parsed(run("audit", "--json"))["is_right"] is True
    result = run("audit")
    assert (result.exit_code, result.stdout) == (0, "everything adds up; 3 messages compared\n")
    sql(
        outbox,
        "DELETE FROM reliablepub_parked WHERE id = 3",
        "UPDATE reliablepub_parked SET body = x'00'",
    )
    refused(
        run("audit"),
        "the ledger counts +1 parked against the rows",
        "message 4: the checksum is",
        code=4,
    )
    as_json = run("audit", "--json")
    assert as_json.exit_code == 4
    assert json.loads(as_json.stdout)["differences"] == {"parked": 1}


def test_a_damaged_outbox_is_rescued(run: Run, outbox: Path, tmp_path: Path) -> None:
    overwrite(outbox, 100, bytes(PAGE_BYTES - 100))  # where each table is
    refused(run("audit"), "reliablepub outbox salvage", code=4)
    result = run("salvage", outbox, tmp_path / "new.db")
    assert result.exit_code == 0
    assert "1 open message and 2 parked messages copied" in result.stdout
    assert run("audit", "--outbox", tmp_path / "new.db").exit_code == 0
    refused(run("salvage", outbox, tmp_path / "new.db"), "exists already", code=4)


def test_a_file_that_is_no_outbox_is_not_rescued(run: Run, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("not an outbox")
    result = run("salvage", notes, tmp_path / "new.db")
    assert (result.exit_code, result.stdout) == (4, "")
    assert "nothing was copied; name the file of the outbox" in result.stderr
    assert not (tmp_path / "new.db").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OutboxDiskFull("the disk is full")])
def test_a_copy_that_is_not_complete_is_not_taken_for_one(
    run: Run, outbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    new = tmp_path / "new.db"
    with monkeypatch.context() as patched:
        patched.setattr("reliablepub.outbox.sqlite.salvage._copy_sources", Mock(side_effect=error))
        result = run("salvage", outbox, new)
    assert result.exit_code == (3 if error is KeyboardInterrupt else 4)
    assert f"{new} is incomplete: delete it, and try again\n" in result.stderr
    again = run("salvage", outbox, new)
    assert "exists already" in again.stderr
    assert "is incomplete" not in again.stderr


def test_what_the_disk_cannot_read_is_listed(
    run: Run, outbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.outbox.sqlite.salvage.Pages.unreadable", ("page 7",))
    refused(
        run("salvage", outbox, tmp_path / "new.db"),
        "page 7 cannot be read from the disk: messages in it may be missing",
        code=1,
    )
    as_json = run("salvage", outbox, tmp_path / "newer.db", "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)["unreadable"]) == (1, ["page 7"])


def test_what_cannot_be_rescued_is_listed(run: Run, outbox: Path, tmp_path: Path) -> None:
    sql(outbox, "UPDATE reliablepub_parked SET body = x'00' WHERE id = 3")
    result = refused(run("salvage", outbox, tmp_path / "new.db"), "message 3 (", code=1)
    assert "1 open message and 1 parked message copied" in result.stdout


def test_a_held_key_is_listed_and_let_go(run: Run, path: Path, fake: FakeBroker) -> None:
    with Publisher(fake.url, outbox=path, retry=RetryPolicy.prompt()) as publisher:
        first = publisher.publish(b"", routing_key="nowhere", ordering_key="k", message_id="m-1")
        publisher.publish(b"", routing_key="all", ordering_key="k")
        with pytest.raises(Unroutable):
            first.result(60)
    assert parsed(run("status", "--json"))["held_keys"] == 1
    [key] = parsed(run("keys", "--json"))
    assert (key["ordering_key"], key["message_id"], key["held_back"]) == ("k", "m-1", 1)
    listed = run("keys").stdout
    title, row = listed.splitlines()
    assert re.match(r"key +holds back +id +since ", title)
    assert re.fullmatch(r"k +1 +1 +.* ago .*m-1 +returned: 312 NO_ROUTE", row)
    assert run("keys", "--skip", "other").exit_code == 2
    assert run("keys", "--skip", "k", "--resume", "k").exit_code == 2
    nothing = run("keys", "--resume", "other", "--json")
    assert (nothing.exit_code, json.loads(nothing.stdout)) == (
        2,
        {"action": "resume", "changed": 0},
    )
    assert "1 message skipped" in run("keys", "--skip", "k").stdout
    assert "no key is held" in run("keys").stdout
    with Publisher(fake.url, outbox=path) as publisher:
        assert publisher.flush(60).open == 0
