"""Relays of an outbox with several shards, each a process: they share work, and cover a loss."""

import json
import signal
import socket
import subprocess
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from reliablepub import Message, Outbox
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.conftest import Cli, line_of, refused
from tests.cli.test_standby import until
from tests.waiting import until as wait_until

KEYS = 12
TAKEN_OVER_S = 20.0


@pytest.fixture
def where(cli: Cli, postgres_url: str) -> str:
    assert cli("outbox", "create", "--shards", "2", "--outbox", postgres_url).code == 0
    return postgres_url


def keyed(first: int, count: int) -> list[Message]:
    return [
        Message(b"%d" % n, routing_key="all", message_id=f"m-{n}", ordering_key=f"k-{n % KEYS}")
        for n in range(first, first + count)
    ]


def assert_in_order(broker: FakeBroker, count: int) -> None:
    first = list(dict.fromkeys(int(message.body) for message in broker.messages("all")))
    assert sorted(first) == list(range(count))
    for key in range(KEYS):
        of_key = [n for n in first if n % KEYS == key]
        assert of_key == sorted(of_key), key


def finding(cli: Cli, where: str) -> tuple[str, str]:
    """The level and the words of what doctor says of the relays."""
    told = json.loads(cli("doctor", "--outbox", where, "--json").out)
    [found] = [row for row in told if (row["about"], row["check"]) == ("outbox", "relay")]
    return found["level"], found["found"]


def owners_among(
    relays: list[subprocess.Popen[str]], cli: Cli, where: str
) -> list[subprocess.Popen[str]]:
    """Wait until doctor finds one of them well for each shard, and return these."""
    owners: list[subprocess.Popen[str]] = []

    def are_two() -> bool:
        level, words = finding(cli, where)
        owners[:] = [one for one in relays if level == "ok" and f"process {one.pid} on" in words]
        return len(owners) == 2 and "shard 0: " in words and "shard 1: " in words

    wait_until(are_two)
    return owners


def test_a_relay_for_each_shard_and_one_that_stands_by(
    cli: Cli, fake: FakeBroker, where: str
) -> None:
    """Which two own the shards may change: if the machine stands still, they all seem silent."""
    outbox = Outbox(where)

    def enqueue(first: int, count: int) -> None:
        for message in keyed(first, count):
            outbox.enqueue(message)

    enqueue(0, 100)
    relays = [cli.begin("relay", "--outbox", where, "--standby") for _ in range(2)]
    for owner in relays:
        assert line_of(owner) == "connected to the broker\n"
    standby = cli.begin("relay", "--outbox", where, "--standby")
    relays.append(standby)
    assert line_of(standby) == "standing by: another relay owns the outbox\n"
    fake.wait_for(100, timeout_s=60)
    host = socket.gethostname()

    def are_shown() -> bool:
        told = cli("outbox", "status", "--over", "0", "--outbox", where).out
        return sum(f"process {one.pid} on {host}" in told for one in relays) == 2

    wait_until(are_shown)
    killed = owners_among(relays, cli, where)[0]

    enqueue(100, 100)
    killed.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    enqueue(200, 100)
    until(standby, "this relay has taken over the outbox")
    relays.remove(killed)
    owners_among(relays, cli, where)
    assert time.monotonic() - killed_at < TAKEN_OVER_S
    fake.wait_for(lambda: _arrived(fake) == 300, timeout_s=60)

    # None stands by any more: one shard goes on, and doctor names the one that does not.
    killed = relays.pop()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    wait_until(lambda: finding(cli, where)[0] == "warning")
    enqueue(300, 100)
    fake.wait_for(lambda: _arrived(fake) > 300, timeout_s=60)

    def is_one_missing() -> bool:
        level, words = finding(cli, where)
        names = f"none, the last was process {killed.pid} on", f"process {relays[0].pid} on"
        return level == "problem" and all(name in words for name in names)

    wait_until(is_one_missing)
    relays.append(cli.begin("relay", "--outbox", where))
    assert line_of(relays[-1]) == "connected to the broker\n"
    fake.wait_for(lambda: _arrived(fake) == 400, timeout_s=60)
    assert_in_order(fake, 400)
    for relay in relays:
        end(cli, relay)
    assert not outbox.audit().differences
    with psycopg.connect(where) as connection:
        query = "SELECT max(confirmed) FROM reliablepub.turns GROUP BY shard"
        assert min(confirmed for (confirmed,) in connection.execute(query)) > 0


def test_all_shards_relayed_is_in_use(cli: Cli, where: str) -> None:
    owners = [cli.begin("relay", "--outbox", where) for _ in range(2)]
    for owner in owners:
        assert line_of(owner) == "connected to the broker\n"
    refused(cli("relay", "--outbox", where), "each of its 2 shards", code=4)
    for owner in owners:
        end(cli, owner)


def test_publish_refuses_an_ordering_key(cli: Cli, where: str) -> None:
    command = ("publish", "-", "--outbox", where, "--routing-key", "all", "--ordering-key", "k")
    told = cli(*command, input="text\n")
    assert told.code != 0
    assert "2 shards" in told.err
    assert Outbox(where).status().stored == 0


def test_publish_refuses_a_file(cli: Cli, where: str) -> None:
    """Two runs would each take a shard, and count their records as one position in the file."""
    (cli.folder / "f.txt").write_text("one\ntwo\n")
    command = ("--outbox", where, "--routing-key", "all")
    refused(
        cli("publish", "f.txt", *command),
        "has 2 shards, where the position in a file cannot be kept",
    )
    assert Outbox(where).status().stored == 0
    assert cli("publish", "-", *command, input="one\ntwo\n").code == 0


def test_draining_one_shard_is_not_draining_the_outbox(
    cli: Cli, fake: FakeBroker, where: str
) -> None:
    fill(where, *(message for message in keyed(0, 40)))
    command = ("relay", "--drain", "--outbox", where, "--json")
    one = cli(*command)
    left = 40 - len(fake.messages("all"))
    assert 0 < left < 40
    assert (one.code, one.json["confirmed"], one.json["open"]) == (3, 40 - left, left)
    assert "the outbox has 2 shards, and this relay has drained one of them" in one.error

    owner = cli.begin("relay", "--outbox", where)  # takes the drained shard
    assert line_of(owner) == "connected to the broker\n"
    other = cli(*command)
    assert (other.code, other.json["open"]) == (0, 0), other.err
    end(cli, owner)
    assert _arrived(fake) == 40

    tomorrow = datetime.now(UTC) + timedelta(days=1)
    fill(where, *(replace(message, not_before=tomorrow) for message in keyed(0, KEYS)))
    waiting = cli(*command)
    assert (waiting.code, waiting.json["open"]) == (0, KEYS), waiting.err


def _arrived(fake: FakeBroker) -> int:
    return len({message.body for message in fake.messages("all")})


def end(cli: Cli, relay: subprocess.Popen[str]) -> None:
    assert cli.stop(relay).code == 0
