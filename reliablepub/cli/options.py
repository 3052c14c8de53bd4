"""Options that several commands share, so that they are called and explained the same everywhere.

Knows: names, environment variables and help texts. Must never know: what is done with a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from reliablepub.cli.output import Form, print_note
from reliablepub.outbox.encryption import OutboxKeys, exposure
from reliablepub.outbox.sqlite.database import absolute
from reliablepub.outbox.sqlite.location import folder_exposure
from reliablepub.relay.handover import WINDOW_MAX, WINDOW_MIN
from reliablepub.transport.address import parse_addresses, with_password, words_of_exposed

_F = TypeVar("_F", bound=Callable[..., Any])

OUTBOX_VARIABLE: Final = "RELIABLEPUB_OUTBOX"
KEYS_VARIABLE: Final = "RELIABLEPUB_OUTBOX_KEYS"
URL_VARIABLE: Final = "RELIABLEPUB_URL"
PASSWORD_VARIABLE: Final = "RELIABLEPUB_PASSWORD_FILE"  # noqa: S105 - a name
_READ: Final = "reliablepub.password-file"
"""Where the content of the file is kept while options are read."""
_AS_GIVEN: Final = "reliablepub.urls"
_PLAINTEXT: Final = "reliablepub.accept-plaintext"


def url_option(function: _F) -> _F:
    """``--url``, required, repeatable; and ``--password-file``."""
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
    """``--password-file``, whose content gets into what `with_passwords` is the callback of."""
    return click.option(
        "--password-file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        envvar=PASSWORD_VARIABLE,
        callback=_password,
        help=f"The password for every URL, in a file of its own. Also from {PASSWORD_VARIABLE}.",
    )(function)


def _password(ctx: click.Context, _option: click.Parameter, path: Path | None) -> None:
    ctx.meta[_READ] = None  # also where an earlier reading of the options has left one
    if path is None or ctx.resilient_parsing:
        return
    try:
        note_exposure(path)
        password = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise click.UsageError(f"cannot read the password file {path}: {reason}") from None
    if not password:
        raise click.UsageError(f"the password file {path} is empty")
    ctx.meta[_READ] = password


def with_passwords(
    ctx: click.Context, _option: click.Parameter, urls: tuple[str, ...]
) -> tuple[str, ...]:
    """The callback of ``--url``: each with the password of ``--password-file``, if there is one."""
    ctx.meta[_AS_GIVEN] = urls
    password = ctx.meta.get(_READ)
    return urls if password is None else tuple(with_password(url, password) for url in urls)


def note_exposed_urls(urls: Sequence[str]) -> None:
    """Say so where a password would go over a network in clear."""
    for address in parse_addresses(urls):
        if address.is_exposed:
            print_note(f"warning: {words_of_exposed(address)}")


def note_exposed_folder(outbox: Path) -> None:
    """Say so where other users can write to the folder of the outbox."""
    if outbox.parent.is_dir() and (words := folder_exposure(absolute(outbox).parent)):
        print_note(f"warning: {words}")


def urls_as_given(ctx: click.Context) -> tuple[str, ...]:
    """What ``--url`` was given, without the password of ``--password-file``."""
    given: tuple[str, ...] = ctx.meta[_AS_GIVEN]
    return given


def note_exposure(path: Path) -> None:
    """Say so where other users can read a file with a secret."""
    if words := exposure(path):
        print_note(f"warning: {words}")


def outbox_option(*, required: bool, text: str) -> Callable[[_F], _F]:
    """``--outbox``."""
    return click.option(
        "--outbox",
        "outbox_path",
        metavar="FILE",
        type=click.Path(path_type=Path),
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
    """``--outbox-keys``; and ``--accept-plaintext``, for commands that publish or encrypt anew."""
    return keys_option(_plaintext_option(function))


def _plaintext_option(function: _F) -> _F:
    return click.option(
        "--accept-plaintext",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_plaintext,
        help="With keys, accept also messages in the outbox that are not encrypted; otherwise they "
        "are parked.",
    )(function)


def keys_option(function: _F) -> _F:
    """``--outbox-keys``."""
    return click.option(
        "--outbox-keys",
        "outbox_keys",
        metavar="FILE",
        type=click.Path(path_type=Path),
        callback=_keys,
        envvar=KEYS_VARIABLE,
        help="Keys that encrypt messages in the outbox, a line each: a name and 64 hexadecimal "
        f"digits. The first encrypts. Also from {KEYS_VARIABLE}.",
    )(function)


def inspected_option(function: _F) -> _F:
    """``--outbox`` of the commands that look into one, or change what is in it."""
    return click.option(
        "--outbox",
        "outbox_path",
        metavar="FILE",
        type=click.Path(path_type=Path),
        callback=lambda _context, _option, path: absolute(path),
        required=True,
        envvar=OUTBOX_VARIABLE,
        help=f"The outbox. Also from {OUTBOX_VARIABLE}.",
    )(function)


def window_options(function: _F) -> _F:
    """``--window`` and ``--window-min``."""
    for name, variable, default, text in (
        ("--window", "window_max", WINDOW_MAX, "Most messages in flight ever."),
        ("--window-min", "window_min", WINDOW_MIN, "Most at first; from there it adapts."),
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
    """``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print the result as one JSON value on stdout."
    )(function)


def form_option(function: _F) -> _F:
    """``--json`` and ``--csv``; neither: a table."""
    for form in (Form.CSV, Form.JSON):
        words = {Form.JSON: "one JSON array", Form.CSV: "CSV with a line of titles"}[form]
        function = click.option(
            f"--{form.value}", "form", flag_value=form.value, help=f"Print {words}, on stdout."
        )(function)
    return function


def as_form(value: str | None) -> Form:
    """What was asked for."""
    return Form(value or Form.TABLE)
