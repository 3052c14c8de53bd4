"""The demo end to end, and what it must see."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from reliablepub.demo import command as story
from reliablepub.demo.arrivals import delete, problems_of
from reliablepub.testing import FakeBroker
from tests.between import before
from tests.waiting import until

RECORDS = 2_000


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    work = tmp_path / "work"
    work.mkdir()
    return os.environ | {"TMPDIR": str(work), "NO_COLOR": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "reliablepub", "demo", *arguments]


def test_nothing_is_lost_through_both_crashes(environment: dict[str, str]) -> None:
    result = subprocess.run(
        command("--records", str(RECORDS), "--json"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    ledger = json.loads(result.stdout)
    assert ledger["problems"] == []
    assert ledger["stored"] == ledger["confirmed"] == ledger["consumed"] == RECORDS
    assert ledger["lost"] == ledger["parked"] == ledger["open"] == ledger["unknown_ids"] == 0
    assert ledger["damaged"] == 0
    assert (ledger["killed"], ledger["crashed"]) == (1, 1)
    assert ledger["connections_lost"] >= 1
    # Every copy beyond the first was made because the fate of an earlier attempt was not known.
    assert ledger["uncertain"] >= ledger["duplicates"] - ledger["redelivered"] >= 0
    assert ledger["uncertain"] > 0
    assert "LEDGER" in result.stderr
    assert list(Path(environment["TMPDIR"]).iterdir()) == []


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.rabbit)])
def url(request: pytest.FixtureRequest, fake_broker: FakeBroker) -> str:
    if request.param == "fake":
        return fake_broker.url
    found: str = request.getfixturevalue("rabbitmq_url")
    return found


def test_a_broker_of_the_users_own_is_left_as_it_was(environment: dict[str, str], url: str) -> None:
    result = subprocess.run(
        command("--records", "500", "--json", "--url", url),
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    ledger = json.loads(result.stdout)
    assert (ledger["consumed"], ledger["lost"], ledger["crashed"]) == (500, 0, 0)
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        exchange = next(word for word in result.stderr.split() if "reliablepub-demo-" in word)
        with pytest.raises(ChannelClosedByBroker, match="NOT_FOUND"):
            connection.channel().exchange_declare(exchange, passive=True)
        with pytest.raises(ChannelClosedByBroker, match="NOT_FOUND"):
            connection.channel().queue_declare(exchange, passive=True)


def test_a_demo_that_is_interrupted_while_it_declares_queues_leaves_none(
    fake_broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockingChannel, "queue_bind", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        story.tell(tmp_path, records=100, url=fake_broker.url, say=lambda _: None)
    assert fake_broker.queues() == ()


def test_a_publisher_that_had_finished_is_not_started_again(
    fake_broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, story._Demo, "kill_at_a_third", lambda demo, publisher: publisher.check())
    ledger = story.tell(tmp_path, records=100, url=fake_broker.url, say=lambda _: None)
    assert problems_of(ledger) == []
    assert (ledger["stored"], ledger["killed"]) == (100, 0)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("amqp://guest:hush@127.0.0.1:1/", "the broker of --url cannot be used: [Errno 111] Conn"),
        ("nonsense", "the URL's scheme is ''"),
        ("", "the URL's scheme is ''"),
        ("http://u:hush@h/", "the URL's scheme is 'http', which is RabbitMQ's management"),
        ("amqp://u:hush@a..b/", "the URL's host is no host name"),
        ("amqp://u@h/", "--url has a user and no password"),
        ("amqp://u:hush@a:5672,b:5672/", "--url names several hosts; give one"),
        ("amqp://u:hush/@h/", "write / in a password as %2F"),
    ],
)
def test_a_broker_that_cannot_be_used_is_one_line(
    url: str, words: str, environment: dict[str, str], tmp_path: Path
) -> None:
    result = subprocess.run(
        command("--records", "100", "--url", url),
        env=environment | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("Error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.glob("reliablepub-demo-*"))
    assert "hush" not in result.stdout + result.stderr


def test_a_broker_that_is_gone_at_the_end_does_not_cost_the_ledger(
    fake_broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    gone = "amqp://guest:hush@127.0.0.1:1/"
    monkeypatch.setattr(story, "delete", lambda _, name: delete(gone, name))
    ledger = story.tell(tmp_path, records=100, url=fake_broker.url, say=said.append)
    assert problems_of(ledger) == []
    assert "stay[/]: the broker of --url cannot be used" in said[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_ends_what_it_started(
    environment: dict[str, str], number: signal.Signals
) -> None:
    demo = subprocess.Popen(
        command("--records", str(RECORDS)), env=environment, stdout=subprocess.PIPE, text=True
    )
    assert demo.stdout is not None
    with demo.stdout as narration:
        line = next(line for line in narration if "the bundled broker is process" in line)
        broker = int(line.split("is process ")[1].split(";")[0])
        os.kill(broker, 0)  # it is there
        demo.send_signal(number)
        assert demo.wait(60) != 0
    until(lambda: is_gone(broker))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
