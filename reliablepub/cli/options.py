"""Options that several commands share, with one name and one help text each.

Knows: names, environment variables, help texts, the files that hold secrets, and the tracing hook.
Must never know: what a command does with a value.

Password files, key files and certificates are read when a command begins, and again when a relay
reopens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from reliablepub.certificates import CertificateFiles
from reliablepub.cli.commands import Exit, Failure
from reliablepub.cli.config import config_option, misspelled_variables, variable_of
from reliablepub.cli.output import print_note
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
from reliablepub.transport.address import (
    has_password,
    parse_addresses,
    with_password,
    words_of_exposed,
)

if TYPE_CHECKING:
    from reliablepub.front.options import PublisherOptions  # which would load the relay

    _ParamType = click.ParamType[float]
else:
    _ParamType = click.ParamType  # generic since click 8.4

_F = TypeVar("_F", bound=Callable[..., Any])
_Option = Callable[[Any], Any]

_AS_GIVEN: Final = "reliablepub.urls"
_OUTBOX_AS_GIVEN: Final = "reliablepub.outbox"


_LONGEST_S: Final = 100 * 365.25 * 86_400
"""The system cannot sleep for more than about 292 years."""


class Duration(_ParamType):
    """A duration such as ``90``, ``90s``, ``5m``, ``2h`` or ``7d``, converted to seconds."""

    name = "time"  # help shows it as TIME

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The duration in seconds; a float is already converted."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value))
        if found is None:
            self.fail(
                f"{value!r} is not a duration; write for example 90s, 5m, 2h or 7d", param, ctx
            )
        seconds = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]
        if seconds > _LONGEST_S:
            self.fail(f"{value!r:.40} is more than 100 years", param, ctx)
        return seconds


def together(*options: _Option) -> Callable[[_F], _F]:
    """One decorator that adds several options; help lists them in this order."""

    def add(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def alike(texts: Mapping[str, str], **settings: Any) -> Callable[[_F], _F]:  # noqa: ANN401
    """Options that differ in nothing but their name and their help text."""
    return together(*(click.option(name, help=text, **settings) for name, text in texts.items()))


# ---------------------------------------------------------------------------- the broker: --url


def _with_passwords(
    ctx: click.Context, _option: click.Parameter, urls: tuple[str, ...]
) -> tuple[str, ...]:
    """Put the password of ``--password-file``, if any, into each URL."""
    ctx.meta[_AS_GIVEN] = urls
    path: Path | None = ctx.params["password_file"]
    if path is None or ctx.resilient_parsing:
        return urls
    try:
        note_exposure(path)
        password = read_password(path)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
    if any(map(has_password, urls)):
        url_from, file_from = _source(ctx, "urls"), _source(ctx, "password_file")
        raise click.UsageError(
            f"the URL ({url_from}) has a password, and a password file is given too ({file_from}): "
            "give one of them"
        )
    return tuple(with_password(url, password) for url in urls)


def _source(ctx: click.Context, name: str) -> str:
    """Where the value of an option came from, in words."""
    (option,) = (one for one in ctx.command.params if one.name == name)
    match ctx.get_parameter_source(name):
        case ParameterSource.ENVIRONMENT:
            return f"of the variable {option.envvar}"
        case ParameterSource.DEFAULT_MAP:
            return "of the configuration"
    return f"of {option.opts[0]}"


_TLS: Final = {
    "--tls-ca": "Certificate authorities that verify the broker of an amqps URL, instead of the "
    "system's.",
    "--tls-certificate": "A client certificate, followed by its chain.",
    "--tls-key": "The key of the client certificate, if it is in a separate file.",
}
tls_options: Final = together(
    *(
        click.option(
            name,
            metavar="FILE",
            type=click.Path(path_type=Path),
            envvar=variable_of(name),
            help=f"{text} PEM.",
        )
        for name, text in _TLS.items()
    )
)


def publisher_options(ctx: click.Context) -> PublisherOptions:
    """The options of a publisher that a command which publishes has."""
    return {
        "outbox_keys": ctx.params["outbox_keys"],
        "window_min": ctx.params["window_min"],
        "window_max": ctx.params["window_max"],
        "ssl_context": tls_context(ctx),
        "credentials": credentials_of(ctx),
        "connection_name": ctx.params["connection_name"],
        "close_timeout_s": 0,
    }


def broker_options(*, required: bool, text: str) -> Callable[[_F], _F]:
    """Add ``--url``, repeatable and with this help text, ``--password-file``, and those of TLS."""
    return together(
        click.option(
            "--url",
            "urls",
            metavar="URL",
            multiple=True,
            required=required,
            envvar=URL_VARIABLE,
            callback=_with_passwords,
            help=text,
        ),
        click.option(
            "--password-file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            is_eager=True,  # before --url
            envvar=PASSWORD_VARIABLE,
            help=f"A file with the password for every URL. Also from {PASSWORD_VARIABLE}.",
        ),
        tls_options,
    )


url_option: Final = broker_options(
    required=True,
    text="amqp://user:password@host:port/vhost, or amqps://...; repeat it for failover. "
    f"Also from {URL_VARIABLE} (several URLs separated by spaces), which keeps the password "
    "out of the process list.",
)


def urls_as_given(ctx: click.Context) -> tuple[str, ...]:
    """The values of ``--url`` as the user gave them, without the content of the password file."""
    given: tuple[str, ...] = ctx.meta[_AS_GIVEN]
    return given


def credentials_of(ctx: click.Context) -> CredentialsProvider | None:
    """``--password-file`` as a provider, which reads it at each connection; None without it."""
    path: Path | None = ctx.params["password_file"]
    return None if path is None else PasswordFile(path)


def note_exposed_urls(urls: Sequence[str]) -> None:
    """Print a warning for each URL that sends a password unencrypted over a network."""
    for address in parse_addresses(urls):
        if address.is_exposed:
            print_note(f"warning: {words_of_exposed(address)}")


# ----------------------------------------------------------------------------------------- TLS


def tls_context(ctx: click.Context) -> CertificateFiles | None:
    """The TLS settings of a command; None: the system's authorities and no client certificate."""
    authorities, certificate, key = (
        ctx.params[name.removeprefix("--").replace("-", "_")] for name in _TLS
    )
    if key is not None and certificate is None:
        raise click.UsageError("--tls-key is the key of a certificate: give --tls-certificate too")
    if authorities is None and certificate is None:
        return None
    try:
        files = CertificateFiles(authorities=authorities, certificate=certificate, key=key)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
    if certificate is not None:
        note_exposure(key if key is not None else certificate)
    return files


# -------------------------------------------------------------------------- the outbox, its keys


def _database(ctx: click.Context, _option: click.Parameter, where: str | None) -> Database | None:
    ctx.meta[_OUTBOX_AS_GIVEN] = where
    return None if where is None else outbox_at(where)


def _inspected(_ctx: click.Context, _option: click.Parameter, where: str) -> Database:
    database = outbox_at(where)
    return database if database.file is None else outbox_at(database.file)  # named in full


def outbox_as_given(ctx: click.Context) -> str | None:
    """The value of `outbox_option` as the user gave it, which may be a URL with a password."""
    given: str | None = ctx.meta[_OUTBOX_AS_GIVEN]
    return given


def outbox_option(
    *, required: bool, text: str, callback: Callable[..., Database | None] = _database
) -> Callable[[_F], _F]:
    """Add ``--outbox`` with the given help text, and ``--config``, which may name it."""
    return together(
        config_option,
        click.option(
            "--outbox",
            "database",
            metavar="FILE|URL",
            type=click.Path(readable=False),  # a file that cannot be read is the outbox's error
            callback=callback,
            required=required,
            envvar=OUTBOX_VARIABLE,
            help=f"{text} Also from {OUTBOX_VARIABLE}.",
        ),
    )


inspected_option: Final = outbox_option(
    required=True,
    text="The outbox: a file, or postgresql://user@host/database.",
    callback=_inspected,
)
"""``--outbox``, for commands that inspect or change an outbox."""


def note_exposure(path: Path) -> None:
    """Print a warning if other users can read a file that holds a secret."""
    if words := exposure(path):
        print_note(f"warning: {words}")


def _keys(ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> OutboxKeys | None:
    if path is None:
        return None
    note_exposure(path)
    return OutboxKeys.read(path, accept_plaintext=ctx.params.get("accept_plaintext", False))


keys_option: Final = click.option(
    "--outbox-keys",
    "outbox_keys",
    metavar="FILE",
    type=click.Path(path_type=Path),
    callback=_keys,
    envvar=KEYS_VARIABLE,
    help="A file of keys that encrypt messages in the outbox, one per line: a name and 64 "
    f"hexadecimal digits. The first one encrypts new messages. Also from {KEYS_VARIABLE}.",
)
relay_keys_options: Final = together(
    keys_option,
    click.option(
        "--accept-plaintext",
        is_flag=True,
        is_eager=True,  # before --outbox-keys
        help="With keys: also accept messages in the outbox that are not encrypted; without this "
        "option such messages are parked, or left as they are by rekey.",
    ),
)
"""For commands that publish or re-encrypt."""

# ------------------------------------------------------------------------ publishing, printing

_COUNT: Final[dict[str, Any]] = {
    "metavar": "COUNT",
    "type": click.IntRange(min=1),
    "show_default": True,
}


def publishing_options(*, required: bool, outbox: str) -> Callable[[_F], _F]:
    """Add what the commands that publish have in common; `outbox` is the help of ``--outbox``."""
    return together(
        url_option,
        click.option(
            "--connection-name",
            metavar="TEXT",
            help="Name of the connection on RabbitMQ's management page; by default it names the "
            "outbox, the host and the process.",
        ),
        outbox_option(required=required, text=outbox),
        relay_keys_options,
        click.option(
            "--window-min",
            default=WINDOW_MIN,
            help="Limit of messages in flight at first; the window adapts from there.",
            **_COUNT,
        ),
        click.option(
            "--window",
            "window_max",
            default=WINDOW_MAX,
            help="Upper limit of messages in flight.",
            **_COUNT,
        ),
    )


def note_risks(urls: Sequence[str], database: Database | None) -> None:
    """Print what may be wrong before a command publishes.

    A note for each variable that is nearly one of the command's options, and a warning of what
    other users can read or harm.
    """
    for name, near in misspelled_variables(click.get_current_context().command):
        print_note(f"the variable {name} is not used; did you mean {near}?")
    note_exposed_urls(urls)
    if database is not None and (words := database.exposure()):
        print_note(f"warning: {words}")


tracing_option: Final = click.option(
    "--tracing",
    is_flag=True,
    help="Trace each attempt with OpenTelemetry, linked to the context in the message's headers. "
    "The OpenTelemetry SDK exports the spans: start the command with opentelemetry-instrument.",
)


def tracing_hooks(*, is_wanted: bool) -> list[object]:
    """The tracing hook, if it is wanted; else nothing."""
    if not is_wanted:
        return []
    try:
        from reliablepub.observe.tracing import Tracing, is_exported  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise Failure(str(error), Exit.BAD_INPUT) from None
    if not is_exported():
        print_note(
            "--tracing: no OpenTelemetry SDK is configured, so no span is exported; "
            "start the command with opentelemetry-instrument"
        )
    return [Tracing()]


limit_option: Final = click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000_000),
    default=50,
    show_default=True,
    help="Maximum number of rows.",
)
json_option: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON value on stdout."
)
form_option: Final = together(
    click.option("--json", "form", flag_value="json", help="Print one JSON array, on stdout."),
    click.option(
        "--csv", "form", flag_value="csv", help="Print CSV with a header line, on stdout."
    ),
)
"""How a list is printed; None, with neither option, is a table."""


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
