"""``reliablepub outbox status``: how an outbox is doing.

Knows: the questions a person asks an `Outbox`. Must never know: SQL, or a broker.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import click

from reliablepub.cli.choosing import Duration
from reliablepub.cli.exits import Exit
from reliablepub.cli.options import inspected_option, json_option
from reliablepub.cli.output import age, one_line, print_json, print_table, size_of
from reliablepub.outbox import Outbox
from reliablepub.outbox.picture import read_picture


@click.command()
@inspected_option
@click.option(
    "--over",
    "over_s",
    metavar="TIME",
    type=Duration(),
    default="0.5s",
    show_default=True,
    help="How long to look, to tell the rates; 0 for none.",
)
@json_option
def status(outbox_path: Path, over_s: float, as_json: bool) -> int:  # noqa: FBT001 - click passes flags as arguments
    """Count the messages of an outbox, and tell who relays it and how that goes.

    Always: stored = open + confirmed + parked + expired + discarded.

    \b
    Example:
      reliablepub outbox status --outbox outbox.db --json

    \b
    Exit codes:
      0  done
      4  it cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    before, begun = Outbox(outbox_path).status(), time.monotonic()
    if over_s:
        time.sleep(over_s)
    found = Outbox(outbox_path).status()
    seconds = time.monotonic() - begun if over_s else 0.0
    now = time.time()
    picture = read_picture(outbox_path) or {}
    oldest = found.oldest_open_at
    values = {
        "stored": found.stored,
        "open": found.open,
        "in_flight": found.in_flight,
        "waiting": found.waiting,
        "held_keys": found.held_keys,
        "confirmed": found.confirmed,
        "parked": found.parked,
        "expired": found.expired,
        "discarded": found.discarded,
    }
    more = {
        "outbox": str(outbox_path),
        "oldest_open_age_s": None if oldest is None else round(max(0.0, now - oldest), 1),
        "stored_per_s": rate(found.stored - before.stored, seconds),
        "confirmed_per_s": rate(found.confirmed - before.confirmed, seconds),
        "relay_pid": found.relay,
        "link": picture.get("link"),
        "link_reason": picture.get("reason"),
        "link_since": picture.get("since"),
        "bytes_on_disk": found.bytes_on_disk,
        "bytes_free": shutil.disk_usage(outbox_path.parent).free,
    }
    if as_json:
        print_json(values | more)
    else:
        print_table(values | _for_people(more, now))
    return Exit.CONFIRMED


def rate(count: int, seconds: float) -> float | None:
    """A second; None where nobody has looked long enough."""
    return round(count / seconds, 1) if seconds else None


def _for_people(more: dict[str, Any], now: float) -> dict[str, object]:
    oldest_age_s, pid = more["oldest_open_age_s"], more["relay_pid"]
    rates = f"{more['stored_per_s']} stored/s, {more['confirmed_per_s']} confirmed/s"
    broker = "nobody knows: no relay is at work"
    if pid is not None:
        link = {"connected": "connected", "blocked": "blocked by the broker"}
        words = link.get(more["link"], "not connected")
        reason = f": {one_line(more['link_reason'])}" if more["link_reason"] else ""
        since = f" since {age(now - more['link_since'])}" if more["link_since"] else ""
        broker = f"{words}{since}{reason}"
    return {
        "oldest open": "none" if oldest_age_s is None else f"{age(oldest_age_s)} old",
        "rates": "not measured" if more["stored_per_s"] is None else rates,
        "relay": "none" if pid is None else f"process {pid}",
        "broker": broker,
        "on disk": f"{size_of(more['bytes_on_disk'])}, {size_of(more['bytes_free'])} free",
    }
