"""One process that has everything imported and only forks, so that a life costs milliseconds.

A module of lives calls `main` when it is run. It knows how a life is described from process to
process; it must never know what one does.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self


class Nursery:
    """The process that forks, run from a module of lives."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def fork(self, life: Any) -> int:
        """Fork a life, which is a dataclass; what its module answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(life)), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def main(fork: Callable[..., int]) -> None:
    """Fork a life for every line, by its fields, and print the answer."""
    assert threading.active_count() == 1, "a process with threads must not fork"
    for line in sys.stdin:
        print(fork(**json.loads(line)), flush=True)
