"""The commands that a document shows in `console` and `sh` blocks, run as a reader would.

Knows: prompts, expected output with ``...`` for what varies, which commands run until a signal.
Must never know: what a document says.

In a `console` block a line after the prompt ``$`` is a command, and the lines below it are what it
prints; in an `sh` block every line is a command. ``export`` lasts until the end of the document. A
command that installs, builds or tests the project itself is not run here; any other one is.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.rabbitmq import free_ports

NOT_RUN = ("git", "make", "pip", "pytest", "python3", ".venv/bin/", "fuser", "systemctl")
"""How commands begin that are not run: they take the network, root, or hours."""
SAFELY = {
    "/etc/prometheus/rules/": "",
    "/etc/systemd/system/": "",
    "--health-host 0.0.0.0 --health-port 9108": "--health-port 0",
    "--control-port 15673": "--control-port 0",
}
"""What a test must not do to the machine it runs on, and does instead."""
BROKER_PORT = 5672
_WAIT_S = 60


@dataclass(frozen=True)
class Command:
    """A command, and the lines that the document shows below it."""

    line: str
    expected: str = ""

    @property
    def is_run(self) -> bool:
        return not self.line.startswith(NOT_RUN)

    @property
    def is_endless(self) -> bool:
        """Whether it runs until a signal."""
        words = shlex.split(self.line, comments=True)
        return words[:2] in (["reliablepub", "broker"], ["reliablepub", "watch"]) or (
            words[:2] == ["reliablepub", "relay"] and "--drain" not in words
        )


def commands_of(language: str, text: str) -> Iterator[Command]:
    """The commands of a block; continued lines are joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    if language == "sh":
        yield from (Command(line) for line in joined.splitlines() if line.strip())
        return
    for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]:
        line, _, expected = part.partition("\n")
        yield Command(line, expected)


def run_command(command: Command, replaced: dict[str, str], environment: dict[str, str]) -> None:
    """Run it in the working directory; AssertionError if it fails or prints something else."""
    line, expected = command.line, command.expected
    for old, new in (replaced | SAFELY).items():
        line = line.replace(old, new)
    if found := re.fullmatch(r"export (\w+)=(\S+)", line):
        environment[found[1]] = found[2]
        return
    (port,) = free_ports(1)
    if line.startswith("reliablepub broker"):  # others may have taken the usual one
        line = line.replace("reliablepub broker", f"reliablepub broker --port {port}")
        expected = expected.replace(str(BROKER_PORT), str(port))
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line}" if command.is_endless else line],
        env=os.environ
        | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if command.is_endless:
            first = _first_line(process, line)
            process.send_signal(signal.SIGTERM)
            printed, complaints = process.communicate(timeout=_WAIT_S)
            printed = first + printed
        else:
            printed, complaints = process.communicate(timeout=_WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, (line, process.returncode, printed, complaints)
    assert not expected or is_as_shown(expected, printed), (line, printed)


def _first_line(process: subprocess.Popen[str], line: str) -> str:
    """Wait until an endless command is at work; return what it has printed by then."""
    assert process.stdout is not None
    assert process.stderr is not None
    if line.startswith(
        "reliablepub relay"
    ):  # which says on stderr that it is connected, or why not
        while "connected" not in (said := process.stderr.readline()):
            assert said, "it has ended"
        return ""
    return process.stdout.readline()


def is_as_shown(expected: str, printed: str) -> bool:
    """Whether a command has printed what a document shows; ``...`` stands for anything."""
    parts = (re.escape(part) for part in expected.rstrip().split("..."))
    return re.fullmatch(".*?".join(parts), printed.rstrip(), re.DOTALL) is not None
