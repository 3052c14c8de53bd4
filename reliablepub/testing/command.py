"""`reliablepub broker`: the fake broker as a process, for demos and for clients in any language.

This module knows the command line and signals. It must never know AMQP.
"""

from __future__ import annotations

import errno
import shlex
import signal
import threading
from pathlib import Path

import click

from reliablepub.testing.broker import FakeBroker
from reliablepub.testing.faults import FaultFileError, load_faults
from reliablepub.testing.options import NodeOptions


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="A loopback address.")
@click.option("--port", default=5672, show_default=True, help="0 picks a free port.")
@click.option(
    "--faults",
    "fault_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with [[fault]] tables.",
)
@click.option(
    "--user",
    "users",
    multiple=True,
    metavar="NAME:PASSWORD",
    default=["guest:guest"],
    show_default=True,
    help="A user who may log in; may be given several times.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of all random choices.")
def broker(
    host: str, port: int, fault_file: Path | None, users: tuple[str, ...], seed: int
) -> None:
    """Serve a fake RabbitMQ until SIGTERM or SIGINT; the first line printed is its URL."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        faults = load_faults(fault_file) if fault_file is not None else ()
        options = NodeOptions(seed=seed, users=dict(map(_credentials, users)))
        fake = FakeBroker(host=host, port=port, options=options)
        fake.inject(*faults)
        fake.start()
    except (FaultFileError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            taken = f"port {port} of {host} is taken, perhaps by a RabbitMQ that you can use"
            raise click.ClickException(f"{taken}; --port 0 picks a free one") from error
        raise click.ClickException(str(error)) from error
    try:
        click.echo(fake.url)  # click flushes
        click.echo(f"For other terminals: export RELIABLEPUB_URL={shlex.quote(fake.url)}", err=True)
        stopped.wait()
    finally:
        fake.stop()


def _credentials(text: str) -> tuple[str, str]:
    name, colon, password = text.partition(":")
    if not colon:
        raise ValueError("--user takes NAME:PASSWORD")
    return name, password
