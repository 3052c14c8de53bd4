"""A run against a publisher that fails in ways a real one seldom does."""

import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from reliablepub import BatchReceipt, Message, Publisher
from reliablepub.cli.progress import Bar
from reliablepub.cli.publish.records import BadRecord, Line
from reliablepub.cli.publish.run import Patience, Run, Stopped, _groups
from reliablepub.cli.signals import Stop
from reliablepub.errors import InvalidMessage, OutboxDiskFull, PublisherClosed, RelayHeldUp
from reliablepub.front.receipt import IssuedBatch
from reliablepub.outbox.entry import Counters, Entry
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.relay.handover import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX
from reliablepub.relay.status import Link, Status
from tests.cli.test_tally import Running

ENTRY = Entry(Message(b"", message_id="m"), 0.0)


class Scripted(Running):
    """Stores everything, and settles each group as told: a kind, None, or an error to raise."""

    def __init__(
        self, *script: OutcomeKind | Exception | None, at_close: Exception | None = None
    ) -> None:
        self.script = list(script)
        self.groups: list[list[Message]] = []
        self.at_close = at_close
        self.status = Status(link=Link.BLOCKED, reason="low", counters=Counters(), connects=1)

    def publish_many(self, messages: Iterable[Message], *, source: str | None) -> BatchReceipt:
        del source
        verdict = self.script.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        group = list(messages)
        self.groups.append(group)
        receipt = IssuedBatch(self)
        receipt.accepted(len(group))
        if verdict is OutcomeKind.CONFIRMED:
            receipt.all_confirmed([ENTRY] * len(group))
        elif verdict is not None:
            for _ in group:
                receipt.given_up(ENTRY, Outcome(verdict))
        return receipt

    def flush(self, timeout_s: float) -> Status:
        del timeout_s
        return self.status

    def close(self, timeout_s: float) -> None:
        del timeout_s
        if self.at_close is not None:
            raise self.at_close


def message(line: Line) -> Message:
    if line.body == b"bad":
        raise BadRecord(line.number, "is bad")
    return Message(line.body)


def lines(count: int) -> Iterator[Line]:
    return (Line(number, b"x") for number in range(1, count + 1))


def ran(
    scripted: Scripted,
    source: Iterable[Line | None],
    *,
    resumes: bool = False,
    open_messages_max: int | None = None,
    not_before: datetime | None = None,
) -> Run:
    with Stop() as stop, Bar(None) as bar:
        run = Run(
            cast("Publisher", scripted),
            source=None,
            resumes=resumes,
            open_messages_max=open_messages_max,
            stop=stop,
            bar=bar,
            patience=Patience(0.05, time.monotonic()),
            not_before=not_before,
        )
        run.run(source, message)
    return run


def test_the_first_message_goes_alone() -> None:
    confirmed = Scripted(*[OutcomeKind.CONFIRMED] * 3)
    run = ran(confirmed, lines(CHUNK_MESSAGES_MAX + 11))
    assert [len(group) for group in confirmed.groups] == [1, CHUNK_MESSAGES_MAX, 10]
    assert (run.stopped, run.tally.open) == (None, 0)


def test_an_error_of_the_outbox_ends_it_with_what_is_stored() -> None:
    run = ran(Scripted(OutcomeKind.CONFIRMED, OutboxDiskFull("the disk is full")), lines(100))
    assert (run.stopped, run.error, run.tally.stored) == (Stopped.OUTBOX, "the disk is full", 1)


def test_what_the_publisher_refuses_is_bad_input_and_the_result_tells_it() -> None:
    run = ran(Scripted(OutcomeKind.CONFIRMED, InvalidMessage("ordering_key", "no")), lines(100))
    assert (run.stopped, run.error) == (Stopped.BAD_INPUT, "ordering_key: no")
    assert run.tally.stored == 1


@pytest.mark.parametrize(("days", "stopped"), [(1, Stopped.NOT_DUE), (-1, Stopped.TIMEOUT)])
def test_only_what_may_be_sent_is_waited_for(days: int, stopped: Stopped) -> None:
    not_before = datetime.now(UTC) + timedelta(days=days)
    assert ran(Scripted(None), lines(1), not_before=not_before).stopped is stopped
    earlier = Scripted()  # an earlier run has stored everything, and was killed
    earlier.status = Status(counters=Counters(stored=1), connects=1)
    assert ran(earlier, lines(0), resumes=True, not_before=not_before).stopped is stopped


def test_a_publisher_that_fails_meanwhile_is_noticed() -> None:
    scripted = Scripted(None, at_close=PublisherClosed("the publisher has failed"))
    scripted.status = Status(link=Link.FAILED)
    run = ran(scripted, lines(1))
    assert (run.stopped, run.error) == (Stopped.OUTBOX, "the publisher has failed")


def test_a_hook_that_does_not_return_leaves_the_result() -> None:
    held_up = RelayHeldUp("the hook does not return")
    run = ran(Scripted(OutcomeKind.CONFIRMED, held_up), lines(100))
    assert (run.stopped, run.error, run.tally.stored) == (Stopped.OUTBOX, str(held_up), 1)
    run = ran(Scripted(OutcomeKind.CONFIRMED, at_close=held_up), lines(1))
    assert (run.stopped, run.error, run.tally.confirmed) == (Stopped.OUTBOX, str(held_up), 1)


def test_an_input_that_cannot_be_read_on_is_bad_input() -> None:
    def source() -> Iterator[Line]:
        yield from lines(1)
        raise OSError(5, "Input/output error")

    run = ran(Scripted(OutcomeKind.CONFIRMED), source())
    assert run.stopped is Stopped.BAD_INPUT
    assert run.error == "the input cannot be read: Input/output error"


def test_refusals_end_it_only_while_nothing_is_confirmed() -> None:
    refused = ran(Scripted(OutcomeKind.REFUSED), lines(10))
    assert (refused.stopped, refused.tally.stored) == (Stopped.REFUSED, 1)
    mixed = ran(Scripted(OutcomeKind.CONFIRMED, OutcomeKind.REFUSED), lines(10))
    assert (mixed.stopped, mixed.tally.parked) == (None, 9)


def test_without_an_outbox_no_more_is_taken_than_fits() -> None:
    scripted = Scripted(None, None)
    run = ran(scripted, lines(2_000), open_messages_max=600)
    assert (run.stopped, run.tally.stored) == (Stopped.TIMEOUT, 501)


@pytest.mark.parametrize("size", [CHUNK_BYTES_MAX // 3, 2 * CHUNK_BYTES_MAX])
def test_a_group_is_what_the_publisher_stores_at_once(size: int) -> None:
    groups = list(_groups(lines(9), lambda _: Message(b"x" * size)))
    assert sum(map(len, groups)) == 9
    for group in groups:
        assert len(group) == 1 or sum(one.size for one in group) <= CHUNK_BYTES_MAX


def test_what_was_read_does_not_wait_for_more() -> None:
    line = Line(1, b"x")
    source = [line, None, None, line, line, None, line]
    assert [len(group) for group in _groups(source, message)] == [1, 2, 1]


def test_what_is_before_a_bad_record_is_handed_out() -> None:
    groups = _groups([*lines(3), Line(4, b"bad")], message)
    assert [len(next(groups)), len(next(groups))] == [1, 2]
    with pytest.raises(BadRecord, match="line 4: is bad"):
        next(groups)
