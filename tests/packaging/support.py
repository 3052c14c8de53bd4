"""What was tested on which versions, as a table: `make spark-versions RECORD=1` and the like.

Knows: how to find the versions of what a run of the tests uses. Must never know: what is tested.

A run that passes writes its versions into ``support.json`` beside this module, under the name of
its target.

    python -m tests.packaging.support                 # writes docs/support.md anew
    python -m tests.packaging.support TARGET FOLDER   # and before, records several runs as one
"""

import json
import os
import platform
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT: Final = Path(__file__).parents[2]
RECORD: Final = Path(__file__).with_name("support.json")
PAGE: Final = ROOT / "docs" / "support.md"
VARIABLE: Final = "RELIABLEPUB_RECORD"
"""The target that a run is recorded as."""
PARTS: Final = "RELIABLEPUB_RECORD_PARTS"
"""The directory where each run of a target that has several leaves how many tests have passed."""
BEGIN, END = "<!-- what ran -->\n", "<!-- end of what ran -->\n"
SERVERS: Final = {
    "RabbitMQ": ("rabbit", "RELIABLEPUB_TEST_RABBITMQ_ROOT", "rabbitmq-server"),
    "PostgreSQL": ("postgres", "RELIABLEPUB_TEST_POSTGRES_ROOT", "postgresql-[0-9]*"),
}
"""The mark of the tests that use one, the variable that names the directory of another Debian, and
Debian's package."""


def _libraries() -> dict[str, str]:
    """The libraries that this project asks for, as far as this process has imported them."""
    asked = {canonicalize_name(Requirement(one).name) for one in requires("reliablepub") or ()}
    imported = {
        canonicalize_name(name)
        for module, names in packages_distributions().items()
        if module in sys.modules
        for name in names
    }
    return {name: version(name) for name in sorted(asked & imported)}


def _server(variable: str, package: str) -> str:
    """The version of a server, without what Debian adds; empty without such a package."""
    root = os.environ.get(variable, "/")
    query = [
        "dpkg-query",
        f"--admindir={root}/var/lib/dpkg",
        "--show",
        "--showformat=${Version}\\n",
    ]
    try:
        found = subprocess.run([*query, package], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return max(line.partition("-")[0].rpartition(":")[2] for line in found.splitlines())


def found(marks: set[str]) -> dict[str, str]:
    """The versions of what a run here has used; `marks` are those of its tests."""
    servers = {name: _server(*where) for name, (mark, *where) in SERVERS.items() if mark in marks}
    versions = {"Python": platform.python_version(), "SQLite": sqlite3.sqlite_version}
    return versions | servers | _libraries()


def record(target: str, passed: int, versions: dict[str, str]) -> None:
    """Write down that a run has passed."""
    today = datetime.now(UTC).date().isoformat()
    runs: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    runs[target] = {"date": today, "passed": passed, "versions": versions}
    RECORD.write_text(json.dumps(dict(sorted(runs.items())), indent=1) + "\n", encoding="utf-8")


def finished(session: pytest.Session, status: int) -> None:
    """For `pytest_sessionfinish`: record the run if that is asked for, and all tests passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if status != pytest.ExitCode.OK or reporter is None:
        return
    target, parts = os.environ.get(VARIABLE), os.environ.get(PARTS)
    if not target and not parts:
        return
    passed = len(reporter.stats.get("passed", ()))
    versions = found({mark.name for item in session.items for mark in item.iter_markers()})
    if target:
        record(target, passed, versions)
    if parts:
        (Path(parts) / str(os.getpid())).write_text(json.dumps([passed, versions]))


def record_parts(target: str, parts: Path) -> None:
    """Write down that all runs of a target have passed."""
    passed, versions = 0, dict[str, str]()
    for path in parts.iterdir():
        of_part, used = json.loads(path.read_text())
        passed += of_part
        versions |= used
    record(target, passed, versions)


def rows() -> Iterator[str]:
    runs = json.loads(RECORD.read_text(encoding="utf-8"))
    shown = ("Python", "SQLite", *SERVERS)
    yield f"| run | {' | '.join(shown)} | tests passed | on |\n"
    yield f"|---|{'---|' * len(shown)}---:|---|\n"
    for target, run in runs.items():
        name, _, which = target.partition(" ")
        cells = [run["versions"].get(one, "") for one in shown]
        cells = [f"`make {name}`{which and f' on {which}'}", *cells]
        yield f"| {' | '.join(cells)} | {run['passed']} | {run['date']} |\n"
    yield "\n| library | versions that ran |\n|---|---|\n"
    for library in sorted({name for run in runs.values() for name in run["versions"]} - {*shown}):
        ran = {run["versions"].get(library, "") for run in runs.values()} - {""}
        yield f"| {library} | {', '.join(sorted(ran, key=Version))} |\n"


def page(text: str) -> str:
    """The page with today's table."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + "".join(rows()) + END + rest.partition(END)[2]


if __name__ == "__main__":
    if sys.argv[1:]:
        record_parts(sys.argv[1], Path(sys.argv[2]))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
