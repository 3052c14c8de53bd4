"""Keys on the command line: what takes them, and how they are rotated."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from reliablepub import Message, Outbox, OutboxKeys
from reliablepub.cli import main
from reliablepub.outbox.rows import checksum_of
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.conftest import Run, refused

OLD, NEW = bytes(32), bytes([1] * 32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "o.db"
    fill(path, Message(b"one", routing_key="all"), keys=OutboxKeys({"old": OLD}))
    fill(path, Message(b"two", routing_key="all"))
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
    assert (result.exit_code, result.stdout) == (2, "1 message encrypted under the first key\n")
    assert result.stderr.startswith("Error: message 2 left as it is: it is not encrypted")
    result = run("outbox", "rekey", "--outbox-keys", keys, "--json")
    assert json.loads(result.stdout)["changed"] == 0
    assert list(json.loads(result.stdout)["left"]) == ["2"]
    result = run("outbox", "rekey", "--outbox-keys", keys, "--accept-plaintext")
    assert (result.exit_code, result.stdout) == (0, "1 message encrypted under the first key\n")
    assert "2 messages with key 'new'" in run("outbox", "check").stdout


def test_it_takes_keys(run: Run, keys: Path) -> None:
    assert run("outbox", "rekey").exit_code == 2
    keys.write_text(f"new {NEW.hex()}\n")
    refused(
        run("outbox", "rekey", "--outbox-keys", keys),
        "key 'old', and that key was not given",
        code=4,
    )


def test_many_that_are_left_are_not_all_named(path: Path, run: Run, keys: Path) -> None:
    fill(path, *[Message(b"x")] * 11)
    lines = run("outbox", "rekey", "--outbox-keys", keys).stderr.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "Error: 2 more left as they are; --json lists them"


def test_rerouting_takes_the_key(run: Run, keys: Path) -> None:
    reroute = ("outbox", "reroute", "1", "--to-routing-key", "elsewhere")
    refused(run(*reroute), "that key was not given", code=4)
    result = run(*reroute, "--outbox-keys", keys)
    assert (result.exit_code, result.stdout) == (0, "1 message rerouted\n")


def test_showing_takes_the_key(path: Path, run: Run, keys: Path, tmp_path: Path) -> None:
    fill(
        path,
        Message(b"card 4111", content_type="text/plain", headers={"a": 7}),
        keys=OutboxKeys({"old": OLD}),
    )
    show, out = ("outbox", "show", "3"), tmp_path / "body"
    result = refused(
        run(*show),
        "encrypted with key 'old', and that key was not given",
        "give the keys of the outbox (--outbox-keys FILE)",
        code=0,
    )
    assert "$key" not in result.stdout
    assert "text/plain" not in result.stdout
    found = json.loads(run(*show, "--json").stdout)
    assert (found["is_encrypted"], found["body"], found["body_base64"]) == (True, None, None)
    assert run(*show, "--body-out", out).exit_code == 4
    assert not out.exists()

    result = run(*show, "--outbox-keys", keys)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "text/plain" in result.stdout
    assert "card 4111" in result.stdout
    found = json.loads(run(*show, "--outbox-keys", keys, "--json").stdout)
    assert (found["properties"], found["headers"]) == ({"content_type": "text/plain"}, {"a": 7})
    assert (found["is_encrypted"], found["body"], found["problem"]) == (False, "card 4111", None)
    assert run(*show, "--outbox-keys", keys, "--body-out", out).exit_code == 0
    assert out.read_bytes() == b"card 4111"


def test_what_was_forged_is_not_shown_as_if_it_were_right(path: Path, run: Run, keys: Path) -> None:
    """With keys, a row that is not encrypted is shown with a warning; one readdressed, not."""
    plain = run("outbox", "show", "2", "--outbox-keys", keys)
    assert "warning: it is not encrypted, and keys are given" in plain.stderr
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE reliablepub_messages SET routing_key = 'mine' WHERE id = 1")
        row = connection.execute(
            "SELECT message_id, exchange, routing_key, properties, body FROM reliablepub_messages"
        ).fetchone()
        texts = [text.encode() for text in row[:4]]
        checksum = checksum_of((texts[0], texts[1], texts[2], texts[3], None), row[4])
        connection.execute("UPDATE reliablepub_messages SET checksum = ? WHERE id = 1", (checksum,))
    found = json.loads(run("outbox", "show", "1", "--outbox-keys", keys, "--json").stdout)
    assert "it was changed since it was encrypted" in found["problem"]
    assert (found["is_encrypted"], found["body"]) == (True, None)


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
