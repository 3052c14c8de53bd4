"""Columns with values of another type, as a flipped bit in the head of a row makes them."""

import json
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner, Result

from reliablepub import Message, Outbox
from reliablepub.cli import main
from tests.sqlite import sql

TABLES = {
    "reliablepub_messages": ("size", "returned", "due_at", "stored_at", "properties", "body"),
    "reliablepub_parked": ("state", "parked_at", "reply_code", "reply_text", "message_id"),
    "reliablepub_attempts": ("at", "tag", "persistence", "outcome", "reply_text"),
    "reliablepub_interventions": ("at", "action", "person", "note"),
}
COMMANDS = ("show 1", "show 2", "explain 1", "explain 2", "list --exchange e*", "duplicates")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Message 1 is open, 2 is parked; both have a history, and no table is STRICT."""
    path = tmp_path_factory.mktemp("whole") / "o.db"
    with Outbox(path) as outbox:
        for _ in range(2):
            outbox.enqueue(Message(b"{}", "e", "q", headers={"a": 1}))
    for arguments in ("park 1 2", "retry 1"):
        invoke(path, f"outbox {arguments}")
    sql(
        path,
        "INSERT INTO reliablepub_attempts SELECT id, id, 'm', 9.0, '1-1', 1, 'uncertain', 0, '', "
        "'possibly persisted' FROM (SELECT 1 AS id UNION SELECT 2)",
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_schema SET sql = replace(sql, ') STRICT', ')')",
    )
    return path


def invoke(path: Path, line: str) -> Result:
    result = CliRunner().invoke(main, [*line.split(), "--outbox", str(path)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def no_json(constant: str) -> NoReturn:
    pytest.fail(f"{constant} is not JSON")


@pytest.mark.parametrize("value", ["x'ff00'", "'text'", "9e999", "x''"])
@pytest.mark.parametrize(("table", "column"), [(t, c) for t in TABLES for c in TABLES[t]])
def test_they_are_shown_as_far_as_they_can_be_read(
    whole: Path, tmp_path: Path, table: str, column: str, value: str
) -> None:
    path = tmp_path / "o.db"
    path.write_bytes(whole.read_bytes())
    sql(path, "PRAGMA ignore_check_constraints = ON", f"UPDATE {table} SET {column} = {value}")
    for command in COMMANDS:
        assert invoke(path, f"outbox {command}").exit_code == 0
        out = invoke(path, f"outbox {command} --json").stdout
        json.loads(out, parse_constant=no_json)
