"""What a type checker knows of the public names: everything, without guessing."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.conftest import ROOT
from tests.packaging.public_api import public_api

PACKAGES = ("reliablepub", "spark_sink")
WITHOUT_TYPES = "reliablepub.integrations.django."
"""What is not public here is derived from classes of Django, which has no types."""


def public_names() -> Iterator[tuple[str, str]]:
    """Each public name, and the name under which its value is defined."""
    for module, lines in public_api().items():
        for line in lines:
            found = re.match(rf"{re.escape(module)}\.(\w+)(?=[(\[. ]|$)", line)
            if found is not None:
                value = getattr(import_module(module), found[1])
                home = str(getattr(value, "__module__", ""))
                is_ours = home.startswith(PACKAGES)  # unlike that of an alias of a type
                yield found[0], f"{home}.{value.__qualname__}" if is_ours else found[0]


def verified(package: str, folder: Path) -> "subprocess.Popen[str]":
    """Begin to verify the types of a package as its users have them installed."""
    program = [str(Path(sys.executable).with_name("basedpyright")), "--verifytypes", package]
    return subprocess.Popen(
        [*program, "--ignoreexternal", "--outputjson"],
        cwd=folder,
        env=os.environ | {"VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.defpath}"},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def symbols(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The symbols of both packages, by name."""
    folder = tmp_path_factory.mktemp("elsewhere")
    reports = [json.loads(run.communicate()[0]) for run in [verified(p, folder) for p in PACKAGES]]
    assert all(report["summary"]["errorCount"] == 0 for report in reports), "no py.typed"
    found = [report["typeCompleteness"]["symbols"] for report in reports]
    return {symbol["name"]: symbol for symbol in reduce(list.__add__, found)}


def test_all_types_are_known(symbols: dict[str, dict[str, Any]]) -> None:
    public = {name for names in public_names() for name in names}
    assert public - symbols.keys() == set()

    def is_public(name: str) -> bool:
        return not public.isdisjoint(_above(name))

    unknown = {
        name: [one["message"] for one in symbol["diagnostics"]]
        for name, symbol in symbols.items()
        if (symbol["isExported"] and symbol["isTypeAmbiguous"])
        or (not symbol["isTypeKnown"] and (symbol["isExported"] or is_public(name)))
    }
    untyped = {name for name in unknown if name.startswith(WITHOUT_TYPES) and not is_public(name)}
    assert untyped, "Django has types now: take it out of here"
    assert {name: unknown[name] for name in unknown.keys() - untyped} == {}


@pytest.mark.timeout(900)  # it takes half a minute by itself
def test_what_a_type_checker_reads_is_what_runs() -> None:
    """Names, parameters and their defaults, by mypy's stubtest."""
    command = ["-m", "mypy.stubtest", *PACKAGES, "--concise", "--ignore-missing-stub"]
    told = subprocess.run(
        [sys.executable, *command, "--mypy-config-file=pyproject.toml"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    ).stdout
    assert told, "slots, caches and enumerations of private modules are always among it"
    roots = {root for names in public_names() for root in names}
    differs = [line for line in told.splitlines() if not roots.isdisjoint(_above(line.split()[0]))]
    assert [line for line in differs if ".__slots__ variable" not in line] == []


def _above(name: str) -> Iterator[str]:
    """The name itself, and each name that it is part of."""
    while name:
        yield name
        name = name.rpartition(".")[0]
