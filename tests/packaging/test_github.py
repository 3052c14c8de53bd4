"""`.ci/github`, what GitHub reads once it is copied to `.github`, and action.yml."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.conftest import ROOT

BIN = Path(sys.executable).parent
GITHUB = ROOT / ".ci" / "github"
WORKFLOWS = sorted((GITHUB / "workflows").iterdir())
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
PUBLISH: dict[str, Any] = yaml.safe_load((GITHUB / "workflows" / "publish.yml").read_text())["jobs"]


def runs(job: str) -> list[str]:
    return [step["run"] for step in PUBLISH[job]["steps"] if "run" in step]


def uses(job: str, action: str) -> dict[str, Any]:
    (step,) = (step for step in PUBLISH[job]["steps"] if step.get("uses", "").startswith(action))
    return dict(step.get("with", {}))


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-actions", [ROOT / "action.yml"]),
        ("github-issue-config", [path for path in FORMS if path.stem == "config"]),
        ("github-issue-forms", [path for path in FORMS if path.stem != "config"]),
        ("dependabot", [GITHUB / "dependabot.yml"]),
    ],
)
def test_github_understands_it(schema: str, files: list[Path]) -> None:
    checker = BIN / "check-jsonschema"
    subprocess.run([checker, "--builtin-schema", f"vendor.{schema}", *files], check=True)


def test_an_auditor_finds_nothing() -> None:
    """Such as an action that is not named by its hash, or a text of others in a command."""
    auditor, action = BIN / "zizmor", ROOT / "action.yml"
    subprocess.run([auditor, "--offline", "--no-progress", *WORKFLOWS, action], check=True)


def test_an_action_has_one_version_everywhere() -> None:
    texts = [path.read_text() for path in (*WORKFLOWS, ROOT / "action.yml")]
    named = set(
        re.findall(r"uses: (\S+)@([0-9a-f]{40}) # (v[\d.]+)$", "\n".join(texts), re.MULTILINE)
    )
    assert len({action for action, *_ in named}) == len(named)


def test_a_change_passes_what_the_makefile_and_the_folder_have() -> None:
    makefile = (ROOT / "Makefile").read_text()
    *commands, _ = runs("build")
    assert commands == ["make dist", "make sbom"]
    for command in commands:
        assert re.search(rf"^{command.removeprefix('make ')}:", makefile, re.MULTILINE), command
    ci = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    assert (ROOT / ci["jobs"]["test"]["steps"][-1]["run"]).is_file()


def test_a_change_passes_on_each_python_that_is_supported() -> None:
    ci = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    versions = ci["jobs"]["pythons"]["strategy"]["matrix"]["python"]
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert ["3.11", *versions] == supported, "the other job has Debian 12's"
    makefile = (ROOT / "Makefile").read_text()
    others = re.findall(r"^PYTHONS := (.*)$", makefile, re.MULTILINE)[0].split()
    assert {*others, "3.14"} == {*versions}
    assert "\n$(PYTHONS:%=python-%) python-3.14: " in makefile


def test_what_did_not_pass_is_not_published() -> None:
    assert (GITHUB / "workflows" / Path(PUBLISH["test"]["uses"]).name).is_file()
    assert PUBLISH["build"]["needs"] == "test"


@pytest.mark.parametrize(("tag", "code"), [("v0.1.0", 0), ("v0.2.0", 1), ("latest", 1)])
def test_a_tag_names_the_version_that_was_built(tag: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "reliablepub-0.1.0.tar.gz").touch()
    command = ["bash", "-ec", runs("build")[-1]]
    assert subprocess.run(command, cwd=tmp_path, env={"TAG": tag}, check=False).returncode == code


def test_the_job_that_runs_code_of_others_cannot_publish() -> None:
    assert PUBLISH["build"]["permissions"] == {"contents": "read"}
    assert PUBLISH["publish"]["permissions"]["id-token"] == "write"
    assert PUBLISH["publish"]["needs"] == "build"
    assert [command.split()[0] for command in runs("publish")] == ["rm"]


def test_each_file_is_attested_and_nothing_but_distributions_is_published() -> None:
    assert uses("publish", "pypa/gh-action-pypi-publish@")["attestations"] is True
    sbom = uses("publish", "actions/attest@")["sbom-path"]
    assert sbom in (ROOT / "Makefile").read_text()
    assert runs("publish")[0].split()[:2] == ["rm", sbom]


def test_each_image_that_can_be_built_is_published() -> None:
    built = re.findall(
        r"^FROM installed AS (\w+)$", (ROOT / "Containerfile").read_text(), re.MULTILINE
    )
    matrix = PUBLISH["images"]["strategy"]["matrix"]["include"]
    assert sorted(one["target"] for one in matrix) == sorted(built)


def test_an_image_is_attested_by_the_digest_that_was_pushed(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    pushed = tmp_path / "pushed.json"
    docker.write_text(f'#!/bin/sh\n[ "$2" != build ] || echo "$@" >{tmp_path}/built\n')
    pushed.write_text('{"containerimage.digest": "sha256:77"}')
    docker.chmod(0o755)
    output = tmp_path / "output"
    given = {"OWNER": "Acme", "IMAGE": "reliablepub", "TARGET": "relay", "TAG": "v1", "ACTOR": "me"}
    environment = given | {
        "TOKEN": "t",
        "GITHUB_OUTPUT": str(output),
        "PATH": f"{tmp_path}:{os.defpath}",
    }
    subprocess.run(
        ["bash", "-eo", "pipefail", "-c", runs("images")[-1]],
        env=environment,
        cwd=tmp_path,
        check=True,
    )
    built = (tmp_path / "built").read_text()
    assert "--tag ghcr.io/acme/reliablepub:v1 " in built, "a registry takes lower case only"
    assert {"--sbom=true", "--push", f"--metadata-file {pushed.name}"} <= set(
        re.findall(r"--\S+(?: pushed\S+)?", built)
    )
    told = dict(line.split("=", 1) for line in output.read_text().splitlines())
    assert told == {"name": "ghcr.io/acme/reliablepub", "digest": "sha256:77"}
    attested = uses("images", "actions/attest@")
    assert attested["subject-name"] == "${{ steps.push.outputs.name }}"
    assert attested["subject-digest"] == "${{ steps.push.outputs.digest }}"


def test_the_form_asks_for_commands_that_there_are() -> None:
    form = (GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    commands = re.findall(r"`reliablepub ([a-z -]+?)(?: ID)?`", form)
    assert {"doctor", "doctor --json", "outbox explain"} <= set(commands)
    for command in commands:
        *names, last = command.split()
        words = [*names, last] if not last.startswith("--") else names
        help_text = subprocess.run(
            [BIN / "reliablepub", *words, "--help"], check=True, capture_output=True, text=True
        ).stdout
        assert not last.startswith("--") or last in help_text
