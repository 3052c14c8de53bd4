"""The processor's instructions a message, in Python, SQLite and the C library alike, by valgrind.

The same on each run, however busy the machine is, so it shows a difference of one in a hundred.
What is counted is everything but the system calls: from the message to its last confirm, in one
thread, without a network (`tests.speed.unplugged`). Starting Python is taken off, by two runs of
which one has twice as many messages. Needs valgrind; takes minutes.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.speed.measuring import Goal, check, print_table, spaced
from tests.speed.unplugged import PROGRAMS, ROOT

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1_800)]

COUNT = 2_000
PEER = "pika"
LIMITS = {"memory": 0.51, "disk": 0.78}
"""A tenth above what was counted with Python 3.11 when it was written."""


def test_beside_a_window_by_hand(tmp_path: Path) -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("no valgrind here: apt-get install valgrind")
    a_message = {
        program: (counted(program, 2 * COUNT, tmp_path) - counted(program, COUNT, tmp_path)) / COUNT
        for program in PROGRAMS
    }
    print_table(
        ("", "instructions a message", "of pika's"),
        [
            (program, spaced(count), f"{count / a_message[PEER]:.2f}")
            for program, count in a_message.items()
        ],
    )
    check(
        [
            Goal(
                f"{program} / {PEER}",
                a_message[program] / a_message[PEER],
                most,
                most,
                is_most=True,
            )
            for program, most in LIMITS.items()
        ]
    )


def counted(program: str, count: int, folder: Path) -> int:
    command = [
        *("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"),
        *(sys.executable, "-m", "tests.speed.unplugged", program, str(count), str(folder)),
    ]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    found = re.search(r"I +refs: +([\d,]+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1].replace(",", ""))
