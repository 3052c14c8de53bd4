"""Messages are corrected by `outbox edit`; the original stays in the story."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from reliablepub import Message, Outbox, OutboxKeys, Publisher
from reliablepub.cli import main
from reliablepub.message import HEADER_BYTES_MAX
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.stores import Where
from tests.waiting import until

KEYS = OutboxKeys({"new": b"k" * 32, "old": b"o" * 32})
OLD_KEYS = OutboxKeys({"old": b"o" * 32})
SENT = Message(
    b"body",
    exchange="orders",
    routing_key="order.1",
    message_id="m",
    user_id="mallory",
    content_type="text/plain",
    headers={"tenant": "acme", "n": 1},
    ordering_key="a",
)


def run(where: Where, *arguments: object, code: int = 0, stdin: bytes | None = None) -> str:
    command = ["outbox", *map(str, arguments), "--outbox", str(where)]
    result = CliRunner().invoke(main, command, input=stdin)
    assert result.exit_code == code, result.output
    return result.output


def shown(where: Where, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(where, "show", "m", "--json", *arguments))
    names = ("exchange", "routing_key", "properties", "headers", "body", "problem")
    return {name: found[name] for name in names}


BEFORE = {
    "exchange": "orders",
    "routing_key": "order.1",
    "properties": {"user_id": "mallory", "content_type": "text/plain"},
    "headers": {"tenant": "acme", "n": 1},
    "body": "body",
    "problem": None,
}


def test_what_the_broker_refused_is_corrected_and_comes(where: Where) -> None:
    with FakeBroker() as broker:
        broker.declare_exchange("orders", "topic")
        broker.declare_queue("q")
        broker.bind("q", "orders", "#")
        with Publisher(broker.url, outbox=where) as publisher:
            publisher.publish(SENT)
            until(lambda: bool(publisher.status.paused))
            edit = ("edit", "--reason", "406", "--unset", "user_id", "--yes")
            assert run(where, *edit) == "1 message edited\n"
            until(lambda: publisher.status.counters.confirmed == 1)
        (came,) = broker.messages("q")
        assert (came.body, came.properties.message_id) == (b"body", "m")
        assert came.properties.user_id is None
        assert came.properties.content_type == "text/plain"
    told = run(where, "explain", "m")
    assert "edited by " in told
    assert ": user_id\n" in told
    assert shown(where, "--original") == BEFORE, "also of a message that has left"
    run(where, "audit")


def test_everything_but_the_id_can_be_changed(where: Where) -> None:
    Outbox(where).enqueue(SENT)
    changes = [
        *("--set", "priority=5", "--set", "timestamp=2026-12-24T18:00:00+01:00"),
        *("--set", "persistent=false", "--set", "expiration=1000", "--set", "type=a=b"),
        *("--unset", "user_id", "--unset", "header.tenant"),
        *("--header", "t=5", "--header", "n:=5", "--header", 'list:=[1, "x"]'),
        *("--body-file", "-", "--to-exchange", "other", "--to-routing-key", ""),
    ]
    assert "1 message would be edited" in run(where, "edit", "m", *changes, "--dry-run")
    assert shown(where) == BEFORE
    assert run(where, "edit", "m", *changes, "--note", "as agreed", stdin=b"{}") == (
        "1 message edited\n"
    )
    assert shown(where) == {
        "exchange": "other",
        "routing_key": "",
        "properties": {
            "priority": 5,
            "expiration": 1000,
            "content_type": "text/plain",
            "type": "a=b",
            "persistent": False,
            "timestamp": datetime(2026, 12, 24, 17, tzinfo=UTC).isoformat(),
        },
        "headers": {"n": 5, "t": "5", "list": [1, "x"]},
        "body": "{}",
        "problem": None,
    }
    note = json.loads(run(where, "explain", "m", "--json"))[0]["interventions"][-1]
    assert (note["action"], note["exchange"]) == ("edit", "orders")
    assert note["note"].startswith(
        "priority, timestamp, persistent, expiration, type, body, user_id, "
    )
    assert note["note"].endswith("header t, header n, header list, header tenant: as agreed")
    run(where, "edit", "m", "--set", "type=again")
    assert shown(where, "--original") == BEFORE, "the first one"
    assert "state          original" in run(where, "show", "m", "--original")
    run(where, "audit")
    run(where, "prune", "--history", "0s", "--yes")
    assert shown(where, "--original") == BEFORE, "as long as the message is there"
    run(where, "discard", "m", "--yes")


def test_an_encrypted_message_stays_encrypted_and_so_does_its_original(
    where: Where, tmp_path: Path
) -> None:
    keys, old_keys = tmp_path / "keys", tmp_path / "old"
    for path, names in ((keys, ("new", "old")), (old_keys, ("old",))):
        key_of = {"new": "6b" * 32, "old": "6f" * 32}
        path.write_text("".join(f"{name} {key_of[name]}\n" for name in names))
        path.chmod(0o600)
    fill(where, SENT, keys=OLD_KEYS)
    assert "key was not given" in run(where, "edit", "m", "--set", "type=t", code=4)
    run(where, "edit", "m", "--set", "type=secret", "--outbox-keys", old_keys)
    for original in ((), ("--original",)):
        told = run(where, "show", "m", *original)
        assert not {"mallory", "acme", "secret"} & set(told.split())
    assert shown(where, "--original", "--outbox-keys", old_keys) == BEFORE
    assert "secret" not in run(where, "explain", "m", "--json")
    told = run(where, "rekey", "--outbox-keys", keys)
    assert told.startswith("2 messages")
    keys.write_text(f"new {'6b' * 32}\n")
    assert shown(where, "--outbox-keys", keys)["properties"]["type"] == "secret"
    assert shown(where, "--original", "--outbox-keys", keys) == BEFORE


def test_a_change_that_does_not_fit_changes_nothing(where: Where, tmp_path: Path) -> None:
    with Outbox(where) as outbox:
        outbox.enqueue(SENT)
        headers = {"large": "x" * (HEADER_BYTES_MAX - 400)}
        outbox.enqueue(b"x", routing_key="q", message_id="full", headers=headers)
    for arguments, words in (
        ((), "give what to change"),
        (("--set", "message_id=x"), "'message_id' is not a property that can be changed"),
        (("--set", "type"), "'type' is not NAME=VALUE"),
        (("--set", "priority=high"), "priority is a whole number, and not 'high'"),
        (("--set", "priority=999"), "priority"),
        (("--set", "persistent=1"), "persistent is true or false"),
        (("--set", "timestamp=2026-12-24"), "timestamp"),
        (("--unset", "persistent"), "use --set"),
        (("--unset", "body"), "not a property"),
        (("--header", "x"), "neither NAME=TEXT nor NAME:=JSON"),
        (("--header", "x:=nan"), "is not JSON"),
        (("--header", "rp-attempt=x"), "reserved"),
        (("--to-exchange", "x" * 256), "exchange"),
    ):
        assert words in run(where, "edit", "m", *arguments, code=2)
    told = run(where, "edit", "--all", "--header", f"x={'x' * 500}", "--yes", code=2)
    assert "1 message edited" in told
    assert "left alone: damaged, or unfit for the change" in told
    told = run(where, "show", "full", "--original", code=2)
    assert "full has no original: it was not edited" in told
    run(where, "audit")
