"""``reliablepub topology``: declares exchanges, queues and bindings from a file, or checks them.

Knows: files, and how differences are reported. Must never know: how the broker is queried.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from reliablepub.cli.commands import Exit, LazyGroup, command
from reliablepub.cli.options import (
    credentials_of,
    json_option,
    note_exposed_urls,
    tls_context,
    together,
    url_option,
    urls_as_given,
)
from reliablepub.cli.output import count_of, print_error, print_json, print_result
from reliablepub.errors import ConfigurationError, TopologyError
from reliablepub.front.provisioning import provision
from reliablepub.printable import one_line
from reliablepub.topology import Topology

_COMMANDS: Final = {
    "check": "reliablepub.cli.topology:check",
    "declare": "reliablepub.cli.topology:declare",
}


@click.command(cls=LazyGroup, table=_COMMANDS)
def topology() -> None:
    """Declare or check the exchanges, queues and bindings that publishers need.

    \b
    The file is TOML:
      [[exchange]]
      name = "orders"
      type = "topic"
      [[queue]]
      name = "billing"
      [[binding]]
      exchange = "orders"
      queue = "billing"
      routing_key = "order.*"

    \b
    Example:
      reliablepub topology check topology.toml \\
        --url amqp://guest:guest@localhost/
    """


_EXITS: Final = {
    0: "everything matches FILE",
    2: "bad usage or a bad FILE, something differs from FILE, or no broker answered",
}
_arguments: Final = together(
    click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    url_option,
    json_option,
)


@command(exits=_EXITS)
@_arguments
def check(file: Path, urls: tuple[str, ...], as_json: bool, **_: object) -> int:
    """Report every difference between the broker and FILE; nothing is changed.

    Differences are missing exchanges and queues, exchanges and queues with other properties, and
    exchanges to which the user may not publish. AMQP cannot query a binding: only its two ends are
    checked.

    \b
    Example:
      reliablepub topology check topology.toml \\
        --url amqp://guest:guest@localhost/
    """
    return _run(file, urls, declares=False, as_json=as_json)


@command(exits=_EXITS)
@_arguments
def declare(file: Path, urls: tuple[str, ...], as_json: bool, **_: object) -> int:
    """Declare what FILE names and the broker lacks; report everything that could not be declared.

    \b
    Example:
      reliablepub topology declare topology.toml \\
        --url amqp://guest:guest@localhost/
    """
    return _run(file, urls, declares=True, as_json=as_json)


def _run(file: Path, urls: tuple[str, ...], *, declares: bool, as_json: bool) -> int:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file} is not valid TOML: {error}") from None
    try:
        wanted = replace(Topology.from_toml(text), declare=declares)
    except ConfigurationError as error:
        raise click.UsageError(f"{file}: {error}") from error
    ctx, problems = click.get_current_context(), tuple[str, ...]()
    note_exposed_urls(urls)
    try:
        provision(
            urls_as_given(ctx),
            wanted,
            ssl_context=tls_context(ctx),
            credentials=credentials_of(ctx),
        )
    except TopologyError as error:
        problems = tuple(one_line(problem) for problem in error.problems)
    kinds = ("exchange", "queue", "binding")
    things = {kind: len(getattr(wanted, f"{kind}s")) for kind in kinds}
    if as_json:
        counts = {f"{kind}s": count for kind, count in things.items()}
        print_json({"declared": declares, **counts, "problems": problems})
    elif problems:
        for problem in problems:
            print_error(problem)
    else:
        words = ", ".join(count_of(count, kind) for kind, count in things.items())
        print_result(f"{'declared' if declares else 'found'}: {words}")
    return Exit.BAD_INPUT if problems else Exit.CONFIRMED
