"""Options that several commands share, with one name and one help text each.

Knows: names, environment variables and help texts. Must never know: what a command does with a
value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from reliablepub.cli.output import Form, print_note
from reliablepub.credentials import CredentialsProvider, PasswordFile, read_password
from reliablepub.errors import ConfigurationError
from reliablepub.front.environment import (
    KEYS_VARIABLE,
    OUTBOX_VARIABLE,
    PASSWORD_VARIABLE,
    URL_VARIABLE,
)
from reliablepub.outbox.database import Database
from reliablepub.outbox.encryption import OutboxKeys, exposure
from reliablepub.outbox.opening import outbox_at
from reliablepub.relay.handover import WINDOW_MAX, WINDOW_MIN
from reliablepub.transport.address import parse_addresses, with_password, words_of_exposed

_F = TypeVar("_F", bound=Callable[..., Any])

_READ: Final = "reliablepub.password-file"
"""Key of `click.Context.meta` for the password file's content, while options are parsed."""
_FILE: Final = "reliablepub.password-file-path"
"""Key for its path."""
_AS_GIVEN: Final = "reliablepub.urls"
_PLAINTEXT: Final = "reliablepub.accept-plaintext"


def url_option(function: _F) -> _F:
    """Add ``--url``, required and repeatable, and ``--password-file``."""
    function = click.option(
        "--url",
        "urls",
        metavar="URL",
        multiple=True,
        required=True,
        envvar=URL_VARIABLE,
        callback=with_passwords,
        help="amqp://user:password@host:port/vhost, or amqps://...; repeat it for failover. "
        f"Also from {URL_VARIABLE}, several separated by spaces, which keeps the password out of "
        "the list of processes.",
    )(function)
    return password_option(function)


def password_option(function: _F) -> _F:
    """Add ``--password-file``; `with_passwords` puts its content into the URLs."""
    return click.option(
        "--password-file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        envvar=PASSWORD_VARIABLE,
        callback=_password,
        help=f"A file with the password for every URL. Also from {PASSWORD_VARIABLE}.",
    )(function)


def _password(ctx: click.Context, _option: click.Parameter, path: Path | None) -> None:
    # An earlier parse of the options may have set it: a relay parses them again after SIGHUP.
    ctx.meta[_READ] = ctx.meta[_FILE] = None
    if path is None or ctx.resilient_parsing:
        return
    try:
        note_exposure(path)
        password = read_password(path)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
    ctx.meta[_READ] = password
    ctx.meta[_FILE] = path


def with_passwords(
    ctx: click.Context, _option: click.Parameter, urls: tuple[str, ...]
) -> tuple[str, ...]:
    """The callback of ``--url``: puts the password of ``--password-file``, if any, into each."""
    ctx.meta[_AS_GIVEN] = urls
    password = ctx.meta.get(_READ)
    return urls if password is None else tuple(with_password(url, password) for url in urls)


def note_exposed_urls(urls: Sequence[str]) -> None:
    """Print a warning for each URL that sends a password unencrypted over a network."""
    for address in parse_addresses(urls):
        if address.is_exposed:
            print_note(f"warning: {words_of_exposed(address)}")


def note_exposed_outbox(database: Database) -> None:
    """Print a warning if other users can harm the outbox."""
    if words := database.exposure():
        print_note(f"warning: {words}")


def urls_as_given(ctx: click.Context) -> tuple[str, ...]:
    """The values of ``--url`` as the user gave them, without the content of the password file."""
    given: tuple[str, ...] = ctx.meta[_AS_GIVEN]
    return given


def credentials_of(ctx: click.Context) -> CredentialsProvider | None:
    """``--password-file`` as a provider, which reads it at each connection; None without it."""
    path: Path | None = ctx.meta.get(_FILE)
    return None if path is None else PasswordFile(path)


def note_exposure(path: Path) -> None:
    """Print a warning if other users can read a file that holds a secret."""
    if words := exposure(path):
        print_note(f"warning: {words}")


def _database(_ctx: click.Context, _option: click.Parameter, where: str | None) -> Database | None:
    return None if where is None else outbox_at(where)


def _inspected(_ctx: click.Context, _option: click.Parameter, where: str) -> Database:
    database = outbox_at(where)
    return database if database.file is None else outbox_at(database.file)  # named in full


def outbox_option(*, required: bool, text: str) -> Callable[[_F], _F]:
    """Add ``--outbox`` with the given help text, for commands that publish."""
    return click.option(
        "--outbox",
        "database",
        metavar="FILE|URL",
        type=click.Path(),
        callback=_database,
        required=required,
        envvar=OUTBOX_VARIABLE,
        help=f"{text} Also from {OUTBOX_VARIABLE}.",
    )


def _keys(ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> OutboxKeys | None:
    if path is None:
        return None
    note_exposure(path)
    return OutboxKeys.read(path, accept_plaintext=bool(ctx.meta.get(_PLAINTEXT)))


def _plaintext(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click passes flags as arguments
    ctx.meta[_PLAINTEXT] = value


def relay_keys_options(function: _F) -> _F:
    """Add ``--outbox-keys`` and ``--accept-plaintext``, for commands that publish or re-encrypt."""
    return keys_option(_plaintext_option(function))


def _plaintext_option(function: _F) -> _F:
    return click.option(
        "--accept-plaintext",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_plaintext,
        help="With keys: also accept messages in the outbox that are not encrypted; without this "
        "option such messages are parked, or left as they are by rekey.",
    )(function)


def keys_option(function: _F) -> _F:
    """Add ``--outbox-keys``."""
    return click.option(
        "--outbox-keys",
        "outbox_keys",
        metavar="FILE",
        type=click.Path(path_type=Path),
        callback=_keys,
        envvar=KEYS_VARIABLE,
        help="A file of keys that encrypt messages in the outbox, one a line: a name and 64 "
        f"hexadecimal digits. The first one encrypts. Also from {KEYS_VARIABLE}.",
    )(function)


def limit_option(function: _F) -> _F:
    """Add ``--limit``, for commands that list."""
    return click.option(
        "--limit",
        type=click.IntRange(min=1),
        default=50,
        show_default=True,
        help="Maximum number of rows.",
    )(function)


def inspected_option(function: _F) -> _F:
    """Add ``--outbox``, for commands that inspect or change an outbox."""
    return click.option(
        "--outbox",
        "database",
        metavar="FILE|URL",
        type=click.Path(),
        callback=_inspected,
        required=True,
        envvar=OUTBOX_VARIABLE,
        help=f"The outbox: a file, or postgresql://user@host/database. Also from "
        f"{OUTBOX_VARIABLE}.",
    )(function)


def window_options(function: _F) -> _F:
    """Add ``--window`` and ``--window-min``."""
    for name, variable, default, text in (
        ("--window", "window_max", WINDOW_MAX, "Upper limit of messages in flight."),
        (
            "--window-min",
            "window_min",
            WINDOW_MIN,
            "Limit of messages in flight at first; the window adapts from there.",
        ),
    ):
        function = click.option(
            name,
            variable,
            metavar="COUNT",
            type=click.IntRange(min=1),
            default=default,
            show_default=True,
            help=text,
        )(function)
    return function


def json_option(function: _F) -> _F:
    """Add ``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print the result as one JSON value on stdout."
    )(function)


def form_option(function: _F) -> _F:
    """Add ``--json`` and ``--csv``; with neither the command prints a table."""
    for form in (Form.CSV, Form.JSON):
        words = {Form.JSON: "one JSON array", Form.CSV: "CSV with a header line"}[form]
        function = click.option(
            f"--{form.value}", "form", flag_value=form.value, help=f"Print {words}, on stdout."
        )(function)
    return function


def as_form(value: str | None) -> Form:
    """The form that the options select; a table by default."""
    return Form(value or Form.TABLE)


def moment(ctx: click.Context, param: click.Parameter, text: str | None) -> datetime | None:
    """The value of an option that is a time with an offset; a callback of click."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        problem = f"{text!r} is not a time with an offset, such as 2026-12-24T18:00:00+01:00"
        raise click.BadParameter(problem, ctx, param)
    return found
