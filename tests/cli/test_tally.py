"""Counting receipts: complete, bounded, and safe beside the thread that settles."""

from collections.abc import Callable
from typing import Any

from reliablepub import Message
from reliablepub.cli.publish.run import FAILURES_SHOWN, Tally
from reliablepub.front.receipt import IssuedBatch
from reliablepub.outbox.entry import Entry
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.relay.status import Status
from tests.outcomes import RETURNED

ENTRY = Entry(Message(b"", message_id="m"), 0.0)
CONFIRMED = Outcome(OutcomeKind.CONFIRMED)


class Running:
    is_ended = False
    failure = None

    def check_thread(self) -> None:
        pass

    status = Status()

    def check_held_up(self) -> None:
        pass

    def keep(self, receipt: object) -> None:
        pass

    def call(self, callback: Callable[[Any], object], receipt: object) -> None:
        callback(receipt)


def receipt(messages: int) -> IssuedBatch:
    made = IssuedBatch(Running())
    made.accepted(messages)
    return made


def test_receipts_are_added_up_and_let_go() -> None:
    tally = Tally()
    first, second = receipt(2), receipt(30)
    tally.add(first)
    tally.add(second)
    first.all_confirmed([ENTRY])
    for _ in range(20):
        second.given_up(ENTRY, RETURNED)
    tally.gather()
    tally.gather()
    assert (tally.stored, tally.confirmed, tally.parked, tally.open) == (32, 1, 20, 11)
    assert len(tally.failures) == FAILURES_SHOWN
    assert second.failures == []
    first.all_confirmed([ENTRY])
    second.all_confirmed([ENTRY] * 10)
    tally.gather()
    tally.gather()
    assert (tally.confirmed, tally.parked, tally.open) == (12, 20, 0)
    assert tally.given_up == {OutcomeKind.RETURNED: 20}
    assert tally._open == []
