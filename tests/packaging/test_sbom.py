"""`make sbom`: what an installation consists of, as the lock has it."""

import json
import subprocess
import sys
import tomllib
from typing import Any

from packaging.utils import canonicalize_name

from tests.packaging.conftest import ROOT
from tests.packaging.test_lock import LOCK, pins


def made() -> str:
    command = [sys.executable, str(ROOT / ".ci" / "sbom")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_it_has_the_pins_and_hashes_of_the_lock_and_nothing_else() -> None:
    bom: dict[str, Any] = json.loads(made())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    found = {
        one["purl"]: sorted(
            each["content"] for file in one["externalReferences"] for each in file["hashes"]
        )
        for one in bom["components"]
    }
    wanted = {
        f"pkg:pypi/{canonicalize_name(pin.name)}@{str(pin.specifier)[2:]}": sorted(
            text.removeprefix("sha256:") for text in hashes
        )
        for pin, hashes in pins(LOCK / "base.txt")
    }
    assert found == wanted


def test_it_is_about_this_project_and_names_what_it_asks_for() -> None:
    bom = json.loads(made())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = bom["metadata"]["component"]
    assert (about["name"], about["version"]) == (project["name"], project["version"])
    (root,) = bom["dependencies"]
    assert root["ref"] == about["bom-ref"]
    assert len(root["dependsOn"]) == len(project["dependencies"])
    assert set(root["dependsOn"]) <= {one["bom-ref"] for one in bom["components"]}


def test_two_runs_are_equal_byte_by_byte() -> None:
    assert made() == made()
