"""``reliablepub outbox stats``: histograms of messages by age, failed attempts and size.

Knows: the classes, and how bars are drawn with characters. Must never know: SQL, or a broker.
"""

from __future__ import annotations

from typing import Any, Final

import click

from reliablepub.cli.exits import Exit
from reliablepub.cli.options import as_form, form_option, inspected_option
from reliablepub.cli.output import print_result, print_rows
from reliablepub.cli.progress import patiently
from reliablepub.outbox.admin.inspection import read_figures
from reliablepub.outbox.database import Database

CLASSES: Final = {
    "age": ("< 1 s", "< 10 s", "< 1 min", "< 10 min", "< 1 h", "< 6 h", "< 1 d", "< 7 d", "older"),
    "attempts": ("0", "1", "2", "3 to 5", "6 to 10", "more"),
    "size": (
        *("< 256 B", "< 1 KiB", "< 4 KiB", "< 16 KiB"),
        *("< 64 KiB", "< 256 KiB", "< 1 MiB", "larger"),
    ),
}
_BAR: Final = 50


@click.command()
@inspected_option
@click.option("--all", "is_all", is_flag=True, help="Count parked and expired messages too.")
@click.option("--plot", is_flag=True, help="Draw bars.")
@form_option
def stats(database: Database, is_all: bool, plot: bool, form: str | None) -> int:  # noqa: FBT001 - click passes flags as arguments
    """Count the open messages by age, by failed attempts, and by size.

    \b
    Examples:
      reliablepub outbox stats --plot --outbox outbox.db
      reliablepub outbox stats --json --outbox outbox.db

    \b
    Exit codes:
      0  done
      2  bad usage
      3  interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
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
        columns = {name: lambda row, name=name: row[name] for name in rows[0]}
        print_rows(rows, as_form(form), columns, nothing="")
        return Exit.CONFIRMED
    for of in CLASSES:
        _draw(of, {row["class"]: row["messages"] for row in rows if row["of"] == of})
    return Exit.CONFIRMED


def _draw(title: str, counts: dict[str, int]) -> None:
    most = max(counts.values())
    print_result(title)
    for name, count in counts.items():
        bar = "█" * -(-count * _BAR // most) if most else ""  # rounded up: even 1 is visible
        print_result(f"  {name:>9}  {count:>9}  {bar}".rstrip())
