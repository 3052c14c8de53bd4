"""The command line as a user has it: a process of its own, against the fake broker over TCP."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result

from reliablepub.cli import main
from reliablepub.cli.app import CommandLine
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.testing import FakeBroker
from tests.cli.exit_codes import assert_documented
from tests.cli.trouble import make_trouble

ROOT = Path(__file__).parents[2]
NOBODY = "amqp://guest:hush@127.0.0.1:1/"
"""Where nothing listens; the password must never be seen."""
_COMMAND = (sys.executable, "-W", "error", "-m", "reliablepub")


@dataclass
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """Its only error, which is one line."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("Error: ")]
        return line.removeprefix("Error: ")


class Cli:
    """Runs `reliablepub` in a directory of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RELIABLEPUB_", "COV_"))
        }
        self.environment |= {"RELIABLEPUB_URL": url, "PYTHONPATH": str(ROOT)}
        self._begun: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: str | Path, input: str | None = None) -> Ended:  # noqa: A002
        process = self.begin(*arguments)
        return self.ended(process, input)

    def begin(self, *arguments: str | Path) -> subprocess.Popen[str]:
        command = [*_COMMAND, *map(str, arguments)]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._begun.append(process)
        return process

    def relay(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Begin a relay, and wait until it is connected."""
        relay = self.begin("relay", *arguments)
        assert line_of(relay) == "connected to the broker\n"
        return relay

    @staticmethod
    def ended(process: subprocess.Popen[str], input: str | None = None) -> Ended:  # noqa: A002
        out, err = process.communicate(input, timeout=100)
        err = said(err)
        assert "Traceback" not in err, err
        assert "hush" not in out + err
        assert isinstance(process.args, list)
        assert_documented(process.args[len(_COMMAND) :], process.returncode)
        return Ended(process.returncode, out, err)

    def stop(self, process: subprocess.Popen[str]) -> Ended:
        """End it with SIGTERM."""
        process.send_signal(signal.SIGTERM)
        return self.ended(process)

    def close(self) -> None:
        for process in self._begun:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            with process:
                pass


HEAD = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR|CRITICAL) +", re.MULTILINE
)
"""Time and level, with which each line of a relay's log begins."""


def said(err: str) -> str:
    """What was said on stderr: the lines of a relay without time and level."""
    return HEAD.sub(lambda found: "Error: " if found[1] == "ERROR" else "", err)


def line_of(process: subprocess.Popen[str]) -> str:
    """What the next line on stderr says."""
    assert process.stderr is not None
    return said(process.stderr.readline())


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """What each further line on stderr says."""
    while line := line_of(process):
        yield line


@pytest.fixture(autouse=True)
def exit_codes_are_documented(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each command that a test runs in this process ends with a code that its help lists."""
    ended: list[tuple[Sequence[str], int]] = []
    run = CommandLine._run

    def noted(self: CommandLine, args: Sequence[str] | None, prog_name: str) -> int:
        code = run(self, args, prog_name)
        ended.append((args or (), code))
        return code

    monkeypatch.setattr(CommandLine, "_run", noted)
    yield
    for arguments, code in ended:
        assert_documented(arguments, code)


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    """A broker with a topic exchange `flights`, and a queue `all` that gets everything from it."""
    with FakeBroker() as broker:
        broker.declare_exchange("flights", "topic")
        broker.declare_queue("all")
        broker.bind("all", "flights", "flight.#")
        yield broker


@pytest.fixture
def cli(tmp_path: Path, fake: FakeBroker) -> Iterator[Cli]:
    cli = Cli(tmp_path, fake.url)
    yield cli
    cli.close()


@pytest.fixture
def postgres_url(postgres_url: str) -> str:
    """A command that connects while the machine stands still for 3 s does not give up."""
    return f"{postgres_url}?connect_timeout=20"


@pytest.fixture
def postgres_outbox(postgres_outbox: str) -> str:
    """As `postgres_url`."""
    return f"{postgres_outbox}?connect_timeout=20"


@pytest.fixture
def relay(path: Path) -> Iterator[SqliteStore]:
    """A relay at work on an outbox with every kind of trouble."""
    with closing(make_trouble(path)) as store:
        yield store


Run = Callable[..., Result]
"""Runs `reliablepub outbox` in this process, on the outbox at `path`."""


@pytest.fixture
def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("RELIABLEPUB_OUTBOX", str(path))
    monkeypatch.delenv("RELIABLEPUB_URL", raising=False)

    def invoke(*arguments: object, **settings: Any) -> Result:
        return CliRunner().invoke(main, ["outbox", *map(str, arguments)], **settings)

    return invoke


_AnyEnded = TypeVar("_AnyEnded", Result, Ended)


def refused(ended: _AnyEnded, *words: str, code: int = 2) -> _AnyEnded:
    """What a command left that ended with this exit code, and these words on stderr."""
    if isinstance(ended, Ended):
        found, said = ended.code, ended.err
    else:
        found, said = ended.exit_code, ended.stderr
    assert found == code, said
    for each in words:
        assert each in said
    return ended


def ids(result: Result) -> list[int]:
    """The rows that a list shows."""
    return [row["id"] for row in parsed(result)]


def state_of(run: Run, id_: int) -> str:
    """Where a message is."""
    state: str = parsed(run("explain", id_, "--json"))[0]["state"]
    return state


def parsed(result: Result) -> Any:
    """What a command that succeeds prints as JSON."""
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def flights(tmp_path: Path) -> Callable[[int], Path]:
    """Make a file of so many records."""

    def make(count: int) -> Path:
        path = tmp_path / "flights.ndjson"
        carriers = ("AA", "UA", "DL")
        lines = (
            json.dumps(
                {"id": i, "carrier": carriers[i % 3], "to": {"code": "JFK"}, "pad": "x" * 150}
            )
            for i in range(count)
        )
        path.write_text("\n".join(lines) + "\n")
        return path

    return make


@pytest.fixture
def arrived(fake: FakeBroker) -> Callable[[], dict[bytes, list[str]]]:
    """Message ids in the queue `all`, by body."""

    def look() -> dict[bytes, list[str]]:
        found: dict[bytes, list[str]] = {}
        for message in fake.messages("all"):
            assert message.properties.message_id is not None
            found.setdefault(message.body, []).append(message.properties.message_id)
        return found

    return look
