"""`reliablepub relay --standby`: one relay owns the outbox, the others wait for its end."""

import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from reliablepub import Message, Outbox
from reliablepub.testing import FakeBroker
from tests.cli.conftest import Cli, line_of, refused
from tests.stores import Where
from tests.waiting import until as wait_until

TAKEN_OVER_S = 20.0
FULL = """
    CREATE FUNCTION public.full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'no space left on device' USING ERRCODE = '53100';
    END $$;
    CREATE TRIGGER full_disk BEFORE INSERT ON reliablepub.runs
    FOR EACH ROW EXECUTE FUNCTION public.full_disk();
"""


def until(relay: subprocess.Popen[str], words: str) -> None:
    """Read lines until one begins with these words; the relay may also tell of its connection."""
    while line := line_of(relay):
        if line.startswith(words):
            return
    pytest.fail(f"it ended, and never said {words!r}")


def standing_by(cli: Cli, where: Where, *options: str) -> subprocess.Popen[str]:
    """Begin a relay beside the one that owns the outbox."""
    standby = cli.begin("relay", "--outbox", where, "--standby", *options)
    assert line_of(standby) == "standing by: another relay owns the outbox\n"
    return standby


def test_a_standby_takes_over_from_a_relay_that_was_killed(
    cli: Cli, fake: FakeBroker, where: Where
) -> None:
    with Outbox(where) as outbox:
        outbox.enqueue(Message(b"", routing_key="all"))
        owner = cli.relay("--outbox", where, "--standby")
        fake.wait_for(1, timeout_s=60)
        standby = standing_by(cli, where, "--json")
        outbox.enqueue(Message(b"", routing_key="all"))
        fake.wait_for(2, timeout_s=60)
        owner.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        outbox.enqueue(Message(b"", routing_key="all"))
        assert line_of(standby) == "this relay has taken over the outbox\n"
        took_s = time.monotonic() - killed_at
        fake.wait_for(3, timeout_s=60)
    assert cli.stop(standby).json["open"] == 0
    assert took_s < TAKEN_OVER_S


def test_a_standby_is_no_relay_without_a_broker(cli: Cli, fake: FakeBroker) -> None:
    owner = cli.relay("--outbox", "o.db")
    standby = cli.begin("relay", "--outbox", "o.db", "--standby", "--health-port", "0")
    url = re.sub(r"health: (.*)/live.*\n", r"\1", line_of(standby))
    assert line_of(standby) == "standing by: another relay owns the outbox\n"

    def samples() -> set[str]:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            return set(re.findall(r"^(reliablepub_\w+)\{", answer.read().decode(), re.MULTILINE))

    for _ in range(20):  # it tries to own the outbox all the time
        assert not samples() & {"reliablepub_connected", "reliablepub_last_turn_age_seconds"}
    assert "reliablepub_outbox_relayed" in samples()
    for path in ("ready", "live"):  # a rollout of two relays goes on
        with urllib.request.urlopen(f"{url}/{path}", timeout=30) as answer:
            assert json.loads(answer.read())["reasons"] == []
    owner.send_signal(signal.SIGTERM)
    until(standby, "this relay has taken over the outbox")
    wait_until(lambda: "reliablepub_connected" in samples())
    assert cli.stop(standby).code == 0


def backends_of_standbys(outbox: str, function: str = "pid") -> set[int]:
    """Processes of the server that serve standbys, each passed to a function of SQL."""
    query = (
        f"SELECT pid, {function} FROM pg_stat_activity"
        " WHERE starts_with(application_name, 'reliablepub standby')"
    )
    with psycopg.connect(outbox, autocommit=True) as connection:
        return {pid for pid, _ in connection.execute(query)}


def test_standbys_are_listed(cli: Cli, fake: FakeBroker, postgres_outbox: str) -> None:
    host = socket.gethostname()

    def standbys(url: str = postgres_outbox) -> int:
        told = cli("outbox", "status", "--outbox", url, "--json").json["standbys"]
        assert all(row["host"] == host and 0 <= row["age_s"] < 60 for row in told)
        return len(told)

    begun = [cli.begin("relay", "--outbox", postgres_outbox, "--standby") for _ in range(3)]
    wait_until(lambda: standbys() == 2)
    other = f"{postgres_outbox}&schema=other"
    Outbox(other).create()
    assert standbys(other) == 0
    shown = cli("outbox", "status", "--outbox", postgres_outbox).out
    assert re.search(rf"^standing by  +{host} for \d+ s, {host} for \d+ s$", shown, re.MULTILINE)
    assert f"{host} for " in cli("doctor", "--outbox", postgres_outbox).out
    before = backends_of_standbys(postgres_outbox, "pg_terminate_backend(pid)")
    wait_until(lambda: len(backends_of_standbys(postgres_outbox) - before) == 2)
    assert standbys() == 2
    owner = cli("outbox", "status", "--outbox", postgres_outbox, "--json").json["relay_pid"]
    cli.stop(next(one for one in begun if one.pid == owner))  # one takes over
    wait_until(lambda: standbys() == 1)


def test_a_wrong_configuration_does_not_end_a_standby(
    cli: Cli, fake: FakeBroker, tmp_path: Path
) -> None:
    config = tmp_path / "relay.toml"
    config.write_text("[relay]\nwindow = 100\n")
    owner = cli.relay("--outbox", "o.db")
    standby = cli.begin("relay", "--outbox", "o.db", "--standby", "--config", config)
    until(standby, "standing by: another relay owns the outbox")
    config.write_text("[relay]\nwindow = none\n")
    standby.send_signal(signal.SIGHUP)
    assert line_of(standby).startswith("not reopened, nothing was changed: ")
    owner.send_signal(signal.SIGTERM)
    until(standby, "this relay has taken over the outbox")
    assert cli.stop(standby).code == 0


def test_a_relay_that_was_paused_for_too_long_stands_by(
    cli: Cli, fake: FakeBroker, postgres_outbox: str
) -> None:
    outbox = Outbox(postgres_outbox)
    first = cli.relay("--outbox", postgres_outbox, "--standby")
    second = standing_by(cli, postgres_outbox)
    third = standing_by(cli, postgres_outbox, "--json")
    outbox.enqueue(Message(b"", routing_key="all"))
    fake.wait_for(1, timeout_s=60)
    wait_until(lambda: outbox.status().confirmed == 1)
    ended = cli.stop(third)
    if "this relay has taken over" not in ended.err:  # because the machine stood still
        told = json.loads(ended.out)
        assert (told["confirmed"], told["parked"], told["open"]) == (0, 0, None)
    first.send_signal(signal.SIGSTOP)
    assert line_of(second) == "this relay has taken over the outbox\n"
    first.send_signal(signal.SIGCONT)
    until(first, "standing by: outbox ")
    outbox.enqueue(Message(b"", routing_key="all"))
    fake.wait_for(2, timeout_s=60)
    wait_until(lambda: outbox.status().confirmed == 2)
    assert "1 confirmed, 0 parked, 0 open" in cli.stop(second).out
    until(first, "this relay has taken over the outbox")
    assert "1 confirmed, 0 parked, 0 open" in cli.stop(first).out


def test_a_relay_that_hangs_is_told_from_none(
    cli: Cli, fake: FakeBroker, postgres_outbox: str
) -> None:
    relay = cli.relay("--outbox", postgres_outbox)
    relay.send_signal(signal.SIGSTOP)
    Outbox(postgres_outbox).enqueue(Message(b"", routing_key="all", message_id="m"))

    def relay_found() -> dict[str, str]:
        found = cli("doctor", "--json", "--outbox", postgres_outbox).json
        return next(row for row in found if row["check"] == "relay")

    wait_until(lambda: "hangs, or is cut off: no sign of life" in relay_found()["found"])
    assert relay_found()["remedy"].startswith("restart that relay")
    status = cli("outbox", "status", "--outbox", postgres_outbox).out
    assert f"process {relay.pid} on " in status
    assert "its relay hangs, and has shown no sign of life for " in status
    told = cli("outbox", "explain", "m", "--outbox", postgres_outbox).out
    assert "the relay of this outbox hangs, without a sign of life for " in told
    relay.send_signal(signal.SIGKILL)
    wait_until(lambda: "none, the last was process" in relay_found()["found"])
    assert relay_found()["remedy"].startswith("start `reliablepub relay`")


def test_a_standby_waits_for_a_full_disk(cli: Cli, fake: FakeBroker, postgres_outbox: str) -> None:
    owner = cli.relay("--outbox", postgres_outbox)
    standby = standing_by(cli, postgres_outbox)
    with closing(psycopg.connect(postgres_outbox, autocommit=True)) as operator:
        operator.execute(FULL)
        assert cli.stop(owner).code == 0
        assert "the disk of the database is full" in line_of(standby)
        operator.execute("DROP TRIGGER full_disk ON reliablepub.runs")
    until(standby, "this relay has taken over the outbox")
    assert cli.stop(standby).code == 0


def test_a_wrong_user_of_postgresql_changes_nothing(
    cli: Cli, fake: FakeBroker, postgres_outbox: str, tmp_path: Path
) -> None:
    config = tmp_path / "relay.toml"
    config.write_text(f"outbox = '{postgres_outbox}'\n")
    relay = cli.begin("relay", "--config", config)
    until(relay, "connected to the broker\n")
    scheme, _, place = postgres_outbox.partition("://")
    config.write_text(f"outbox = '{scheme}://nobody@{place.rpartition('@')[2]}'\n")
    relay.send_signal(signal.SIGHUP)
    told = line_of(relay)
    assert told.startswith("reopened with the earlier settings: ")
    assert 'role "nobody" does not exist' in told
    Outbox(postgres_outbox).enqueue(Message(b"", routing_key="all"))
    fake.wait_for(1, timeout_s=60)
    assert cli.stop(relay).code == 0


def test_a_drain_that_is_interrupted_while_it_stands_by_is_not_done(
    cli: Cli, fake: FakeBroker
) -> None:
    owner = cli.relay("--outbox", "o.db")
    ended = cli.stop(standing_by(cli, "o.db", "--drain"))
    assert ended.code == 3
    assert ended.error == "interrupted while standing by: another relay owns the outbox"
    assert cli.stop(owner).code == 0


def test_without_it_a_second_relay_ends(cli: Cli, where: Where) -> None:
    owner = cli.relay("--outbox", where)
    refused(cli("relay", "--outbox", where), f"is relayed by process {owner.pid}", code=4)
    assert cli.stop(owner).code == 0
