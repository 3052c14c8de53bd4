"""The picture at several sizes and in several states; the command, also in a terminal."""

import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from reliablepub import Message
from reliablepub.cli import main
from reliablepub.cli.watch.lookout import Look, look
from reliablepub.cli.watch.page import page_of
from reliablepub.cli.watch.screen import ASCII_BARS, draw, trend_of
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.database import Relaying
from reliablepub.outbox.entry import Changes, Entry
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.cli.conftest import Cli, refused
from tests.cli.test_app import section
from tests.cli.trouble import make_trouble
from tests.waiting import until

SIZES = [(200, 60), (110, 30), (80, 24), (79, 24), (40, 24), (40, 12), (20, 5)]
LATENCY = {"confirms": 9, "p50_s": 0.0012, "p95_s": 0.025, "p99_s": 0.2, "max_s": 1.0}
LINK = {
    "link": "connected",
    "reason": "",
    "since": 1.0,
    "window": 1000,
    "connects": 2,
    "latency": LATENCY,
    "buffered": 3,
    "aside": 1,
    "violations": 0,
    "paused": [],
}


def drawn(seen: Look, *, width: int = 110, height: int = 30) -> list[str]:
    console = Console(
        width=width, height=height, file=io.StringIO(), record=True, color_system=None
    )
    console.print(draw(page_of(seen), width=width, height=height, hint="q quits"))
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("link", ["connected", "blocked", "disconnected", None])
def test_the_picture_fits(
    path: Path, relay: SqliteStore, width: int, height: int, link: str | None
) -> None:
    if link is None:
        relay.close()
    else:
        relay.show({**LINK, "link": link, "reason": "no route\nto host " * 20})
    lines = drawn(look(outbox_at(path), closely=True), width=width, height=height)
    assert max(map(len, lines)) <= width
    assert lines[-1] == "q quits"
    if height >= 24:
        assert len(lines) <= height
    if width >= 40:
        assert any("in flight" in line for line in lines)


def test_it_shows_what_the_relay_shows_of_itself(path: Path, relay: SqliteStore) -> None:
    relay.show(LINK)
    text = "\n".join(drawn(look(outbox_at(path), closely=True)))
    for words in (
        f"relay {os.getpid()}: connected for",
        "2 connections made",
        "in flight  1 of 1000, 1 aside",
        "p50 1.2 ms  p95 25 ms",
        "p99 200 ms  max 1000 ms",
        "3 x  returned: 312 NO_ROUTE  (last",
        "orders / order.created  returned: 312 NO_ROUTE",
        "parked     2",
    ):
        assert words in text
    assert "{" not in text, "no body"


def test_paused_destinations_are_named(path: Path, relay: SqliteStore) -> None:
    paused = {"exchange": "", "routing_key": "q", "refusals": 5, "probe_in_s": 10.0}
    more = {"since": time.time() - 60.5, "reason": "nacked: basic.nack", "waiting": 1}
    relay.show({**LINK, "paused": [paused | more], "paused_destinations": 1})
    lines = drawn(look(outbox_at(path), closely=True))
    assert "1 destination paused: fix the cause, and publishing resumes" in lines
    words = r"\(default\) / q: nacked: basic\.nack; for 1 min \d+ s; 1 message waits; probed in"
    assert any(re.search(words, line) for line in lines)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_reason_is_cut(path: Path, relay: SqliteStore, width: int) -> None:
    why = "refused: 404 NOT_FOUND - no exchange 'orders.of.the.morning' in vhost '/shop'"
    row = {"exchange": "orders.of.the.morning", "routing_key": None, "refusals": 3, "waiting": 9}
    paused = row | {"reason": why, "since": time.time() - 60.5, "probe_in_s": 10.0}
    lost = "connection lost: rabbit-1.example.com:5671: certificate verify failed: it has expired"
    shown = {"link": "disconnected", "reason": lost, "since": time.time() - 5}
    relay.show({**LINK, **shown, "paused": [paused], "paused_destinations": 1})
    told = re.sub(
        r"[\s│]+", " ", " ".join(drawn(look(outbox_at(path), closely=True), width=width, height=60))
    )
    assert "the relay is not connected; messages are safe, and wait" in told
    assert f"{why}; for 1 min" in told
    assert re.search(rf"not connected for \d+ s: {re.escape(lost)}; 2 connections made", told)
    assert "1 x refused: 404 NOT_FOUND - no exchange 'missing' in vhost '/' (last" in told


def test_what_needs_a_person_comes_first(path: Path, relay: SqliteStore) -> None:
    for link, words in (
        ("disconnected", "the relay is not connected; messages are safe, and wait"),
        ("blocked", "the broker accepts no messages: check its memory and disk"),
        ("connected", "3 messages given up: see `reliablepub outbox summary`"),
    ):
        relay.show({**LINK, "link": link})
        assert drawn(look(outbox_at(path), closely=True))[2] == words
    relay.close()
    assert drawn(look(outbox_at(path), closely=True))[2].startswith(
        "no relay runs for this outbox: start"
    )


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (
            {"reason": "the disk of the outbox fails: look at the system's log"},
            "messages wait: the disk of the outbox fails: look at the system's log",
        ),
        ({"at": time.time() - 300}, "the relay hangs: find out what it waits for, and restart it"),
        ({"aside": 2}, "2 messages set aside: see `reliablepub outbox list --sort attempts`"),
        (None, "the relay shows no status: if this does not change, read its log"),
    ],
)
def test_nothing_that_needs_a_person_is_nothing_to_do(
    path: Path, shown: dict[str, object] | None, words: str
) -> None:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[Entry(Message(b"x", message_id="m"), time.time() - 200)]))
        if shown is not None:
            store.show({**LINK, "aside": 0, **shown})
        assert drawn(look(outbox_at(path), closely=True), width=200)[2] == words


def test_a_full_disk_comes_first(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        store.show({**LINK, "link": "disconnected", "reason": "no route to host"})
        seen = look(outbox_at(path), closely=True)
    seen = replace(seen, values={**seen.values, "is_disk_full": True})
    assert drawn(seen)[2].startswith("the disk is full: free space")


def test_a_relay_that_has_failed_is_told_also_if_nothing_is_open(path: Path) -> None:
    store = SqliteStore(path)
    store.close({**LINK, "link": "failed", "reason": "the relay has failed: a bug"})
    lines = drawn(look(outbox_at(path), closely=True))
    assert lines[1].startswith("no relay: failed ")
    assert lines[1].endswith("ago: the relay has failed: a bug; 2 connections made")
    assert lines[2] == "the relay has failed: start `reliablepub relay` again"


def test_all_shards_are_shown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Outbox(path).create()
    row = {"exchange": "", "routing_key": "q", "refusals": 5, "probe_in_s": 10.0, "waiting": 1}
    paused = [row | {"since": since, "reason": f"nacked {since}"} for since in (1.0, 2.0, 3.0)]
    shown = {**LINK, "hooks_off": ""}
    one = {**shown, "paused": [paused[1]], "paused_destinations": 1}
    two = {**shown, "paused": [paused[0], paused[2]], "paused_destinations": 9, "hooks_off": "old"}
    two |= {"latency": {**LATENCY, "p50_s": 0.5, "max_s": 0.9}}
    relays = [Relaying(0, 17, one), Relaying(1, None, {}), Relaying(2, 18, two)]
    monkeypatch.setattr("reliablepub.cli.watch.lookout.read_relays", lambda _: relays)
    more = look(outbox_at(path), closely=True).values
    assert more["paused"] == paused
    assert (more["paused_destinations"], more["window"], more["aside"]) == (10, 2000, 2)
    assert more["hooks_off"] == "old"
    assert more["latency"] == {**LATENCY, "confirms": 18, "p50_s": 0.5}


def test_an_idle_outbox_needs_no_operator(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        store.show({**LINK, "aside": 0})
        lines = drawn(look(outbox_at(path), closely=True))
    assert lines[2] == "nothing to do"
    assert any("newest failures" in line for line in lines)


def test_a_held_key_is_told(path: Path) -> None:
    with closing(SqliteStore(path)) as store, Outbox(path) as outbox:
        for _ in range(2):
            outbox.enqueue(Message(b"", ordering_key="k"))
        intervene(outbox_at(path), [1], Intervention(Action.PARK))
        store.show(LINK)
        assert (
            drawn(look(outbox_at(path), closely=True))[2]
            == "1 ordering key held: see `reliablepub outbox keys`"
        )


def test_rates_leave_a_trail(path: Path, relay: SqliteStore) -> None:
    seen = look(outbox_at(path), closely=True)
    assert seen.rates == ((0.0, 0.0),)
    seen = replace(seen, rates=[(rate, 0.0) for rate in (0.0, 50.0, 100.0)])
    assert look(outbox_at(path), seen).rates[:3] == tuple(seen.rates)
    stored, confirmed = (fact.trend for fact in page_of(seen).sections["flow"][:2])
    assert trend_of(stored, 10) == "▁▅█"
    assert trend_of(stored, 2) == "▅█"
    assert trend_of(stored, 10, ASCII_BARS) == "_=#"
    assert trend_of(stored, 0) == trend_of(confirmed, 10) == ""


# ------------------------------------------------------------------------------------ the command


def test_for_programs_a_look_is_a_line(path: Path, relay: SqliteStore) -> None:
    relay.show(LINK)
    arguments = ["watch", "--outbox", str(path), "--count", "2", "--interval", "0.1s"]
    for more in ([], ["--json"]):
        result = CliRunner().invoke(main, arguments + more)
        assert result.exit_code == 0, result.stderr
        first, second = (json.loads(line) for line in result.stdout.splitlines())
        assert (first["stored_per_s"], second["stored_per_s"]) == (None, 0.0)
        assert first["latency"] == LATENCY
        assert first["reasons"][0]["outcome"] == "returned"
    table = section("reliablepub watch").split("| key | meaning |")[1]
    own = set(re.findall(r"`(\w+)`", re.sub(r"\| [^|]*? \|$", "|", table, flags=re.MULTILINE)))
    of_status = section("reliablepub outbox status").split("| key | meaning |")[1]
    shared = set(re.findall(r"^\| (.*?) \|", of_status, re.MULTILINE))
    shared = set(re.findall(r"`(\w+)`", " ".join(shared)))
    assert set(first) == own | shared


def test_looking_on_writes_nothing(path: Path) -> None:
    make_trouble(path).close()
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    CliRunner().invoke(main, ["watch", "--outbox", str(path), "--count", "1"])
    after = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert {name: after.get(name) for name in before} == before


def test_what_is_no_outbox_is_an_error(tmp_path: Path) -> None:
    refused(
        CliRunner().invoke(main, ["watch", "--outbox", str(tmp_path / "nix")]),
        "there is no outbox",
        code=4,
    )


def test_a_signal_ends_it(cli: Cli, path: Path) -> None:
    make_trouble(path).close()
    process = cli.begin("watch", "--outbox", path, "--interval", "1h")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["stored"] == 10
    assert cli.stop(process).code == 0


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, path: Path, *, stderr: Any = None, **environment: str) -> None:
        self.fd, child = pty.openpty()
        ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
        self.modes = termios.tcgetattr(child)
        command = [sys.executable, "-W", "error", "-m", "reliablepub", "watch"]
        self.process = subprocess.Popen(
            [*command, "--outbox", str(path), "--interval", "1h"],
            stdin=child,
            stdout=child,
            stderr=child if stderr is None else stderr,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TERM": "xterm-256color", **environment},
            process_group=0,  # the group of a daemon is not stopped by SIGTSTP
        )
        self.child = child
        self.output = ""

    def until(self, words: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while words not in self.output:
            left = deadline - time.monotonic()
            assert left > 0, self.output
            if select.select([self.fd], [], [], left)[0]:
                self.output += os.read(self.fd, 65_536).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.child)
        os.close(self.fd)


@contextmanager
def watched(path: Path, **environment: Any) -> Iterator[Terminal]:
    """A terminal in which the picture is there, for a block; it gets its modes back."""
    make_trouble(path).close()
    terminal = Terminal(path, **environment)
    try:
        terminal.until("q quits")
        yield terminal
    finally:
        terminal.close()


def assert_given_back(terminal: Terminal) -> None:
    terminal.until("\x1b[?1049l")
    assert terminal.process.wait(60) == 0
    assert termios.tcgetattr(terminal.child) == terminal.modes, "it is as it was before"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_gives_the_screen_back(path: Path, number: signal.Signals) -> None:
    with watched(path) as terminal:
        terminal.process.send_signal(number)
        assert_given_back(terminal)


def test_while_it_is_stopped_the_shell_has_the_screen(path: Path) -> None:
    with watched(path) as terminal:
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.until("\x1b[?1049l")
        until(lambda: _state_of(terminal.process.pid) == "T")
        assert termios.tcgetattr(terminal.child) == terminal.modes
        terminal.output = ""
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until("\x1b[?1049h")
        terminal.until("q quits")
        os.write(terminal.fd, b"q")
        assert_given_back(terminal)


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_terminal_that_is_gone_ends_it_without_a_traceback(path: Path) -> None:
    make_trouble(path).close()
    terminal = Terminal(path, stderr=subprocess.PIPE)
    terminal.until("q quits")
    os.close(terminal.child)
    os.close(terminal.fd)
    assert terminal.process.stderr is not None
    assert terminal.process.stderr.read() == b""
    assert terminal.process.wait(60) in {0, 2}
    terminal.process.stderr.close()


def test_a_terminal_without_utf8_keeps_its_lines(path: Path) -> None:
    with watched(path, PYTHONIOENCODING="iso-8859-1", PYTHONUTF8="0") as terminal:
        assert "\\u" not in terminal.output


@pytest.mark.parametrize("key", ["q", "\x1b", None])
def test_in_a_terminal_it_fills_the_screen_until_a_key_or_a_signal(
    path: Path, key: str | None
) -> None:
    with watched(path, NO_COLOR="1") as terminal:
        assert "\x1b[?1049h" in terminal.output, "a screen of its own"
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]", terminal.output), "no colors"
        if key is None:
            terminal.process.send_signal(signal.SIGINT)
        else:
            os.write(terminal.fd, key.encode())
        assert_given_back(terminal)
