"""Looking into an outbox with every kind of trouble in it."""

import csv
import io
import json
import re
import shlex
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

from reliablepub import Message, Outbox
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.sqlite.space import PAGE_BYTES
from reliablepub.outbox.sqlite.status_file import write_status_file
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.asking import fill
from tests.cli.conftest import Run, ids, parsed, refused
from tests.cli.test_app import json_keys
from tests.cli.trouble import make_trouble
from tests.outcomes import RETURNED
from tests.sqlite import overwrite, sql


@pytest.fixture
def alone(path: Path) -> Path:
    """The outbox without a relay."""
    make_trouble(path).close()
    return path


# ------------------------------------------------------------------------------------ list


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), [3, 4, 5, 6, 7, 8, 9, 10]),
        (("--state", "parked"), [3, 4]),
        (("--state", "expired"), [10]),
        (("--state", "waiting"), [5]),
        (("--state", "ready"), [6, 7, 8, 9]),
        (("--state", "ready", "--state", "parked"), [3, 4, 6, 7, 8, 9]),
        (("--exchange", "miss*"), [3]),
        (("--exchange", "orders", "--routing-key", "order.*"), [4]),
        (("--key", "k"), [7, 8]),
        (("--reason", "no_route"), [4]),
        (("--reason", "404"), [3]),
        (("--reason", "nack"), [5]),
        (("--older-than", "3500s"), [3, 4, 5, 6, 7]),
        (("--newer-than", "3500s"), [8, 9, 10]),
        (("--older-than", "7d"), []),
        (("--sort", "attempts", "--limit", "2"), [4, 3]),
        (("--sort", "age", "--limit", "1"), [3]),
        (("--sort", "size", "--limit", "1"), [4]),
        (("--limit", "3"), [3, 4, 5]),
    ],
)
def test_messages_are_found(
    run: Run, relay: SqliteStore, options: tuple[str, ...], expected: list[int]
) -> None:
    assert ids(run("list", "--json", *options)) == expected


def test_a_list_shows_what_was_said_last_and_no_body(run: Run, relay: SqliteStore) -> None:
    lines = run("list").stdout.splitlines()
    assert lines[0].split() == [
        *("id", "state", "stored", "due", "tries", "exchange", "routing", "key", "size"),
        *("message", "id", "said"),
    ]
    (waiting,) = (line for line in lines if line.startswith("5 "))
    assert "waiting" in waiting
    assert waiting.endswith("m-5         nacked: basic.nack; may have arrived")
    assert "body" not in "".join(lines)
    assert run("list", "--exchange", "nix").stdout == "no message matches\n"
    assert "the first 2; there may be more" in run("list", "--limit", 2).stderr


@pytest.mark.parametrize("command", ["list", "schedule", "in-flight", "duplicates", "keys"])
def test_csv_of_nothing_has_its_header(
    run: Run, relay: SqliteStore, tmp_path: Path, command: str
) -> None:
    Outbox(tmp_path / "empty.db").create()
    run("park", 7)  # so that a key is held
    header, *rows = run(command, "--csv").stdout.splitlines()
    assert rows
    assert run(command, "--csv", "--outbox", tmp_path / "empty.db").stdout == f"{header}\n"


def test_csv_and_json_have_the_same_values(run: Run, relay: SqliteStore) -> None:
    rows = parsed(run("list", "--json"))
    table = list(csv.DictReader(io.StringIO(run("list", "--csv").stdout)))
    assert [list(row) for row in table] == [list(row) for row in rows]
    assert [row["message_id"] for row in table] == [row["message_id"] for row in rows]
    assert json_keys("reliablepub outbox list") == set(rows[0])


# ------------------------------------------------------------------------------------ show


def test_a_message_is_shown_with_everything_in_it(run: Run, relay: SqliteStore) -> None:
    out = run("show", "m-4").stdout
    for words in ("state         parked", "priority      3", 'header price  {"$decimal": "1.50"}'):
        assert words in out
    assert out.endswith('\n\n{"n": "ü"}\n')
    values = parsed(run("show", 4, "--json"))
    assert values["body"] == '{"n": "ü"}'
    assert values["headers"]["raw"] == {"$bytes": "AP8="}


def test_a_body_that_is_no_text_is_shown_in_hexadecimal(run: Run, relay: SqliteStore) -> None:
    assert run("show", 3).stdout.splitlines()[-1] == "00000010  00 01" + " " * 42 + "  .."
    assert parsed(run("show", 3, "--json"))["body_base64"] == "AAEAAQABAAEAAQABAAEAAQAB"


def test_a_body_is_written_byte_for_byte(run: Run, relay: SqliteStore, tmp_path: Path) -> None:
    target = tmp_path / "body"
    assert run("show", 3, "--body-out", target).exit_code == 0
    assert target.read_bytes() == b"\x00\x01" * 9
    assert target.stat().st_mode & 0o777 == 0o600
    again = run("show", 3, "--body-out", target)
    assert (again.exit_code, again.stderr) == (2, f"Error: {target} exists; name a new file\n")


def test_a_damaged_message_is_shown_with_a_warning(run: Run, relay: SqliteStore) -> None:
    refused(run("show", 9), "warning: the checksum is", code=0)


def test_of_two_messages_with_one_id_it_is_said_which_is_shown(run: Run, path: Path) -> None:
    fill(path, *(Message(body, message_id="m") for body in (b"first", b"second")))
    result = run("show", "m")
    assert result.stdout.endswith("\nsecond\n")
    assert result.stderr == "m is the id of 2 messages (rows 1, 2); this is row 2\n"
    assert run("show", 1).stderr == ""


def test_what_is_gone_cannot_be_shown(run: Run, relay: SqliteStore) -> None:
    refused(run("show", 1), "`reliablepub outbox explain 1` shows its history")
    assert "no record of message 'nix'" in run("show", "nix").stderr


# ------------------------------------------------------------------------------------ explain


@pytest.mark.parametrize(
    ("id_", "expected"),
    [
        (1, ("gone", None, "nothing")),
        (2, ("confirmed", "persisted", "nothing")),
        (3, ("parked", "not written", "nothing until an operator decides")),
        (4, ("parked", "not written", "nothing until an operator decides")),
        (5, ("waiting", "possibly persisted", "it is sent when it is due")),
        (6, ("in flight", "possibly persisted", "the broker answers")),
        (7, ("ready", "not written", "it is sent")),
        (8, ("ready", "not written", "it is sent when its ordering key is free")),
        (10, ("expired", "possibly persisted", "nothing until an operator decides")),
    ],
)
def test_every_kind_of_trouble_is_explained(
    run: Run, relay: SqliteStore, id_: int, expected: tuple[str | None, ...]
) -> None:
    (story,) = parsed(run("explain", id_, "--json"))
    assert (story["state"], story["persistence"], story["next"]) == expected
    assert story["message_id"] == (f"m-{id_}" if id_ > 1 else None)
    assert set(story) <= json_keys("reliablepub outbox explain")


@pytest.mark.parametrize(
    ("id_", "words"),
    [
        (1, "It was stored here and is gone: most likely it was confirmed"),
        (2, "uncertain (epoch 1-1, tag 2; possibly persisted): connection lost: reset by peer"),
        (2, "confirmed (epoch 1-2, tag 1; persisted)"),
        (3, "Why: refused: 404 NOT_FOUND - no exchange 'missing' in vhost '/'"),
        (3, "Delivered? not written: no queue has it."),
        (4, "What to do: bind a queue or correct the routing key, then retry it."),
        (5, "sends it in 59 min"),
        (6, "sent (epoch 1-2, tag 7); no answer yet"),
        (7, "sends it after the 1 message before it"),
        (8, "it waits for message 7, which has the same ordering key"),
        (10, "It has expired"),
    ],
)
def test_a_story_is_told(run: Run, relay: SqliteStore, id_: int, words: str) -> None:
    relay.show({"link": "connected", "reason": "", "since": 0.0})
    result = run("explain", id_)
    assert result.exit_code == 0
    assert words in result.stdout


def test_what_may_have_arrived_is_to_be_looked_for_before_it_is_retried(
    run: Run, path: Path
) -> None:
    with closing(SqliteStore(path)) as store:
        message = Message(b"x", routing_key="q", ordering_key="k", message_id="m")
        entry = Entry.accepted(message, time.time())
        store.commit(Changes(new=[entry]))
        entry.uncertain, entry.returned = 1, 3
        gone = Attempt(entry, "1-2", 3, RETURNED, time.time())
        store.commit(Changes(parked=[gone], attempts=[gone]))
    first = "it may have arrived, so look for it first; if it has not, bind a queue"
    assert f"What to do: {first}" in run("explain", 1).stdout
    for command in ("list", "keys"):
        assert "returned: 312 NO_ROUTE; may have arrived" in run(command).stdout
        assert parsed(run(command, "--json"))[0]["may_have_arrived"] is True
    assert "may have arrived  yes\n" in run("show", 1).stdout
    assert "may have arrived" in run("retry", "--state", "parked", "--dry-run").stdout


def test_what_no_broker_has_refused_has_another_remedy(run: Run, path: Path) -> None:
    fill(path, Message(b"x", routing_key="q"))
    sql(path, "UPDATE reliablepub_messages SET body = x'00'")
    with closing(SqliteStore(path)) as store:
        store.read_ready(0, 9, limit=9, bytes_max=10**9)
        store.commit(Changes())
    told = run("explain", 1).stdout
    assert "Why: refused: the checksum is" in told
    assert "broker names" not in told
    assert "What to do: retried as it is, it is parked again" in told


def test_what_was_never_sent_is_not_sent_again(run: Run, path: Path, relay: SqliteStore) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    with Outbox(path) as outbox:
        name = outbox.enqueue(Message(b"", not_before=later))
        first = outbox.enqueue(Message(b""))
    assert "It is open, and waits for its time.\n" in run("explain", name).stdout
    assert "It is open, and waits to be sent again.\n" in run("explain", 5).stdout
    assert "sends it after the 4 messages before it\n" in run("explain", first).stdout
    run("park", 7, 8, 9)
    assert "sends it after the 1 message before it\n" in run("explain", first).stdout
    sql(path, "UPDATE reliablepub_messages SET due_at = 9e9 WHERE id = 6")
    assert "sends it next\n" in run("explain", first).stdout


def test_a_deadline_is_told(run: Run, path: Path) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    fill(path, Message(b"", expires_in_s=600, not_before=later), Message(b"", expires_in_s=1e-9))
    assert re.search(r"; its deadline: in 9 min 5\d s\n", run("explain", 1).stdout)
    assert "It is open, and waits for its time.\n" in run("explain", 1).stdout
    passed = run("explain", 2).stdout
    assert re.search(r"; its deadline: \d s ago\n", passed)
    assert "It is open, but its deadline has passed: a relay only moves it" in passed


def test_a_command_that_is_proposed_can_be_pasted(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "my outbox's.db"
    fill(path, Message(b""))
    words = run("explain", 1, "--outbox", path).stdout.partition("start one: `")[2]
    assert shlex.split(words.partition("`\n")[0]) == [
        *("reliablepub", "relay", "--outbox", str(path))
    ]


def test_without_a_relay_that_is_what_is_missing(run: Run, alone: Path) -> None:
    assert f"start one: `reliablepub relay --outbox {alone}`" in run("explain", 7).stdout
    assert parsed(run("explain", 6, "--json"))[0]["state"] == "ready"


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("disconnected", "is connected; it has not been for 0 s: no route to host"),
        ("blocked", "lifts its block, which it set 0 s ago: no route to host"),
    ],
)
def test_without_a_broker_that_is_what_is_missing(
    run: Run, relay: SqliteStore, link: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.cli.outbox.explain.time.time", lambda: 1_000.0)
    relay.show({"link": link, "reason": "no route\nto host", "since": 1_000.0})
    assert words in run("explain", 7).stdout
    assert parsed(run("status", "--json", "--over", 0))["link"] == link
    assert "no route to host" in run("status", "--over", 0).stdout


def test_what_is_in_flight_at_a_broker_that_blocks_says_so(run: Run, relay: SqliteStore) -> None:
    relay.show({"link": "blocked", "reason": "low on memory", "since": time.time() - 61})
    told, status = run("explain", 6).stdout, run("status", "--over", 0).stdout
    assert re.search(r"the broker has blocked the relay for 1 min \d+ s: low on memory", told)
    assert re.search(r"blocked by the broker for 1 min \d+ s: low on memory", status)


def test_a_relay_that_has_failed_tells_when(run: Run, relay: SqliteStore) -> None:
    relay.show({"link": "failed", "reason": "a bug", "since": time.time() - 61})
    assert re.search(r"failed 1 min \d+ s ago: a bug", run("status", "--over", 0).stdout)


def test_a_relay_that_shows_nothing_is_not_called_disconnected(
    run: Run, relay: SqliteStore
) -> None:
    assert "broker       unknown: its relay shows no status" in run("status", "--over", 0).stdout


def test_a_relay_that_hangs_is_not_called_connected(run: Run, relay: SqliteStore) -> None:
    now = time.time()
    relay.show({"link": "connected", "reason": "", "since": 0.0, "at": now - 61.5})
    words = "unknown: its relay hangs, and has shown no sign of life for 1 min"
    assert words in run("status", "--over", 0).stdout
    (row,) = parsed(run("status", "--json", "--over", 0))["relays"]
    assert row["silent_s"] > 60
    for id_ in (5, 6, 7, 8):
        assert (
            "; but the relay hangs, and has shown no sign of life for" in run("explain", id_).stdout
        )
    relay.show({"link": "disconnected", "reason": "refused", "since": now, "at": now - 61.5})
    assert "Next: nothing until the relay" in run("explain", 7).stdout
    assert "; but the relay hangs" in run("explain", 7).stdout
    assert "the relay hangs" not in run("explain", 3).stdout
    relay.show({"link": "connected", "reason": "", "since": now, "at": now})
    assert "broker       connected for" in run("status", "--over", 0).stdout


def test_a_relay_that_can_store_nothing_does_not_send(run: Run, relay: SqliteStore) -> None:
    now = time.time()
    why = "the outbox is locked by another process"
    relay.show({"link": "connected", "reason": why, "since": now - 61, "at": now})
    words = rf"before it; but the outbox has had trouble for 1 min \d+ s: {why}"
    assert re.search(words, run("explain", 7).stdout)


def test_one_byte_is_one(run: Run, path: Path) -> None:
    assert "'q'; 1 byte\n" in run("explain", Outbox(path).enqueue(b"x", routing_key="q")).stdout


def test_a_folder_and_a_file_of_others_are_no_missing_outbox(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.mkdir()
    assert f"Error: {path} is not a regular file" in run("status").stderr
    monkeypatch.setattr(Path, "stat", Mock(side_effect=PermissionError(13, "Permission denied")))
    refused(
        run("status"),
        "cannot be seen by this user: Permission denied; run this as its owner",
        code=4,
    )


def test_the_status_tells_the_window(run: Run, relay: SqliteStore) -> None:
    relay.show({"link": "connected", "reason": "", "since": 0.0, "window": 128})
    assert parsed(run("status", "--json", "--over", 0))["window"] == 128
    assert "128 messages" in run("status", "--over", 0).stdout


def test_a_message_whose_destination_is_paused_says_so(run: Run, alone: Path) -> None:
    (address,) = sql(
        alone,
        "UPDATE reliablepub_messages SET due_at = 9e999 WHERE id = 7",
        "SELECT exchange, routing_key FROM reliablepub_messages WHERE id = 7",
    )
    row = {"exchange": address[0], "routing_key": address[1], "refusals": 5, "probe_in_s": 30.0}
    more = {"since": time.time() - 5, "reason": "nacked: basic.nack", "waiting": 3}
    with closing(SqliteStore(alone)) as relay:
        assert "its destination is paused, because it kept refusing" in run("explain", 7).stdout
        elsewhere = row | more | {"exchange": "elsewhere"}
        shown = {"at": time.time(), "link": "connected", "reason": "", "since": 0.0}
        for routing_key in (None, address[1]):
            here = row | more | {"routing_key": routing_key}
            relay.show({**shown, "paused": [elsewhere, here], "paused_destinations": 12})
            told = run("explain", 7).stdout
            assert "Why: nacked: basic.nack" in told
            assert "3 messages wait; probed in" in told
        status = run("status", "--over", 0).stdout
        assert "3 messages wait; probed in" in status
        assert "10 destinations" in status
        assert parsed(run("status", "--json", "--over", 0))["paused_destinations"] == 12
    for command in (("explain", 7, "--json"), ("show", 7, "--json"), ("list", "--json")):
        assert "Infinity" not in run(*command).stdout
    assert run("list").exit_code == run("show", 7).exit_code == 0
    assert "Infinity" not in run("export").stdout


def test_an_unknown_message_gets_an_honest_answer(run: Run, relay: SqliteStore) -> None:
    refused(run("explain", "nix"), "never stored here, or it was confirmed at the first attempt")
    assert run("explain", 99).exit_code == 2


# ------------------------------------------------------------------------------------ the rest


def test_tags_in_flight_are_those_of_the_relay_at_work(run: Run, relay: SqliteStore) -> None:
    (sent,) = parsed(run("in-flight", "--json"))
    assert (sent["epoch"], sent["tag"], sent["id"], sent["message_id"]) == ("1-2", 7, 6, "m-6")
    assert abs(parsed(run("explain", 6, "--json"))[0]["in_flight"]["sent_at"] - sent["sent_at"]) < 1
    assert "1-2" in run("in-flight").stdout
    relay.close()
    assert run("in-flight").stdout == "nothing is in flight\n"


def test_what_may_have_arrived_twice_is_listed(run: Run, relay: SqliteStore) -> None:
    rows = parsed(run("duplicates", "--json"))
    assert [(row["id"], row["unsure"], row["is_confirmed"]) for row in rows] == [
        *((5, 1, 0), (10, 1, 0), (2, 1, 1))
    ]
    assert "uncertain" in run("duplicates").stdout


def test_figures_add_up_and_can_be_drawn(run: Run, relay: SqliteStore) -> None:
    for options, count in (((), 5), (("--all",), 8)):
        rows = parsed(run("stats", "--json", *options))
        for of in ("age", "attempts", "size"):
            assert sum(row["messages"] for row in rows if row["of"] == of) == count
    assert "     < 6 h          3  " + "█" * 50 in run("stats", "--plot").stdout
    assert run("stats", "--plot", "--csv").exit_code == 2


def test_rates_are_measured(run: Run, alone: Path) -> None:
    status = parsed(run("status", "--json", "--over", "0.01"))
    assert (status["stored_per_s"], status["confirmed_per_s"]) == (0.0, 0.0)
    assert parsed(run("status", "--json", "--over", "0"))["stored_per_s"] is None
    assert "unknown: no relay runs" in run("status", "--over", "0").stdout


# ------------------------------------------------------------------------------------ names


def test_a_message_is_named_by_the_key_it_was_enqueued_under(run: Run, path: Path) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"1", message_id="m-1"), key="order 17")
        outbox.enqueue(Message(b"2", message_id="order 17"))
        outbox.enqueue(Message(b"3", message_id="m-3"), key="order 18")
    assert parsed(run("show", "order 18", "--json"))["message_id"] == "m-3"
    assert parsed(run("show", "order 17", "--json"))["message_id"] == "order 17", "an id goes first"
    assert run("park", "order 18").stdout == "1 message parked\n"
    with closing(SqliteStore(path)) as store:
        (entry,), _ = store.read_ready(1, 1, limit=1, bytes_max=1)
        store.commit(Changes(confirmed=[entry]))
    (story,) = parsed(run("explain", "m-1", "--json"))
    assert (story["id"], story["state"]) == (1, "gone"), "its key still remembers it"


def test_a_confirmed_message_that_is_kept_is_shown(run: Run, path: Path) -> None:
    with closing(SqliteStore(path, keep_confirmed_s=60)) as store:
        entry = Entry(Message(b"here", message_id="m-1", content_type="text/plain"), 0.0)
        store.commit(Changes(new=[entry]))
        store.commit(Changes(confirmed=[entry]))
        out = run("explain", "m-1").stdout
        assert re.search(r"It was confirmed \d s ago, and is kept for a while\.", out)
        assert "Delivered? persisted: the broker has taken responsibility for it." in out
        assert run("show", 1).stdout.endswith("\n\nhere\n")
        assert parsed(run("show", 1, "--json"))["problem"] is None


# ------------------------------------------------------------------------------------ check


def levels(run: Run, *options: str) -> dict[str, str]:
    result = run("check", "--json", *options)
    assert result.stdout, result.stderr
    found = json.loads(result.stdout)
    assert all(finding["remedy"] for finding in found if finding["level"] != "ok")
    return {finding["check"]: finding["level"] for finding in found if finding["level"] != "ok"}


def test_a_sound_file_has_no_findings(run: Run, path: Path) -> None:
    with closing(SqliteStore(path)), Outbox(path) as outbox:
        outbox.enqueue(Message(b"x"))
        result = run("check")
        assert result.exit_code == 0
        assert "1 message compared with their checksums" in result.stdout
        assert levels(run) == levels(run, "--quick") == {}


def test_what_is_damaged_or_edited_is_found(run: Run, alone: Path) -> None:
    assert levels(run) == {"messages": "problem"}
    sql(
        alone,
        "DELETE FROM reliablepub_parked WHERE id = 3",
        "DROP TRIGGER reliablepub_key_skipped",
        "DROP VIEW reliablepub_open",
        "CREATE VIEW reliablepub_open AS SELECT 1 AS one",
    )
    alone.chmod(0o644)
    assert levels(run) == {
        "messages": "problem",
        "ledger": "problem",
        "schema": "problem",
        "access": "warning",
    }
    out = run("check").stdout
    assert "trigger reliablepub_key_skipped is missing; view reliablepub_open was changed" in out
    assert "+1 parked" in out


def test_damaged_pages_and_indexes_are_found(run: Run, path: Path) -> None:
    with Outbox(path) as outbox:
        for n in range(100):
            outbox.enqueue(Message(bytes(1_000), message_id=f"m-{n}"), key=f"k{n}")
    sql(
        path,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_schema SET sql = replace(sql, 'IS NOT NULL', 'IS NULL') "
        "WHERE name = 'reliablepub_messages_waiting'",
    )
    assert levels(run, "--quick") == {"schema": "problem"}, "the index lacks every row"
    assert levels(run) == {"schema": "problem", "pages": "problem"}
    overwrite(path, PAGE_BYTES * 30, b"\xff" * PAGE_BYTES)
    assert "pages" in levels(run, "--quick")
    assert run("check").exit_code == 4


def test_what_a_killed_relay_has_left_is_named(run: Run, alone: Path) -> None:
    write_status_file(alone, {})
    assert f"a relay that was killed has left {alone.name}.relay" in run("check").stdout


def test_looking_changes_nothing(run: Run, alone: Path) -> None:
    before = alone.read_bytes()
    for arguments in (("status",), ("list",), ("show", 3), ("explain", 3), ("stats",)):
        run(*arguments)
    assert alone.read_bytes() == before
