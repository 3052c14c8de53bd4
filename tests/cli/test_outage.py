"""A PostgreSQL that is away: what a relay, `watch` and `doctor` do meanwhile."""

import json
import urllib.request
from urllib.error import HTTPError

import pytest

from reliablepub import Message
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.conftest import Cli, line_of
from tests.postgres import PostgresServer


def test_a_relay_that_starts_waits_for_its_database(
    cli: Cli, fake: FakeBroker, postgres_server: PostgresServer, postgres_outbox: str
) -> None:
    fill(postgres_outbox, Message(b"x", exchange="flights", routing_key="flight.AA"))
    postgres_server.stop()
    relay = cli.begin("relay", "--outbox", postgres_outbox, "--health-port", "0")
    url = line_of(relay).partition(" ")[2].partition("/live")[0]
    assert line_of(relay).startswith("standing by: outbox ")
    with pytest.raises(HTTPError) as refused:  # nothing can be stored
        urllib.request.urlopen(f"{url}/ready", timeout=30)
    with refused.value as answer:
        assert json.loads(answer.read())["reasons"] == [
            "standing by: the outbox cannot be opened for now"
        ]
    assert relay.poll() is None
    postgres_server.start()
    fake.wait_for(1, timeout_s=60)
    assert cli.stop(relay).code == 0


def test_one_that_drains_does_not(
    cli: Cli, postgres_server: PostgresServer, postgres_outbox: str
) -> None:
    postgres_server.stop()
    assert cli("relay", "--drain", "--outbox", postgres_outbox).code == 4


def test_watch_goes_on_when_the_database_is_back(
    cli: Cli, postgres_server: PostgresServer, postgres_outbox: str
) -> None:
    watch = cli.begin("watch", "--outbox", postgres_outbox, "--interval", "0.1s")
    assert watch.stdout is not None
    assert "unreachable_s" not in json.loads(watch.stdout.readline())
    postgres_server.stop()
    seen: dict[str, object] = {}
    while "unreachable_s" not in seen:
        seen = json.loads(watch.stdout.readline())
    assert "cannot be reached" in str(seen["unreachable_reason"])
    assert seen["stored"] == 0  # the last figures, as old as it says
    postgres_server.start()
    while "unreachable_s" in seen:
        seen = json.loads(watch.stdout.readline())
    assert cli.stop(watch).code == 0


def test_doctor_looks_at_the_broker_all_the_same(
    cli: Cli, fake: FakeBroker, postgres_server: PostgresServer, postgres_outbox: str
) -> None:
    postgres_server.stop()
    ended = cli("doctor", "--outbox", postgres_outbox, "--url", fake.url, "--json")
    assert ended.code == 4
    found = {(row["about"], row["check"]): row for row in ended.json}
    assert found["outbox", "outbox"]["level"] == "problem"
    assert "cannot be reached" in found["outbox", "outbox"]["found"]
    assert any(about == "broker" for about, _ in found)
