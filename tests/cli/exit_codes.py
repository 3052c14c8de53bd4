"""What a command's help says of its exit codes."""

import inspect
import re
from collections.abc import Sequence

import click

from reliablepub.cli import app, main


def exit_codes(help_text: str) -> dict[int, str]:
    """The list below ``Exit codes``: what each code means, in the order of the text."""
    _, _, after = inspect.cleandoc(help_text).partition("Exit codes")
    block = after.partition(":\n")[2].partition("\n\n")[0]
    found: dict[int, str] = {}
    for code, meaning in re.findall(r"^  (\d)  (.+(?:\n {5}.+)*)", block, re.MULTILINE):
        assert int(code) not in found, f"code {code} is listed twice"
        found[int(code)] = " ".join(meaning.split())
    return found


def command_called(arguments: Sequence[str]) -> tuple[str, click.Command] | None:
    """The built-in command that these arguments call; None for a group or an unknown name."""
    command: click.Command = main
    words = ["reliablepub"]
    for word in arguments:
        if not isinstance(command, click.Group):
            break
        if command is main and word not in app._BUILT_IN:
            return None
        inner = command.get_command(click.Context(command), word)
        if inner is None:
            return None
        command = inner
        words.append(word)
    return None if isinstance(command, click.Group) else (" ".join(words), command)


def assert_documented(arguments: Sequence[str], code: int) -> None:
    """The command's help lists the code that it ended with.

    A negative code is a signal that killed the process.
    """
    found = command_called(arguments)
    if found is None or code < 0:
        return
    name, command = found
    codes = exit_codes(command.help or "")
    assert code in codes, f"{name} ended with {code}, and its help lists {list(codes)}"
