"""Asking a person before something is done that cannot be undone.

Knows: that nobody may be there to answer. Must never know: what is asked.
"""

from __future__ import annotations

import sys

import click

from reliablepub.cli.exits import Exit, Failure


def ask(question: str) -> None:
    """Go on if the answer is yes.

    Raises:
        Failure: it is not, or nobody is there; nothing was changed.
    """
    if not is_somebody_there():
        raise Failure(f"{question} Nobody is there to answer; say --yes", Exit.BAD_INPUT)
    if not click.confirm(question, err=True):
        raise Failure("nothing was changed", Exit.BAD_INPUT)


def is_somebody_there() -> bool:
    """Whether a question would be seen."""
    return sys.stdin.isatty()
