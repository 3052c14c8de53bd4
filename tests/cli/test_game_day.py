"""A night with only the command line: each breakage is mended by the advice that is printed.

The test does literally what `doctor`, an error, or the row of a table in docs/on-call.md says, and
nothing else; then every message is confirmed.
"""

import json
import re
import shlex
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reliablepub import Message, Outbox, Publisher, RetryPolicy
from reliablepub.outbox.sqlite.connections import OLDEST
from reliablepub.outbox.sqlite.sql import statements
from reliablepub.testing import FakeBroker
from tests.cli.conftest import Cli
from tests.docs.documents import ROOT
from tests.sqlite import overwrite
from tests.waiting import until

PAGE = (ROOT / "docs" / "on-call.md").read_text()
COMMAND = re.compile(r"`(reliablepub [^`]+)`|(?:^|: )(reliablepub [^;`]+)")
EARLIER = ROOT / "tests" / "outbox" / "earlier"
ASKING = ("retry", "reroute", "edit", "replay", "discard")


class Night:
    """A broker with a queue `invoices`, an outbox, and whoever is on call."""

    def __init__(self, cli: Cli, where: str) -> None:
        self.cli = cli
        self.where = where
        self.broker = FakeBroker()
        self.broker.start()
        self.broker.declare_queue("invoices")
        self.broker.declare_exchange("orders", "topic")
        cli.environment |= {"RELIABLEPUB_URL": self.broker.url, "RELIABLEPUB_OUTBOX": where}

    def enqueue(self, *messages: Message) -> None:
        with Outbox(self.where) as outbox:
            for message in messages or (Message(b"", routing_key="invoices"),):
                outbox.enqueue(message)

    def run(self, command: str, code: int | None = 0) -> str:
        words = shlex.split(command)
        assert words[0] == "reliablepub"
        if words[2] in ASKING and "--dry-run" not in words:
            words.append("--yes")  # the answer to the question
        ended = self.cli(*words[1:])
        assert code is None or ended.code == code, (command, ended)
        return ended.out + ended.err

    def doctor(self, check: str) -> str:
        """The remedy of a check of `doctor`, which has found something."""
        rows = json.loads(self.cli("doctor", "--json").out)
        (row,) = [row for row in rows if row["check"] == check]
        assert row["level"] != "ok", row
        remedy: str = row["remedy"]
        return remedy

    def check(self, check: str) -> str:
        """The remedy of a check of `outbox check`, which has found something."""
        rows = json.loads(self.cli("outbox", "check", "--json").out)
        (remedy,) = [row["remedy"] for row in rows if row["check"] == check]
        return str(remedy)

    def is_well(self, check: str) -> bool:
        rows = json.loads(self.cli("doctor", "--json").out)
        return all(row["level"] == "ok" for row in rows if row["check"] == check)

    def relayed(self, count: int = 1) -> None:
        """A relay is started, and the messages come."""
        self.cli.relay()
        self.come(count)

    def come(self, count: int = 1) -> None:
        """So many messages are in the queue, and none is open or given up."""
        self.broker.wait_for(lambda: len(self.broker.messages("invoices")) >= count, 30)
        until(lambda: Outbox(self.where).status().open == 0)
        assert Outbox(self.where).status().parked == 0


def commands_in(advice: str) -> list[str]:
    """The commands that an advice names, in its order."""
    found = [first or second.strip() for first, second in COMMAND.findall(advice)]
    assert found, advice
    return found


def row_of(answer: str) -> str:
    """What the table of the page says about an answer of the broker."""
    rows = [line for line in below("Messages are parked").splitlines() if line.startswith("| `")]
    answers = {row: re.findall(r"`([^`]+)`", row)[0].split("'")[0] for row in rows}
    answers = {row: words for row, words in answers.items() if words in answer}
    return max(answers, key=lambda row: len(answers[row])).split("|")[-2]


def below(title: str) -> str:
    """What is below a title of the page."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def section(title: str) -> list[str]:
    """The commands below a title of the page."""
    blocks = re.findall(r"^```sh\n(.*?)^```", below(title), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    cli = Cli(tmp_path, "")
    night = Night(cli, str(tmp_path / "outbox.db"))
    yield night
    cli.close()
    night.broker.stop()


@pytest.fixture
def at_server(night: Night, postgres_outbox: str) -> Night:
    night.where = night.cli.environment["RELIABLEPUB_OUTBOX"] = postgres_outbox
    return night


def test_no_relay_runs(night: Night) -> None:
    night.enqueue()
    (command,) = commands_in(night.doctor("relay"))
    night.cli.relay(*shlex.split(command)[2:])
    night.come()


@pytest.mark.soak  # a relay on a file is said to hang after half a minute
def test_the_relay_hangs(night: Night) -> None:
    relay = night.cli.relay()
    relay.send_signal(signal.SIGSTOP)
    night.enqueue()
    until(lambda: not night.is_well("relay"))
    assert night.doctor("relay").endswith("; restart it")
    relay.send_signal(signal.SIGKILL)
    night.relayed()


def test_an_exchange_is_missing(night: Night) -> None:
    night.cli.relay()
    night.enqueue(Message(b"", exchange="shop", routing_key="x"))
    until(lambda: not night.is_well("paused"))
    assert night.doctor("exchange").startswith("declare it")
    night.broker.declare_exchange("shop", "fanout")
    night.broker.bind("invoices", "shop", "")
    night.come()


@pytest.fixture
def parked(night: Night) -> Night:
    """A night in which a broker has refused five messages until their retries ended."""
    options: dict[str, Any] = {"outbox": night.where, "retry": RetryPolicy.prompt()}
    with Publisher(night.broker.url, **options) as publisher:
        for n in range(5):
            publisher.publish(b"", exchange="orders", routing_key=f"order.{n}")
        until(lambda: publisher.status.counters.parked == 5)
    return night


def test_a_binding_is_missing(parked: Night) -> None:
    (summary,) = commands_in(parked.doctor("given up"))
    (_, line) = parked.run(summary).splitlines()
    assert line.split()[:4] == ["5", "parked", "orders", "(several)"]
    advice = row_of(line)
    assert advice.strip().startswith("the binding")
    assert "then `retry`" in advice
    parked.broker.bind("invoices", "orders", "order.#")
    parked.run("reliablepub outbox retry --reason NO_ROUTE")
    parked.relayed(5)


def test_the_address_is_wrong(parked: Night) -> None:
    (summary,) = commands_in(parked.doctor("given up"))
    assert "a wrong address: `reroute`" in row_of(parked.run(summary))
    reroute = "reliablepub outbox reroute --exchange orders --to-exchange '' --to-routing-key"
    parked.run(f"{reroute} invoices")
    parked.relayed(5)


def test_the_broker_refuses_a_property(night: Night) -> None:
    night.cli.relay()
    night.enqueue(Message(b"", routing_key="invoices", user_id="mallory"))
    until(lambda: not night.is_well("paused"))
    advice = row_of(night.run("reliablepub outbox summary"))
    (change,) = re.findall(r"`(edit [^`]+)`", advice)
    until(lambda: "1 message edited" in night.run(f"reliablepub outbox {change} --all", None))
    night.come()


def test_a_message_is_late(night: Night) -> None:
    night.enqueue(Message(b"", routing_key="invoices", expires_in_s=0.001))
    night.run("reliablepub relay --drain")
    (summary,) = commands_in(night.doctor("given up"))
    assert "`retry`, which removes the deadline" in row_of(night.run(summary))
    night.run("reliablepub outbox retry --state expired")
    night.relayed()


def test_a_queue_is_deleted_with_its_messages(night: Night) -> None:
    relay = night.cli.relay("--keep-confirmed", "3600")
    night.enqueue(*[Message(b"", routing_key="invoices")] * 3)
    night.come(3)
    night.broker.delete_queue("invoices")
    night.broker.declare_queue("invoices")
    told = [night.run(line) for line in section("A queue was deleted with its messages")]
    assert "3 messages would be put back" in told[1]
    night.come(3)
    night.cli.stop(relay)


def test_a_parked_message_holds_its_key(night: Night) -> None:
    first = Message(b"", routing_key="gone", ordering_key="k", message_id="first")
    night.enqueue(first, Message(b"", routing_key="invoices", ordering_key="k"))
    options: dict[str, Any] = {"outbox": night.where, "retry": RetryPolicy.prompt()}
    with Publisher(night.broker.url, **options) as publisher:
        until(lambda: publisher.status.counters.parked == 1)
    assert "held_keys    1" in night.run("reliablepub outbox status")
    assert "k" in night.run(section("A key is held")[0])
    night.broker.declare_queue("gone")
    night.run("reliablepub outbox keys --resume k")
    night.relayed()
    assert len(night.broker.messages("gone")) == 1


def test_the_password_is_wrong(night: Night) -> None:
    night.enqueue()
    right = night.cli.environment["RELIABLEPUB_URL"]
    night.cli.environment["RELIABLEPUB_URL"] = right.replace(":guest@", ":wrong@")
    assert "password" in night.doctor("connection")
    night.cli.environment["RELIABLEPUB_URL"] = right
    assert night.is_well("connection")
    night.relayed()


def test_others_may_read_the_file(night: Night) -> None:
    night.enqueue()
    path = Path(night.where)
    path.chmod(0o644)
    subprocess.run(["sh", "-c", night.check("access").partition(": ")[2]], check=True)
    assert path.stat().st_mode & 0o777 == 0o600
    night.relayed()


def test_a_page_of_the_file_is_damaged(night: Night, tmp_path: Path) -> None:
    night.enqueue(*[Message(b"x" * 500, routing_key="invoices")] * 100)
    with closing(sqlite3.connect(night.where)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'reliablepub_attempts'"
        ).fetchone()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    overwrite(Path(night.where), (root - 1) * page_bytes, b"\xff" * page_bytes)
    new = str(tmp_path / "new.db")
    (command,) = commands_in(night.check("pages"))
    night.run(command.replace("NEW", new))
    night.where = night.cli.environment["RELIABLEPUB_OUTBOX"] = new
    night.relayed(100)


def test_the_outbox_is_of_an_earlier_version(night: Night) -> None:
    path = Path(night.where)
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements((EARLIER / f"sqlite-{OLDEST}.sql").read_text()):
            connection.execute(statement)
        connection.execute("INSERT INTO reliablepub_schema VALUES (?, 0.0)", (OLDEST,))
        connection.commit()
    path.chmod(0o600)
    (command,) = commands_in(night.cli("outbox", "status").error)
    night.run(command)
    night.enqueue()
    night.relayed()


# ------------------------------------------------------------------- PostgreSQL


def test_a_function_of_the_outbox_was_changed(at_server: Night) -> None:
    with psycopg.connect(at_server.where, autocommit=True) as owner:
        owner.execute(
            b"CREATE OR REPLACE FUNCTION reliablepub.shard_of(ordering_key text, exchange text, "
            b"routing_key text) RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 0'"
        )
    (command,) = commands_in(at_server.doctor("schema"))
    assert "function shard_of is that of this version" in at_server.run(command)
    assert at_server.is_well("schema")
    at_server.enqueue()
    at_server.relayed()


def test_a_sequence_is_behind_its_rows(at_server: Night) -> None:
    at_server.enqueue(*[Message(b"", routing_key="invoices")] * 3)
    with psycopg.connect(at_server.where, autocommit=True) as owner:
        owner.execute(b"SELECT setval('reliablepub.message_ids', 1)")
        remedy = at_server.doctor("sequences")
        (call,) = re.findall(r"SELECT setval\([^)]+\)", remedy)
        owner.execute(call.encode())
    assert at_server.is_well("sequences")
    at_server.enqueue()
    at_server.relayed(4)


def test_a_relay_in_postgresql_hangs(at_server: Night) -> None:
    relay = at_server.cli.relay()
    relay.send_signal(signal.SIGSTOP)
    at_server.enqueue()
    until(lambda: not at_server.is_well("relay"))
    assert at_server.doctor("relay").startswith("restart that relay")
    relay.send_signal(signal.SIGKILL)
    at_server.relayed()
