"""``reliablepub outbox status | stats | metrics``: the figures of an outbox.

Knows: how figures are printed, as text or in Prometheus's format. Must never know: SQL, or a
broker.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import click

from reliablepub.cli.commands import Exit, Failure, command
from reliablepub.cli.options import Duration, form_option, inspected_option, json_option
from reliablepub.cli.output import print_json, print_result, print_rows, print_table, print_text
from reliablepub.cli.progress import patiently
from reliablepub.cli.watch.lookout import look
from reliablepub.cli.watch.page import facts_of
from reliablepub.outbox.admin.inspection import read_figures
from reliablepub.outbox.database import Database
from reliablepub.printable import printable

CLASSES: Final = {
    "age": ("< 1 s", "< 10 s", "< 1 min", "< 10 min", "< 1 h", "< 6 h", "< 1 d", "< 7 d", "older"),
    "attempts": ("0", "1", "2", "3 to 5", "6 to 10", "more"),
    "size": (
        *("< 256 B", "< 1 KiB", "< 4 KiB", "< 16 KiB"),
        *("< 64 KiB", "< 256 KiB", "< 1 MiB", "larger"),
    ),
}
_BAR: Final = 50
"""Length of the longest bar of ``--plot``, in characters."""


@command()
@inspected_option
@click.option(
    "--over",
    "over_s",
    type=Duration(),
    default="0.5s",
    show_default=True,
    help="Time over which rates are measured; 0 for no rates.",
)
@json_option
def status(database: Database, over_s: float, as_json: bool) -> None:
    """Count the messages of an outbox, and show its relay and the connection to the broker.

    Always: stored = open + confirmed + parked + expired + discarded.

    \b
    Example:
      reliablepub outbox status --outbox outbox.db --json
    """
    before = look(database)
    if over_s:
        time.sleep(over_s)
    found = look(database, before if over_s else None)
    if as_json:
        print_json(found.values)
    else:
        print_table({fact.name: fact.words for fact in facts_of(found)})


@command()
@inspected_option
@click.option("--all", "is_all", is_flag=True, help="Count parked and expired messages too.")
@click.option("--plot", is_flag=True, help="Draw bars.")
@form_option
def stats(database: Database, is_all: bool, plot: bool, form: str | None) -> None:
    """Count the open messages by age, by failed attempts, and by size.

    \b
    Examples:
      reliablepub outbox stats --plot --outbox outbox.db
      reliablepub outbox stats --json --outbox outbox.db
    """
    if plot and form is not None:
        raise click.UsageError("give --plot, or one of --json and --csv")
    with patiently("counting"):
        counts = read_figures(database, is_all=is_all)
    rows: list[dict[str, Any]] = [
        {"of": of, "class": name, "messages": counts[of][number]}
        for of, names in CLASSES.items()
        for number, name in enumerate(names)
    ]
    if not plot:
        print_rows(rows, form, list(rows[0]), nothing="")
        return
    for of in CLASSES:
        _draw(of, {row["class"]: row["messages"] for row in rows if row["of"] == of})


def _draw(title: str, counts: dict[str, int]) -> None:
    most = max(counts.values())
    print_result(title)
    for name, count in counts.items():
        bar = "█" * -(-count * _BAR // most) if most else ""  # rounded up: even 1 is visible
        print_result(f"  {name:>9}  {count:>9}  {bar}".rstrip())


@command(
    exits={
        2: "bad usage, the file cannot be written, or prometheus-client is not installed",
        4: "the outbox cannot be used; the metrics are still written, and say so",
    },
)
@inspected_option
@click.option(
    "--name",
    metavar="TEXT",
    help="Value of the label `outbox`; use the relay's. Its path or URL unless given.",
)
@click.option(
    "--to",
    "to",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this file, and replace it at once, instead of printing; node_exporter reads "
    "names that end in .prom.",
)
def metrics(database: Database, name: str | None, to: Path | None) -> int:
    """Print the metrics of an outbox for Prometheus, whether a relay runs or not.

    Run it each minute from cron or a timer, for the textfile collector of node_exporter. It reports
    open messages that no process relays, which a killed relay cannot do.

    \b
    Example:
      reliablepub outbox metrics --outbox outbox.db --name orders \\
        --to /var/lib/prometheus/node-exporter/orders.prom
    """
    try:
        from reliablepub.observe.metrics import exposition_of  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise Failure(str(error), Exit.BAD_INPUT) from None
    if to is not None and database.file is not None and to.resolve() == database.file.resolve():
        raise click.UsageError("--to is the outbox itself, which the metrics would replace")
    text, is_readable = exposition_of(name or printable(database.name), database)
    ending = Exit.CONFIRMED if is_readable else Exit.OUTBOX
    if to is None:
        print_text(text.decode().rstrip("\n"))
        return ending
    beside = Path(f"{to}.{os.getpid()}")  # the collector ignores names without .prom
    try:
        beside.unlink(missing_ok=True)  # of a process that was killed and had this id
        with beside.open("xb") as file:  # follows no link that another user has planted
            file.write(text)
        beside.replace(to)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise Failure(f"cannot write {to}: {error.strerror}", Exit.BAD_INPUT) from None
    return ending
