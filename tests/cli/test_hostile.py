"""Publishers and the broker choose texts that operators read: none acts on a terminal."""

import csv
import io
import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from reliablepub import Message, Outbox, Publisher, PublishError, RetryPolicy
from reliablepub.cli import main
from reliablepub.cli.watch.lookout import look
from reliablepub.cli.watch.page import page_of
from reliablepub.cli.watch.screen import draw
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.conftest import Run

EVIL = "\x1b[2J\x1b]0;owned\x07\x00\x9b1m\r\n\u202eevil\u2028"
NOTE = EVIL.replace("\x00", "")
"""With U+0000 it is refused, since PostgreSQL cannot store it."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "o.db"
    refused = Outcome(OutcomeKind.REFUSED, 404, f"NOT_FOUND {EVIL}")
    with closing(SqliteStore(path)) as store:
        entries = [
            Entry(
                Message(
                    f"body {EVIL}".encode(),
                    f"e{EVIL}",
                    f"k{EVIL}",
                    message_id=f"{start}{EVIL}{n}",
                    headers={f"h{EVIL}": EVIL},
                    app_id=EVIL,
                    content_type="text/plain",
                    ordering_key=f"o{EVIL}{n // 2}",
                ),
                stored_at=1000.0 + n,
            )
            for n, start in enumerate(("=1+1", "+1", "-1", "@SUM(A1)", "m", "m"))
        ]
        store.commit(Changes(new=entries))
        ended = [Attempt(entry, "1-1", n, refused, 2000.0) for n, entry in enumerate(entries[:5])]
        store.commit(Changes(parked=ended[:4], attempts=ended, rescheduled=[entries[4]]))
    fill(path, Message(b"ok\rgone\r\n\tx", content_type="text/plain"))
    intervene(
        outbox_at(path), [5], Intervention(Action.RETRY, note=f"why {NOTE}", person=f"me{NOTE}")
    )
    return path


@pytest.fixture
def run(path: Path) -> Run:
    def invoke(*arguments: object, **settings: Any) -> Result:
        return CliRunner().invoke(main, [*map(str, arguments), "--outbox", str(path)], **settings)

    return invoke


def message_ids(path: Path) -> list[str]:
    return [str(row["message_id"]) for v in ("open", "parked") for row in Outbox(path).rows(v)]


def assert_harmless(text: str) -> None:
    for line in text.split("\n"):
        for char in line:
            assert char.isprintable() or char in "\t\u3000", repr(line)


@pytest.mark.parametrize(
    "command",
    [
        *("list", "list --csv", "list --json", "keys", "keys --csv"),
        *("stats", "stats --csv", "stats --exchange e*", "status", "check", "audit"),
        *("in-flight", "duplicates", "duplicates --csv", "explain 1", "explain 5"),
        *("explain 1 --json", "show 1", "show 1 --json", "show 7", "export"),
        *("retry 1 --dry-run", "retry --all --dry-run", "park 77", "prune --dry-run"),
    ],
)
def test_no_command_prints_what_a_terminal_acts_on(run: Run, command: str) -> None:
    result = run("outbox", *command.split())
    assert_harmless(result.stdout)
    assert_harmless(result.stderr)
    assert "Traceback" not in result.stderr


def test_nor_does_a_name_that_is_looked_for(run: Run) -> None:
    for command in ("show", "explain"):
        result = run("outbox", command, EVIL.replace("\x00", ""))
        assert result.exit_code == 2
        assert_harmless(result.stderr)


def test_a_message_of_its_own_is_one_line_of_a_list(run: Run) -> None:
    lines = run("outbox", "list").stdout.splitlines()
    assert len(lines) == 1 + 7
    assert r"\x1b[2J\x1b]0;owned\x07\x00\x9b1m" in lines[1]


def test_a_body_keeps_its_lines_and_tabs(run: Run) -> None:
    assert run("outbox", "show", 7).stdout.endswith("\nok\\x0dgone\n\tx\n")


def test_no_spreadsheet_runs_a_cell(run: Run) -> None:
    rows = list(csv.DictReader(io.StringIO(run("outbox", "list", "--csv").stdout)))
    ids = [row["message_id"] for row in rows]
    assert [id_[:3] for id_ in ids[:5]] == ["'=1", "'+1", "'-1", "'@S", "m\\x"]
    assert rows[0]["id"] == "1", "a number is one"


def test_what_is_exported_is_brought_in_as_it_was(run: Run, path: Path, tmp_path: Path) -> None:
    lines = run("outbox", "export").stdout
    new = tmp_path / "new.db"
    result = CliRunner().invoke(main, ["outbox", "import", "-", "--outbox", str(new)], input=lines)
    assert result.stdout == "7 messages stored\n"
    ids = [row["message_id"] for row in json.loads(run("outbox", "list", "--json").stdout)]
    assert f"=1+1{EVIL}0" in ids, "JSON is exact"
    assert sorted(ids) == sorted(message_ids(new))


@pytest.mark.parametrize("width", [60, 120])
def test_watch_draws_nothing_that_acts(path: Path, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=60, color_system=None)
    page = page_of(look(outbox_at(path), closely=True))
    console.print(draw(page, width=width, height=60, hint="q"))
    output = console.file
    assert isinstance(output, io.StringIO)
    assert_harmless(output.getvalue())
    assert r"\x1b[2J" in output.getvalue()


def test_no_line_of_the_log_is_forged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "reliablepub")
    with FakeBroker() as broker:
        broker.declare_queue("all")
        path, prompt = tmp_path / "log.db", RetryPolicy.prompt()
        with Publisher(broker.url, outbox=path, retry=prompt) as publisher:
            forged = f"m\n2026 INFO forged{EVIL}"
            for exchange in ("", f"e{EVIL}"):
                receipt = publisher.publish(
                    b"", exchange=exchange, routing_key=f"k{EVIL}", message_id=forged + exchange
                )
                with pytest.raises(PublishError) as caught:
                    receipt.result(30)
                assert_harmless(str(caught.value))
                assert len(str(caught.value).splitlines()) == 1
    ours = [record for record in caplog.records if record.name.startswith("reliablepub")]
    assert any("forged" in record.getMessage() for record in ours)
    for record in ours:
        assert len(record.getMessage().splitlines()) == 1
        assert_harmless(record.getMessage())
        for value in vars(record).values():
            if isinstance(value, str):
                assert "\x1b" not in value
                assert "\n" not in value
