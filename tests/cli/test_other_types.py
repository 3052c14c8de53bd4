"""Columns with values of another type, as a flipped bit in the head of a row makes them."""

import json
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner, Result

from reliablepub import Message, Outbox
from reliablepub.cli import main
from tests.asking import fill
from tests.sqlite import sql

TABLES = {
    "reliablepub_messages": ("size", "returned", "due_at", "stored_at", "properties", "body"),
    "reliablepub_parked": ("state", "parked_at", "reply_code", "reply_text", "message_id"),
    "reliablepub_attempts": ("at", "tag", "persistence", "outcome", "reply_text"),
    "reliablepub_interventions": ("at", "action", "person", "note"),
}
LOOKS = (
    *("outbox status --over 0", "outbox metrics", "outbox stats", "outbox schedule"),
    *("outbox keys", "outbox in-flight", "watch --count 1", "doctor"),
)
COMMANDS = (
    *("show 1", "show 2", "explain 1", "explain 2", "duplicates"),
    *("list --exchange e*", "list --sort size", "list --sort attempts"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Message 1 is open, 2 is parked; both have a history, and no table is STRICT."""
    path = tmp_path_factory.mktemp("whole") / "o.db"
    fill(path, *[Message(b"{}", "e", "q", headers={"a": 1})] * 2)
    for arguments in ("park 1 2", "retry 1"):
        invoke(path, f"outbox {arguments}")
    sql(
        path,
        "INSERT INTO reliablepub_attempts SELECT id, id, 'm', 9.0, '1-1', 1, 'uncertain', 0, '', "
        "'possibly persisted' FROM (SELECT 1 AS id UNION SELECT 2)",
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_schema SET sql = replace(replace(sql, ') STRICT', ')'), ' NOT NULL', '') "
        "WHERE type = 'table'",
    )
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A copy of that outbox, for one test."""
    path = tmp_path / "o.db"
    path.write_bytes(whole.read_bytes())
    return path


def invoke(path: Path, line: str) -> Result:
    result = CliRunner().invoke(main, [*line.split(), "--outbox", str(path)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def no_json(constant: str) -> NoReturn:
    pytest.fail(f"{constant} is not JSON")


VALUES = ("x'ff00'", "'text'", "9e999", "NULL")


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("table", "column"), [(t, c) for t in TABLES for c in TABLES[t]])
def test_they_are_shown_as_far_as_they_can_be_read(
    path: Path, table: str, column: str, value: str
) -> None:
    sql(path, "PRAGMA ignore_check_constraints = ON", f"UPDATE {table} SET {column} = {value}")
    for command in COMMANDS:
        assert invoke(path, f"outbox {command}").exit_code == 0
        out = invoke(path, f"outbox {command} --json").stdout
        json.loads(out, parse_constant=no_json)
    for command in LOOKS:
        assert invoke(path, command).exit_code in {0, 4}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("table", "column"), [(t, c) for t in list(TABLES)[:2] for c in TABLES[t]])
def test_they_are_left_alone_and_the_others_changed(
    path: Path, table: str, column: str, value: str
) -> None:
    sql(path, "PRAGMA ignore_check_constraints = ON", f"UPDATE {table} SET {column} = {value}")
    with Outbox(path) as outbox:
        id_ = outbox.enqueue(Message(b"{}", "e", "q"))
    for command in ("retry 2", f"reroute 1 2 {id_} --to-exchange x"):
        for options in (" --dry-run", ""):
            assert invoke(path, f"outbox {command}{options}").exit_code in {0, 2}
    assert json.loads(invoke(path, f"outbox show {id_} --json").stdout)["exchange"] == "x"


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("column", ["size", "body", "properties", "uncertain", "checksum"])
def test_they_can_be_discarded_and_are_not_exported(path: Path, column: str, value: str) -> None:
    sql(path, f"UPDATE reliablepub_messages SET {column} = {value}")
    result = invoke(path, "outbox export")
    assert result.exit_code in {0, 4}
    for line in result.stdout.splitlines():
        json.loads(line, parse_constant=no_json)
    assert invoke(path, "outbox audit").exit_code == 4
    assert invoke(path, "outbox discard 1 --yes").exit_code == 0
    assert invoke(path, "outbox explain 1").stdout.startswith("message 1")


def test_they_are_not_retried_and_the_others_are(path: Path) -> None:
    assert invoke(path, "outbox park 1").exit_code == 0
    sql(path, "UPDATE reliablepub_parked SET size = x'31' WHERE id = 2")
    result = invoke(path, "outbox retry --all --yes")
    assert (result.exit_code, result.stdout) == (2, "1 message put back\n")
    assert result.stderr == "Error: message 2 left alone: damaged\n"


@pytest.mark.parametrize("value", VALUES)
def test_a_ledger_that_is_no_number_is_damage(path: Path, value: str) -> None:
    pragma = "PRAGMA ignore_check_constraints = ON"
    sql(path, pragma, f"UPDATE reliablepub_ledger SET confirmed = {value}")
    for command in ("outbox status --over 0", "watch --count 1", "doctor"):
        result = invoke(path, command)
        assert (result.exit_code, "ledger of outbox" in result.output) == (4, True)
    assert invoke(path, "outbox metrics").exit_code == 4
