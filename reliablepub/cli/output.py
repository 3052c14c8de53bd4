"""Where words go: results to stdout, everything else to stderr, an error in one line.

Knows: the two streams, JSON, and how numbers are written for people. Must never know: what the
words are about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import click


def print_result(text: str) -> None:
    """A line of the command's result."""
    click.echo(text)


def print_json(value: object) -> None:
    """The command's result for machines: one JSON value in one line."""
    click.echo(json.dumps(value))


def print_note(text: str) -> None:
    """A line for whoever watches."""
    click.echo(one_line(text), err=True)


def print_error(text: str) -> None:
    """Why the command does not end well."""
    click.echo(f"Error: {one_line(text)}", err=True)


def print_table(values: Mapping[str, object]) -> None:
    """Names and values, one a line."""
    width = max(map(len, values))
    for name, value in values.items():
        click.echo(f"{name:<{width}}  {value}")


def one_line(text: str) -> str:
    """The text without line ends, whatever a broker or a library put into it."""
    return " ".join(text.split())


def count_of(number: int, noun: str) -> str:
    """``1 message``, ``2 messages``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def age(seconds: float) -> str:
    """A duration in the two largest units that matter."""
    whole = int(seconds)
    days, hours, minutes = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
