"""`reliablepub outbox`: looking changes nothing, and parking can be undone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from reliablepub import Message, Outbox, Publisher, Unroutable
from reliablepub.cli import main
from reliablepub.testing import FakeBroker

EQUATION = ("open", "confirmed", "parked", "expired", "discarded")
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    for variable in ("RELIABLEPUB_URL", "RELIABLEPUB_OUTBOX"):
        monkeypatch.delenv(variable, raising=False)

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["outbox", *map(str, arguments)])

    return invoke


@pytest.fixture
def outbox(tmp_path: Path, fake: FakeBroker) -> Path:
    """Two confirmed, two parked, one open."""
    path = tmp_path / "o.db"
    with Publisher(fake.url, outbox=path) as publisher:
        for _ in range(2):
            publisher.publish(b"secret", routing_key="all").result(10)
        for _ in range(2):
            with pytest.raises(Unroutable):
                publisher.publish(b"secret", routing_key="nowhere").result(10)
    with Outbox(path) as opened:
        opened.enqueue(Message(b"secret", routing_key="all"))
    return path


def parsed(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_status_adds_up(run: Run, outbox: Path) -> None:
    status = parsed(run("status", "--outbox", outbox, "--json"))
    assert status["stored"] == sum(status[name] for name in EQUATION) == 5
    assert (status["open"], status["confirmed"], status["parked"]) == (1, 2, 2)
    assert (status["in_flight"], status["relay_pid"]) == (0, None)
    assert 0 <= status["oldest_open_age_s"] < 60
    assert status["bytes_on_disk"] > 0


def test_status_names_the_relay(run: Run, outbox: Path, fake: FakeBroker) -> None:
    with Publisher(fake.url, outbox=outbox):
        assert "relay        process " in run("status", "--outbox", outbox).stdout


def test_status_for_people_is_a_table(run: Run, outbox: Path) -> None:
    lines = run("status", "--outbox", outbox).stdout.splitlines()
    assert lines[0].split() == ["stored", "5"]
    assert any(line.startswith("oldest open  0 s old") for line in lines)


def test_parked_messages_are_listed_without_bodies(run: Run, outbox: Path) -> None:
    result = run("parked", "--outbox", outbox)
    assert result.stdout.count("returned after 3 attempts: 312 NO_ROUTE; message ") == 2
    assert "secret" not in result.stdout
    (first,) = parsed(run("parked", "--outbox", outbox, "--limit", 1, "--json"))
    assert (first["outcome"], first["routing_key"]) == ("returned", "nowhere")


def test_parking_is_undone(run: Run, outbox: Path) -> None:
    first, second = (
        message["id"] for message in parsed(run("parked", "--outbox", outbox, "--json"))
    )
    assert run("retry", first, "--outbox", outbox).stdout == "1 message put back\n"
    assert [m["id"] for m in parsed(run("parked", "--outbox", outbox, "--json"))] == [second]
    assert run("retry", "--all", "--outbox", outbox).stdout == "1 message put back\n"
    assert run("parked", "--outbox", outbox).stdout == "no message is parked\n"
    status = parsed(run("status", "--outbox", outbox, "--json"))
    assert (status["open"], status["parked"]) == (3, 0)


def test_an_id_that_is_not_parked_is_an_error(run: Run, outbox: Path) -> None:
    result = run("retry", 999, "--outbox", outbox)
    assert result.exit_code == 2
    assert result.stderr == "Error: 1 ID of no parked message\n"


@pytest.mark.parametrize("arguments", [("retry",), ("retry", "1", "--all")])
def test_retry_wants_ids_or_all(run: Run, outbox: Path, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--outbox", outbox)
    assert result.exit_code == 2
    assert "give the IDs of parked messages, or --all" in result.stderr


@pytest.mark.parametrize("command", [("status",), ("parked",), ("retry", "--all")])
def test_a_missing_outbox_is_not_created(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    result = run(*command, "--outbox", tmp_path / "o.db")
    assert result.exit_code == 4
    assert result.stderr.startswith("Error: there is no outbox ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("status",), ("parked",), ("retry", "--all")])
def test_a_text_file_is_no_outbox(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("dear diary\n" * 100)
    result = run(*command, "--outbox", text)
    assert result.exit_code == 4
    assert result.stderr.count("\n") == 1
    assert text.read_text() == "dear diary\n" * 100


def test_the_outbox_may_come_from_the_environment(
    run: Run, outbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELIABLEPUB_OUTBOX", str(outbox))
    assert parsed(run("status", "--json"))["stored"] == 5
