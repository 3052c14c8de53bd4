"""What is sent later: listed by time, cancelled and rescheduled from the command line."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from reliablepub import Message, Outbox, Publisher
from reliablepub.testing import FakeBroker, faults
from tests.cli.conftest import Run, ids, refused
from tests.waiting import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Messages 1 to 3, of which 2 is due first; 4 is not scheduled."""
    path = tmp_path / "o.db"
    now = datetime.now(UTC)
    with Outbox(path) as outbox:
        for number, hours in enumerate((2, 1, 72), start=1):
            outbox.enqueue(
                Message(b"", "reminders", f"r{number}", not_before=now + timedelta(hours=hours)),
                key=f"order {number}",
            )
        outbox.enqueue(b"")
    return path


def open_ids(path: Path) -> list[object]:
    with Outbox(path) as outbox:
        assert outbox.audit().is_right
        return [row["id"] for row in outbox.rows("open")]


def test_the_schedule_is_in_the_order_of_time(run: Run) -> None:
    assert ids(run("schedule", "--json")) == [2, 1, 3]
    assert ids(run("schedule", "--json", "--within", "90m")) == [2]
    assert ids(run("schedule", "--json", "--routing-key", "r[13]")) == [1, 3]
    limited = run("schedule", "--limit", "2")
    assert "r3" not in limited.stdout
    assert "in 59 min" in limited.stdout
    assert "the first 2; there may be more" in limited.stderr
    assert "no message waits" in run("schedule", "--exchange", "other").output
    assert run("schedule", "--state", "parked").exit_code == 2


def test_a_key_is_cancelled(run: Run, path: Path) -> None:
    dry = run("cancel", "order 1", "order 2", "--dry-run")
    assert dry.stdout == "2 messages would be cancelled\n"
    assert run("cancel", "order 1").exit_code == 2
    assert "There is no terminal to ask on" in run("cancel", "order 1").stderr
    assert open_ids(path) == [1, 2, 3, 4]
    done = run("cancel", "order 1", 4, "--yes", "--note", "has left")
    assert done.stdout == "2 messages cancelled\n"
    assert open_ids(path) == [2, 3]
    with Outbox(path) as outbox:
        outbox.enqueue(b"", key="order 1")
    assert open_ids(path) == [2, 3, 5]
    assert "has left" in run("explain", 4).stdout
    gone = run("cancel", 4, "--yes")
    assert (gone.exit_code, gone.stdout) == (2, "0 messages cancelled\n")
    assert "left alone" in gone.stderr


def test_a_dry_run_tells_which_would_be_left_alone(run: Run, path: Path) -> None:
    run("park", 3)
    run("cancel", 4, "--yes")
    dry = run("cancel", 1, 3, 4, "--dry-run")
    assert (dry.exit_code, dry.stdout) == (2, "2 messages would be cancelled\n")
    assert "message 4 would be left alone: gone, given up" in dry.stderr
    when = ("--not-before", "2038-01-19T03:14:07Z")
    dry = run("reschedule", 1, 3, 4, *when, "--dry-run", "--json")
    assert (dry.exit_code, json.loads(dry.stdout)["unfit"]) == (2, [3, 4])
    assert ids(run("schedule", "--json")) == [2, 1]


def test_two_ids_of_one_message_name_it_once(run: Run) -> None:
    dry = run("retry", 1, "order 1", 1, "--dry-run")
    assert dry.stdout.splitlines()[1:-1] == [dry.stdout.splitlines()[1]]
    assert dry.stdout.splitlines()[-1] == "1 message would be put back"
    assert json.loads(run("cancel", 1, "order 1", "--yes", "--json").stdout)["chosen"] == 1


def test_an_unknown_id_changes_nothing(run: Run, path: Path) -> None:
    refused(run("cancel", "order 1", "order 9", "--yes"), "nothing was changed")
    assert open_ids(path) == [1, 2, 3, 4]


def test_a_message_is_rescheduled(run: Run) -> None:
    result = run("reschedule", "order 2", 4, "--not-before", "2038-01-19T03:14:07Z", "--json")
    assert json.loads(result.stdout)["changed"] == 2
    assert ids(run("schedule", "--json")) == [1, 3, 2, 4]
    words = run("reschedule", 1, "--not-before", "2000-01-01T00:00:00+01:00").stdout
    assert words == "1 message rescheduled\n"
    assert ids(run("schedule", "--json"))[0] == 1
    assert run("reschedule", 1, "--not-before", "tomorrow").exit_code == 2
    assert run("reschedule", 1).exit_code == 2


def test_it_is_too_late_for_what_is_in_flight(run: Run, path: Path) -> None:
    with FakeBroker() as broker, Publisher(broker.url, outbox=path, close_timeout_s=0) as publisher:
        broker.declare_queue("q")
        broker.inject(faults.HoldConfirms())
        with Outbox(path) as outbox:
            outbox.enqueue(Message(b"", "", "q"), key="now")
        until(lambda: bool(broker.messages("q")))
        dry = run("cancel", "now", "order 1", "--dry-run")
        assert (dry.exit_code, dry.stdout) == (3, "1 message would be cancelled\n")
        assert "message 5 would be left alone: in flight" in dry.stderr
        result = run("cancel", "now", "order 1", "--yes")
        assert (result.exit_code, result.stdout) == (3, "1 message cancelled\n")
        assert "message 5 left alone: in flight" in result.stderr
        assert json.loads(run("cancel", "now", "--yes", "--json").stdout)["too_late"] == [5]
        broker.release_confirms()
        until(lambda: publisher.status.counters.confirmed >= 1)
