"""Options for TLS: certificate authorities and client certificate.

Knows: certificate files, and Python's `ssl`. Must never know: what is sent over TLS.

The files are read when a command begins, and again when a relay reopens.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import click

from reliablepub.cli.config import variable_of
from reliablepub.cli.options import note_exposure

_F = TypeVar("_F", bound=Callable[..., Any])

TLS: Final = {
    "--tls-ca": "Certificate authorities that verify the broker of an amqps URL, instead of the "
    "system's.",
    "--tls-certificate": "A client certificate, followed by its chain.",
    "--tls-key": "The key of the client certificate, if it is in a separate file.",
}


def tls_options(function: _F) -> _F:
    """Add ``--tls-ca``, ``--tls-certificate`` and ``--tls-key``, which `tls_context` reads."""
    for name, text in reversed(TLS.items()):
        function = click.option(
            name,
            metavar="FILE",
            type=click.Path(path_type=Path),
            expose_value=False,
            callback=_remember,
            envvar=variable_of(name),
            help=f"{text} PEM.",
        )(function)
    return function


def _remember(ctx: click.Context, option: click.Parameter, path: Path | None) -> None:
    ctx.meta[f"reliablepub.{option.opts[0]}"] = path


def tls_context(ctx: click.Context) -> ssl.SSLContext | None:
    """The TLS settings of a command; None: the system's authorities and no client certificate.

    Raises:
        click.UsageError: a file cannot be used; the message names it.
    """
    authorities, certificate, key = (ctx.meta.get(f"reliablepub.{name}") for name in TLS)
    if key is not None and certificate is None:
        raise click.UsageError("--tls-key is the key of a certificate: give --tls-certificate too")
    if authorities is None and certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as error:  # ssl.SSLError is an OSError
        raise click.UsageError(f"--tls-ca: cannot use {authorities}: {_reason(error)}") from None
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key, password=_refuse_to_ask)
        except OSError as error:
            files = f"{certificate} with {key}" if key is not None else str(certificate)
            problem = f"--tls-certificate: cannot use {files}: {_reason(error)}"
            raise click.UsageError(problem) from None
        note_exposure(key if key is not None else certificate)
    return context


def _refuse_to_ask() -> NoReturn:
    """Refuse an encrypted key.

    Without this callback OpenSSL prompts for the password on the terminal, and a service would wait
    for ever.
    """
    raise click.UsageError("the key of --tls-certificate is encrypted; give an unencrypted key")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a PEM file of that kind, or certificate and key do not match ({error.reason})"
    return error.strerror or str(error)
