"""`.ci/publish.yml`, which publishes a release, fits the Makefile and keeps its jobs apart."""

import re
from typing import Any

import yaml

from tests.packaging.conftest import ROOT

JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".ci" / "publish.yml").read_text())["jobs"]


def runs(job: str) -> list[str]:
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def uses(job: str, action: str) -> dict[str, Any]:
    (step,) = (step for step in JOBS[job]["steps"] if step.get("uses", "").startswith(action))
    return dict(step.get("with", {}))


def test_what_it_makes_has_a_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert runs("build") == ["make dist", "make sbom"]
    for command in runs("build"):
        assert re.search(rf"^{command.removeprefix('make ')}:", makefile, re.MULTILINE), command


def test_the_job_that_runs_code_of_others_cannot_publish() -> None:
    assert JOBS["build"]["permissions"] == {"contents": "read"}
    assert JOBS["publish"]["permissions"]["id-token"] == "write"
    assert JOBS["publish"]["needs"] == "build"
    assert [command.split()[0] for command in runs("publish")] == ["rm"]


def test_each_file_is_attested_and_nothing_but_distributions_is_published() -> None:
    assert uses("publish", "pypa/gh-action-pypi-publish@")["attestations"] is True
    sbom = uses("publish", "actions/attest-sbom@")["sbom-path"]
    assert sbom in (ROOT / "Makefile").read_text()
    assert runs("publish")[0].split()[:2] == ["rm", sbom]
