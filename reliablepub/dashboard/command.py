"""``reliablepub dashboard``: serves the page for the person on call.

Knows: options, and the server. Must never know: what a page shows.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

import click

from reliablepub.cli.commands import Exit, Failure, command
from reliablepub.cli.options import inspected_option, keys_option
from reliablepub.cli.output import print_note
from reliablepub.cli.signals import Stop
from reliablepub.outbox.database import Database
from reliablepub.outbox.encryption import OutboxKeys

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOOK_S: Final = 1.0
_CLOSING_S: Final = 5
_LOOPBACK: Final = ("127.0.0.1", "::1")


@command(
    exits={
        0: "stopped by a signal",
        2: "bad usage, the port is taken, or the extra dashboard is missing",
    },
)
@inspected_option
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; any but 127.0.0.1 and ::1 needs --trust-proxy.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8025,
    show_default=True,
    help="0 takes any free one.",
)
@click.option("--allow-changes", "may_change", is_flag=True, help="Offer changes, not only views.")
@click.option("--no-bodies", is_flag=True, help="Show no properties, headers and bodies.")
@click.option(
    "--trust-proxy",
    "user_header",
    metavar="HEADER",
    help="Trust a proxy to log users in, and to name the user in this header, such as "
    "X-Forwarded-User. Only the proxy may reach this port.",
)
@click.option(
    "--name",
    "names",
    metavar="HOST",
    multiple=True,
    help="With --trust-proxy, the name of the host in the browser; may be repeated.",
)
@keys_option
def dashboard(
    *,
    database: Database,
    host: str,
    port: int,
    may_change: bool,
    no_bodies: bool,
    user_header: str | None,
    names: tuple[str, ...],
    outbox_keys: OutboxKeys | None,
) -> int:
    """Show an outbox in a browser: is it healthy, what is stuck and why, and what to do.

    The command prints the address, with a token that lets one browser in. Looking changes nothing,
    and does not disturb the relay; changes are journaled as those of the command line.

    \b
    Examples:
      reliablepub dashboard --outbox outbox.db
      reliablepub dashboard --outbox outbox.db --allow-changes --port 0
    """
    if host not in _LOOPBACK and user_header is None:
        raise click.UsageError(f"--host {host} can be reached by others: give --trust-proxy")
    if names and user_header is None:
        raise click.UsageError("--name is for a page behind a proxy: give --trust-proxy")
    with database.reading():
        pass  # raises if there is no outbox
    try:
        import uvicorn  # noqa: PLC0415 - an extra

        from reliablepub.dashboard.app import Desk, new_app  # noqa: PLC0415
        from reliablepub.dashboard.guard import Secrets  # noqa: PLC0415
    except ImportError as error:
        said = f"{error}: install reliablepub with the extra dashboard"
        raise Failure(said, Exit.BAD_INPUT) from None
    known = Secrets()
    desk = Desk(database, may_change, not no_bodies, outbox_keys, known)
    app = new_app(desk, user_header=user_header, hosts=frozenset(names))
    with _bound(host, port) as listener, Stop() as stop:
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listener.getsockname()[1]}/"
        print_note(f"open {url}" if user_header else f"open {url}?token={known.token}")
        # Its lines of access would show the token.
        settings: Mapping[str, Any] = {
            "access_log": False,
            "log_level": logging.WARNING,
            "timeout_graceful_shutdown": _CLOSING_S,
        }
        config = uvicorn.Config(app, lifespan="off", server_header=False, **settings)
        server = uvicorn.Server(config)
        # On a thread of its own it leaves the signals to this one.
        serving = {"sockets": [listener]}
        thread = threading.Thread(target=server.run, kwargs=serving, daemon=True)
        thread.start()
        while not stop.wait(_LOOK_S) and thread.is_alive():
            pass
        server.should_exit = True
        thread.join()
    return Exit.CONFIRMED


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        said = f"cannot listen on {host} port {port}: {error.strerror}"
        raise Failure(said, Exit.BAD_INPUT) from None
