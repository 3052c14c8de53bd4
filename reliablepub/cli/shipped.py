"""``reliablepub shipped``: prints a file that comes with the package.

Knows: where these files are. Must never know: their content.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

import click

from reliablepub.cli.commands import command
from reliablepub.cli.output import print_text

FILES: Final = (
    *("alerts.yml", "dashboard.json", "kubernetes.yaml", "kubernetes-postgresql.yaml"),
    "reliablepub-relay@.service",
)
_RUNBOOK: Final = 'runbook_url: "{}#'


@command()
@click.argument("name", type=click.Choice(FILES), metavar="FILE")
@click.option(
    "--runbook",
    metavar="URL",
    default="on-call.md",
    show_default=True,
    help="The URL of your copy of the on-call page, to which the alerts of alerts.yml link.",
)
def shipped(name: str, runbook: str) -> None:
    """Print a file that comes with reliablepub, for installation.

    FILE is alerts.yml (alert rules for Prometheus), dashboard.json (for Grafana), kubernetes.yaml
    (a pod with a relay, its probes, and an outbox in a file), kubernetes-postgresql.yaml (two
    relays of an outbox in PostgreSQL), or reliablepub-relay@.service (a systemd unit).

    \b
    Examples:
      reliablepub shipped alerts.yml --runbook https://docs.example.com/on-call \\
        > /etc/prometheus/rules/reliablepub.yml
      reliablepub shipped reliablepub-relay@.service \\
        > /etc/systemd/system/reliablepub-relay@.service
    """
    folder = files("reliablepub.observe") / "shipped"
    text = (folder / name).read_text(encoding="utf-8").rstrip("\n")
    print_text(text.replace(_RUNBOOK.format("on-call.md"), _RUNBOOK.format(runbook)))
