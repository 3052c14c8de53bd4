"""What CI installs: pinned and hashed, and what pyproject.toml asks for. Mended by `make lock`."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.conftest import ROOT

LOCK = ROOT / ".ci" / "lock"
FILES = [pytest.param(path, id=path.name) for path in sorted(LOCK.glob("*.txt"))]
PYTHONS = ("3.11.0", "3.11.9", "3.12.0", "3.13.0", "3.14.0")
BACKENDS = {"editables", "hatchling", "pip", "setuptools"}


def pins(path: Path) -> Iterator[tuple[Requirement, list[str]]]:
    """Each pin of a lock, with its hashes."""
    lines = "\n".join(line for line in path.read_text().splitlines() if "#" not in line)
    for pin in lines.replace("\\\n", " ").splitlines():
        requirement, *hashes = re.split(r"\s+--hash=", pin.strip())
        yield Requirement(requirement), hashes


def locked(path: Path, python: str) -> dict[str, str]:
    """The version that this Python gets of each package."""
    environment = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin, _ in pins(path)
        if pin.marker is None or pin.marker.evaluate(environment)
    }


def asked_for() -> list[Requirement]:
    """Every dependency of the project, its extras and its dependency groups."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, groups = settings["project"], settings["dependency-groups"]
    lists = [project["dependencies"], *project["optional-dependencies"].values(), *groups.values()]
    return [Requirement(text) for texts in lists for text in texts if isinstance(text, str)]


@pytest.mark.parametrize("path", FILES)
def test_every_package_is_pinned_and_has_hashes(path: Path) -> None:
    found = list(pins(path))
    assert found
    for requirement, hashes in found:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", text) for text in hashes), requirement


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_what_the_project_asks_for(python: str) -> None:
    versions = locked(LOCK / "dev.txt", python)
    for requirement in asked_for():
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: make lock"


def test_what_builds_is_locked_in_the_same_versions() -> None:
    build, dev = (locked(LOCK / name, PYTHONS[0]) for name in ("build.txt", "dev.txt"))
    assert set(build) >= BACKENDS
    assert {name: dev[name] for name in build if name in dev} == {
        name: version for name, version in build.items() if name in dev
    }
