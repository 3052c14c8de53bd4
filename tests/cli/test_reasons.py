"""`outbox summary`: what is stuck, by state, destination and last answer."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tenacity import stop_after_delay, wait_fixed

from reliablepub import Breaker, Message, Outbox, Publisher, Retries, RetryPolicy
from reliablepub.cli import main
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.test_edit import run
from tests.stores import Where
from tests.waiting import until


@pytest.fixture
def stuck(where: Where) -> Where:
    """An outbox with five parked messages, one that waits for its destination and a new one."""
    with FakeBroker() as broker:
        broker.declare_exchange("orders", "topic")
        broker.declare_queue("q")
        options: dict[str, Any] = {"outbox": where, "keep_confirmed_s": 60.0}
        with Publisher(broker.url, retry=RetryPolicy.prompt(), **options) as publisher:
            for n in range(3):
                publisher.publish(b"xx", exchange="orders", routing_key=f"order.{n}")
            for _ in range(2):
                publisher.publish(b"x", routing_key="gone")
            publisher.publish(b"x", routing_key="q").result(20)
            until(lambda: Outbox(where).status().parked == 5)
        with Publisher(broker.url, **options) as publisher:
            publisher.publish(b"x", exchange="missing")
            until(lambda: bool(publisher.status.paused))
    fill(where, Message(b"x", routing_key="later"))
    return where


def summary(where: Where, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["outbox", "summary", *arguments, "--outbox", str(where)])
    assert result.exit_code == 0, result.output
    return result.stdout


def found(where: Where, *arguments: str) -> list[tuple[object, ...]]:
    names = ("messages", "state", "exchange", "routing_key", "is_several", "outcome", "reply_code")
    rows = json.loads(summary(where, "--json", *arguments))
    assert all(row["oldest_at"] <= row["newest_at"] for row in rows)
    return [tuple(row[name] for name in names) for row in rows]


def test_the_largest_group_comes_first(stuck: Where) -> None:
    orders = (3, "parked", "orders", "order.0", True, "returned", 312)
    gone = (2, "parked", "", "gone", False, "returned", 312)
    missing = (1, "waiting", "missing", "", False, "refused", 404)
    later = (1, "ready", "", "later", False, None, None)
    assert found(stuck)[:2] == [orders, gone]
    assert set(found(stuck)[2:]) == {missing, later}
    assert found(stuck, "--exchange", "orders", "--state", "parked") == [orders]
    assert found(stuck, "--state", "confirmed") == [(1, "confirmed", "", "q", False, None, None)]
    assert len(found(stuck, "--limit", "1")) == 1


def test_each_line_says_what_and_why(stuck: Where) -> None:
    head, orders, *_ = summary(stuck, "--state", "parked").splitlines()
    assert head.split() == [
        *("messages", "state", "exchange", "of", "routing", "key"),
        *("oldest", "newest", "bytes", "answer"),
    ]
    assert orders.split()[:4] == ["3", "parked", "orders", "(several)"]
    assert orders.endswith("returned: 312 NO_ROUTE")
    (line,) = csv.DictReader(summary(stuck, "--csv", "--exchange", "missing").splitlines())
    assert "no exchange 'missing'" in line["reply_text"]
    assert "no message matches" in summary(stuck, "--exchange", "other")


def test_a_message_whose_destination_is_paused_says_so(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    with FakeBroker() as broker, Publisher(broker.url, outbox=path) as publisher:
        publisher.publish(b"x", exchange="missing")
        until(lambda: bool(publisher.status.paused))
        for _ in range(3):
            publisher.publish(b"x", exchange="missing")
        until(lambda: "paused" in summary(path))
        assert sum(int(str(row[0])) for row in found(path)) == 4


def test_a_message_that_is_retried_says_when_it_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    patient = Retries(stop_after_delay(900), wait_fixed(60))
    policy = RetryPolicy(returned=patient, breaker=None)
    with FakeBroker() as broker, Publisher(broker.url, outbox=path, retry=policy) as publisher:
        publisher.publish(b"x", routing_key="gone")
        until(lambda: "and gives it up in 14 min" in run(path, "explain", "1"))
        told = run(path, "explain", "1")
        assert "unless it is accepted by then; `reliablepub outbox retry 1` sends it now" in told


def test_lists_name_the_task_of_celery(where: Where) -> None:
    with Outbox(where) as outbox:
        outbox.create()
        for headers in ({"task": "shop.ship"}, {"task": 5}, None):
            outbox.enqueue(Message(b"", routing_key="celery", headers=headers))
    head, first, *_ = run(where, "list").splitlines()
    assert "task" in head.split()
    assert "shop.ship" in first
    rows = json.loads(run(where, "list", "--json"))
    assert [row["task"] for row in rows][:1] == ["shop.ship"]
    assert rows[2]["task"] is None


def test_a_pause_counts_anew_what_waits_after_an_operator(where: Where) -> None:
    Outbox(where).create()
    breaker = Breaker(pause=wait_fixed(600))  # no probe comes meanwhile
    options: dict[str, Any] = {"outbox": where, "retry": RetryPolicy(breaker=breaker)}
    with FakeBroker() as broker, Publisher(broker.url, **options) as publisher:
        for _ in range(20):
            publisher.publish(b"x", exchange="missing")
        until(lambda: sum(one.waiting for one in publisher.status.paused) == 20)
        ids = [row["id"] for row in json.loads(run(where, "list", "--json"))[:15]]
        assert run(where, "park", *ids) == "15 messages parked\n"
        until(lambda: sum(one.waiting for one in publisher.status.paused) == 5)
