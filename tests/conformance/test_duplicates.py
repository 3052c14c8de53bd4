"""A broker that drops the second copy of a message: it returns or nacks what has arrived before.

Exchanges of the message-deduplication plugin return a duplicate, its queues nack it. A script of
faults makes the fake broker do both.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from tenacity import stop_after_attempt, wait_none

from reliablepub import (
    GiveUp,
    Message,
    Nacked,
    Outbox,
    Publisher,
    PublishError,
    Refusal,
    Retries,
    RetryPolicy,
    Unroutable,
    hooks,
)
from reliablepub.outbox.admin.story import tell
from reliablepub.outbox.opening import outbox_at
from reliablepub.testing import FakeBroker
from reliablepub.testing.faults import DropConnection, Nack, PublishFault, Return
from tests.conformance.conftest import FrontDoor
from tests.stores import Where

THRICE = Retries(stop_after_attempt(3), wait_none())
ERRORS: dict[type[PublishFault], tuple[type[PublishError], str]] = {
    Return: (Unroutable, "returned: 312 NO_ROUTE"),
    Nack: (Nacked, "nacked: basic.nack"),
}
BOTH_ANSWERS = pytest.mark.parametrize("answer", [Return, Nack])


def settles(refusal: Refusal) -> GiveUp | None:
    return GiveUp.ARRIVED if refusal.may_be_duplicate else None


DEDUPLICATING = RetryPolicy(nacked=THRICE, returned=THRICE, decide=settles)


def drop_duplicates(fake: FakeBroker, answer: type[PublishFault], copies: int) -> None:
    """Lose the connection with the first confirm; answer so many further copies like this."""
    fake.declare_queue("q", durable=True)
    fake.inject(DropConnection(accepted=True), answer(nth=2, times=copies))


class Heard:
    """Keeps what a hook is told of refusals, confirms, and messages that were given up."""

    def __init__(self) -> None:
        self.ended: list[hooks.AttemptEnded] = []
        self.parked: list[hooks.MessageGivenUp] = []
        self.on_returned = self.on_nacked = self.on_confirmed = self.ended.extend
        self.on_parked = self.parked.extend


@BOTH_ANSWERS
def test_that_it_may_have_arrived_is_told_wherever_a_refusal_is(
    fake: FakeBroker,
    outbox: Where,
    front_door: FrontDoor,
    caplog: pytest.LogCaptureFixture,
    answer: type[PublishFault],
) -> None:
    drop_duplicates(fake, answer, 3)
    heard, (error, said) = Heard(), ERRORS[answer]
    asked: list[Refusal] = []
    retry = RetryPolicy(nacked=THRICE, returned=THRICE, decide=asked.append)
    with (
        caplog.at_level(logging.ERROR, "reliablepub.messages"),
        front_door(fake.url, outbox=outbox, retry=retry, hooks=[heard]) as publisher,
    ):
        receipt = publisher.publish(b"1", routing_key="q", ordering_key="k")
        with pytest.raises(error, match="after 4 attempts; it may have arrived, so look") as raised:
            receipt.result(60)
        publisher.flush(60)
    assert (raised.value.attempts, raised.value.may_have_arrived) == (4, True)
    assert [one.refusals for one in asked] == [1, 2, 3]
    assert all(one.may_have_arrived and one.may_be_duplicate for one in asked)
    assert [(one.attempts, one.may_have_arrived) for one in heard.ended] == [
        *((2, True), (3, True), (4, True))
    ]
    [given_up] = heard.parked
    assert (given_up.attempts, given_up.may_have_arrived) == (4, True)
    [line] = (one.getMessage() for one in caplog.records if one.levelno == logging.ERROR)
    assert line.endswith(f"given up (parked): {said} (attempt 4; may have arrived)")
    people = Outbox(outbox)
    [parked], [key] = people.parked(), people.held_keys()
    assert (parked.attempts, parked.may_have_arrived, key.may_have_arrived) == (4, True, True)
    story = tell(outbox_at(outbox), parked.id)
    assert (len(story.attempts), story.persistence) == (4, "possibly persisted")
    assert [message.body for message in fake.messages("q")] == [b"1"], "it did arrive"


@BOTH_ANSWERS
def test_what_the_policy_says_has_arrived_is_confirmed_and_its_key_goes_on(
    fake: FakeBroker, open_publisher: Callable[..., Publisher], answer: type[PublishFault]
) -> None:
    drop_duplicates(fake, answer, 1)
    heard = Heard()
    publisher = open_publisher(fake.url, retry=DEDUPLICATING, hooks=[heard])
    first = publisher.publish(b"1", routing_key="q", ordering_key="k", message_id="m-1")
    behind = publisher.publish(b"2", routing_key="q", ordering_key="k")
    assert first.result(60).message_id == "m-1"
    behind.result(60)
    status = publisher.flush(60)
    counters = status.counters
    assert (counters.stored, counters.confirmed, counters.parked, counters.open) == (2, 2, 0, 0)
    assert (counters.open_bytes, status.callback_errors) == (0, 0)
    assert [message.body for message in fake.messages("q")] == [b"1", b"2"]
    confirmed, _ = heard.ended
    outcome = confirmed.outcome
    assert (outcome.kind.value, outcome.reply_code, confirmed.attempts) == (
        *("confirmed", 312 if answer is Return else 0, 1),
    )
    assert "as a duplicate, says RetryPolicy.decide" in outcome.reply_text


@BOTH_ANSWERS
def test_the_outbox_tells_what_became_of_a_duplicate(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor, answer: type[PublishFault]
) -> None:
    drop_duplicates(fake, answer, 1)
    with front_door(fake.url, outbox=outbox, retry=DEDUPLICATING) as publisher:
        publisher.publish(b"1", routing_key="q").result(60)
        publisher.flush(60)
    people = Outbox(outbox)
    [audit] = people.rows("audit")
    assert {audit[name] for name in audit if name.endswith("_difference")} == {0}
    assert (audit["stored"], audit["confirmed"], audit["open"]) == (1, 1, 0)
    first, second = people.rows("history")
    assert (first["outcome"], first["persistence"]) == ("uncertain", "possibly persisted")
    assert (second["outcome"], second["persistence"]) == ("confirmed", "persisted")
    assert second["reply_code"] == (312 if answer is Return else 0)
    assert "as a duplicate" in str(second["reply_text"])
    story = tell(outbox_at(outbox), int(str(first["id"])))
    assert (story.state, story.persistence) == ("confirmed", "persisted")


@BOTH_ANSWERS
def test_a_refusal_without_an_earlier_copy_is_no_duplicate(
    fake: FakeBroker, open_publisher: Callable[..., Publisher], answer: type[PublishFault]
) -> None:
    fake.declare_queue("q", durable=True)
    fake.inject(answer(keep=True))

    def hopes(_refusal: Refusal) -> GiveUp:
        return GiveUp.ARRIVED

    options: dict[str, Any] = {"retry": RetryPolicy(nacked=THRICE, returned=THRICE, decide=hopes)}
    publisher = open_publisher(fake.url, **options)
    receipt = publisher.publish_many([Message(b"1", routing_key="q")]).wait(60)
    assert (receipt.confirmed, receipt.failed) == (0, 1)
    status = publisher.flush(60)
    assert (status.counters.parked, status.callback_errors) == (1, 3)
