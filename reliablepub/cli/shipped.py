"""``reliablepub shipped``: prints a file that comes with the package.

Knows: where these files are. Must never know: their content.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

import click

from reliablepub.cli.exits import Exit
from reliablepub.cli.output import print_text

FILES: Final = ("alerts.yml", "dashboard.json", "reliablepub-relay@.service")


@click.command()
@click.argument("name", type=click.Choice(FILES), metavar="FILE")
def shipped(name: str) -> int:
    """Print a file that comes with reliablepub, for installation.

    FILE is alerts.yml (alert rules for Prometheus), dashboard.json (for Grafana), or
    reliablepub-relay@.service (a systemd unit).

    \b
    Examples:
      reliablepub shipped alerts.yml > /etc/prometheus/rules/reliablepub.yml
      reliablepub shipped reliablepub-relay@.service \\
        > /etc/systemd/system/reliablepub-relay@.service

    \b
    Exit codes:
      0  done
      2  bad usage
      3  interrupted
    """  # noqa: D301 - click: keep these lines as they are
    folder = files("reliablepub.observe") / "shipped"
    print_text((folder / name).read_text(encoding="utf-8").rstrip("\n"))
    return Exit.CONFIRMED
