"""``reliablepub doctor``: checks everything that delivery depends on, with a remedy per finding.

Knows: which functions gather the facts, and how findings are printed. Must never know: what a fact
means.
"""

from __future__ import annotations

import time

import click

from reliablepub.cli.doctor.diagnosis import of_broker, of_client, of_credentials, of_outbox
from reliablepub.cli.doctor.findings import exit_of, print_findings
from reliablepub.cli.doctor.server import of_server
from reliablepub.cli.options import (
    as_form,
    credentials_of,
    form_option,
    inspected_option,
    password_option,
    with_passwords,
)
from reliablepub.cli.progress import patiently
from reliablepub.cli.tls import tls_context, tls_options
from reliablepub.front.environment import URL_VARIABLE
from reliablepub.outbox.admin.inspection import read_relays
from reliablepub.outbox.database import Database, Relaying
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.postgres.environment import ServerSurroundings
from reliablepub.outbox.postgres.environment import look_around as ask_server
from reliablepub.outbox.sqlite.environment import Surroundings, look_around
from reliablepub.relay.status import Link
from reliablepub.transport.address import parse_addresses
from reliablepub.transport.pika_hooks import TESTED_VERSIONS, hooks
from reliablepub.transport.probe import probe


@click.command()
@click.option(
    "--url",
    "urls",
    metavar="URL",
    multiple=True,
    envvar=URL_VARIABLE,
    callback=with_passwords,
    help="URL of the broker; repeat it for failover. Without it only the outbox is checked. Also "
    f"from {URL_VARIABLE}.",
)
@password_option
@tls_options
@inspected_option
@form_option
def doctor(urls: tuple[str, ...], database: Database, form: str | None) -> int:
    """Check the outbox, its disk or server, and the broker; each problem comes with a remedy.

    Nothing is changed, neither in the outbox nor at the broker: passive declarations check the
    exchanges and queues that messages name.

    \b
    Example:
      reliablepub doctor --outbox outbox.db --url amqp://guest:guest@localhost/

    \b
    Exit codes:
      0  no problem; there may be warnings
      2  bad usage, or a problem with the broker
      3  interrupted
      4  a problem with the outbox, or the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    ctx = click.get_current_context()
    context, credentials = tls_context(ctx), credentials_of(ctx)
    addresses = parse_addresses(urls, ssl_context=context) if urls else ()
    with patiently("looking at the outbox"):
        relays = read_relays(database)
        shown = [one.status for one in relays]
        failed = next((one["reason"] for one in shown if one.get("link") == Link.FAILED), "")
        status = Outbox(database).status()
        around: Surroundings | ServerSurroundings
        if database.file is None:
            around = ask_server(database)
            found = list(of_server(status, around, time.time(), relays, failed))
        else:
            around = look_around(database.file)
            found = list(of_outbox(status, around, time.time(), shown[0], failed))
    found.append(
        of_client(Relaying.first(relays).status.get("hooks_off"), hooks.why_off(), TESTED_VERSIONS)
    )
    if addresses and credentials is not None:
        found += of_credentials(credentials)
    for address in addresses:
        with patiently(f"asking {address}"):
            learned = probe(
                address, exchanges=around.exchanges, queues=around.queues, ssl_context=context
            )
        found += of_broker(address, learned)
    print_findings(found, as_form(form))
    return exit_of(found)
