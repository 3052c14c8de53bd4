"""The option ``--tracing``, and the hook that it adds.

Knows: the extra ``observe``, which has the hook. Must never know: what a span is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from reliablepub.cli.exits import Exit, Failure
from reliablepub.cli.output import print_note

tracing_option: Final[Callable[[Any], Any]] = click.option(
    "--tracing",
    is_flag=True,
    help="Trace each attempt with OpenTelemetry, linked to the context in the message's headers. "
    "The OpenTelemetry SDK exports the spans: start the command with opentelemetry-instrument.",
)


def tracing_hooks(*, is_wanted: bool) -> list[object]:
    """The tracing hook, if it is wanted; else nothing.

    Raises:
        Failure: OpenTelemetry is not installed.
    """
    if not is_wanted:
        return []
    try:
        from reliablepub.observe.tracing import Tracing, is_exported  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise Failure(str(error), Exit.BAD_INPUT) from None
    if not is_exported():
        print_note(
            "--tracing: no OpenTelemetry SDK is configured, so no span is exported; "
            "start the command with opentelemetry-instrument"
        )
    return [Tracing()]
