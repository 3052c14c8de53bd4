"""``reliablepub outbox status``: counts of an outbox, and the state of its relay.

Knows: the snapshot (`lookout`), and how it is printed. Must never know: SQL, or a broker.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from reliablepub.cli.choosing import Duration
from reliablepub.cli.exits import Exit
from reliablepub.cli.options import inspected_option, json_option
from reliablepub.cli.output import age, count_of, paused_words, print_json, print_table
from reliablepub.cli.watch.lookout import disk_words, link_words, look, relay_words
from reliablepub.outbox.database import Database


@click.command()
@inspected_option
@click.option(
    "--over",
    "over_s",
    metavar="TIME",
    type=Duration(),
    default="0.5s",
    show_default=True,
    help="Time over which rates are measured; 0 for no rates.",
)
@json_option
def status(database: Database, over_s: float, as_json: bool) -> int:  # noqa: FBT001 - click passes flags as arguments
    """Count the messages of an outbox, and show its relay and the connection to the broker.

    Always: stored = open + confirmed + parked + expired + discarded.

    \b
    Example:
      reliablepub outbox status --outbox outbox.db --json

    \b
    Exit codes:
      0  done
      2  bad usage
      3  interrupted
      4  the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    before = look(database)
    if over_s:
        time.sleep(over_s)
    found = look(database, before if over_s else None)
    if as_json:
        print_json(found.values)
    else:
        print_table({**found.counts, **_in_words(found.more, found.now)})
    return Exit.CONFIRMED


def _in_words(more: Mapping[str, Any], now: float) -> dict[str, object]:
    oldest_age_s = more["oldest_open_age_s"]
    rates = f"{more['stored_per_s']} stored/s, {more['confirmed_per_s']} confirmed/s"
    slow = {"client library": f"slower: {more['hooks_off']}"} if more["hooks_off"] else {}
    return {
        "oldest open": "none" if oldest_age_s is None else f"{age(oldest_age_s)} old",
        "rates": "not measured" if more["stored_per_s"] is None else rates,
        "relay": relay_words(more),
        "broker": link_words(more, now),
        "window": "unknown" if more["window"] is None else f"{more['window']} messages",
        **slow,
        **_paused(more, now),
        "on disk": disk_words(more),
    }


def _paused(more: Mapping[str, Any], now: float) -> dict[str, object]:
    """Paused destinations, as the relay's status file lists them."""
    rows = more["paused"] or []
    words: dict[str, object] = {
        f"paused {n}": paused_words(row, now, now) for n, row in enumerate(rows, 1)
    }
    left = (more["paused_destinations"] or 0) - len(rows)
    return words | ({"paused too": count_of(left, "destination")} if left > 0 else {})
