"""Asks for confirmation before a change that cannot be undone.

Knows: whether stdin is a terminal. Must never know: what is asked.
"""

from __future__ import annotations

import sys

import click

from reliablepub.cli.exits import Exit, Failure


def ask(question: str) -> None:
    """Ask a question; return if the answer is yes.

    Raises:
        Failure: the answer is not yes, or stdin is no terminal. Nothing was changed.
    """
    if not can_be_answered():
        raise Failure(f"{question} There is no terminal to ask on; give --yes", Exit.BAD_INPUT)
    if not click.confirm(question, err=True):
        raise Failure("nothing was changed", Exit.BAD_INPUT)


def can_be_answered() -> bool:
    """Whether stdin is a terminal."""
    return sys.stdin.isatty()
