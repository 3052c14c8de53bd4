"""What hooks are told: everything once, in order, and nothing that harms when they fail."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import pytest
from tenacity import stop_after_attempt, wait_fixed

from reliablepub import hooks
from reliablepub.errors import ConfigurationError
from reliablepub.outbox.entry import Store
from reliablepub.outcome import NACKED, Outcome, OutcomeKind
from reliablepub.policy import Breaker, GiveUp, Retries, RetryPolicy
from reliablepub.printable import named
from reliablepub.relay.callbacks import LOGGER, Guard, calls_of
from tests.relay.scripted import PARK_AT_ONCE, connected

ONCE = Retries(stop_after_attempt(1), wait_fixed(1))


class Listener:
    """Writes down everything it is told, call by call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda events: self.calls.append((name.removeprefix("on_"), list(events)))

    def __dir__(self) -> list[str]:
        return [f"on_{name}" for name in hooks.EVENTS]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def told(self, name: str) -> list[Any]:
        return [event for called, events in self.calls if called == name for event in events]


def test_a_message_that_goes_well_is_stored_sent_and_confirmed(store: Store) -> None:
    listener = Listener()
    w = connected(store, hooks=[listener]).turned()
    assert listener.calls == [("connected", [hooks.LinkChanged("", 1, 0)])]
    w.sends("a", "b")
    w.time.now += 0.25
    w.hears_ack(2, multiple=True)
    assert listener.names == ["connected", "stored", "sent", "confirmed"]

    first, second = listener.told("confirmed")
    assert (first.message_id, second.message_id) == ("a", "b")
    assert first.latency_s == pytest.approx(0.25)
    assert (first.epoch, first.tag) == (f"{store.run}-1", 1)
    assert first.outcome.kind is OutcomeKind.CONFIRMED
    assert first.attempts == 0
    stored = listener.told("stored")[0]
    assert stored == hooks.MessageStored("a", "", "q", None, stored.size)
    sent = listener.told("sent")[1]
    assert sent == hooks.AttemptBegun("b", "", "q", None, sent.size, f"{store.run}-1", 2, 1)


def test_each_refusal_and_what_is_given_up_is_told_with_the_reason(store: Store) -> None:
    listener = Listener()
    connected(store, "a", policy=PARK_AT_ONCE, hooks=[listener]).hears_nack(1)
    nack = Outcome(OutcomeKind.NACKED, 0, "basic.nack")
    [ended] = listener.told("nacked")
    assert (ended.outcome, ended.attempts, ended.may_have_arrived) == (nack, 1, True)
    [parked] = listener.told("parked")
    doubt = True
    assert parked == hooks.MessageGivenUp("a", "", "q", None, parked.size, nack, 1, doubt)


def test_what_the_policy_discards_is_told(store: Store) -> None:
    listener = Listener()
    policy = RetryPolicy(nacked=Retries(stop_after_attempt(1), wait_fixed(1), GiveUp.DISCARD))
    connected(store, "a", policy=policy, hooks=[listener]).hears_nack(1)
    assert [event.message_id for event in listener.told("discarded")] == ["a"]
    assert listener.told("parked") == []


def test_a_message_that_cannot_be_written_is_refused_without_a_tag(store: Store) -> None:
    listener = Listener()
    w = connected(store, hooks=[listener])
    w.transport.unencodable.add("a")
    w.sends("a")
    w.turn()
    [ended] = listener.told("refused")
    assert (ended.tag, ended.latency_s, ended.outcome.reply_text) == (0, 0.0, "a does not fit")
    assert listener.told("sent") == []


def test_a_lost_connection_is_told_once_for_each_reason(store: Store) -> None:
    listener = Listener()
    w = connected(store, "a", hooks=[listener]).hears_loss("reset")
    for _ in range(3):
        w.turn(after_s=100)
        w.hears_loss("refused")
    w.reconnect()
    w.turn()
    told = [(name, events[0].reason) for name, events in listener.calls if "connected" in name]
    assert told == [
        ("connected", ""),
        ("disconnected", "reset"),
        ("disconnected", "refused"),
        ("connected", ""),
    ]
    assert listener.told("connected")[-1].connects == 2
    [uncertain] = listener.told("uncertain")
    assert (uncertain.message_id, uncertain.attempts) == ("a", 1)
    assert listener.told("sent")[-1].attempt == 2


def test_the_reasons_of_several_hosts_are_told_once_in_an_outage(store: Store) -> None:
    listener = Listener()
    w = connected(store, hooks=[listener]).turned()
    for _ in range(2):
        for n in range(6):
            w.hears_loss(f"host {n % 2}: refused")
            w.turn(after_s=100)
        w.connect()
        w.turn()
    told = [event.reason for event in listener.told("disconnected")]
    assert told == ["host 0: refused", "host 1: refused"] * 2


def test_a_lost_connection_is_told_when_the_next_attempt_begins_in_the_same_turn(
    store: Store,
) -> None:
    listener = Listener()
    w = connected(store, hooks=[listener]).turned()
    w.lose_connection("reset")
    w.turn(after_s=100)
    w.connect()
    w.turn()
    told = [(name, events[0].reason) for name, events in listener.calls if "connected" in name]
    assert told == [("connected", ""), ("disconnected", "reset"), ("connected", "")]


def test_pauses_are_told(store: Store) -> None:
    listener = Listener()
    breaker = Breaker(refusals_max=1, pause=wait_fixed(10))
    patient = Retries(stop_after_attempt(9), wait_fixed(0))
    policy = RetryPolicy(patient, patient, patient, breaker=breaker)
    w = connected(store, "a", policy=policy, hooks=[listener]).hears_nack(1).turned(after_s=10)
    w.turns(3)
    w.hears_ack(2)
    w.turn()
    changed = hooks.DestinationChanged("", "q", 1, NACKED)
    assert listener.told("paused") == [changed]
    assert listener.told("resumed") == [replace(changed, refusals=0)]


def test_a_hook_that_fails_is_logged_once_and_the_next_one_is_told(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:

    class Broken:
        def on_stored(self, events: Sequence[hooks.MessageStored]) -> None:
            raise LookupError

        def on_sent(self, events: Sequence[hooks.AttemptBegun]) -> None:
            raise LookupError

    listener = Listener()
    w = connected(store, hooks=[Broken(), listener])
    with caplog.at_level(logging.ERROR, "reliablepub"):
        for id_ in ("a", "b", "c"):
            assert w.sends(id_).is_stored
    assert w.hears_ack(3, multiple=True, is_flushing=True).relay.status.counters.confirmed == 3
    assert w.relay.status.callback_errors == 6
    assert [event.message_id for event in listener.told("sent")] == ["a", "b", "c"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} ({__name__}.{Broken.__qualname__}.{name}) has raised an exception; further ones "
        "are counted, not logged"
        for name in ("on_stored", "on_sent")
    ]


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (SystemExit(), 0, ""),
        (SystemExit(263), 7, ""),
        (SystemExit("why"), 1, "SystemExit: why"),
        (KeyError("x"), 1, "KeyError: 'x'"),
    ],
)
def test_a_forked_child_ends_with_its_callback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException | None,
    status: int,
    said: str,
) -> None:
    def end(status: int) -> NoReturn:
        raise Ended(status)

    def fork() -> None:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        if error is not None:
            raise error

    monkeypatch.setattr(os, "_exit", end)
    guard = Guard()
    with pytest.raises(Ended, match=f"^{status}$"), guard.calling("a hook"):
        fork()
    assert said in capsys.readouterr().err
    assert guard.errors == 0


def test_callbacks_are_named_so_that_they_can_be_found() -> None:
    assert named(logging.Logger.info) == "logging.Logger.info"
    assert named(partial(logging.Logger.info, LOGGER)) == "logging.Logger.info"
    assert named(LOGGER.info) == "logging.Logger.info"
    assert named([].append) == "list.append"
    assert named(Listener()) == f"{__name__}.Listener"


def test_events_without_listeners_are_not_collected(store: Store) -> None:
    class Quiet:
        def on_parked(self, events: Sequence[hooks.MessageGivenUp]) -> None:
            raise AssertionError

    w = connected(store, "a", hooks=[Quiet()])
    assert w.hears_ack(1).relay._notices._events == {"parked": []}


@pytest.mark.parametrize(
    ("hook", "problem"),
    [(object(), "has no method on_"), (type("Typo", (), {"on_conformed": None})(), "on_conformed")],
)
def test_a_hook_that_would_never_be_called_is_refused(hook: object, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        calls_of([hook])
