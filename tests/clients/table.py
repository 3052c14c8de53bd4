"""The whole table: every client plays every script, each with a broker and a process of its own.

Run as `make client-table`, which writes the tables of docs/client-conformance.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from reliablepub.testing import FakeBroker
from tests.clients import page
from tests.clients.adapters import MODULES
from tests.clients.cell import HUNG
from tests.clients.judge import Judgment, judge
from tests.clients.scripts import SCRIPTS, Script

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "client-conformance.md"
WORKERS = 4


@dataclass(frozen=True)
class Cell:
    """What one client told of each letter of a script, and what that was worth."""

    script: Script
    client: str
    told: dict[str, str]
    judgments: dict[str, Judgment]

    @property
    def worst(self) -> Judgment:
        """The worst of its judgments."""
        return max(self.judgments.values(), key=list(Judgment).index)


def play(client: str, script: Script) -> Cell:
    """One cell."""
    with FakeBroker() as broker:
        for letter in script.letters:
            if letter.name != "nowhere" and not letter.exchange:
                broker.declare_queue(letter.name)
        broker.inject(*script.faults)
        number = str(SCRIPTS.index(script))
        command = [sys.executable, "-m", "tests.clients.cell", client, broker.url, number]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if script.act is not None:
            script.act(broker)
        output, errors = process.communicate()  # it watches itself
        assert process.returncode in (0, HUNG), errors  # the adapter itself is broken
        has_ended = process.returncode == 0
        published = broker.published
    told = dict(json.loads(line) for line in output.splitlines())
    judgments = {
        letter.name: judge(letter, told.get(letter.name), published, has_ended=has_ended)
        for letter in script.letters
    }
    return Cell(script, client, told, judgments)


def play_all(clients: Iterable[str], scripts: Iterable[Script]) -> list[Cell]:
    """Cells by script, then by client; most of them only wait, so several at a time."""
    pairs = [(client, script) for script in scripts for client in clients]
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(lambda pair: play(*pair), pairs))


def main() -> None:
    """Play all, and write the tables of the page."""
    PAGE.write_text(page.render(PAGE.read_text(), play_all(MODULES, SCRIPTS)))


if __name__ == "__main__":
    main()
