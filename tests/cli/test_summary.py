"""Which exit code goes first, and what is said: over every combination that can come about."""

from dataclasses import replace
from itertools import product

import pytest

from reliablepub.cli.commands import Exit
from reliablepub.cli.publish.run import ENDS, Stopped, Tally
from reliablepub.cli.publish.summary import Summary
from reliablepub.errors import Unroutable
from reliablepub.outbox.entry import Counters
from reliablepub.relay.status import Link, Status

RETURNED = ENDS[Unroutable]


def summary(
    *,
    parked: int = 0,
    open_: int = 0,
    stopped: Stopped | None = None,
    error: str = "",
    outbox: bool = True,
    resumed_at: int | None = None,
    parked_before: int = 0,
    records: int = 10,
    link: Status | None = None,
) -> Summary:
    tally = Tally(stored=10, confirmed=10 - parked - open_)
    tally.given_up[RETURNED] = parked
    failure = Unroutable(
        message_id="m-1", exchange="x", routing_key="k", reply_code=312, reply_text="NO_ROUTE"
    )
    tally.failures = [(RETURNED, failure)] * parked
    counters = Counters(
        stored=10 + parked_before, confirmed=10 - parked - open_, parked=parked + parked_before
    )
    return Summary(
        source="f",
        outbox="o.db" if outbox else None,
        records=records,
        resumed_at=resumed_at,
        tally=tally,
        status=Status(counters=counters),
        last_link=link or Status(link=Link.CONNECTED),
        stopped=stopped,
        error=error,
        seconds=2.0,
    )


@pytest.mark.parametrize(
    ("stopped", "parked", "open_", "code"),
    [
        (None, 0, 0, Exit.CONFIRMED),
        (None, 1, 0, Exit.PARKED),
        (Stopped.TIMEOUT, 0, 1, Exit.OPEN),
        (Stopped.TIMEOUT, 0, 0, Exit.CONFIRMED),  # the last confirm came while it was closed
        (Stopped.TIMEOUT, 1, 1, Exit.PARKED),
        (Stopped.INTERRUPTED, 0, 1, Exit.OPEN),
        (Stopped.INTERRUPTED, 1, 1, Exit.PARKED),
        (Stopped.REFUSED, 1, 0, Exit.PARKED),
        (Stopped.BAD_INPUT, 1, 1, Exit.BAD_INPUT),
        (Stopped.OUTBOX, 1, 1, Exit.OUTBOX),
    ],
)
def test_the_worst_goes_first(stopped: Stopped | None, parked: int, open_: int, code: Exit) -> None:
    assert summary(stopped=stopped, parked=parked, open_=open_, error="x").exit is code


@pytest.mark.parametrize("stopped", [Stopped.INTERRUPTED, Stopped.TIMEOUT])
def test_a_file_that_was_not_read_to_its_end_is_not_done(stopped: Stopped) -> None:
    unfinished = summary(stopped=stopped, records=11)
    assert unfinished.exit is Exit.OPEN
    (line,) = unfinished.problems()
    assert line.endswith("after record 10 of 11; the same command resumes there")


def test_whatever_is_not_well_is_said_and_nothing_else() -> None:
    errors = {Stopped.BAD_INPUT: "line 3: bad", Stopped.OUTBOX: "the disk is full"}
    for stopped, parked, open_, outbox in product((None, *Stopped), (0, 1), (0, 2), (True, False)):
        if stopped is Stopped.REFUSED and not parked:
            continue
        case = summary(
            stopped=stopped,
            parked=parked,
            open_=open_,
            outbox=outbox,
            error=errors.get(stopped, "") if stopped else "",
        )
        assert bool(case.problems()) == (case.exit is not Exit.CONFIRMED)
        assert all("\n" not in line for line in case.problems())
        assert case.as_json()["exit_code"] == case.exit


def test_a_resumed_run_speaks_for_the_earlier_one_too() -> None:
    assert summary(resumed_at=6).exit is Exit.CONFIRMED
    assert summary(parked_before=2).exit is Exit.CONFIRMED, "they are of no run of this file"
    case = summary(resumed_at=6, parked_before=2)
    assert case.exit is Exit.PARKED
    (problem,) = case.problems()
    assert problem == (
        "2 messages in the outbox are parked or expired, and may be of the earlier run; see "
        "`reliablepub outbox list --state parked --state expired --outbox o.db`"
    )
    assert len(summary(resumed_at=6, parked=1).problems()) == 1, "that one is of this run"
    open_ = Status(counters=Counters(stored=10, confirmed=9))
    case = replace(summary(resumed_at=6), status=open_)
    assert case.exit is Exit.CONFIRMED, "it has waited for all that may be sent"
    case = replace(case, stopped=Stopped.TIMEOUT)
    assert case.exit is Exit.OPEN


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        (Status(link=Link.CONNECTED, reason=""), ""),
        (Status(link=Link.DISCONNECTED, reason="Connection refused"), "connection refused"),
        (Status(link=Link.CONNECTING, reason="403 ACCESS_REFUSED"), "403 ACCESS_REFUSED"),
        (Status(link=Link.CONNECTING), "no connection was made yet"),
        (Status(link=Link.BLOCKED, reason="low\non disk"), "blocked by the broker: low on disk"),
    ],
)
def test_the_reason_is_the_connections(link: Status, reason: str) -> None:
    assert summary(open_=1, link=link).reason == reason


def test_figures_for_people() -> None:
    assert summary(parked=1).headline() == (
        "f: 10 records, 10 stored, 9 confirmed, 1 parked, 0 open in 2.0 s (4 confirmed per second)"
    )


def test_a_command_for_a_server_needs_the_users_own_url() -> None:
    """Its name lacks the user, and parameters such as sslmode."""
    told = replace(summary(open_=1, stopped=Stopped.TIMEOUT), outbox="postgresql://db/shop")
    (line,) = told.problems()
    assert "run `reliablepub relay --outbox ... --url ...`" in line
