"""`reliablepub relay`: goes on, drains, stops."""

import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from reliablepub import Message, Outbox, RetryPolicy
from reliablepub.cli.relay.command import _settings
from reliablepub.cli.relay.command import relay as relay_command
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.policy import wait_s
from reliablepub.testing import FakeBroker, faults
from tests.cli.conftest import NOBODY, Cli, line_of, refused
from tests.waiting import until


@pytest.fixture
def enqueue(cli: Cli) -> Callable[..., Path]:
    """Put messages into `o.db` as an application would."""

    def put(count: int, routing_key: str = "all", *, persistent: bool = True) -> Path:
        path = cli.folder / "o.db"
        with Outbox(path) as outbox:
            for i in range(count):
                message = Message(b"%d" % i, routing_key=routing_key, persistent=persistent)
                outbox.enqueue(message)
        return path

    return put


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_publishes_what_is_put_in_until_a_signal(
    cli: Cli, fake: FakeBroker, enqueue: Callable[..., Path], number: signal.Signals
) -> None:
    relay = cli.begin("relay", "--outbox", "o.db", "--json")
    until((cli.folder / "o.db").exists)
    enqueue(3)
    fake.wait_for(3, timeout_s=60)
    enqueue(2)
    fake.wait_for(5, timeout_s=60)
    relay.send_signal(number)
    ended = cli.ended(relay)
    assert ended.code == 0
    assert ended.err == "connected to the broker\n"
    assert (ended.json["confirmed"], ended.json["open"]) == (5, 0)


def test_what_is_in_flight_is_given_a_moment(
    cli: Cli, fake: FakeBroker, enqueue: Callable[..., Path]
) -> None:
    fake.inject(faults.HoldConfirms())
    enqueue(4, persistent=False)  # so that the verdicts are there to be released
    relay = cli.begin("relay", "--outbox", "o.db", "--json")
    fake.wait_for(4, timeout_s=60)
    relay.send_signal(signal.SIGTERM)
    fake.release_confirms()
    assert cli.ended(relay).json["confirmed"] == 4


def test_changes_of_the_connection_are_lines(
    cli: Cli, fake: FakeBroker, enqueue: Callable[..., Path]
) -> None:
    relay = cli.relay("--outbox", "o.db")
    fake.block("low on memory")
    enqueue(1)  # RabbitMQ tells only those who publish
    assert line_of(relay) == "blocked by the broker: low on memory\n"
    fake.unblock()
    assert line_of(relay) == "connected to the broker\n"
    fake.stop()
    line = line_of(relay)
    assert line.startswith("not connected to the broker: ")
    assert line.endswith("; trying again\n")
    assert cli.stop(relay).code == 0


def test_draining_reports_what_is_parked(cli: Cli, enqueue: Callable[..., Path]) -> None:
    enqueue(2)
    enqueue(1, "nowhere")
    ended = cli("relay", "--outbox", "o.db", "--drain")
    assert ended.code == 0
    assert "2 confirmed, 1 parked, 0 open" in ended.out
    assert (
        "1 message is parked; see `reliablepub outbox list --state parked --outbox o.db`"
        in ended.err
    )
    lines = [line for line in ended.err.splitlines() if "routing key 'nowhere'" in line]
    assert lines[0].endswith(": returned: 312 NO_ROUTE (attempt 1)")
    assert "given up (parked): returned: 312 NO_ROUTE" in lines[-1]
    assert len(lines) == 2, "however many attempts there were"


def test_draining_does_not_wait_for_what_is_put_off(cli: Cli, enqueue: Callable[..., Path]) -> None:
    with Outbox(enqueue(2)) as outbox:
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        outbox.enqueue(Message(b"", routing_key="all", not_before=tomorrow))
    ended = cli("relay", "--outbox", "o.db", "--drain")
    assert ended.code == 0
    assert "2 confirmed, 0 parked, 1 open" in ended.out
    assert "1 message is still open, and stays in the outbox: it waits for its time" in ended.err
    assert "holds, or was stored while the relay ended; see" in ended.err


def test_draining_that_is_interrupted_is_not_done(cli: Cli, enqueue: Callable[..., Path]) -> None:
    enqueue(2)
    relay = cli.begin("relay", "--outbox", "o.db", "--drain", "--url", NOBODY)
    assert "connection refused" in line_of(relay)
    ended = cli.stop(relay)
    assert ended.code == 3
    assert ended.error == "interrupted; 2 messages are still open, and stay in the outbox"


def test_there_is_nothing_to_drain_without_an_outbox(cli: Cli) -> None:
    refused(cli("relay", "--outbox", "o.db", "--drain"), "there is no outbox o.db", code=4)
    assert list(cli.folder.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--drain"]])
def test_a_relay_that_fails_ends_with_its_exit_code(
    cli: Cli, fake: FakeBroker, enqueue: Callable[..., Path], options: list[str]
) -> None:
    fake.inject(faults.HoldConfirms())
    path = enqueue(1)
    relay = cli.begin("relay", "--outbox", "o.db", *options)
    fake.wait_for(1, timeout_s=60)
    path.rename(path.with_name("elsewhere.db"))
    ended = cli.ended(relay)
    assert ended.code == 4
    assert "OutboxMoved" in ended.err
    assert "o.db.rescued-1" in ended.err
    with Outbox(path.with_name("o.db.rescued-1")) as rescued:
        assert rescued.status().open == 1


@pytest.mark.parametrize("drains", [False, True])
def test_the_retry_policy_is_set_by_options_or_the_configuration(
    tmp_path: Path, *, drains: bool
) -> None:
    config = tmp_path / "relay.toml"
    config.write_text(f'outbox = "{tmp_path / "o.db"}"\n[relay]\nreturned-for = "2h"\n')
    given = ["--url", "amqp://h/", "--config", str(config), "--nacked-for", "90s"]
    given += ["--unavailable-for", "1d", "--pause-max", "7s", "--confirm-timeout", "5s"]
    given += ["--drain"] if drains else []
    with relay_command.make_context("relay", given) as context:
        options = _settings(context).options
    retry = options["retry"]
    assert retry is not None
    assert retry.unavailable is not None
    lasts = [one.lasts_s for one in (retry.nacked, retry.returned, retry.unavailable)]
    assert lasts == [90, 7200, 86_400]
    assert retry.breaker is not None
    assert wait_s(retry.breaker.pause, 30) == 7
    assert options["confirm_timeout_s"] == 5
    assert retry.retries(Outcome(OutcomeKind.REFUSED, 406, "malformed")).lasts_s is None


def test_without_these_options_the_policy_is_the_usual_one(tmp_path: Path) -> None:
    given = ["--url", "amqp://h/", "--outbox", str(tmp_path / "o.db")]
    with relay_command.make_context("relay", given) as context:
        retry = _settings(context).options["retry"]
    assert retry == RetryPolicy()
    assert retry.breaker is RetryPolicy().breaker
