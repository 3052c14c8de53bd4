"""``reliablepub outbox check``: checks the file of an outbox, its schema, messages and ledger.

Knows: which functions gather the facts, and how findings are printed. Must never know: what a fact
means.
"""

from __future__ import annotations

import click

from reliablepub.cli.doctor.diagnosis import of_file
from reliablepub.cli.doctor.findings import exit_of, print_findings
from reliablepub.cli.options import as_form, form_option, inspected_option
from reliablepub.cli.progress import patiently
from reliablepub.errors import OutboxError
from reliablepub.outbox.admin.integrity import Audit
from reliablepub.outbox.database import Database, file_of
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite.checkup import Checkup, check_up


@click.command()
@inspected_option
@click.option("--quick", is_flag=True, help="Do not compare indexes with their tables.")
@form_option
def check(database: Database, quick: bool, form: str | None) -> int:  # noqa: FBT001 - click passes flags as arguments
    """Check everything that can be wrong with the file; each problem comes with a remedy.

    The command checks pages and indexes, tables and views, every message against its checksum, the
    ledger, unused space, access rights, and files left beside the outbox. It reads the whole file,
    changes nothing, and does not disturb the relay. `audit` checks only messages and ledger, and
    prints the figures.

    \b
    Example:
      reliablepub outbox check --outbox outbox.db

    \b
    Exit codes:
      0  no problem; there may be warnings
      2  bad usage
      3  interrupted
      4  a problem, or the outbox cannot be used
    """  # noqa: D301 - click: keep these lines as they are
    file = file_of(database)
    with patiently("looking at every page"):
        found = check_up(file, is_quick=quick)
    books = None
    if not found.pages:
        with patiently("comparing every message with its checksum"):
            books = _audited(database, found)
    findings = list(of_file(file, found, books))
    print_findings(findings, as_form(form))
    return exit_of(findings)


def _audited(database: Database, found: Checkup) -> Audit | None:
    """The audit; None if missing or changed tables make it impossible."""
    try:
        return Outbox(database).audit()
    except OutboxError:
        if not (found.missing or found.changed):
            raise
        return None
