"""Changing messages from the command line, also beside a relay under load."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from reliablepub import Message, Outbox, Publisher, RetryPolicy, Withdrawn
from reliablepub.errors import OutboxLocked
from reliablepub.outbox.admin import interventions, pruning
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.admin.selection import Selection, find_ids
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.testing import FakeBroker, faults
from tests.asking import fill
from tests.cli.conftest import Run, refused, state_of
from tests.cli.test_app import json_keys
from tests.waiting import until


def test_ids_are_changed_at_once(run: Run, relay: SqliteStore) -> None:
    assert run("park", 7, "m-8", "--note", "wrong price").stdout == "2 messages parked\n"
    assert state_of(run, 7) == "parked"
    story = run("explain", 7).stdout
    assert "Why: withdrawn: parked by " in story
    assert story.rstrip().endswith(": wrong price")
    assert run("retry", 7).stdout == "1 message put back\n"
    assert state_of(run, 7) == "ready"
    assert run("retry", 5).stdout == "1 message put back\n"


def test_a_discarded_message_is_remembered(run: Run, relay: SqliteStore) -> None:
    assert run("discard", 3, "--yes").stdout == "1 message discarded\n"
    assert state_of(run, 3) == "discarded"
    told = run("explain", "m-3").stdout
    assert "It was discarded by an operator" in told
    assert "Next: nothing: it is not sent again\n" in told
    status = json.loads(run("status", "--json", "--over", 0).stdout)
    assert (status["parked"], status["discarded"]) == (1, 1)


def test_a_rerouted_message_has_its_new_address(run: Run, relay: SqliteStore) -> None:
    assert run("reroute", 3, "--to-exchange", "orders").stdout == "1 message rerouted\n"
    shown = json.loads(run("show", 3, "--json").stdout)
    assert (shown["exchange"], shown["routing_key"], shown["problem"]) == ("orders", "key.3", None)
    assert "rerouted from exchange 'missing'" in run("explain", 3).stdout


@pytest.mark.parametrize("order", [(3, "nix"), ("nix", 3)])
def test_an_unknown_id_changes_nothing_and_the_help_says_so(
    run: Run, relay: SqliteStore, order: tuple[object, ...]
) -> None:
    result = run("retry", *order)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: nothing was changed: " in result.stderr
    assert "no record of message 'nix'" in result.stderr
    assert state_of(run, 3) == "parked"
    for command in ("retry", "park", "discard", "reroute"):
        said = " ".join(run(command, "--help").stdout.split())
        assert "an unknown ID, or the question was not answered with yes: nothing was changed" in (
            said
        )


@pytest.mark.parametrize(
    ("command", "question"),
    [
        (
            ("reroute", "--reason", "404", "--to-exchange", "orders", "--to-routing-key", "new"),
            "reroute 1 message of {path} to exchange 'orders', routing key 'new'?",
        ),
        (("discard", 3, 4), "discard messages 3 (m-3), 4 (m-4) of {path} for good?"),
        (("prune", "--parked", "0s"), "delete 2 messages (2 parked) of {path} for good?"),
        (("retry", "--reason", "404"), "retry 1 message of {path}?"),
        (("cancel", 1, 7), "cancel messages 1 (not in the outbox), 7 (m-7) of {path} for good?"),
        (("discard", 1, 7), "discard messages 1 (not in the outbox), 7 (m-7) of {path} for good?"),
    ],
)
def test_the_question_names_what_will_be_changed(
    run: Run, relay: SqliteStore, command: tuple[object, ...], question: str
) -> None:
    asked = f"{question.format(path=relay.path)} There is no terminal to ask on; give --yes"
    refused(run(*command), asked)
    assert state_of(run, 3) == "parked"


def test_the_question_shows_that_a_number_is_not_the_message_id_that_was_meant(
    run: Run, path: Path
) -> None:
    fill(path, *(Message(b"", routing_key="q", message_id=name) for name in ("2", "1", "\x1b[2J")))
    for command in ("discard", "cancel"):
        refused(run(command, 1), f"{command} message 1 (2) of {path} for good?")
        refused(run(command, 3), f"message 3 (\\x1b[2J) of {path}")


def test_an_answer_is_heeded(run: Run, relay: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reliablepub.cli.choosing.can_be_answered", lambda: True)
    assert run("retry", "--reason", "404", input="n\n").exit_code == 2
    assert state_of(run, 3) == "parked"
    assert "1 message put back" in run("retry", "--reason", "404", input="y\n").stdout
    assert state_of(run, 3) == "ready"


IN_FLIGHT = "message 6 would be left alone: in flight, so the broker may have it"


@pytest.mark.parametrize(
    ("command", "code", "last", "words", "found"),
    [
        (("discard", "--all"), 0, "3 messages would be discarded", "", (3, [], [], [])),
        (
            ("retry", 3, 7, 1),
            2,
            "1 message would be put back",
            "messages 7, 1 would be left alone: gone, or in a state other than waiting, parked or",
            (3, [], [7, 1], []),
        ),
        (("park", 6), 3, "0 messages would be parked", IN_FLIGHT, (1, [6], [], [])),
        (
            ("park", "--state", "ready"),
            3,
            "3 messages would be parked",
            IN_FLIGHT,
            (4, [6], [], []),
        ),
        (
            ("reroute", "--all", "--to-exchange", "x"),
            2,
            "6 messages would be rerouted",
            "message 9 would be left alone: damaged",
            (8, [6], [], [9]),
        ),
    ],
)
@pytest.mark.parametrize("is_json", [False, True])
def test_what_does_not_fit_is_left_alone_as_a_dry_run_tells_that_changes_nothing(
    run: Run,
    relay: SqliteStore,
    *,
    command: tuple[object, ...],
    code: int,
    last: str,
    words: str,
    found: tuple[object, ...],
    is_json: bool,
) -> None:
    foreseen = refused(run(*command, "--dry-run"), words, code=code)
    assert foreseen.stdout.splitlines()[-1] == last
    assert ("m-3" in foreseen.stdout) == (command[0] != "park")
    keys = ("chosen", "in_flight", "unfit", "damaged")
    values = json.loads(run(*command, "--dry-run", "--json").stdout)
    assert tuple(values[key] for key in keys) == found
    assert state_of(run, 3) == "parked"
    ended = refused(run(*command, "--yes", *(["--json"] if is_json else [])), code=code)
    if is_json:
        done = json.loads(ended.stdout)
        assert tuple(done[key] for key in keys) == found
        assert last.startswith(str(done["changed"]))
    else:
        assert ended.stdout == last.replace("would be ", "") + "\n"
        assert words.replace("would be ", "") in ended.stderr


@pytest.mark.parametrize("dry", [("--dry-run",), ("--yes",)])
def test_what_a_queue_may_have_is_named_before_it_is_discarded(
    run: Run, relay: SqliteStore, dry: tuple[str, ...]
) -> None:
    """Message 5 was nacked."""
    assert "a queue may still have message 5" in run("discard", 3, 5, *dry).stderr
    assert json.loads(run("discard", 4, *dry, "--json").stdout)["possibly_persisted"] == []


@pytest.mark.parametrize("command", ["discard", "prune"])
def test_what_another_operator_has_retried_meanwhile_is_not_discarded(
    run: Run, relay: SqliteStore, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """While the question waits for its answer, for example."""

    def ask(_question: str) -> None:
        assert run("retry", 3).stdout == "1 message put back\n"

    if command == "discard":
        monkeypatch.setattr("reliablepub.cli.outbox.changing.ask", ask)
        result = run("discard", "--state", "parked")
        assert "message 3 left alone: gone or changed since they were selected" in result.stderr
        assert (result.exit_code, result.stdout) == (0, "1 message discarded\n")
    else:

        def found(*arguments: Any) -> list[int]:
            ids = find_ids(*arguments)
            ask("")
            return ids

        monkeypatch.setattr(pruning, "find_ids", found)
        monkeypatch.setattr("reliablepub.cli.outbox.upkeep.foresee", lambda *_: pruning.Pruned())
        result = run("prune", "--parked", "0s", "--json")
        assert json.loads(result.stdout)["parked"] == 1
    assert state_of(run, 3) == "ready"
    assert state_of(run, 4) == "discarded"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OutboxLocked("nothing was changed")])
def test_what_was_done_before_an_error_is_told(
    run: Run, relay: SqliteStore, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    monkeypatch.setattr(interventions, "CHUNK", 1)
    change, calls = interventions.change, 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise error
        return change(*arguments, **named)

    monkeypatch.setattr(interventions, "change", interrupted)
    result = run("park", "--state", "ready", "--yes")
    assert result.exit_code == (3 if error is KeyboardInterrupt else 4)
    note, *_, last = result.stderr.splitlines()
    assert note == "at least 2 of 4 were done before this error"
    assert last.startswith("Error: ")
    calls = 0
    result = run("prune", "--parked", "0s", "--expired", "0s", "--yes")
    assert result.stderr.splitlines()[0] == "done before this error: 2 parked"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("retry",), "give IDs, or a filter, or --all"),
        (("retry", "--state", "ready"), "retry takes messages that are waiting, parked or"),
        (
            ("park", "--state", "parked"),
            "park takes messages that are ready or waiting, not parked",
        ),
        (("retry", "1", "--all"), "give IDs, or a filter, or --all"),
        (("park", "1", "--state", "ready"), "give IDs, or a filter, or --all"),
        (("reroute", "1"), "give --to-exchange or --to-routing-key"),
        (("reroute", "1", "--to-exchange", "x" * 256), "exchange: has 256 bytes"),
    ],
)
def test_bad_usage_is_one_line(
    run: Run, relay: SqliteStore, arguments: tuple[str, ...], words: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


# ---------------------------------------------------------------------- beside a relay under load


def audit(run: Run) -> None:
    assert run("audit").exit_code == 0


def test_people_step_in_while_a_relay_publishes(run: Run, path: Path, fake: FakeBroker) -> None:
    """Every message ends in one place: in the queue, or as what a person made of it."""
    fake.declare_queue("elsewhere")
    fake.inject(faults.Latency(delay_s=0.01, keep=True))  # so that there is a backlog
    changed = dict.fromkeys((Action.PARK, Action.DISCARD, Action.REROUTE), 0)
    published, is_done = 0, threading.Event()

    def publish() -> None:
        nonlocal published
        while not is_done.wait(0.001):
            if publisher.status.open > 1_000:
                continue
            batch = range(published, published + 100)
            publisher.publish_many(
                Message(b"%d" % n, routing_key="all", message_id=f"m-{n}") for n in batch
            )
            published += 100

    with Publisher(fake.url, outbox=path, window_max=20) as publisher:
        producer = threading.Thread(target=publish)
        producer.start()
        try:
            while min(changed.values()) < 15:
                for action in changed:
                    routing_key = "elsewhere" if action is Action.REROUTE else None
                    chosen = find_ids(outbox_at(path), Selection(states=("ready",)))[-7:]
                    changed[action] += intervene(
                        outbox_at(path), chosen, Intervention(action, routing_key=routing_key)
                    ).changed
        finally:
            is_done.set()
            producer.join()
        status = publisher.flush(timeout_s=60)
        assert status.is_flushed
        counters = status.counters
    parked = {message.message_id for message in Outbox(path).parked(published)}
    arrived = [
        m.properties.message_id for name in ("all", "elsewhere") for m in fake.messages(name)
    ]
    assert len(arrived) == len(set(arrived)), "sent twice"
    assert not parked & set(arrived), "in two places"
    assert (counters.stored, counters.open) == (published, 0)
    assert (len(parked), len(arrived)) == (counters.parked, counters.confirmed)
    assert counters.discarded == changed[Action.DISCARD]
    audit(run)


def test_who_waits_is_told(run: Run, path: Path, fake: FakeBroker) -> None:
    patient = RetryPolicy()
    with Publisher(fake.url, outbox=path, retry=patient, close_timeout_s=0) as publisher:
        fake.block("low on memory")
        publisher.publish(b"first", routing_key="all")  # RabbitMQ tells only those who publish
        until(lambda: publisher.status.reason == "low on memory")
        receipt = publisher.publish(b"second", routing_key="all")
        until(lambda: "low on memory" in run("explain", receipt.message_id).stdout)
        # It counts as in flight for a moment if the relay has just told that it is blocked.
        discard = ("discard", receipt.message_id, "--yes", "--note", "too late")
        until(lambda: run(*discard).exit_code == 0)
        with pytest.raises(Withdrawn, match=r"discarded by .*: too late"):
            receipt.result(timeout_s=60)
    audit(run)


def test_prune_asks_only_before_messages_go(
    run: Run, relay: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("prune").stdout.startswith("0 messages deleted\n")
    foreseen = run("prune", "--parked", "0s", "--dry-run")
    assert foreseen.stdout.startswith("2 messages (2 parked) would be deleted\n")
    monkeypatch.setattr("reliablepub.cli.choosing.can_be_answered", lambda: True)
    assert run("prune", "--parked", "0s", input="n\n").exit_code == 2
    assert run("prune", "--parked", "0s", input="y\n").exit_code == 0
    assert state_of(run, 3) == "discarded"
    assert run("explain", 3).stdout.rstrip().endswith(": pruned")
    found = json.loads(run("prune", "--expired", "0s", "--yes", "--json").stdout)
    assert (found["dry_run"], found["expired"], found["parked"]) == (False, 1, 0)
    assert json_keys("reliablepub outbox prune") == set(found)
