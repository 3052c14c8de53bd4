"""The page docs/client-conformance.md, made of cells.

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

HEAD = """\
# What clients tell their callers

What seven Python publishers report to their callers when a broker misbehaves, and whether it is
true. Each cell of the first table shows the worst result among the messages of a script; the
scripts follow, where a report without a judgment is true. The broker is
[FakeBroker](fake-broker.md), whose history is the truth.

| | |
|---|---|
| true | reported as confirmed, and a queue has it; or as a failure, and no queue has it |
| unsure | an error that leaves the outcome open: the caller knows to send the message again |
| hung | no report within six seconds |
| **false failure** | reported as refused, and a queue has it |
| **false confirm** | reported as confirmed, and no queue has it |
| **lost** | not reported, and no queue has it |

"""

USED = """\
## How each was used

As its own documentation recommends for confirms, with a timeout of one second where it offers one
for a confirm. The application continues after an error, and reopens closed channels and
connections. The code is in `tests/clients`, a module for each client. `make client-table` writes
this page in about three minutes; each test run repeats part of it and compares.

"""


def render(cells: Sequence[Cell]) -> str:
    """All of it; no date, so that the same facts are the same page."""
    clients = list(dict.fromkeys(cell.client for cell in cells))
    scripts = list(dict.fromkeys(cell.script.title for cell in cells))
    by_place = {(cell.script.title, cell.client): cell for cell in cells}
    overview = [_row("", *clients), _row(*["---"] * (len(clients) + 1))]
    overview += [
        _row(title, *(_shown(by_place[title, client].worst) for client in clients))
        for title in scripts
    ]
    parts = [HEAD, *overview]
    for title in scripts:
        of_it = [by_place[title, client] for client in clients]
        parts.append(f"\n## {title[0].upper()}{title[1:]}\n\n{of_it[0].script.story}\n\n")
        names = [letter.name for letter in of_it[0].script.letters]
        parts += [_row("", *names), _row(*["---"] * (len(names) + 1))]
        parts += rows(of_it)
    parts += ["\n", USED, _row("client", "version", "how"), _row("---", "---", "---")]
    parts += [_use(client) for client in clients]
    return "".join(parts)


def rows(cells: Sequence[Cell]) -> list[str]:
    """What the clients told of each letter of one script; those that told alike share a row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for cell in cells:
        alike.setdefault(tuple(fields(cell)), []).append(cell.client)
    return [_row(", ".join(clients), *told) for told, clients in alike.items()]


def fields(cell: Cell) -> list[str]:
    """What one client told of each letter of one script."""
    fields = []
    for name, judgment in cell.judgments.items():
        told = cell.told.get(name)
        if told is None:
            fields.append(_shown(judgment))
        elif judgment in HONEST:
            fields.append(told)
        else:
            fields.append(f"{told}: {_shown(judgment)}")
    return fields


def versions(client: str) -> str:
    """What of a client is installed here, as `pika 1.4.4`."""
    module = adapter(client)
    names = [module.DISTRIBUTION, *getattr(module, "TRANSPORTS", ())]
    return ", ".join(f"{name} {version(name)}" for name in names)


def _use(client: str) -> str:
    how = adapter(client).__doc__
    assert how is not None
    return _row(client, versions(client), " ".join(how.split()))


def _shown(judgment: Judgment) -> str:
    return judgment.value if judgment in HONEST | {Judgment.HUNG} else f"**{judgment.value}**"


def _row(*fields: str) -> str:
    return f"| {' | '.join(fields)} |\n".replace("|  |", "| |")
