"""Keys on the command line: what takes them, and how they are rotated."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from reliablepub import Message, Outbox, OutboxKeys
from reliablepub.cli import main
from reliablepub.testing import FakeBroker

OLD, NEW = bytes(32), bytes([1] * 32)
Run = Callable[..., Result]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "o.db"
    with Outbox(path, keys=OutboxKeys({"old": OLD})) as outbox:
        outbox.enqueue(Message(b"one", routing_key="all"))
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"two", routing_key="all"))
    return path


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(f"new {NEW.hex()}\nold {OLD.hex()}\n")
    return file


@pytest.fixture
def run(path: Path) -> Run:
    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(main, [*map(str, arguments), "--outbox", str(path)])

    return invoke


def test_a_key_is_replaced(run: Run, keys: Path) -> None:
    found = run("outbox", "check")
    assert "1 message with key 'old', 1 message not encrypted" in " ".join(found.stdout.split())
    result = run("outbox", "rekey", "--outbox-keys", keys)
    assert (result.exit_code, result.stdout) == (2, "1 message encrypted anew\n")
    assert result.stderr.startswith("Error: message 2 left as it is: it is not encrypted")
    result = run("outbox", "rekey", "--outbox-keys", keys, "--json")
    assert json.loads(result.stdout)["changed"] == 0
    assert list(json.loads(result.stdout)["left"]) == ["2"]
    result = run("outbox", "rekey", "--outbox-keys", keys, "--accept-plaintext")
    assert (result.exit_code, result.stdout) == (0, "1 message encrypted anew\n")
    assert "2 messages with key 'new'" in run("outbox", "check").stdout


def test_it_takes_keys(run: Run, keys: Path) -> None:
    assert run("outbox", "rekey").exit_code == 2
    keys.write_text(f"new {NEW.hex()}\n")
    result = run("outbox", "rekey", "--outbox-keys", keys)
    assert result.exit_code == 4
    assert "key 'old', and that key was not given" in result.stderr


def test_many_that_are_left_are_not_all_named(path: Path, run: Run, keys: Path) -> None:
    with Outbox(path) as outbox:
        for _ in range(11):
            outbox.enqueue(Message(b"x"))
    lines = run("outbox", "rekey", "--outbox-keys", keys).stderr.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "Error: 2 more left as they are; --json lists them"


def test_rerouting_takes_the_key(run: Run, keys: Path) -> None:
    reroute = ("outbox", "reroute", "1", "--to-routing-key", "elsewhere")
    result = run(*reroute)
    assert result.exit_code == 4
    assert "that key was not given" in result.stderr
    result = run(*reroute, "--outbox-keys", keys)
    assert (result.exit_code, result.stdout) == (0, "1 message rerouted\n")


def test_a_relay_parks_what_is_not_encrypted_unless_told(path: Path, run: Run, keys: Path) -> None:
    with FakeBroker() as broker:
        broker.declare_queue("all")
        relay = ("relay", "--url", broker.url, "--drain", "--outbox-keys", keys)
        run(*relay)
        assert [bytes(m.body) for m in broker.messages("all")] == [b"one"]
        assert Outbox(path).parked()[0].reply_text.startswith("it is not encrypted, and keys are")
        assert Outbox(path).retry() == 1
        assert run(*relay, "--accept-plaintext").exit_code == 0
        assert [bytes(m.body) for m in broker.messages("all")] == [b"one", b"two"]
