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
    if not is_somebody_there():
        raise Failure(f"{question} Nobody is there to answer; say --yes", Exit.BAD_INPUT)
    if not click.confirm(question, err=True):
        raise Failure("nothing was changed", Exit.BAD_INPUT)


def is_somebody_there() -> bool:
    """Whether stdin is a terminal."""
    return sys.stdin.isatty()
