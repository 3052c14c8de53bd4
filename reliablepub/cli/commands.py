"""What all commands share: exit codes, errors, help that lists the codes, and groups.

Knows: the name and the module of each command, and the exit codes. Must never know: what a command
does.

Where several exit codes apply, the first of 4, 2, 1, 3, 0 wins: a problem that needs an operator
outranks one that only needs time. A group imports a command when it is called, so starting one does
not import the others.
"""

from __future__ import annotations

from ast import FunctionDef, Module, PyCF_ONLY_AST, get_docstring
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import IntEnum
from importlib import import_module
from inspect import cleandoc, getsource
from textwrap import dedent, wrap
from typing import Any, Final

import click

from reliablepub.cli.config import variable_of


class Exit(IntEnum):
    """Exit codes of every command; the help of a command says what each means there."""

    CONFIRMED = 0
    """Done."""
    PARKED = 1
    """Some messages were given up (parked) or are damaged."""
    BAD_INPUT = 2
    """Bad input, usage or configuration, or a problem with the broker."""
    OPEN = 3
    """Not finished: messages are open or in flight, or the command was interrupted."""
    OUTBOX = 4
    """The outbox cannot be used or has a problem, the disk is full, or the relay has failed."""


class Failure(click.ClickException):
    """An error that ends the command with one line on stderr and the given exit code."""

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        self.code = code


_WIDTH: Final = 78
"""Of the lines of exit codes, which click indents by two, so that help fits 80 columns."""
_MEANINGS: Final = {0: "done", 2: "bad usage", 3: "interrupted"}
"""What an exit code means unless the command says otherwise."""
_OUTBOX_MEANING: Final = {4: "the outbox cannot be used"}
"""The meaning of 4 for a command that has ``--outbox``."""


def docstring_of(callback: Callable[..., Any] | None) -> str:
    """The docstring of a command's function, from its source: ``python -OO`` drops the others."""
    if callback is None:
        return ""
    # `ast.parse` drops docstrings with -OO since Python 3.13, unless told otherwise.
    source = dedent(getsource(callback))
    module = compile(source, "", "exec", PyCF_ONLY_AST, optimize=0)
    assert isinstance(module, Module)
    function = module.body[0]
    assert isinstance(function, FunctionDef)
    return get_docstring(function) or ""


def tell_whole_sentence(command: click.Command) -> None:
    """Let a group show the whole first sentence of a command; click would cut it at the edge."""
    command.short_help = command.get_short_help_str(limit=1_000)


class Command(click.Command):
    """A command whose help ends with its exit codes; it refuses text that is not UTF-8."""

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - click's
        exits: Mapping[int, str] | None = None,  # meanings that differ from the usual ones
        before: Callable[[click.Context, list[str]], None] | None = None,  # before it parses these
        has_variables: bool = False,  # each option has an environment variable, see `variable_of`
        **settings: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*args, **settings)
        self._before = before
        for option in self.params if has_variables else ():
            if isinstance(option, click.Option) and option.envvar is None:
                option.envvar = variable_of(option.opts[0])
        has_outbox = any("--outbox" in option.opts for option in self.params)
        meanings = _MEANINGS | (_OUTBOX_MEANING if has_outbox else {}) | dict(exits or {})
        lines = [
            line
            for code, meaning in sorted(meanings.items())
            for line in wrap(f"  {code}  {meaning}", _WIDTH, subsequent_indent=" " * 5)
        ]
        told = cleandoc(self.help or docstring_of(self.callback))
        self.help: str | None = "\n".join([told, "", "\b", "Exit codes:", *lines])
        tell_whole_sentence(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; refuse text that is not UTF-8."""
        if self._before is not None:
            self._before(ctx, args)
        rest = super().parse_args(ctx, args)
        for option in self.params:
            value = ctx.params.get(option.name or "")
            texts = value if isinstance(value, tuple) else (value,)
            # No message and no database can hold such text; a path may have any bytes
            if option.type is click.STRING and not all(map(_is_utf8, texts)):
                raise click.UsageError(f"{option.get_error_hint(ctx)} is not UTF-8", ctx)
        return rest


def command(name: str | None = None, **settings: Any) -> Callable[..., Command]:  # noqa: ANN401
    """Make a function a `Command`."""
    return click.command(name, cls=Command, **settings)


def _is_utf8(value: object) -> bool:
    """Whether a value is no text, or one whose bytes in the arguments were UTF-8."""
    return not isinstance(value, str) or not any("\ud800" <= char <= "\udfff" for char in value)


class LazyGroup(click.Group):
    """A group whose commands are imported on first use."""

    def __init__(self, *args: Any, table: Mapping[str, str], **settings: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(*args, **settings)
        self.help: str | None = self.help or docstring_of(self.callback)
        tell_whole_sentence(self)
        self._table = table  # ``module:attribute`` of each command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands, sorted."""
        del ctx
        return sorted(self._table)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments begin with; if there is none, name the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not near:
                raise
            said = f"{error.message.rstrip('.')} (did you mean {near[0]!r}?)"
            raise click.UsageError(said, ctx) from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if no command has this name."""
        del ctx
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command
