"""action.yml, the GitHub Action that starts the fake broker: its steps are run, without GitHub."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from tests.packaging.conftest import ROOT, arrives

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
_EXPRESSION = re.compile(r"\$\{\{ (.*?) \}\}")


class Job:
    """What GitHub knows of a job, and does with the steps of an action.

    Args:
        folder: the runner's directory of temporary files.
        inputs: those that the job gives.
    """

    def __init__(self, folder: Path, **inputs: str) -> None:
        self._folder = folder
        given = {name: one["default"] for name, one in ACTION["inputs"].items()} | inputs
        self._known = {f"inputs.{name}": value for name, value in given.items()} | {
            "github.action_path": str(ROOT),
            "steps.python.outputs.python-path": sys.executable,
        }

    def run(self, name: str) -> None:
        """Run a step as `shell: bash` does, and take its outputs."""
        (step,) = (step for step in STEPS if step["id"] == name)
        output = self._folder / "output"
        output.touch()
        values = {key: self._filled(value) for key, value in step["env"].items()}
        runner = {"RUNNER_TEMP": str(self._folder), "GITHUB_OUTPUT": str(output)}
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run(shell, cwd="/", env=environment | values | runner, check=True, timeout=200)
        for line in output.read_text().splitlines():
            key, _, value = line.partition("=")
            self._known[f"steps.{name}.outputs.{key}"] = value

    def output(self, name: str) -> str:
        return self._filled(ACTION["outputs"][name]["value"])

    def _filled(self, text: str) -> str:
        return _EXPRESSION.sub(lambda found: self._known[found[1]], text)


@contextmanager
def ended(folder: Path) -> Iterator[None]:
    """End what the steps have left running, as GitHub does after a job."""
    program = f"{folder}/fake-rabbitmq/bin/"
    try:
        yield
    finally:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if program in path.read_text():
                    os.kill(int(path.parent.name), signal.SIGTERM)
            except (FileNotFoundError, ProcessLookupError):
                pass


@pytest.mark.timeout(300)
def test_a_client_publishes_to_the_broker_that_it_starts(tmp_path: Path) -> None:
    job = Job(tmp_path, port="0", options="--vhost / --vhost shop --seed 7")
    job.run("install")
    with ended(tmp_path):
        job.run("broker")
        arrives(job.output("url"))
        arrives(job.output("url").replace("%2F", "shop"))
        with urlopen(job.output("control-url")) as answer:
            assert json.load(answer)
        with pytest.raises(subprocess.CalledProcessError):  # and not wait for ever
            Job(tmp_path, port="0", options="--unknown").run("broker")


def test_every_expression_names_what_there_is() -> None:
    """The program that the first step gets from GitHub is the only one that is not run here."""
    text = (ROOT / "action.yml").read_text()
    known = {f"inputs.{name}" for name in ACTION["inputs"]} | {"github.action_path"}
    ids = [step["id"] for step in STEPS]
    steps = {found for found in _EXPRESSION.findall(text) if found.startswith("steps.")}
    assert {found.split(".")[1] for found in steps} <= set(ids)
    assert set(_EXPRESSION.findall(text)) - steps <= known
    assert all("${{" not in step.get("run", "") for step in STEPS), "a way to inject commands"
    assert all(step["shell"] == "bash" for step in STEPS if "run" in step)


def test_the_example_of_the_page_uses_inputs_and_outputs_that_there_are() -> None:
    page = (ROOT / "docs" / "fake-broker.md").read_text()
    example = page.partition("```yaml\n")[2].partition("```")[0]
    first, *others = yaml.safe_load(example)["steps"]
    assert set(first["with"]) <= set(ACTION["inputs"])
    read = set(re.findall(r"steps\.rabbitmq\.outputs\.([\w-]+)", str(others)))
    assert read == set(ACTION["outputs"])
