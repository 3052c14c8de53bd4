"""``reliablepub outbox metrics``: the metrics of an outbox, as text, without a relay.

Knows: the file that is written. Must never know: which metrics there are.

A second process exports the backlog and whether the outbox is relayed, so that a relay that was
killed is seen although it exposes nothing any more.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import click

from reliablepub.cli.exits import Exit, Failure
from reliablepub.cli.options import inspected_option
from reliablepub.cli.output import print_text
from reliablepub.outbox.database import Database


@click.command()
@inspected_option
@click.option(
    "--name",
    metavar="TEXT",
    help="Value of the label `outbox`, the name that the relay has; the outbox in full unless "
    "given.",
)
@click.option(
    "--to",
    "to",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Replace this file, as a whole, instead of printing; for node_exporter it ends in .prom.",
)
def metrics(database: Database, name: str | None, to: Path | None) -> int:
    """Print the metrics of an outbox for Prometheus, whether a relay runs or not.

    Run it each minute from cron or a timer, for the textfile collector of node_exporter. It reports
    open messages that no process relays, which a killed relay cannot do.

    \b
    Example:
      reliablepub outbox metrics --outbox outbox.db --name orders \\
        --to /var/lib/prometheus/node-exporter/orders.prom

    \b
    Exit codes:
      0  done
      2  bad usage, the file cannot be written, or prometheus-client is not
         installed
      3  interrupted
      4  the outbox cannot be used; the metrics are still written, and say so
    """  # noqa: D301 - click: keep these lines as they are
    try:
        from reliablepub.observe.metrics import exposition_of  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise Failure(str(error), Exit.BAD_INPUT) from None
    text, is_readable = exposition_of(name or database.name, database)
    ending = Exit.CONFIRMED if is_readable else Exit.OUTBOX
    if to is None:
        print_text(text.decode().rstrip("\n"))
        return ending
    beside = to.with_name(f"{to.name}.{os.getpid()}")  # the collector ignores names without .prom
    try:
        beside.write_bytes(text)
        beside.replace(to)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise Failure(f"cannot write {to}: {error.strerror}", Exit.BAD_INPUT) from None
    return ending
