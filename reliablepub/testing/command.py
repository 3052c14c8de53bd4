"""`reliablepub broker`: the fake broker as a process, for demos and for clients in any language.

Knows: the command line, signals, TLS files. Must never know: AMQP.
"""

from __future__ import annotations

import errno
import shlex
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click

from reliablepub.testing.broker import FakeBroker
from reliablepub.testing.control import ControlServer
from reliablepub.testing.faults import FaultFileError, load_faults
from reliablepub.testing.options import NodeOptions, Permissions

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PORT = click.IntRange(0, 65_535)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="A loopback address.")
@click.option("--port", type=_PORT, default=5672, show_default=True, help="0 picks a free port.")
@click.option(
    "--faults",
    "fault_file",
    type=_FILE,
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
@click.option(
    "--vhost",
    "virtual_hosts",
    multiple=True,
    default=["/"],
    show_default=True,
    help="A virtual host; may be given several times.",
)
@click.option(
    "--permissions",
    nargs=5,
    multiple=True,
    metavar="USER VHOST CONFIGURE WRITE READ",
    help="Restrict a user to regular expressions; may be given several times. A user without "
    "restrictions has all rights.",
)
@click.option("--tls-certificate", type=_FILE, help="Speak AMQPS, with this certificate (PEM).")
@click.option("--tls-key", type=_FILE, help="Its key, if that is in another file.")
@click.option(
    "--control-port",
    type=_PORT,
    help="Serve the control port, HTTP with JSON; 0 picks a free port.",
)
@click.option(
    "--allow-remote",
    is_flag=True,
    help="Permit a --host that other machines can reach, as in a container.",
)
@click.option(
    "--history-max",
    default=NodeOptions().history_max,
    show_default=True,
    help="Maximum number of publishes kept for inspection.",
)
@click.option(
    "--history-bytes-max",
    default=NodeOptions().history_bytes_max,
    show_default=True,
    help="Maximum total size of their bodies.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of all random choices.")
def broker(
    host: str,
    port: int,
    *,
    fault_file: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    control_port: int | None,
    allow_remote: bool,
    users: tuple[str, ...],
    permissions: tuple[tuple[str, str, str, str, str], ...],
    **options: Any,  # noqa: ANN401 - of NodeOptions, by name
) -> None:
    """Serve a fake RabbitMQ until SIGTERM or SIGINT; the first line printed is its URL.

    With --control-port the second line is the URL of the control port.
    """
    with ExitStack() as stack:
        stopped = stack.enter_context(_stop_signals())
        try:
            faults = load_faults(fault_file) if fault_file is not None else ()
            fake = FakeBroker(
                host=host,
                port=port,
                allow_remote=allow_remote,
                options=NodeOptions(
                    users=dict(map(_credentials, users)),
                    permissions=_granted(permissions),
                    **options,
                ),
                tls=_tls_context(tls_certificate, tls_key),
            )
            fake.inject(*faults)
            stack.enter_context(fake)
            control = None
            if control_port is not None:
                port = control_port
                control = ControlServer(fake, host, control_port, is_remote=allow_remote)
                stack.enter_context(control)
        except (FaultFileError, ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                taken = f"port {port} of {host} is taken, perhaps by a RabbitMQ that you can use"
                raise _Failure(f"{taken}; --port 0 picks a free one") from error
            words = str(error).replace("pass allow_remote=True", "give --allow-remote")
            raise _Failure(words) from error
        click.echo(fake.url)  # click flushes
        if control is not None:
            click.echo(control.url)
        click.echo(f"For other terminals: export RELIABLEPUB_URL={shlex.quote(fake.url)}", err=True)
        stopped.get()


@contextmanager
def _stop_signals() -> Iterator[SimpleQueue[None]]:
    """A queue that SIGTERM and SIGINT fill; the former handlers are restored at the end."""
    # A handler interrupts this thread: `Event.set` would block on the lock that `Event.wait` holds.
    stopped: SimpleQueue[None] = SimpleQueue()
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, lambda *_: stopped.put(None)) for number in numbers]
    try:
        yield stopped
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Failure(click.ClickException):
    """The error that ends the command, as bad usage does."""

    exit_code = 2


def _granted(
    permissions: tuple[tuple[str, str, str, str, str], ...],
) -> dict[str, dict[str, Permissions]]:
    """Return the permissions by user and virtual host."""
    granted: dict[str, dict[str, Permissions]] = {}
    for user, vhost, configure, write, read in permissions:
        rights = Permissions(configure=configure, write=write, read=read)
        granted.setdefault(user, {})[vhost] = rights
    return granted


def _tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        if key is not None:
            raise ValueError("--tls-key is the key of a certificate: give --tls-certificate too")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def _credentials(text: str) -> tuple[str, str]:
    name, colon, password = text.partition(":")
    if not colon:
        raise ValueError("--user takes NAME:PASSWORD")
    return name, password
