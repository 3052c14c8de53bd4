"""``reliablepub relay``: publishes what others put into the outbox.

Knows: a publisher that is handed nothing, and when to end. Must never know: how it publishes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import click

from reliablepub.cli.exits import Exit
from reliablepub.cli.link import LinkNotes, describe
from reliablepub.cli.options import (
    json_option,
    keys_option,
    outbox_option,
    url_option,
    window_option,
)
from reliablepub.cli.output import count_of, print_error, print_json, print_note, print_result
from reliablepub.cli.signals import Stop
from reliablepub.errors import NotAnOutbox
from reliablepub.outbox import OutboxKeys
from reliablepub.publisher import Publisher
from reliablepub.relay.status import Status

_LOOK_S: Final = 0.05
_ALIVE_S: Final = 1.0


@click.command()
@url_option
@outbox_option(required=True, text="The outbox; created if it is missing, but not with --drain.")
@keys_option
@window_option
@click.option(
    "--keep-confirmed",
    "keep_confirmed_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=0.0,
    help="How long confirmed messages stay in the outbox, for people to look at.",
)
@click.option("--drain", is_flag=True, help="End once nothing is open, instead of going on.")
@json_option
def relay(
    urls: tuple[str, ...],
    outbox_path: Path,
    outbox_keys: OutboxKeys | None,
    window_max: int,
    keep_confirmed_s: float,
    *,
    drain: bool,
    as_json: bool,
) -> int:
    """Publish what is in an outbox, now and whenever something is put in.

    One relay at a time; any number of processes may put messages in. Each change of the connection
    is a line on stderr. SIGTERM and SIGINT stop sending, wait a moment for the confirms of what is
    in flight, and end; what is open stays in the outbox.

    \b
    Examples:
      reliablepub relay --outbox outbox.db --url amqp://guest:guest@localhost/
      reliablepub relay --outbox outbox.db --url ... --drain

    \b
    Exit codes:
      0  stopped by a signal, or with --drain: nothing is open (parked messages are reported)
      2  bad usage or configuration
      3  --drain was interrupted while messages were open
      4  the outbox cannot be used, or another process relays it
    """  # noqa: D301 - click: keep these lines as they are
    if drain and not outbox_path.is_file():
        raise NotAnOutbox(f"there is no outbox {outbox_path}, so there is nothing to drain")
    begun = time.monotonic()
    with (
        Stop() as stop,
        Publisher(
            urls,
            outbox=outbox_path,
            outbox_keys=outbox_keys,
            keep_confirmed_s=keep_confirmed_s,
            window_max=window_max,
            close_timeout_s=0,
        ) as publisher,
    ):
        before = publisher.status
        _watch(publisher, stop, is_draining=drain)
        last = publisher.status
        status = publisher.close(timeout=0)
    _report(outbox_path, before, status, last, time.monotonic() - begun, as_json=as_json)
    if drain and stop.is_set and status.open:
        print_error(f"interrupted; {_still_open(status)}")
        return Exit.OPEN
    return Exit.CONFIRMED


def _watch(publisher: Publisher, stop: Stop, *, is_draining: bool) -> None:
    """Until the signal; or until nothing is open, if that is the task."""
    notes = LinkNotes(print_note, is_eager=True)
    alive_at = 0.0
    while not stop.is_set:
        status = publisher.status
        notes.look(status)
        if is_draining and (not status.open or publisher.flush(timeout=_LOOK_S).is_flushed):
            return
        now = time.monotonic()
        if now >= alive_at:
            alive_at = now + _ALIVE_S
            publisher.flush(timeout=0)  # raises if the publisher has failed
        stop.wait(_LOOK_S)
    notes.look(publisher.status)  # the signal may have come before it was looked at


def _report(
    outbox: Path, before: Status, status: Status, last: Status, seconds: float, *, as_json: bool
) -> None:
    counters = status.counters
    confirmed = counters.confirmed - before.counters.confirmed
    # A person may have put some back meanwhile.
    parked = max(0, counters.parked - before.counters.parked)
    if as_json:
        print_json(
            {
                "outbox": str(outbox),
                "confirmed": confirmed,
                "parked": parked,
                "open": counters.open,
                "seconds": round(seconds, 3),
                "link": last.link.value,
                "reason": last.reason,
            }
        )
        return
    print_result(
        f"{outbox}: {confirmed} confirmed, {parked} parked, {counters.open} open "
        f"in {seconds:.1f} s ({describe(last)})"
    )
    if counters.parked:
        are = "is" if counters.parked == 1 else "are"
        print_note(
            f"{count_of(counters.parked, 'message')} {are} parked; "
            f"see `reliablepub outbox list --state parked --outbox {outbox}`"
        )


def _still_open(status: Status) -> str:
    are = "is" if status.open == 1 else "are"
    return f"{count_of(status.open, 'message')} {are} still open, and stay in the outbox"
