"""Options from a TOML file and from variables: a file counts less than they, they less than flags.

Knows: TOML, and the options a click command has. Must never know: what an option is for.

The order is click's own: a flag, the variable, the ``default_map``, the default. The file becomes
the ``default_map``, so a value of it is read as if it had been typed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from reliablepub.transport.address import has_password

_F = TypeVar("_F", bound=Callable[..., Any])

PREFIX: Final = "RELIABLEPUB_"
"""Of every variable; the rest is the option's name, in capitals."""
CONFIG_VARIABLE: Final = "RELIABLEPUB_CONFIG"
TABLES: Final = ("publish", "relay")
"""Commands that read the file; each has a table for what is its own."""
SHARED: Final = (
    *("accept-plaintext", "outbox", "outbox-keys", "password-file"),
    *("tls-ca", "tls-certificate", "tls-key", "url", "window", "window-min"),
)
"""What stands above the tables, for all of these commands."""


class ConfigurableCommand(click.Command):
    """A command each of whose options has a variable, named by the same rule."""

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(*args, **settings)
        for option in self.params:
            if isinstance(option, click.Option) and option.envvar is None:
                option.envvar = variable_of(option.opts[0])


def variable_of(flag: str) -> str:
    """The variable that stands for a flag."""
    return PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def config_option(function: _F) -> _F:
    """``--config``; it stands above all other options, whose defaults it changes."""
    return click.option(
        "--config",
        metavar="FILE",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_use,
        envvar=CONFIG_VARIABLE,
        help="Options from a TOML file, for what neither a flag nor a variable sets. "
        f"Also from {CONFIG_VARIABLE}.",
    )(function)


def _use(ctx: click.Context, _option: click.Parameter, path: Path | None) -> None:
    if path is not None:
        ctx.default_map = _defaults(ctx.command, path)


def _defaults(command: click.Command, path: Path) -> dict[str, object]:
    """What the file sets, by parameter of the command."""
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
    own = tables.get(command.name or "", {})
    _refuse_unknown(own, options, f"{path}: in [{command.name}], unknown key")
    return {
        str(options[key].name): _value(path, key, value, options[key])
        for key, value in {**shared, **own}.items()
        if key in options
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path} is not TOML: {error}") from None


def _refuse_unknown(
    keys: Mapping[str, object],
    known: Collection[str],
    said: str,
    *,
    tables: Collection[str] = (),
) -> None:
    """A key that nobody reads is a setting that somebody believes in."""
    for key in keys:
        if key in known:
            continue
        if key in tables:
            raise click.UsageError(f"{said} {key!r}; it is a table: [{key}]")
        near = get_close_matches(key.replace("_", "-").lower(), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
        raise click.UsageError(f"{said} {key!r}; {hint}")


def _value(path: Path, key: str, value: object, option: click.Option) -> object:
    """The value as it would have been typed."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) for one in values):
        raise click.UsageError(f"{path}: {key} is a {type(value).__name__}, which no option takes")
    if isinstance(value, list) and not option.multiple:
        raise click.UsageError(f"{path}: {key} is a list, and takes one value")
    typed = [str(one) for one in values]
    if key == "url" and any(map(has_password, typed)):
        raise click.UsageError(
            f"{path}: url holds a password, and a configuration is read by many; put it into a "
            "file of its own and name that with password-file, or set RELIABLEPUB_URL"
        )
    return typed if option.multiple else typed[0]
