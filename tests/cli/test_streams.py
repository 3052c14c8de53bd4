"""Standard streams that are closed, full, no longer read, or of another encoding."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.progress import Progress

from reliablepub import Message
from reliablepub.cli.progress import Bar
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.conftest import ROOT

_PLAIN = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
_LATIN = "schlüssel"
_COMMAND = f"{sys.executable} -W error -m reliablepub"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "o.db"
    fill(path, *(Message(b"{}", routing_key=_LATIN, message_id=f"m{n}") for n in range(3)))
    return path


def shell(
    line: str,
    path: Path,
    input: bytes | None = None,  # noqa: A002
    **variables: str,
) -> subprocess.CompletedProcess[bytes]:
    """Run a line of the shell in which ``RUN`` stands for the command line."""
    return subprocess.run(
        ["bash", "-c", line.replace("RUN", _COMMAND)],
        cwd=path.parent,
        env=_PLAIN | {"RELIABLEPUB_OUTBOX": path.name} | variables,
        input=input,
        capture_output=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "closed", "code"),
    [
        ("outbox list", ">&-", 0),
        ("outbox list --csv", ">&-", 0),
        ("outbox list", "2>&-", 0),
        ("outbox park 1", "2>&-", 0),
        ("outbox discard 1", "<&-", 2),
        ("outbox import -", "<&-", 0),
        ("watch --count 1", "<&- >&- 2>&-", 0),
    ],
)
def test_a_closed_stream_is_like_dev_null(path: Path, command: str, closed: str, code: int) -> None:
    ended = shell(f"RUN {command} {closed}", path)
    assert ended.returncode == code, ended.stderr
    assert b"Traceback" not in ended.stderr


def test_an_outbox_never_gets_the_descriptor_of_a_closed_stream(path: Path) -> None:
    """`publish -` read its own wake-up pipe as stdin, and waited for ever."""
    line = "RUN publish - --routing-key q --url amqp://127.0.0.1:1/ --json <&-"
    assert json.loads(shell(line, path).stdout)["records"] == 0


@pytest.mark.parametrize("form", ["", " --json"])
def test_publish_has_its_own_code_though_nobody_reads_the_result(path: Path, form: str) -> None:
    with FakeBroker() as broker:
        publish = f"RUN publish - --routing-key nowhere --url {broker.url}{form}"
        line = f"exec 3> >(exec 0<&-); wait $!; {publish} >&3"
        ended = shell(line, path, b"x\n")
    assert ended.returncode == 1, ended.stderr
    assert b"Error: 1 message given up (1 returned)" in ended.stderr


def test_a_terminal_that_is_closed_ends_no_publisher(path: Path) -> None:
    ours, theirs = os.openpty()
    line = "RUN publish - --routing-key q --url amqp://127.0.0.1:1/ --timeout 2"
    publisher = subprocess.Popen(
        ["bash", "-c", f"trap '' HUP; exec {line.replace('RUN', _COMMAND)}"],
        cwd=path.parent,
        env=_PLAIN | {"TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    os.read(ours, 1)  # the bars are there
    os.close(ours)
    out, _ = publisher.communicate(b"x\n", timeout=60)
    assert (publisher.returncode, out[:32]) == (3, b"-: 1 record, 1 accepted, 0 confi"), out


def test_a_terminal_that_is_closed_as_the_bars_begin_ends_no_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        Progress, "start", Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    )
    with Bar(2) as bar:
        bar.show("stored", 1)


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("to", ["/dev/full", "&3"])
def test_a_drain_has_its_own_code_though_its_result_cannot_be_written(
    path: Path, log_format: str, to: str
) -> None:
    with FakeBroker() as broker:
        broker.declare_queue(_LATIN)
        drain = f"RUN relay --drain --url {broker.url} --log-format {log_format}"
        ended = shell(f"exec 3> >(exec 0<&-); wait $!; {drain} >{to}", path)
    assert ended.returncode == 0, ended.stderr
    told = b"the result cannot be written: No space left on device" in ended.stderr
    assert told == (to == "/dev/full"), ended.stderr


@pytest.mark.parametrize("line", ["RUN --help", "RUN --version", "RUN relay --help"])
def test_a_reader_that_ends_before_the_help_interrupts(path: Path, line: str) -> None:
    ended = shell(f"{line} | true; echo ${{PIPESTATUS[0]}}", path)
    assert ended.stdout in {b"0\n", b"3\n"}, "0 if the pipe has taken it before"
    assert ended.stderr == b""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_full_disk_for_the_log_ends_no_relay(path: Path, log_format: str) -> None:
    """Its messages would stay where it is needed most: the outbox may be on that disk."""
    with FakeBroker() as broker:
        broker.declare_queue(_LATIN)
        line = f"RUN relay --drain --url {broker.url} --log-format {log_format} 2>/dev/full"
        assert shell(line, path).returncode == 0
        assert broker.published_count == 3


def test_a_full_disk_for_the_log_is_no_bad_input(path: Path) -> None:
    line = "RUN publish - --routing-key q --url amqp://127.0.0.1:1/ --timeout 1 --json 2>/dev/full"
    ended = shell(line, path, input=b"{}\n" * 3)
    told = json.loads(ended.stdout)
    assert (ended.returncode, told["stored"], told["exit_code"]) == (3, 3, 3)


@pytest.mark.parametrize("command", ["list", "list --csv", "export"])
def test_a_reader_that_ends_early_interrupts(path: Path, command: str) -> None:
    fill(path, *(Message(b"{}", routing_key=_LATIN, message_id=f"more{n}") for n in range(300)))
    limit = "" if command == "export" else "--limit 1000"
    ended = shell(f"RUN outbox {command} {limit} | true; echo ${{PIPESTATUS[0]}}", path)
    assert ended.stdout == b"3\n"
    assert ended.stderr == b""


@pytest.mark.parametrize("command", ["list", "list --csv", "export"])
def test_an_output_that_cannot_be_written_is_an_error(path: Path, command: str) -> None:
    ended = shell(f"RUN outbox {command} >/dev/full", path)
    assert ended.returncode == 2
    assert ended.stderr == b"Error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("ulimit -f 100; RUN outbox export >lines", 2, b"Error: [Errno 27] File too large\n"),
        ("RUN outbox export | head -c 1 >lines; exit ${PIPESTATUS[0]}", 3, b""),
    ],
)
def test_a_part_of_an_output_is_not_the_whole(
    path: Path, line: str, code: int, error: bytes, unbuffered: str
) -> None:
    fill(path, Message(bytes(300_000)))
    ended = shell(line, path, PYTHONUNBUFFERED=unbuffered)
    assert (ended.returncode, ended.stderr) == (code, error)


@pytest.mark.parametrize(
    ("command", "encoding"),
    [("list --csv", "ascii"), ("list", "ascii"), ("stats --plot", "latin-1")],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_no_encoding_of_stdout_fails(
    path: Path, command: str, encoding: str, unbuffered: str
) -> None:
    line = f"RUN outbox {command}"
    ended = shell(line, path, PYTHONIOENCODING=encoding, PYTHONUNBUFFERED=unbuffered)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_export_is_utf_8(path: Path, encoding: str) -> None:
    ended = shell("RUN outbox export", path, PYTHONIOENCODING=encoding)
    assert [json.loads(line)["routing_key"] for line in ended.stdout.splitlines()] == [_LATIN] * 3
    brought = shell("RUN outbox import - --outbox new.db", path, input=ended.stdout)
    assert brought.stdout == b"3 messages stored\n"
