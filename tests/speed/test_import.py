"""What `import reliablepub` costs a program that starts, beside other clients."""

import statistics
import subprocess
import sys

import pytest

from tests.speed.measuring import Goal, check, print_table, processor_s

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]

ROUNDS = 9
NOTHING = "pass"
OURS = "import reliablepub"
PROGRAMS = (NOTHING, "import asyncio", "import pika", "import aio_pika", OURS)


def test_the_first_import() -> None:
    taken_ms: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    for _ in range(ROUNDS):
        for program, taken in taken_ms.items():
            before_s = processor_s()
            subprocess.run([sys.executable, "-c", program], check=True)
            taken.append(1_000 * (processor_s() - before_s))
    print_table(
        ("", "least processor time", "median"),
        [
            (f"`{program}`", f"{min(taken):.0f} ms", f"{statistics.median(taken):.0f} ms")
            for program, taken in taken_ms.items()
        ],
    )
    ours_ms = min(taken_ms[OURS]) - min(taken_ms[NOTHING])
    check([Goal(f"`{OURS}`, ms of processor time", ours_ms, 150.0, is_most=True)])
