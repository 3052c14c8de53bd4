"""Commands on a full disk work, or say that it is full."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from reliablepub import Message, Outbox
from reliablepub.cli import main
from reliablepub.testing import FakeBroker
from tests.cli.conftest import Run
from tests.disks import KINDS, fill, small_disk

COUNT = 200


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An outbox that no process has open, on a disk without a free byte."""
    with small_disk(tmp_path, request.param, 24) as disk:
        path = disk / "outbox.db"
        with Outbox(path) as outbox:
            for _ in range(COUNT):
                outbox.enqueue(Message(b"x" * 1024, routing_key="q"))
        fill(disk)
        yield path


@pytest.fixture
def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("RELIABLEPUB_OUTBOX", str(path))
    monkeypatch.delenv("RELIABLEPUB_URL", raising=False)
    return lambda *arguments, **more: CliRunner().invoke(main, [*map(str, arguments)], **more)


def cli(*arguments: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reliablepub", *arguments]
    return subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=100, check=False
    )


def test_looks_work(run: Run, path: Path) -> None:
    for command in ("status", "list", "explain 1", "show 1", "audit", "check", "stats", "export 1"):
        result = run("outbox", *command.split())
        assert result.exit_code == 0, (command, result.output)
    assert "disk full" in run("outbox", "status").stdout
    assert json.loads(run("outbox", "status", "--json").stdout)["is_disk_full"] is True
    assert path.with_name("outbox.db.ballast").stat().st_size > 4 * 1024 * 1024


def test_doctor_says_that_the_disk_is_full(run: Run) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 4
    found = {row["check"]: row for row in json.loads(result.stdout)}
    assert found["disk"]["level"] == "problem"
    assert found["disk"]["found"].startswith("disk full: ")
    assert "free disk space" in found["disk"]["remedy"]


def test_without_a_reserve_publishing_says_that_the_disk_is_full(path: Path) -> None:
    path.with_name("outbox.db.ballast").unlink()
    fill(path.parent)
    where = ("--url", "amqp://guest:guest@localhost:1/", "--outbox", str(path))
    done = cli("publish", "-", *where, "--routing-key", "q", lines="x\n")
    assert done.returncode == 4
    assert "the disk is full" in done.stderr
    assert "free some space" in done.stderr


def test_a_relay_drains_it(path: Path) -> None:
    with FakeBroker() as broker:
        broker.declare_queue("q", durable=True)
        done = cli("relay", "--drain", "--outbox", str(path), "--url", broker.url)
        assert done.returncode == 0, done.stderr
        assert len(broker.messages("q")) >= COUNT
    assert Outbox(path).status().confirmed == COUNT
