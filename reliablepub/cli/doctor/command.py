"""``reliablepub doctor`` and ``reliablepub outbox check``: each finding comes with a remedy.

Knows: which functions gather the facts, how findings are printed, and their exit code. Must never
know: what a fact means.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version

import click

from reliablepub.cli.commands import Exit, command
from reliablepub.cli.doctor import diagnosis
from reliablepub.cli.doctor.server import of_server
from reliablepub.cli.facts import Finding, Level, finding
from reliablepub.cli.options import (
    broker_options,
    credentials_of,
    form_option,
    inspected_option,
    tls_context,
)
from reliablepub.cli.output import print_rows
from reliablepub.cli.progress import patiently
from reliablepub.errors import OutboxError
from reliablepub.front.environment import URL_VARIABLE
from reliablepub.outbox.admin.inspection import read_relays
from reliablepub.outbox.database import Database, Relaying, file_of
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.postgres.environment import ServerSurroundings
from reliablepub.outbox.postgres.environment import look_around as ask_server
from reliablepub.outbox.sqlite.checkup import Surroundings, check_up, look_around
from reliablepub.relay.status import Link
from reliablepub.transport.address import parse_addresses
from reliablepub.transport.pika_hooks import TESTED_VERSIONS, hooks
from reliablepub.transport.probe import probe
from reliablepub.version import installed_version


@command(
    exits={
        0: "no problem; there may be warnings",
        2: "bad usage, or a problem with the broker",
        4: "a problem with the outbox, or the outbox cannot be used",
    },
)
@broker_options(
    required=False,
    text="URL of the broker; repeat it for failover. Without it only the outbox is checked. Also "
    f"from {URL_VARIABLE}.",
)
@inspected_option
@form_option
def doctor(
    urls: tuple[str, ...],
    database: Database,
    form: str | None,
    **_: object,  # read by `tls_context` and `credentials_of`
) -> int:
    """Check the outbox, its disk or server, and the broker; each problem comes with a remedy.

    Nothing is changed, neither in the outbox nor at the broker: passive declarations check the
    exchanges and queues that messages name.

    \b
    Example:
      reliablepub doctor --outbox outbox.db --url amqp://guest:guest@localhost/
    """
    ctx = click.get_current_context()
    context, credentials = tls_context(ctx), credentials_of(ctx)
    addresses = parse_addresses(urls, ssl_context=context) if urls else ()
    found: list[Finding] = []
    around: Surroundings | ServerSurroundings | None = None
    try:
        with patiently("looking at the outbox"):
            relaying, around = look_at(database, found)
    except OutboxError as error:  # the rest can be checked
        found.append(finding("outbox", Level.PROBLEM, str(error)))
    else:
        hooks_off = relaying.status.get("hooks_off")
        found.append(diagnosis.of_client(hooks_off, hooks.why_off(), TESTED_VERSIONS))
    own = installed_version() or "(not installed)"
    found.append(diagnosis.of_versions({"reliablepub": own, "pika": version("pika")}))
    if addresses and credentials is not None:
        found += diagnosis.of_credentials(credentials)
    if context is not None and context.validity is not None:
        found.append(diagnosis.of_certificate(context.validity, time.time()))
    for address in addresses:
        with patiently(f"asking {address}"):
            learned = probe(
                address,
                exchanges=around.exchanges if around is not None else (),
                queues=around.queues if around is not None else (),
                ssl_context=context,
            )
        found += diagnosis.of_broker(address, learned)
    return _report(found, form)


def look_at(
    database: Database, found: list[Finding]
) -> tuple[Relaying, Surroundings | ServerSurroundings]:
    """Add the findings about an outbox; return its relay, and what is around it."""
    relays = read_relays(database)
    shown = [one.status for one in relays]
    failed = next((one.get("reason", "") for one in shown if one.get("link") == Link.FAILED), "")
    status = Outbox(database).status()
    around: Surroundings | ServerSurroundings
    if database.file is None:
        around = ask_server(database)
        found += of_server(status, around, time.time(), relays, failed)
    else:
        around = look_around(database.file)
        found += diagnosis.of_outbox(status, around, time.time(), shown[0], failed)
    return Relaying.first(relays), around


@command(
    exits={0: "no problem; there may be warnings", 4: "a problem, or the outbox cannot be used"},
)
@inspected_option
@click.option("--quick", is_flag=True, help="Do not compare indexes with their tables.")
@form_option
def check(database: Database, quick: bool, form: str | None) -> int:
    """Check everything that can be wrong with the file; each problem comes with a remedy.

    The command checks pages and indexes, tables and views, every message against its checksum, the
    ledger, unused space, access rights, and files left beside the outbox. It reads the whole file,
    changes nothing, and does not disturb the relay. `audit` checks only messages and ledger, and
    prints the figures.

    \b
    Example:
      reliablepub outbox check --outbox outbox.db
    """
    file = file_of(database)
    with patiently("looking at every page"):
        found = check_up(file, is_quick=quick)
    books = None
    if not found.pages:
        try:
            with patiently("comparing every message with its checksum"):
                books = Outbox(database).audit()
        except OutboxError:
            if not (found.missing or found.changed):  # else the tables make it impossible
                raise
    return _report(list(diagnosis.of_file(file, found, books)), form)


def _report(found: Sequence[Finding], form: str | None) -> Exit:
    """Print all findings, including those of level ``ok``; return the exit code.

    A problem of the outbox outranks one of the broker; warnings do not count.
    """
    marks = {Level.OK: "ok", Level.WARNING: "!", Level.PROBLEM: "!!"}
    print_rows(
        [asdict(one) for one in found],
        form,
        ("", "about", "check", "found"),
        cells={"": lambda row: marks[row["level"]]},
        nothing="",
        below=lambda row: f"what to do: {row['remedy']}" if row["remedy"] else "",
    )
    problems = {one.about for one in found if one.level is Level.PROBLEM}
    if "outbox" in problems:
        return Exit.OUTBOX
    return Exit.BAD_INPUT if problems else Exit.CONFIRMED
