"""A group of commands, each in a module of its own that is imported when it is asked for.

Knows: names and where their commands are. Must never know: what they do.

So starting one command does not load the others, and a new command is one line in one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """Commands by name, loaded when asked for.

    Args:
        table: ``module:attribute`` of each command.
        settings: as for `click.Group`.
    """

    def __init__(self, *args: Any, table: Mapping[str, str], **settings: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(*args, **settings)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, sorted."""
        del ctx
        return sorted(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one command; None where there is none of this name."""
        del ctx
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command
