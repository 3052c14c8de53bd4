"""Options that several commands share, so that they are called and explained the same everywhere.

Knows: names, environment variables and help texts. Must never know: what is done with a value.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])

OUTBOX_VARIABLE: Final = "RELIABLEPUB_OUTBOX"
URL_VARIABLE: Final = "RELIABLEPUB_URL"


def url_option(function: _F) -> _F:
    """``--url``, required, repeatable."""
    return click.option(
        "--url",
        "urls",
        metavar="URL",
        multiple=True,
        required=True,
        envvar=URL_VARIABLE,
        help="amqp://user:password@host:port/vhost, or amqps://...; repeat it for failover. "
        f"Also from {URL_VARIABLE}, several separated by spaces, which keeps the password out of "
        "the list of processes.",
    )(function)


def outbox_option(*, required: bool, text: str) -> Callable[[_F], _F]:
    """``--outbox``."""
    return click.option(
        "--outbox",
        "outbox_path",
        metavar="FILE",
        type=click.Path(path_type=Path),
        required=required,
        envvar=OUTBOX_VARIABLE,
        help=f"{text} Also from {OUTBOX_VARIABLE}.",
    )


def window_option(function: _F) -> _F:
    """``--window``."""
    return click.option(
        "--window",
        "window_max",
        metavar="COUNT",
        type=click.IntRange(min=1),
        default=1_000,
        show_default=True,
        help="Most messages in flight.",
    )(function)


def json_option(function: _F) -> _F:
    """``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print the result as one JSON value on stdout."
    )(function)
