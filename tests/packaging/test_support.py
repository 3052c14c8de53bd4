"""docs/support.md: what ran, and why each upper bound."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging import support

TEXT = support.PAGE.read_text(encoding="utf-8")
PROJECT = tomllib.loads((support.ROOT / "pyproject.toml").read_text())["project"]


def test_the_table_is_what_was_recorded() -> None:
    assert support.page(TEXT) == TEXT, "python -m tests.packaging.support"


def test_each_upper_bound_has_a_reason() -> None:
    extras = PROJECT["optional-dependencies"].values()
    asked = map(
        Requirement, [*PROJECT["dependencies"], *(one for extra in extras for one in extra)]
    )
    bounds = {}
    for one in asked:
        for bound in one.specifier:
            if bound.operator in {"<", "<="}:
                bounds[canonicalize_name(one.name)] = bound.version
    table = TEXT.partition("## Why each upper bound")[2]
    assert dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+)[ ,|]", table, re.MULTILINE)) == bounds


@pytest.mark.parametrize(("name", "parts"), [("Python", 2), ("RabbitMQ", 2), ("PostgreSQL", 1)])
def test_what_is_called_tested_was_recorded(name: str, parts: int) -> None:
    """On the page, and on the first page."""
    runs = json.loads(support.RECORD.read_text()).values()
    ran = {".".join(run["versions"].get(name, "").split(".")[:parts]) for run in runs} - {""}
    told = re.findall(rf"^\| {name} \|[^|]*\|([^|]*)\|$", TEXT, re.MULTILINE)[0]
    assert set(re.findall(r"[\d.]+", told)) == ran
    first_page = (support.ROOT / "README.md").read_text()
    assert name == "PostgreSQL" or f"{name} {told.strip()}" in first_page.replace("\n", " ")


def test_each_package_that_a_plain_install_brings_has_its_reason() -> None:
    lock = (support.ROOT / ".ci" / "lock" / "base.txt").read_text()
    table = TEXT.partition("## What a plain install brings")[2].partition("\n\nA separate")[0]
    rows = table.partition("|---|---|---|\n")[2].splitlines()
    told = {
        one for row in rows for one in re.findall(r"[a-z][\w-]+", " ".join(row.split("|")[1::2]))
    }
    assert told == set(re.findall(r"^([\w-]+)==", lock, re.MULTILINE))


def test_the_oldest_of_every_extra_is_tested_spark_aside() -> None:
    recipe = (support.ROOT / "Makefile").read_text().partition("--resolution=lowest-direct")[2]
    named = set(re.findall(r"--extra=(\w+)", recipe.partition("--output-file")[0]))
    assert named == set(PROJECT["optional-dependencies"]) - {"spark"}


def test_the_last_run_of_a_target_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "support.json"
    path.write_text('{"python-3.9": {"date": "2020-01-01", "passed": 5, "versions": {}}}')
    monkeypatch.setattr(support, "RECORD", path)
    versions = support.found({"rabbit"})
    support.record("rabbitmq-versions sid", 3, versions)
    support.record("rabbitmq-versions sid", 4, versions)
    support.record("python-3.9", 2, versions)
    runs = json.loads(path.read_text())
    assert [run["passed"] for run in runs.values()] == [2, 4]
    assert runs["python-3.9"]["versions"]["pika"]
    assert runs["python-3.9"]["versions"]["RabbitMQ"]
    assert "PostgreSQL" not in runs["python-3.9"]["versions"], "no test used it"
    assert "| `make rabbitmq-versions` on sid | " in "".join(support.rows())


def test_several_runs_are_recorded_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own, as `make test RECORD=1` runs them."""
    monkeypatch.setattr(support, "RECORD", tmp_path / "support.json")
    support.RECORD.write_text("{}")
    parts = tmp_path / "parts"
    parts.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != support.VARIABLE}
    for choice in ("upper_bound", "brings_has", "no_test_has_this_name"):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", choice]
        subprocess.run(
            [*command, __file__],
            cwd=support.ROOT,
            env=environment | {support.PARTS: str(parts)},
            stdout=subprocess.DEVNULL,
            check=False,
        )
    support.record_parts("test", parts)
    assert json.loads(support.RECORD.read_text())["test"]["passed"] == 2
