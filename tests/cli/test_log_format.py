"""`reliablepub relay --log-format json`: every line is an object, also errors at the start."""

import json
import logging
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reliablepub import Message, Outbox, OutboxMoved
from reliablepub.cli import loglines
from reliablepub.cli.output import print_note
from reliablepub.relay.status import described
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.conftest import NOBODY, Cli, line_of

EVERY_LINE = {"time", "level", "logger", "text", "event"}


def lines(text: str) -> list[dict[str, Any]]:
    """The lines, each a JSON object with what every line has."""
    found = [json.loads(line) for line in text.splitlines()]
    for line in found:
        assert set(line) >= EVERY_LINE
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
    return found


def test_a_relay_tells_all_of_its_life_as_json(cli: Cli, fake: FakeBroker) -> None:
    fill(
        cli.folder / "o.db",
        Message(b"x", exchange="no-such", message_id="m-1"),
        Message(b"x", routing_key="all"),
    )
    ended = cli(
        "relay", "--outbox", "o.db", "--drain", "--log-format", "json", "--health-port", "0"
    )
    assert ended.code == 0
    assert (ended.json["confirmed"], ended.json["parked"]) == (1, 1)  # it implies --json
    told = {line["event"]: line for line in lines(ended.err)}
    assert told["health"]["logger"] == "reliablepub.cli"
    assert (told["connected"]["level"], told["connected"]["connects"]) == ("INFO", 1)
    parked = told["parked"]
    assert (parked["level"], parked["message_id"], parked["reply_code"]) == ("ERROR", "m-1", 404)


def test_a_stopped_relay_has_said_each_thing_once(cli: Cli, fake: FakeBroker) -> None:
    cli.environment["RELIABLEPUB_URL"] = NOBODY
    relay = cli.begin("relay", "--outbox", "o.db", "--log-format", "json")
    (first,) = lines(line_of(relay))
    assert (first["event"], first["level"]) == ("disconnected", "WARNING")
    assert [line["event"] for line in lines(cli.stop(relay).err)] == []


@pytest.mark.parametrize(
    ("arguments", "environment", "config", "said"),
    [
        (("--log-format", "json", "--bogus"), {}, None, "No such option"),
        (("--log-format=json", "--window", "x"), {}, None, "'x' is not a valid integer"),
        (("--log-format", "json", "--outbox", "no.db", "--drain"), {}, None, "there is no outbox"),
        ((), {"RELIABLEPUB_LOG_FORMAT": "json"}, None, "Missing option '--outbox'"),
        ((), {}, "[relay]\nlog-format = 'json'\nbogus = 1\n", "unknown key 'bogus'"),
    ],
)
def test_errors_at_the_start_are_json(
    cli: Cli, arguments: tuple[str, ...], environment: dict[str, str], config: str | None, said: str
) -> None:
    if config is not None:
        (cli.folder / "relay.toml").write_text(config)
        arguments = ("--config", "relay.toml")
    cli.environment |= environment
    ended = cli("relay", *arguments)
    assert ended.code in {2, 4}
    (line,) = lines(ended.err)
    assert (line["level"], line["event"]) == ("ERROR", "error")
    assert said in line["text"]


def test_a_configuration_that_cannot_be_read_is_reported_as_text(cli: Cli) -> None:
    (cli.folder / "relay.toml").write_text("log-format = ")
    assert "is not valid TOML" in cli("relay", "--config", "relay.toml").error


def test_a_configuration_from_a_pipe_is_left_to_be_read(cli: Cli) -> None:
    """Such as `--config <(sops -d relay.toml)`."""
    Outbox(cli.folder / "o.db").create()
    ended = cli("relay", "--config", "/dev/stdin", "--drain", input="outbox = 'o.db'\n")
    assert ended.code == 0, ended.err


def test_other_commands_keep_their_lines(cli: Cli) -> None:
    cli.environment["RELIABLEPUB_LOG_FORMAT"] = "json"
    assert cli("outbox", "status", "--outbox", "no.db").error


def test_a_bug_is_a_line_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    loglines.use("json")
    try:
        sys.excepthook(ZeroDivisionError, ZeroDivisionError("ours"), None)
    finally:
        loglines.use("text")
    (line,) = lines(capsys.readouterr().err)
    assert (line["level"], line["event"]) == ("CRITICAL", "bug")
    assert "ZeroDivisionError: ours" in line["traceback"]


def test_as_text_a_bug_has_its_traceback_and_nothing_is_told_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_note("warning: everybody can write to directory x")
    write = partial(logging.Logger.log, logging.getLogger("reliablepub.relay"), logging.CRITICAL)
    with loglines.records():
        for error in (ZeroDivisionError("ours"), OutboxMoved("it was moved")):
            write(described(error), extra={"event": "failed"}, exc_info=error)
        logging.getLogger("reliablepub.outbox").warning("everybody can write to directory x")
        logging.getLogger("reliablepub.outbox").warning("the locks were lost")
        link = logging.getLogger("reliablepub.link")
        link.warning("not connected", extra={"event": "disconnected"})  # a note says that, too
        link.warning("public interface", extra={"event": "hooks_off"})
        link.info("connected", extra={"event": "connected"})
    text = capsys.readouterr().err
    assert text.count("everybody can write to directory x") == 1
    assert "not connected" not in text
    assert "the locks were lost\npublic interface\n" in text
    assert "the relay has failed: ZeroDivisionError: ours\nZeroDivisionError: ours\n" in text
    assert text.count("it was moved") == 1, "it says what to do, and is no bug"


def test_no_traceback_acts_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A propagator of traces, for instance, may quote the header that it cannot read."""
    error = ValueError("bad header \x1b]0;owned\x07\n\u202e")
    with loglines.records():
        logging.getLogger("reliablepub.hooks").error("a callback has raised", exc_info=error)
    told = capsys.readouterr().err
    assert told.startswith("a callback has raised\nValueError: bad header \\x1b]0;owned\\x07\n")
    assert all(line.isprintable() for line in told.splitlines())


def test_it_is_among_the_last_of_the_same_flag() -> None:
    wanted: Callable[..., str] = loglines.wanted
    assert wanted(["--log-format", "json", "--log-format", "text"], {}) == "text"
    assert wanted(["--log-format"], {}) == "text"
    assert wanted([], {"RELIABLEPUB_CONFIG": str(Path("no-such"))}) == "text"


@pytest.mark.usefixtures("fake")
def test_a_configuration_that_is_wrong_by_now_leaves_the_lines_json(cli: Cli) -> None:
    file = cli.folder / "relay.toml"
    file.write_text("outbox = 'o.db'\n[relay]\nlog-format = 'json'\n")
    relay = cli.begin("relay", "--config", "relay.toml")
    assert json.loads(line_of(relay))["text"].startswith("connected to the broker")
    file.write_text("log-format = ")
    relay.send_signal(signal.SIGHUP)
    assert json.loads(line_of(relay))["text"].startswith("not reopened, nothing was")
    assert cli.stop(relay).json["open"] == 0
