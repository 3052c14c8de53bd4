"""Tables on a terminal: at 80 and 120 columns, a remedy and a reason are always shown whole."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from reliablepub import Message
from reliablepub.cli.grid import lay_out
from tests.asking import fill
from tests.cli.conftest import ROOT

WIDTHS = (80, 120)
NO_ROUTE = "refused: 404 NOT_FOUND - no exchange 'flights.of.the.morning' in vhost '/'"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An outbox with an open message, and one that was parked for a long reason."""
    path = tmp_path / "outbox.db"
    fill(
        path,
        Message(b"1", "flights", "flight.AA.JFK"),
        Message(b"2", "flights.of.the.morning", "flight.united.newark"),
    )
    note = NO_ROUTE.removeprefix("refused: ")
    subprocess.run(
        [sys.executable, "-m", "reliablepub", "outbox", "park", "2", "--note", note],
        env={**os.environ, "RELIABLEPUB_OUTBOX": str(path), "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    return path


def on_terminal(path: Path, width: int, *arguments: str) -> str:
    """The output of a command on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "reliablepub", *arguments],
        env={**environment, "RELIABLEPUB_OUTBOX": str(path), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 65_536):
            parts.append(part)
    except OSError:
        pass  # Linux: the other end of the terminal is closed
    os.close(ours)
    process.communicate()
    return b"".join(parts).decode().replace("\r\n", "\n")


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("width", WIDTHS)
def test_doctor_shows_each_remedy_below_its_finding(path: Path, width: int) -> None:
    lines = on_terminal(path, width, "doctor").splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    (at,) = [n for n, line in enumerate(lines) if re.match("!! +outbox +relay", line)]
    assert lines[at].endswith("none, and 1 message open")
    assert lines[at + 1] == "    what to do: start `reliablepub relay`"
    (given_up,) = [line for line in lines if "summary --state parked" in line]
    assert given_up.endswith("reliablepub outbox summary --state parked --state expired")


@pytest.mark.parametrize("width", WIDTHS)
def test_list_shows_each_reason_whole(path: Path, width: int) -> None:
    shown = on_terminal(path, width, "outbox", "list", "--state", "parked")
    assert max(map(len, shown.splitlines())) <= width
    assert "NOT_FOUND" in shown
    last = shown.splitlines()[0].index("said")
    reason = " ".join(line[last:] for line in shown.splitlines()[1:])
    assert "404 NOT_FOUND - no exchange 'flights.of.the.morning' in vhost '/'" in words(reason)
    assert "flight.united.newark" in shown


@pytest.mark.parametrize("width", WIDTHS)
def test_keys_shows_each_key_whole(path: Path, width: int) -> None:
    key = "customer-17-of-the-shop"
    fill(path, *[Message(b"3", "flights", "flight.AA.JFK", ordering_key=key)] * 2)
    on_terminal(path, width, "outbox", "park", "3", "--note", NO_ROUTE)
    shown = on_terminal(path, width, "outbox", "keys")
    assert max(map(len, shown.splitlines())) <= width
    assert f"{key}  1" in shown
    assert "flights.of.the.morning" in words(shown)


def test_a_pipe_gets_whole_lines_and_all_columns(path: Path) -> None:
    environment = {**os.environ, "RELIABLEPUB_OUTBOX": str(path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "reliablepub", "outbox", "list"]
    ended = subprocess.run(
        command, env={**environment, "COLUMNS": "40"}, check=True, capture_output=True, text=True
    )
    titles, *rows = ended.stdout.splitlines()
    assert len(rows) == 2
    assert "message id" in titles
    assert not ended.stderr


CELLS = [["17", "parked", "a.long.routing.key", "it was refused by the broker"]]
TITLES = ["id", "state", "routing key", "said"]


def test_columns_are_left_out_in_order_before_the_last_one_is_wrapped() -> None:
    wide, left_out = lay_out(TITLES, CELLS, width=63, lesser=("state", "routing key"))
    assert wide == [
        "id  state   routing key         said",
        "17  parked  a.long.routing.key  it was refused by the broker",
    ]
    assert left_out == []
    narrow, left_out = lay_out(TITLES, CELLS, width=55, lesser=("state", "routing key"))
    assert left_out == ["state"]
    assert narrow[1] == "17  a.long.routing.key  it was refused by the broker"
    narrower, left_out = lay_out(TITLES, CELLS, width=26, lesser=("state", "routing key"))
    assert left_out == ["state", "routing key"]
    assert narrower == ["id  said", "17  it was refused by the", "    broker"]


@pytest.mark.parametrize("width", [26, 27, 28, 30, 33, 40, 50, 60, 61, 62, 63, 64, 100])
def test_no_line_is_longer_than_the_terminal_and_no_word_of_the_last_column_is_lost(
    width: int,
) -> None:
    below = ["what to do: declare the exchange"]
    laid, _ = lay_out(TITLES, CELLS, width=width, below=below)
    assert max(map(len, laid)) <= width
    last = laid[0].index("said")
    at = next(n for n, line in enumerate(laid) if line.startswith("    what"))
    said = "".join(line[last:] for line in laid[1:at])
    assert said.replace(" ", "") == CELLS[0][-1].replace(" ", "")
    assert words("".join(laid[at:])).replace(" ", "") == below[0].replace(" ", "")
