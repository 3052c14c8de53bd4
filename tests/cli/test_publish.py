"""`reliablepub publish`: every way it can end."""

import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from reliablepub import Message, Outbox, Publisher
from reliablepub.cli import main
from reliablepub.testing import FakeBroker, faults
from tests.cli.conftest import NOBODY, Cli, refused
from tests.disks import small_disk
from tests.sqlite import sql
from tests.waiting import until

TO_ALL = ("--exchange", "flights", "--routing-key", "flight.{carrier}.{to.code}")
Arrived = Callable[[], dict[bytes, list[str]]]
Flights = Callable[[int], Path]


def test_records_arrive_where_their_fields_say(
    cli: Cli, fake: FakeBroker, flights: Flights
) -> None:
    path = flights(1500)
    ended = cli("publish", path, *TO_ALL, "--message-id", "f-{id}", "--outbox", "o.db", "--json")
    assert ended.code == 0, ended.err
    assert ended.err == ""
    result = ended.json
    expected = {"records": 1500, "stored": 1500, "confirmed": 1500, "parked": 0, "open": 0}
    assert {key: result[key] for key in expected} == expected
    assert result["source"] == str(path)
    assert (result["link"], result["reason"]) == ("connected", "")
    assert (result["exit_code"], result["resumed_at"], result["stopped"]) == (0, None, None)
    assert result["outbox"]["confirmed"] == 1500
    messages = fake.messages("all")
    assert [message.body for message in messages] == path.read_bytes().splitlines()
    assert messages[1].routing_key == "flight.UA.JFK"
    assert messages[1].properties.message_id == "f-1"
    assert messages[1].properties.content_type == "application/json"


def test_a_human_summary_is_one_line(cli: Cli, flights: Flights) -> None:
    ended = cli("publish", flights(3), *TO_ALL)
    assert ended.code == 0
    assert "3 records, 3 accepted, 3 confirmed, 0 given up, 0 open in" in ended.out
    assert ended.out.count("\n") == 1


def test_stdin_is_published_as_it_comes(cli: Cli, fake: FakeBroker) -> None:
    process = cli.begin("publish", "-", "--routing-key", "all", "--json")
    assert process.stdin is not None
    process.stdin.write("one\n\n two \nthr")
    process.stdin.flush()
    fake.wait_for(2, timeout_s=60)
    ended = cli.ended(process, "ee\r\n")
    assert ended.code == 0, ended.err
    assert (ended.json["records"], ended.json["confirmed"]) == (3, 3)
    assert [message.body for message in fake.messages("all")] == [b"one", b" two ", b"three"]
    assert fake.messages("all")[0].properties.content_type == "text/plain"


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_nothing_to_publish_is_no_error(cli: Cli, content: str) -> None:
    ended = cli("publish", "-", "--routing-key", "all", "--json", input=content)
    assert (ended.code, ended.json["records"]) == (0, 0)


def test_publishing_again_publishes_again(cli: Cli, flights: Flights, fake: FakeBroker) -> None:
    for _ in range(2):
        assert cli("publish", flights(5), *TO_ALL, "--outbox", "o.db").code == 0
    assert len(fake.messages("all")) == 10


# ---------------------------------------------------------------------- bad input and usage


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{oops", "is not valid JSON"),
        ('{"carrier": "AA"}', "field 'to' is missing (--routing-key"),
        ('{"carrier": null, "to": {"code": "X"}}', "field 'carrier' is null"),
    ],
)
def test_a_bad_line_stores_nothing(
    cli: Cli, flights: Flights, fake: FakeBroker, line: str, problem: str
) -> None:
    path = flights(700)
    path.write_text(path.read_text() + "\n" + line + "\n")
    ended = refused(cli("publish", path, *TO_ALL, "--outbox", "o.db"), f"line 702: {problem}")
    assert ended.error.endswith("nothing was stored")
    assert ended.out == ""
    assert not (cli.folder / "o.db").exists()
    assert fake.published_count == 0


def test_a_bad_line_of_stdin_names_what_is_stored(cli: Cli, fake: FakeBroker) -> None:
    good = '{"carrier": "AA", "to": {"code": "JFK"}}\n'
    ended = cli(
        "publish", "-", *TO_ALL, "--outbox", "o.db", "--json", input=good * 3 + "{\n" + good
    )
    assert ended.code == 2
    assert "line 4: is not valid JSON" in ended.error
    assert ended.error.endswith("; 3 records before it are stored")
    assert (ended.json["confirmed"], ended.json["stopped"]) == (3, "bad input")
    assert len(fake.messages("all")) == 3


def _cut(path: Path) -> None:
    os.truncate(path, 7)


def _grow(path: Path) -> None:
    path.write_text(path.read_text() + "more\n")


def _rewrite(path: Path) -> None:
    path.write_text(path.read_text().upper())
    os.utime(path, (1, 1))


@pytest.mark.parametrize("change", [_cut, _grow, _rewrite])
@pytest.mark.parametrize("outbox", [(), ("--outbox", "o.db")])
def test_a_file_that_is_changed_after_its_check_is_not_reported_as_complete(
    fake: FakeBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    outbox: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "f.txt"
    path.write_text("one\n\ntwo\nthree\n")

    def opened(*arguments: Any, **options: Any) -> Publisher:
        change(path)  # the records are checked before the publisher is opened
        return Publisher(*arguments, **options)

    monkeypatch.setattr("reliablepub.cli.publish.command.Publisher", opened)
    command = ("publish", str(path), "--routing-key", "all", "--url", fake.url, *outbox, "--json")
    ended = CliRunner().invoke(main, command)
    assert ended.exit_code == 2, ended.output
    stored = len(fake.messages("all"))
    assert stored >= 2
    assert ": the file was changed while it was read" in ended.stderr
    assert json.loads(ended.stdout)["stored"] == stored


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("publish", "missing.txt", "--routing-key", "q"), "cannot read missing.txt: No such file"),
        (("publish", ".", "--routing-key", "q"), "cannot read .: is a directory"),
        (("publish", "-"), "give --routing-key, --exchange or both"),
        (("publish", "-", "--routing-key", "{a"), "has no partner"),
        (("publish", "-", "--routing-key", "{a}", "--format", "lines"), "plain lines do not have"),
        (("publish", "-", "--routing-key", "q", "--url", "http://x:hush@y"), "scheme is 'http'"),
        (("publish", "-", "--routing-key", "q", "--url", "amqp://x:hush@y:z/"), "cannot be read"),
        (("publish", "-", "--routing-key", "q", "--window", "0"), "--window"),
        (("publish", "-", "--routing-key", "q", "--bad"), "--bad"),
        (("publish", "-", "--routing-key", "q", "--expires-in", "0"), "--expires-in"),
        (("publish", "-", "--routing-key", "q", "--not-before", "2999-01-01"), "with an offset"),
        (("publish", "-", "--routing-key", "q", "--not-before", "2999-01-01T00Z"), "needs --outb"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], problem: str) -> None:
    ended = CliRunner(env={"RELIABLEPUB_URL": NOBODY}).invoke(main, arguments)
    assert ended.exit_code == 2
    assert ended.stderr.startswith("Error: ")
    assert problem in ended.stderr
    assert "hush" not in ended.output
    assert ended.stderr.count("\n") == 1


def test_the_url_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELIABLEPUB_URL", raising=False)
    refused(
        CliRunner().invoke(main, ["publish", "-", "--routing-key", "q"]), "Missing option '--url'"
    )


# ---------------------------------------------------------------------- the broker is not well


def test_a_broker_that_is_down_costs_nothing(cli: Cli, flights: Flights, arrived: Arrived) -> None:
    path = flights(1200)
    cli.environment["RELIABLEPUB_OUTBOX"] = "o.db"
    ended = cli("publish", path, *TO_ALL, "--url", NOBODY, "--timeout", "0.3", "--json")
    assert ended.code == 3
    assert ended.error == (
        "1200 messages are stored, not yet published (127.0.0.1:1: connection refused); "
        "run `reliablepub relay --outbox o.db --url ...`"
    )
    assert (ended.json["stored"], ended.json["open"]) == (1200, 1200)
    assert (ended.json["reason"], ended.json["stopped"]) == (
        "127.0.0.1:1: connection refused",
        "timeout",
    )

    drained = cli("relay", "--drain", "--json")
    assert drained.code == 0, drained.err
    assert (drained.json["confirmed"], drained.json["open"]) == (1200, 0)
    assert {body: len(ids) for body, ids in arrived().items()} == dict.fromkeys(
        path.read_bytes().splitlines(), 1
    )


def test_without_an_outbox_it_says_that_nothing_is_kept(cli: Cli, flights: Flights) -> None:
    limits = ("--window", "1000", "--timeout", "0.3")
    ended = refused(
        cli("publish", flights(9000), *TO_ALL, "--url", NOBODY, *limits, "--json"),
        "there is no outbox to keep them: publish them again",
        "Error: gave up after record",
        code=3,
    )
    assert 0 < ended.json["open"] == ended.json["stored"] <= 4000
    assert ended.json["outbox"] is None


TROUBLES: dict[str, Callable[[FakeBroker], object]] = {
    "the broker refused the credentials": lambda _: None,
    "blocked by the broker: low on disk": lambda fake: fake.block("low on disk"),
    "the broker has not confirmed": lambda fake: fake.inject(faults.HoldConfirms()),
}


@pytest.mark.parametrize("words", TROUBLES)
def test_what_is_wrong_with_the_broker_is_named(
    cli: Cli, flights: Flights, fake: FakeBroker, words: str
) -> None:
    TROUBLES[words](fake)
    password = "hush" if "credentials" in words else "guest"
    url = fake.url.replace("guest:guest", f"guest:{password}")
    where = ("--outbox", "o.db", "--url", url, "--timeout", "0.5", "--json")
    ended = refused(cli("publish", flights(800), *TO_ALL, *where), words, code=3)
    assert ended.error.startswith("800 messages are stored, not yet published (")
    assert (ended.json["link"] == "blocked") == ("blocked" in words)


def test_failover_goes_to_the_next_address(cli: Cli, flights: Flights, fake: FakeBroker) -> None:
    ended = cli("publish", flights(2), *TO_ALL, "--url", NOBODY, "--url", fake.url)
    assert ended.code == 0, ended.err


# ---------------------------------------------------------------------- too early, too late


def test_what_may_not_be_sent_yet_is_stored_and_not_waited_for(
    cli: Cli, flights: Flights, fake: FakeBroker
) -> None:
    wait = ("--not-before", "2999-01-01T02:00:00+02:00", "--timeout", "3600")
    publish = ("publish", flights(3), *TO_ALL, *wait, "--outbox", "o.db", "--json")
    ended = cli(*publish)
    assert ended.code == 3
    assert (ended.json["stored"], ended.json["open"], ended.json["stopped"]) == (3, 3, "not due")
    assert "3 messages are stored, not yet published (they are not due yet)" in ended.error
    assert fake.published_count == 0
    due = {str(row["due_at"]) for row in Outbox(cli.folder / "o.db").rows("open")}
    assert len(due) == 1
    assert cli(*publish).json["stored"] == 3, "that run had ended"
    assert due.pop().startswith("2999-01-01 00:00:00")


def test_what_was_not_to_be_sent_before_now_is_sent(
    cli: Cli, flights: Flights, fake: FakeBroker
) -> None:
    since = ("--not-before", "2020-01-01T00:00:00Z", "--expires-in", "3600")
    assert cli("publish", flights(3), *TO_ALL, *since, "--outbox", "o.db").code == 0
    assert len(fake.messages("all")) == 3


def test_what_is_not_confirmed_in_time_has_expired(cli: Cli, flights: Flights) -> None:
    late = ("--expires-in", "0.1", "--url", NOBODY)
    ended = cli("publish", flights(3), *TO_ALL, *late, "--outbox", "o.db", "--json")
    assert (ended.code, ended.json["outcomes"]["expired"]) == (1, 3)
    assert Outbox(cli.folder / "o.db").status().expired == 3


def test_an_unknown_exchange_parks_one_message_and_not_the_file(cli: Cli, flights: Flights) -> None:
    ended = cli("publish", flights(2000), "--exchange", "nowhere", "--outbox", "o.db", "--json")
    assert ended.code == 1
    assert ended.error == (
        "the broker refuses these messages (404 NOT_FOUND - no exchange 'nowhere' in vhost '/'); "
        "stopped reading after record 1 of 2000: 1 stored, 1 parked, 0 open; "
        "see `reliablepub outbox list --state parked --outbox o.db`"
    )
    result = ended.json
    assert (result["stored"], result["parked"], result["stopped"]) == (1, 1, "refused")
    assert result["failures"][0]["outcome"] == "refused"
    assert result["failures"][0]["reply_code"] == 404


@pytest.mark.parametrize("outbox", [(), ("--outbox", "o.db")])
def test_unroutable_messages_are_counted_and_the_others_arrive(
    cli: Cli, flights: Flights, fake: FakeBroker, outbox: tuple[str, ...]
) -> None:
    fake.declare_exchange("picky", "direct")
    for key in ("AA", "UA"):
        fake.bind("all", "picky", key)
    to = ("--exchange", "picky", "--routing-key", "{carrier}")
    ended = cli("publish", flights(30), *to, *outbox, "--json")
    assert ended.code == 1
    assert ended.error.startswith("10 messages given up (10 returned); the first is message ")
    assert "routing key 'DL': 312 NO_ROUTE" in ended.error
    result = ended.json
    assert (result["confirmed"], result["parked"], result["open"]) == (20, 10, 0)
    assert result["outcomes"]["returned"] == 10
    assert len(result["failures"]) == 10
    assert len(fake.messages("all")) == 20


def test_messages_that_an_operator_withdraws_meanwhile_are_counted(
    cli: Cli, flights: Flights, fake: FakeBroker
) -> None:
    fake.block("low on memory")
    process = cli.begin("publish", flights(3), *TO_ALL, "--outbox", "o.db", "--json")
    until(lambda: cli("outbox", "show", "3", "--outbox", "o.db").code == 0)
    assert cli("outbox", "discard", "2", "--yes", "--outbox", "o.db").code == 0
    assert cli("outbox", "park", "3", "--note", "wrong price", "--outbox", "o.db").code == 0
    fake.unblock()
    ended = cli.ended(process)
    assert ended.code == 1
    assert ended.error.startswith("2 messages given up (2 withdrawn); the first is message ")
    assert (ended.json["confirmed"], ended.json["parked"], ended.json["open"]) == (1, 2, 0)
    assert ended.json["outcomes"]["withdrawn"] == 2
    assert "wrong price" in ended.json["failures"][1]["reply_text"]


# ---------------------------------------------------------------------- killed, stopped


def test_a_killed_run_is_resumed_and_nothing_is_lost(
    cli: Cli, flights: Flights, fake: FakeBroker, arrived: Arrived
) -> None:
    path = flights(20_000)
    publish = ("publish", path, *TO_ALL, "--outbox", "o.db", "--json")
    first = cli.begin(*publish)
    fake.wait_for(1, timeout_s=60)
    first.kill()
    cli.ended(first)

    second = cli(*publish)
    assert second.code == 0, second.err
    done = second.json["resumed_at"] - 1
    assert 0 < done < 20_000
    assert second.err.splitlines()[0] == (
        f"resuming at record {done + 1}: {done} were stored by a run that did not finish"
    )
    assert second.json["stored"] == 20_000 - done
    assert second.json["outbox"]["stored"] == second.json["outbox"]["confirmed"] == 20_000
    found = arrived()
    assert set(found) == set(path.read_bytes().splitlines())
    assert all(len(set(ids)) == 1 for ids in found.values()), "a duplicate has the same id"


def test_a_resumed_run_does_not_wait_for_a_reminder(
    cli: Cli, flights: Flights, fake: FakeBroker
) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    with Outbox(cli.folder / "o.db") as outbox:
        outbox.create()
        outbox.enqueue(Message(b"remember", routing_key="all", not_before=tomorrow))
    publish = ("publish", flights(30), *TO_ALL, "--outbox", "o.db", "--json")
    assert cli(*publish, "--url", NOBODY, "--timeout", "0.3").code == 3
    second = cli(*publish)
    assert (second.code, second.json["stored"], second.err.count("\n")) == (0, 0, 1), second.err
    assert second.json["outbox"]["open"] == 1
    assert len(fake.messages("all")) == 30
    assert cli(*publish).json["stored"] == 30, "that run has ended"


def test_a_resumed_run_waits_for_what_an_ordering_key_holds(cli: Cli, fake: FakeBroker) -> None:
    (cli.folder / "f.txt").write_text("1\n2\n")
    key = ("--ordering-key", "k", "--routing-key", "gone")
    publish = ("publish", "f.txt", *key, "--outbox", "o.db", "--json", "--timeout", "1")
    assert cli(*publish).code == 1
    again = cli(*publish)
    assert (again.code, again.json["stopped"]) == (1, "timeout"), "the key is still held"
    assert again.json["stored"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, None])
def test_a_run_stopped_or_killed_while_it_waits_is_not_begun_again(
    cli: Cli, flights: Flights, fake: FakeBroker, arrived: Arrived, number: signal.Signals | None
) -> None:
    path = flights(30)
    fake.inject(faults.HoldConfirms())
    publish = ("publish", path, *TO_ALL, "--outbox", "o.db", "--json")
    if number is None:
        first = cli(*publish, "--timeout", "0.5")
    else:
        process = cli.begin(*publish)
        fake.wait_for(30, timeout_s=60)
        process.send_signal(number)
        first = cli.ended(process)
    if number is not signal.SIGKILL:
        assert (first.code, first.json["stored"], first.json["open"]) == (3, 30, 30)
        again = cli(*publish, "--timeout", "0.5")
        assert (again.code, again.json["stored"], again.json["open"]) == (3, 0, 0)
        assert "30 messages are stored, not yet published" in again.error
    fake.release_confirms()

    second = cli(*publish)
    assert (second.code, second.json["stored"]) == (0, 0), second.err
    assert "all 30 records were stored by a run that did not finish" in second.err
    assert {body: len(set(ids)) for body, ids in arrived().items()} == dict.fromkeys(
        path.read_bytes().splitlines(), 1
    )
    assert Outbox(cli.folder / "o.db").status().stored == 30
    assert cli(*publish).json["stored"] == 30, "all were confirmed, so that run has ended"


def test_a_position_beyond_the_end_of_the_file_is_no_finished_run(
    cli: Cli, flights: Flights, fake: FakeBroker
) -> None:
    """As left by runs on several shards, which earlier versions let add up their records."""
    path = flights(5)
    publish = ("publish", path, *TO_ALL, "--outbox", "o.db", "--json")
    assert cli(*publish, "--url", NOBODY, "--timeout", "0.3").code == 3
    sql(cli.folder / "o.db", "UPDATE reliablepub_sources SET position = 8")
    refused(cli(*publish), "has 8 stored records of ", "some may be missing", code=4)
    os.utime(path)
    assert cli(*publish).json["stored"] == 5


@pytest.mark.parametrize("is_parked", [False, True])
def test_what_a_relay_has_published_or_parked_meanwhile_is_not_published_again(
    cli: Cli, flights: Flights, fake: FakeBroker, *, is_parked: bool
) -> None:
    to = ("--routing-key", "nowhere") if is_parked else TO_ALL
    publish = ("publish", flights(30), *to, "--outbox", "o.db", "--json")
    assert cli(*publish, "--url", NOBODY, "--timeout", "0.3").code == 3
    assert cli("relay", "--drain", "--outbox", "o.db").code == 0
    again = cli(*publish)
    assert (again.code, again.json["stored"]) == (int(is_parked), 0), again.err
    if is_parked:
        told = "30 messages in the outbox are parked or expired, and may be of"
        assert again.error.startswith(told)
    assert len(fake.messages("all")) == (0 if is_parked else 30)


def test_what_the_earlier_run_has_parked_is_told(
    cli: Cli, flights: Flights, fake: FakeBroker
) -> None:
    publish = ("publish", flights(3), "--exchange", "later", "--outbox", "o.db", "--json")
    assert cli(*publish).json["stopped"] == "refused"
    fake.declare_exchange("later", "fanout")
    fake.bind("all", "later", "")
    again = cli(*publish)
    assert (again.code, again.json["confirmed"]) == (1, 2), again.err
    assert again.error.startswith("1 message in the outbox is parked or expired, and may be of")


def test_a_changed_file_is_another_file(cli: Cli, flights: Flights, fake: FakeBroker) -> None:
    path = flights(20)
    fake.inject(faults.HoldConfirms())
    first = cli.begin("publish", path, *TO_ALL, "--outbox", "o.db")
    fake.wait_for(20, timeout_s=60)
    first.kill()
    cli.ended(first)
    fake.release_confirms()
    os.utime(path, ns=(1, 1))
    second = cli("publish", path, *TO_ALL, "--outbox", "o.db", "--json")
    assert (second.code, second.json["resumed_at"], second.json["stored"]) == (0, None, 20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_good_order(
    cli: Cli, flights: Flights, fake: FakeBroker, number: signal.Signals
) -> None:
    publish = ("publish", flights(20_000), *TO_ALL, "--outbox", "o.db", "--json")
    process = cli.begin(*publish)
    fake.wait_for(1, timeout_s=60)
    process.send_signal(number)
    ended = cli.ended(process)
    assert ended.code == 3
    assert ended.json["stopped"] == "interrupted"
    assert 0 < ended.json["stored"] < 20_000
    assert "Error: interrupted after record " in ended.err
    assert "the same command resumes there" in ended.err
    assert Outbox(cli.folder / "o.db").status().stored == ended.json["stored"]
    again = cli(*publish)
    assert again.code == 0, again.err
    assert again.json["stored"] == 20_000 - ended.json["stored"]


@pytest.mark.parametrize(
    ("count", "options"), [(10, ("--outbox", "o.db")), (10, ()), (9000, ("--window", "1000"))]
)
def test_a_signal_ends_the_wait_for_confirms(
    cli: Cli, flights: Flights, fake: FakeBroker, count: int, options: tuple[str, ...]
) -> None:
    fake.inject(faults.HoldConfirms())
    process = cli.begin("publish", flights(count), *TO_ALL, *options, "--json")
    fake.wait_for(min(count, 32), timeout_s=60)
    ended = cli.stop(process)
    assert ended.code == 3
    assert ended.json["stopped"] == "interrupted"
    assert ended.json["open"] == ended.json["stored"] > 0


def test_a_terminal_gets_a_progress_bar(cli: Cli, flights: Flights) -> None:
    ours, theirs = os.openpty()
    cli.environment |= {"NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "reliablepub", "publish", str(flights(30)), *TO_ALL]
    for url, expected in (
        (cli.environment["RELIABLEPUB_URL"], "30/30"),
        (NOBODY, "not connected to the broker: 127.0.0.1:1: connection refused; trying again"),
    ):
        done = subprocess.run(
            [*command, "--url", url, "--timeout", "0.3"],
            env=cli.environment,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            check=False,
        )
        shown = b""
        while select.select([ours], [], [], 0.2)[0]:
            shown += os.read(ours, 100_000)  # of a terminal, 4 KiB at most
        assert expected in shown.decode()
        assert b"\x1b[3" not in shown, "NO_COLOR"
        assert done.stdout.count("\n") == 1
    os.close(theirs)
    os.close(ours)


def test_a_signal_ends_the_wait_for_stdin(cli: Cli, fake: FakeBroker) -> None:
    process = cli.begin("publish", "-", "--routing-key", "all", "--json")
    assert process.stdin is not None
    process.stdin.write("one\n")
    process.stdin.flush()
    fake.wait_for(1, timeout_s=60)
    ended = cli.stop(process)
    assert (ended.code, ended.json["confirmed"]) == (3, 1)


# ---------------------------------------------------------------------- the outbox is not well


def test_a_file_that_is_no_outbox_is_left_alone(cli: Cli, flights: Flights) -> None:
    text = cli.folder / "notes.txt"
    text.write_text("dear diary\n" * 100)
    refused(
        cli("publish", flights(1), *TO_ALL, "--outbox", text), "is not a SQLite database", code=4
    )
    assert text.read_text() == "dear diary\n" * 100


def test_a_relay_that_fails_leaves_the_result(cli: Cli, flights: Flights, fake: FakeBroker) -> None:
    fake.inject(faults.HoldConfirms())
    process = cli.begin("publish", flights(3), *TO_ALL, "--outbox", "o.db", "--json")
    fake.wait_for(3, timeout_s=60)
    (cli.folder / "o.db").rename(cli.folder / "elsewhere.db")
    ended = cli.ended(process)
    assert ended.code == 4
    assert (ended.json["stored"], ended.json["open"], ended.json["stopped"]) == (3, 3, "outbox")
    assert "OutboxMoved" in ended.err


def test_a_full_disk_keeps_what_was_accepted(cli: Cli, flights: Flights) -> None:
    path = flights(20_000)
    with small_disk(cli.folder, "tmpfs", 9) as disk:  # 5 MiB of it are the reserve
        where = ("--outbox", f"{disk}/o.db", "--json")
        ended = cli("publish", path, *TO_ALL, *where, "--url", NOBODY, "--timeout", "0.3")
        status = cli("outbox", "status", *where)
    assert ended.code == 4, ended.err
    assert "Error: outbox" in ended.err
    assert "the disk is full" in ended.err
    stored = ended.json["stored"]
    assert 0 < stored < 20_000
    assert status.json["open"] == stored


def test_memory_stays_bounded(cli: Cli, flights: Flights) -> None:
    """Ten times the records may not take more than a little more memory."""
    code = (
        "import resource, sys; from reliablepub.cli import main\n"
        "try: main()\n"
        "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    peaks = Counter[int]()
    for count in (500, 20_000):
        path = flights(count)
        done = subprocess.run(
            [sys.executable, "-c", code, "publish", path, *TO_ALL],
            env=cli.environment,
            cwd=cli.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        peaks[count] = int(done.stderr.splitlines()[-1])
    assert peaks[20_000] - peaks[500] < 40_000, peaks


TRACED = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from reliablepub.cli import main

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
with trace.get_tracer("a job").start_as_current_span("job") as job:
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        assert not end.code, end.code
attempts = [span for span in exporter.get_finished_spans() if span.kind.name == "CLIENT"]
links = [format(link.context.span_id, "016x") for span in attempts for link in span.links]
print(len(attempts), format(job.get_span_context().span_id, "016x"), *links)
"""


def test_each_attempt_is_traced_on_request(cli: Cli, flights: Flights, fake: FakeBroker) -> None:
    command = [sys.executable, "-W", "error", "-c", TRACED]
    arguments = ["publish", str(flights(3)), *TO_ALL, "--json", "--tracing"]
    ended = subprocess.run(
        [*command, *arguments],
        cwd=cli.folder,
        env=cli.environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    count, job, *links = ended.stdout.splitlines()[-1].split()
    assert int(count) == 3
    headers = [message.properties.headers or {} for message in fake.messages("all")]
    contexts = [str(one["traceparent"]) for one in headers]
    assert [context.split("-")[2] for context in contexts] == [job] * 3
    assert links == [job] * 3


def test_tracing_without_an_sdk_is_told(cli: Cli, flights: Flights) -> None:
    refused(
        cli("publish", flights(1), *TO_ALL, "--tracing"),
        "no OpenTelemetry SDK is configured",
        code=0,
    )


def test_of_an_input_that_was_read_to_its_end_no_record_is_left(cli: Cli) -> None:
    ended = cli(
        "publish", "-", "--routing-key", "q", "--url", NOBODY, "--timeout", "0.2", input="a\n"
    )
    assert (ended.code, "are not confirmed" in ended.err or "is not confirmed" in ended.err) == (
        3,
        True,
    )
    assert "were not published" not in ended.err


def test_a_named_pipe_that_was_not_read_to_its_end_is_not_done(cli: Cli, fake: FakeBroker) -> None:
    """Like stdin; such as `publish <(zcat flights.gz)`."""
    pipe = cli.folder / "pipe"
    os.mkfifo(pipe)
    process = cli.begin("publish", "pipe", "--routing-key", "all", "--outbox", "o.db")
    with pipe.open("wb") as writer:
        writer.write(b"one\ntwo\n")
        writer.flush()
        fake.wait_for(2, timeout_s=60)
        process.send_signal(signal.SIGINT)
        ended = cli.ended(process)
    assert ended.code == 3
    assert ended.error == (
        "interrupted after record 2 of 2; the records after it were not published"
    )


def test_without_an_outbox_nothing_is_said_to_be_kept(cli: Cli, flights: Flights) -> None:
    ended = cli("publish", flights(1), "--routing-key", "nowhere")
    assert ", 1 accepted, 0 confirmed, 1 given up, 0 open in " in ended.out
    assert ended.error.endswith("; without an outbox nothing keeps what was given up")
    ended = cli("publish", flights(1), "--routing-key", "q", "--exchange", "nowhere")
    assert ": 1 accepted, 1 given up, 0 open; without an outbox nothing keeps" in ended.error


def test_beside_a_relay_it_needs_an_outbox_of_its_own(cli: Cli, flights: Flights) -> None:
    with Publisher(NOBODY, outbox=cli.folder / "o.db", close_timeout_s=0):
        ended = cli("publish", flights(1), "--routing-key", "all", "--outbox", "o.db")
    refused(ended, f"is relayed by process {os.getpid()}", code=4)
    assert ended.error.endswith("; or give `publish` a separate outbox")
