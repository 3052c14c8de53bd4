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
from tests.stores import DURABLE, outbox_of
from tests.waiting import until


@pytest.fixture(params=DURABLE)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An outbox with five parked messages, one that waits for its destination and a new one."""
    where = str(outbox_of(request.param, request, tmp_path))
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


def summary(where: str, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["outbox", "summary", *arguments, "--outbox", where])
    assert result.exit_code == 0, result.output
    return result.stdout


def found(where: str, *arguments: str) -> list[tuple[object, ...]]:
    names = ("messages", "state", "exchange", "routing_key", "is_several", "outcome", "reply_code")
    rows = json.loads(summary(where, "--json", *arguments))
    assert all(row["oldest_at"] <= row["newest_at"] for row in rows)
    return [tuple(row[name] for name in names) for row in rows]


def test_the_largest_group_comes_first(where: str) -> None:
    orders = (3, "parked", "orders", "order.0", True, "returned", 312)
    gone = (2, "parked", "", "gone", False, "returned", 312)
    missing = (1, "waiting", "missing", "", False, "refused", 404)
    later = (1, "ready", "", "later", False, None, None)
    assert found(where)[:2] == [orders, gone]
    assert set(found(where)[2:]) == {missing, later}
    assert found(where, "--exchange", "orders", "--state", "parked") == [orders]
    assert found(where, "--state", "confirmed") == [(1, "confirmed", "", "q", False, None, None)]
    assert len(found(where, "--limit", "1")) == 1


def test_each_line_says_what_and_why(where: str) -> None:
    head, orders, *_ = summary(where, "--state", "parked").splitlines()
    assert head.split() == [
        *("messages", "state", "exchange", "of", "routing", "key"),
        *("oldest", "newest", "bytes", "answer"),
    ]
    assert orders.split()[:4] == ["3", "parked", "orders", "(several)"]
    assert orders.endswith("returned: 312 NO_ROUTE")
    (line,) = csv.DictReader(summary(where, "--csv", "--exchange", "missing").splitlines())
    assert "no exchange 'missing'" in line["reply_text"]
    assert "no message matches" in summary(where, "--exchange", "other")


def test_a_message_whose_destination_is_paused_says_so(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    with FakeBroker() as broker, Publisher(broker.url, outbox=path) as publisher:
        publisher.publish(b"x", exchange="missing")
        until(lambda: bool(publisher.status.paused))
        for _ in range(3):
            publisher.publish(b"x", exchange="missing")
        until(lambda: "paused" in summary(str(path)))
        assert sum(int(str(row[0])) for row in found(str(path))) == 4


def test_a_message_that_is_retried_says_when_it_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    patient = Retries(stop_after_delay(900), wait_fixed(60))
    policy = RetryPolicy(returned=patient, breaker=None)
    with FakeBroker() as broker, Publisher(broker.url, outbox=path, retry=policy) as publisher:
        publisher.publish(b"x", routing_key="gone")

        def told() -> str:
            command = ["outbox", "explain", "1", "--outbox", str(path)]
            return CliRunner().invoke(main, command).stdout

        until(lambda: "and gives it up in 14 min" in told())
        assert "unless it is accepted by then; `reliablepub outbox retry 1` sends it now" in told()


@pytest.mark.parametrize("kind", DURABLE)
def test_lists_name_the_task_of_celery(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    where = str(outbox_of(kind, request, tmp_path))
    with Outbox(where) as outbox:
        outbox.create()
        for headers in ({"task": "shop.ship"}, {"task": 5}, None):
            outbox.enqueue(Message(b"", routing_key="celery", headers=headers))
    listed = ["outbox", "list", "--outbox", where]
    head, first, *_ = CliRunner().invoke(main, listed).stdout.splitlines()
    assert "task" in head.split()
    assert "shop.ship" in first
    rows = json.loads(CliRunner().invoke(main, [*listed, "--json"]).stdout)
    assert [row["task"] for row in rows][:1] == ["shop.ship"]
    assert rows[2]["task"] is None


@pytest.mark.parametrize("kind", DURABLE)
def test_a_pause_counts_anew_what_waits_after_an_operator(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    where = str(outbox_of(kind, request, tmp_path))
    Outbox(where).create()
    breaker = Breaker(pause=wait_fixed(600))  # no probe comes meanwhile
    options: dict[str, Any] = {"outbox": where, "retry": RetryPolicy(breaker=breaker)}
    with FakeBroker() as broker, Publisher(broker.url, **options) as publisher:
        for _ in range(20):
            publisher.publish(b"x", exchange="missing")
        until(lambda: sum(one.waiting for one in publisher.status.paused) == 20)
        listed = json.loads(
            CliRunner().invoke(main, ["outbox", "list", "--json", "--outbox", where]).stdout
        )
        ids = [str(row["id"]) for row in listed[:15]]
        park = ["outbox", "park", *ids, "--outbox", where]
        assert CliRunner().invoke(main, park).stdout == "15 messages parked\n"
        until(lambda: sum(one.waiting for one in publisher.status.paused) == 5)
