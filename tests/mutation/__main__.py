"""Change the code of the core and the outbox in small ways, and see whether mypy or a test notices.

Run as `make mutants`, or `make mutants ONLY=reliablepub/_core/confirms.py` for some modules. It
answers with a table, and with every survivor that `survivors.toml` does not explain.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mutmut.__main__ import _run as run_mutmut
from mutmut.configuration import config

from tests.mutation.operators import with_decorated_functions
from tests.mutation.runner import with_collected_tests
from tests.mutation.types import with_mypy
from tests.mutation.verdict import forget_survivors, room

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "mutation"
SCORE_MIN = 0.95
# Unless TMPDIR says otherwise: most mutants of the outbox die within a few turns, and a turn is a
# sync.
RAM = Path("/dev/shm")

CHECKPOINTS = "tests/outbox/test_checkpoints.py"
# Which tests a room's mutants have to face. Not those that kill processes, break disks or search
# at random for many seconds: what only they notice deserves a quick test of its own.
TESTS = {
    "reliablepub/_core": [
        "tests/core",
        "--deselect=tests/core/test_confirms_model.py::test_a_long_random_run",
    ],
    "reliablepub/outbox": [
        "tests/outbox",
        "tests/relay",
        *(f"tests/cli/test_{name}.py" for name in ("looking", "stepping_in", "transfer")),
        *(
            f"--ignore=tests/outbox/test_{name}.py"
            for name in ("crash", "faults", "frameworks", "power_loss", "speed", "store_model")
        ),
        "--deselect=tests/outbox/test_backlog.py::test_a_backlog_needs_little_memory",
        # It counts words in the source, which the mutants repeat.
        f"--deselect={CHECKPOINTS}::test_a_checkpoint_is_asked_for_in_one_place_only",
        "--deselect=tests/outbox/test_salvage.py::test_one_damaged_page_costs_its_own_rows_only",
        "--deselect=tests/cli/test_stepping_in.py::test_who_waits_is_told",
        "--deselect=tests/cli/test_stepping_in.py::test_people_step_in_while_a_relay_publishes",
    ],
}


def main(targets: Sequence[str]) -> int:
    """Each room in a process of its own, since mutmut keeps what it knows in globals."""
    rooms = {
        folder: [target for target in targets or TESTS if target.startswith(folder)]
        for folder in TESTS
    }
    rooms = {folder: wanted for folder, wanted in rooms.items() if wanted}
    if not rooms:
        sys.exit(f"name modules below {' or '.join(TESTS)}")
    if len(rooms) == 1:
        ((folder, wanted),) = rooms.items()
        return run(folder, [target for target in wanted if target != folder])
    command = [sys.executable, "-m", "tests.mutation"]
    return max(subprocess.call([*command, *wanted], cwd=ROOT) for wanted in rooms.values())


def run(folder: str, modules: Sequence[str]) -> int:
    """Of some modules, or of all, what has changed or was not run yet, and the survivors again."""
    _enter(WORK / folder)
    config().only_mutate[:] = [f"{folder}/*"]
    config().pytest_add_cli_args_test_selection[:] = TESTS[folder]
    names = [module.removesuffix(".py").replace("/", ".") + ".*" for module in modules]
    forget_survivors()
    fast = RAM if RAM.is_dir() and "TMPDIR" not in os.environ else None
    # Errors: a mutant may die while a test has a file system mounted there.
    with tempfile.TemporaryDirectory(dir=fast, ignore_cleanup_errors=True) as temporary:
        Path(temporary).chmod(0o755)  # as /tmp: some tests are another user for a moment
        os.environ["TMPDIR"] = tempfile.tempdir = temporary
        with with_decorated_functions(), with_mypy(folder), with_collected_tests():
            run_mutmut(names, max_children=None)
    found = room(Path(folder))
    found.show()
    is_good = found.noticed + found.explained >= SCORE_MIN * found.mutants
    return 0 if is_good and not found.outdated else 1


def _enter(work: Path) -> None:
    """Go where mutmut may leave its copies."""
    (work / "mutants").mkdir(parents=True, exist_ok=True)
    for name in ("pyproject.toml", "reliablepub", "tests", "mutants/docs"):
        if not (work / name).exists():
            (work / name).symlink_to(ROOT / name.removeprefix("mutants/"))
    for file in ROOT.glob("reliablepub/**/*.sql"):  # mutmut would keep those of the first run
        copy = work / "mutants" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    os.chdir(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
