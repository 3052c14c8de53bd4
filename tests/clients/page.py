"""The tables of docs/client-conformance.md, made of cells.

It must never know how a cell was played.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from tests.clients.adapters import adapter
from tests.clients.judge import HONEST, Judgment

if TYPE_CHECKING:
    from tests.clients.table import Cell


def render(written: str, cells: Sequence[Cell]) -> str:
    """The page with its tables written anew; no date, so that the same facts are the same page."""
    clients = list(dict.fromkeys(cell.client for cell in cells))
    stories = {cell.script.title: cell.script.story for cell in cells}
    worst = {(cell.script.title, cell.client): shown(cell.worst) for cell in cells}
    tables = {
        "results": [
            _row("", *clients),
            _row(*["---"] * (len(clients) + 1)),
            *(_row(title, *(worst[title, client] for client in clients)) for title in stories),
        ],
        "scripts": [_row("", ""), _row("---", "---"), *(_row(*both) for both in stories.items())],
        "clients": [_row("client", "version", "how"), _row(*["---"] * 3), *map(_use, clients)],
    }
    for name, rows in tables.items():
        before, begin, rest = written.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        written = "".join((before, begin, *rows, end, after))
    return written


def versions(client: str) -> str:
    """What of a client is installed here, as `pika 1.4.4`."""
    module = adapter(client)
    names = [module.DISTRIBUTION, *getattr(module, "TRANSPORTS", ())]
    return ", ".join(f"{name} {version(name)}" for name in names)


def _use(client: str) -> str:
    how = adapter(client).__doc__
    assert how is not None
    return _row(client, versions(client), " ".join(how.split()))


def shown(judgment: Judgment) -> str:
    """A judgment as the page has it."""
    return judgment.value if judgment in HONEST | {Judgment.HUNG} else f"**{judgment.value}**"


def _row(*fields: str) -> str:
    return f"| {' | '.join(fields)} |\n".replace("|  |", "| |").replace("|  |", "| |")
