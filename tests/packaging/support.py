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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
RECORD: Final = Path(__file__).with_name("support.json")
PAGE: Final = ROOT / "docs" / "support.md"
VARIABLE: Final = "RELIABLEPUB_RECORD"
"""The target that a run is recorded as."""
PARTS: Final = "RELIABLEPUB_RECORD_PARTS"
"""The directory where each run of a target that has several leaves how many tests have passed."""
BEGIN, END = "<!-- what ran -->\n", "<!-- end of what ran -->\n"
LIBRARIES: Final = (
    *("pika", "aio-pika", "psycopg", "pyspark", "celery", "django", "sqlalchemy", "starlette"),
    *("dramatiq", "taskiq"),
)
SERVERS: Final = {
    "RabbitMQ": ("RELIABLEPUB_TEST_RABBITMQ_ROOT", "rabbitmq-server"),
    "PostgreSQL": ("RELIABLEPUB_TEST_POSTGRES_ROOT", "postgresql-[0-9]*"),
}
"""Debian's packages, and the variable that names the directory of another Debian."""


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


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


def found() -> dict[str, str]:
    """The versions of what a run here uses."""
    servers = {name: _server(*where) for name, where in SERVERS.items()}
    libraries = {name: _installed(name) for name in LIBRARIES}
    versions = {"Python": platform.python_version(), "SQLite": sqlite3.sqlite_version}
    return {name: text for name, text in (versions | servers | libraries).items() if text}


def record(target: str, passed: int) -> None:
    """Write down that a run has passed."""
    today = datetime.now(UTC).date().isoformat()
    runs: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    runs[target] = {"date": today, "passed": passed, "versions": found()}
    RECORD.write_text(json.dumps(dict(sorted(runs.items())), indent=1) + "\n", encoding="utf-8")


def finished(session: pytest.Session, status: int) -> None:
    """For `pytest_sessionfinish`: record the run if that is asked for, and all tests passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if status != pytest.ExitCode.OK or reporter is None:
        return
    passed = len(reporter.stats.get("passed", ()))
    if target := os.environ.get(VARIABLE):
        record(target, passed)
    if parts := os.environ.get(PARTS):
        (Path(parts) / str(os.getpid())).write_text(str(passed))


def record_parts(target: str, parts: Path) -> None:
    """Write down that all runs of a target have passed."""
    record(target, sum(int(path.read_text()) for path in parts.iterdir()))


def rows() -> Iterator[str]:
    runs = json.loads(RECORD.read_text(encoding="utf-8"))
    shown = ("Python", "SQLite", *SERVERS)
    yield f"| run | {' | '.join(shown)} | libraries | tests passed | on |\n"
    yield f"|---|{'---|' * len(shown)}---|---:|---|\n"
    for target, run in runs.items():
        versions = run["versions"]
        name, _, which = target.partition(" ")
        libraries = ", ".join(f"{one} {versions[one]}" for one in LIBRARIES if one in versions)
        cells = [versions.get(one, "") for one in shown]
        cells = [f"`make {name}`{which and f' on {which}'}", *cells, libraries]
        yield f"| {' | '.join(cells)} | {run['passed']} | {run['date']} |\n"


def page(text: str) -> str:
    """The page with today's table."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + "".join(rows()) + END + rest.partition(END)[2]


if __name__ == "__main__":
    if sys.argv[1:]:
        record_parts(sys.argv[1], Path(sys.argv[2]))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
