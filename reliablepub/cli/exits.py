"""Exit codes, and the exit code of each error.

Knows: the errors of the vocabulary. Must never know: what a command does.

Where several codes apply, the first of 4, 2, 1, 3, 0 wins: a problem that needs an operator
outranks one that only needs time.
"""

from __future__ import annotations

from enum import IntEnum

import click

from reliablepub.errors import OutboxError, PublisherClosed


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
    """An error that ends the command with one line on stderr and the given exit code.

    Args:
        message: what happened, and what to do.
        code: the exit code.
    """

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        self.code = code


def exit_of(error: Exception) -> Exit:
    """The exit code of an error that the command did not handle."""
    # A relay fails when it loses its outbox, or through a bug. Open messages stay in the outbox.
    if isinstance(error, (OutboxError, PublisherClosed)):
        return Exit.OUTBOX
    return Exit.BAD_INPUT
