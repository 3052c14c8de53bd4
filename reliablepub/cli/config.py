"""Options from environment variables and from a TOML file.

Knows: TOML, and the options of a click command. Must never know: what an option is for.

The precedence is click's: flag, environment variable, ``default_map``, default. The file becomes
the ``default_map``, so click parses its values like values typed on the command line.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import click

from reliablepub.cli.passwords import has_outbox_password
from reliablepub.transport.address import has_password

PREFIX: Final = "RELIABLEPUB_"
"""Prefix of every variable; the option's name follows, in capitals with ``_`` for ``-``."""
_NEAR: Final = 0.8
"""How alike a misspelled name is, for `difflib`."""
CONFIG_VARIABLE: Final = "RELIABLEPUB_CONFIG"
TABLES: Final = ("publish", "relay")
"""Commands that publish; each has a table for its own options."""
SHARED: Final = (
    *("accept-plaintext", "connection-name", "json", "outbox", "outbox-keys", "password-file"),
    *("tls-ca", "tls-certificate", "tls-key", "tracing", "url", "window", "window-min"),
)
"""Top-level keys of the file: options that all of these commands have."""
LOOKED_AT: Final = (
    *("outbox", "outbox-keys", "password-file", "tls-ca", "tls-certificate", "tls-key", "url"),
)
"""What the commands that inspect or change the relay's outbox read, also from its table."""
_PASSWORDS: Final = {
    "outbox": (
        has_outbox_password,
        "put it into ~/.pgpass or PGPASSWORD, or set RELIABLEPUB_OUTBOX",
    ),
    "url": (
        has_password,
        (
            "put the password into a separate file and name it with password-file, or set "
            "RELIABLEPUB_URL"
        ),
    ),
}
"""By option: whether its URL holds a password, and where that belongs."""
_PIPED: Final[dict[Path, dict[str, Any]]] = {}
"""What was read from each path that is no regular file: a pipe can be read only once, and a relay
parses its options again after SIGHUP."""


def misspelled_variables(command: click.Command) -> Iterator[tuple[str, str]]:
    """Yield variables that no option has, and the variable of an option that each is nearly.

    Others with this prefix may be of another command, or of Kubernetes (service links).
    """
    known = {str(option.envvar) for option in command.params if option.envvar}
    unset = [name.removeprefix(PREFIX) for name in known - os.environ.keys()]
    for name in sorted(os.environ.keys() - known):
        if name.startswith(PREFIX):
            for near in get_close_matches(name.removeprefix(PREFIX), unset, n=1, cutoff=_NEAR):
                yield name, PREFIX + near


def variable_of(flag: str) -> str:
    """The environment variable of a flag: ``--health-port`` is ``RELIABLEPUB_HEALTH_PORT``."""
    return PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def _use(ctx: click.Context, _option: click.Parameter, path: Path | None) -> None:
    if path is not None:
        ctx.default_map = _defaults(ctx.command, path)


config_option: Final = click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_use,
    envvar=CONFIG_VARIABLE,
    help="A TOML file with options; flags and environment variables override it. "
    f"Also from {CONFIG_VARIABLE}.",
)
"""``--config``, which click handles before all other options: it sets their defaults."""


def _defaults(command: click.Command, path: Path) -> dict[str, object]:
    """The values that the file sets for this command, by parameter name."""
    file = _read(path)
    options = {
        name.removeprefix("--"): option
        for option in command.params
        if isinstance(option, click.Option)
        for name in option.opts
        if name.startswith("--") and name != "--config"
    }
    tables = {key: value for key, value in file.items() if isinstance(value, dict)}
    shared = {key: value for key, value in file.items() if key not in tables}
    _refuse_unknown(shared, SHARED, f"{path}: unknown key", tables=TABLES)
    _refuse_unknown(tables, TABLES, f"{path}: unknown table")
    if command.name in TABLES:
        own = tables.get(command.name, {})
        _refuse_unknown(own, options, f"{path}: in [{command.name}], unknown key")
    else:
        own = tables.get("relay", {})
        options = {key: option for key, option in options.items() if key in LOOKED_AT}
    return {
        str(options[key].name): _value(path, key, value, options[key])
        for key, value in {**shared, **own}.items()
        if key in options
    }


def _read(path: Path) -> dict[str, Any]:
    if path in _PIPED:
        return _PIPED[path]
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                _PIPED[path] = values
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # ValueError: also of an endless number
        raise click.UsageError(f"{path} is not valid TOML: {error}") from None
    return values


def _refuse_unknown(
    keys: Mapping[str, object], known: Collection[str], said: str, *, tables: Collection[str] = ()
) -> None:
    """Raise for an unknown key, with the nearest known one.

    An ignored key would be a setting that the operator believes is in effect.
    """
    for key in keys:
        if key in known:
            continue
        if key in tables:
            raise click.UsageError(f"{said} {key!r}; it is a table: [{key}]")
        near = get_close_matches(key.replace("_", "-").lower(), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
        raise click.UsageError(f"{said} {key!r}; {hint}")


def _value(path: Path, key: str, value: object, option: click.Option) -> object:
    """The value as text, as it would be typed on the command line."""
    values = value if isinstance(value, list) else [value]
    values = [one.isoformat() if isinstance(one, datetime) else one for one in values]
    if not all(isinstance(one, str | int | float) for one in values):
        raise click.UsageError(
            f"{path}: {key} is of type {type(value).__name__}, which no option takes"
        )
    if isinstance(value, list) and not option.multiple:
        raise click.UsageError(f"{path}: {key} is a list; it takes one value")
    typed = [str(one) for one in values]
    if key in _PASSWORDS:
        has_one, instead = _PASSWORDS[key]
        if any(map(has_one, typed)):
            raise click.UsageError(
                f"{path}: {key} holds a password, which readers of the configuration would see; "
                f"{instead}"
            )
    return typed if option.multiple else typed[0]
