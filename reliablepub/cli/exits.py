"""How a command ends: exit codes, and which of them an error stands for.

Knows: the errors of the vocabulary. Must never know: what a command does.

Where several apply, the first of this order wins: 4, 2, 1, 3, 0. What needs a person goes before
what only needs time.
"""

from __future__ import annotations

from enum import IntEnum

import click

from reliablepub.errors import OutboxError, PublisherClosed


class Exit(IntEnum):
    """Exit codes of every command."""

    CONFIRMED = 0
    """Everything that was asked for is done."""
    PARKED = 1
    """Some messages were given up."""
    BAD_INPUT = 2
    """The input, an option or an address is wrong."""
    OPEN = 3
    """Not finished: messages are open, or reading was interrupted."""
    OUTBOX = 4
    """The outbox cannot be used, the disk is full, or the relay has failed."""


class Failure(click.ClickException):
    """An error that ends the command with the given exit code and one line.

    Args:
        message: what happened, and what to do.
        code: how to end.
    """

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        self.code = code


def ask_for_command(ctx: click.Context) -> Exit:
    """A group that was called without a command shows what there is, and is not content."""
    if ctx.invoked_subcommand is not None:
        return Exit.CONFIRMED
    click.echo(ctx.get_help(), err=True)
    return Exit.BAD_INPUT


def exit_of(error: Exception) -> Exit:
    """The exit code of an error that no command has dealt with."""
    # A relay that fails has lost its outbox, or has met with a bug: what is open is in the outbox.
    if isinstance(error, (OutboxError, PublisherClosed)):
        return Exit.OUTBOX
    return Exit.BAD_INPUT
