"""What `import reliablepub` costs a program that starts, compared with other clients.

Everything is compiled before, into a directory of the test's: as pip leaves what it has installed.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.speed.measuring import Goal, check, print_table, processor_s

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]

ROUNDS = 9
NOTHING = "pass"
PIKA = "import pika"
OURS = "import reliablepub"
PUBLISHER = "from reliablepub import Publisher"
BOTH = f"{PIKA}; {PUBLISHER}"
PROGRAMS = (NOTHING, "import asyncio", PIKA, "import aio_pika", OURS, PUBLISHER, BOTH)


def test_the_first_import(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def cost_ms(program: str) -> float:
        before_s = processor_s()
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        return 1_000 * (processor_s() - before_s)

    for program in PROGRAMS:
        cost_ms(program)  # compiles
    taken_ms: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    for _ in range(ROUNDS):
        for program, taken in taken_ms.items():
            taken.append(cost_ms(program))
    print_table(
        ("", "least CPU time", "median"),
        [
            (f"`{program}`", f"{min(taken):.0f} ms", f"{statistics.median(taken):.0f} ms")
            for program, taken in taken_ms.items()
        ],
    )
    pika_ms = min(taken_ms[PIKA]) - min(taken_ms[NOTHING])
    ours_ms = min(taken_ms[OURS]) - min(taken_ms[NOTHING])
    beside_ms = min(taken_ms[BOTH]) - min(taken_ms[PIKA])
    check(
        [
            Goal(f"`{OURS}`, of `{PIKA}`", ours_ms / pika_ms, 0.6, is_most=True),
            Goal(f"`{PUBLISHER}` beside pika, of `{PIKA}`", beside_ms / pika_ms, 1.2, is_most=True),
        ]
    )
