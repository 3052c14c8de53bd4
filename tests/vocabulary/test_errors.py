"""Errors say what happened, to which message and what to do; they travel, and keep secrets."""

import copy
import pickle

import pytest

import reliablepub.errors as vocabulary
from reliablepub.errors import (
    Damaged,
    Expired,
    InvalidMessage,
    Nacked,
    OutboxDiskFailed,
    OutboxDiskFull,
    OutboxFull,
    OutboxInUse,
    OutboxLocked,
    OutboxUnreachable,
    PublishError,
    Refused,
    RelayHeldUp,
    ReliablePubError,
    StillOpen,
    Unroutable,
    Withdrawn,
)

BIND = "bind a queue or correct the routing key, then retry it"
ALL = [
    kind
    for kind in vars(vocabulary).values()
    if isinstance(kind, type) and issubclass(kind, ReliablePubError)
]
OF_ONE_MESSAGE = [PublishError, Unroutable, Nacked, Refused, Expired, Damaged, Withdrawn]


def made(kind: type[ReliablePubError]) -> ReliablePubError:
    """An error as the package would raise it."""
    if issubclass(kind, PublishError):
        return kind(
            message_id="m1",
            exchange="orders",
            routing_key="created",
            reply_code=312,
            reply_text="NO_ROUTE",
            attempts=3,
        )
    if issubclass(kind, InvalidMessage):
        return kind("routing_key", "has 256 bytes")
    return kind("what happened; what to do")


@pytest.mark.parametrize("kind", ALL)
def test_errors_have_their_public_name(kind: type[ReliablePubError]) -> None:
    assert kind.__module__ == "reliablepub"
    assert kind.__doc__


@pytest.mark.parametrize("kind", ALL)
def test_errors_survive_a_copy_with_all_they_know(kind: type[ReliablePubError]) -> None:
    error = made(kind)
    error.add_note("seen in partition 7")
    twin = copy.copy(error)
    assert type(twin) is kind
    assert (str(twin), twin.args, twin.__dict__) == (str(error), error.args, error.__dict__)


@pytest.mark.parametrize("kind", ALL)
def test_errors_travel_between_processes(kind: type[ReliablePubError]) -> None:
    error = made(kind)
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is kind
    assert (str(twin), twin.args, twin.__dict__) == (str(error), error.args, error.__dict__)


@pytest.mark.parametrize("kind", OF_ONE_MESSAGE)
def test_the_error_of_a_message_names_it_and_what_to_do(kind: type[PublishError]) -> None:
    error = made(kind)
    assert str(error) == (
        f"message m1 to exchange 'orders' with routing key 'created' {kind.what} "
        f"(312 NO_ROUTE) after 3 attempts; {kind.remedy}"
    )


@pytest.mark.parametrize(
    ("kind", "is_kept", "said"),
    [
        (Unroutable, True, f"it may have arrived, so look for it first; if it has not, {BIND}"),
        (Nacked, True, "it may have arrived, so look for it first; if it has not, look at the"),
        (Refused, True, "it may have arrived, so look for it first; if it has not, correct what"),
        (Unroutable, False, "the retry policy discarded it; it may have arrived"),
        (Expired, True, "retry it if it is still wanted"),
        (Damaged, True, "see `reliablepub outbox salvage`, and check the disk"),
        (Withdrawn, True, "`reliablepub outbox explain` names the operator"),
    ],
)
def test_the_error_of_what_may_have_arrived_sends_people_to_look_first(
    kind: type[PublishError],
    is_kept: bool,  # noqa: FBT001
    said: str,
) -> None:
    error = kind(
        message_id="m1", exchange="", routing_key="q", may_have_arrived=True, is_kept=is_kept
    )
    assert f"; {said}" in str(error)


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [(0, "", "was nacked: a queue refused it or failed; "), (0, "basic.nack", " (basic.nack); ")],
)
def test_the_brokers_words_are_quoted_where_it_gave_any(code: int, text: str, said: str) -> None:
    error = Nacked(message_id="m1", exchange="", routing_key="q", reply_code=code, reply_text=text)
    assert said in str(error)
    assert "attempts" not in str(error)


def test_an_invalid_message_names_the_field() -> None:
    error = InvalidMessage("headers['h']", "does not fit 64 bits")
    assert (error.field, error.problem) == ("headers['h']", "does not fit 64 bits")
    assert str(error) == "headers['h']: does not fit 64 bits"
    assert isinstance(error, ValueError)


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    retryable = {kind for kind in ALL if kind.retryable}
    assert retryable == {
        StillOpen,
        OutboxFull,
        OutboxDiskFailed,
        OutboxDiskFull,
        OutboxInUse,
        OutboxLocked,
        OutboxUnreachable,
        RelayHeldUp,
    }


def test_waiting_too_long_is_a_timeout() -> None:
    assert isinstance(StillOpen("1 message is still open"), TimeoutError)
