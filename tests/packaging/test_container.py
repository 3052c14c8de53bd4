"""Containerfile: paths, options and ports that it names exist, and fit the pod that is shipped."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.shell import BROKER_PORT
from tests.docs.test_documents import assert_command
from tests.observe.test_pod import pod, relay
from tests.packaging.conftest import ROOT, arrives


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its arguments, lines that continue joined."""
    text = (ROOT / "Containerfile").read_text()
    joined = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(name, words.strip()) for name, _, words in found]


def of(name: str, stage: str = "") -> list[str]:
    """What this instruction says, in one stage or in all of them."""
    found, now = [], ""
    for each, words in instructions():
        if each == "FROM":
            now = words.rpartition(" AS ")[2]
        if each == name and stage in ("", now):
            found.append(words)
    return found


def test_what_it_copies_is_there() -> None:
    from_here = [words.split()[:-1] for words in of("COPY") if "--from" not in words]
    for source in (name for names in from_here for name in names):
        assert (ROOT / source).exists(), source
    (from_build,) = (words.split() for words in of("COPY") if "--from" in words)
    assert from_build[0] == "--from=build"
    assert f"venv {from_build[1]} " in of("RUN")[0]
    assert f"PATH={from_build[2]}/bin:" in of("ENV")[0]


def test_the_build_names_locks_and_extras_that_there_are() -> None:
    copied = [word for words in of("COPY") for word in words.split()]
    locks = re.findall(r"(?:--requirement|--constraint) (\.ci\S+)", " ".join(of("RUN")))
    assert len(locks) == 2
    assert set(locks) <= set(copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, _, extras),) = (words.partition("=") for words in of("ARG"))
    assert name == "EXTRAS"
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    stages = {words.rpartition(" AS ")[2] for words in of("FROM")}
    images = {words.split()[0] for words in of("FROM")} - stages
    (python,) = (re.findall(r"python:(3\.\d+)-slim$", image)[0] for image in images)
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]


def test_without_a_target_it_is_a_relay_and_suits_the_pod() -> None:
    assert of("FROM")[-1] == "installed AS relay"
    (program,) = json.loads(of("ENTRYPOINT")[0])
    assert program == relay()["command"][0] == "reliablepub"
    words = json.loads(of("CMD", "relay")[0])
    assert_command(words)
    port = words[words.index("--health-port") + 1]
    assert [port] == of("EXPOSE", "relay") == [str(relay()["ports"][0]["containerPort"])]
    path = relay()["livenessProbe"]["httpGet"]["path"]
    assert f"http://127.0.0.1:{port}{path}'" in of("HEALTHCHECK", "relay")[0]
    _, workload = pod()
    user = workload["spec"]["template"]["spec"]["securityContext"]
    assert of("USER") == [f"{user['runAsUser']}:{user['runAsGroup']}"]


def test_the_fake_broker_can_be_reached_at_the_ports_that_it_exposes() -> None:
    words = json.loads(of("CMD", "broker")[0])
    assert_command(words)
    control = words[words.index("--control-port") + 1]
    assert of("EXPOSE", "broker") == [f"{BROKER_PORT} {control}"]
    assert f"http://127.0.0.1:{control}/'" in of("HEALTHCHECK", "broker")[0]
    assert {"0.0.0.0", "--allow-remote"} <= set(words)


def test_the_variables_of_its_example_are_those_of_the_command_line() -> None:
    shown = re.findall(r"RELIABLEPUB_\w+", (ROOT / "Containerfile").read_text())
    assert shown
    for name in shown:
        assert_command(
            ["relay", "--" + name.removeprefix("RELIABLEPUB_").lower().replace("_", "-")]
        )


@pytest.mark.timeout(300)
def test_its_steps_make_a_relay_and_a_fake_broker(tmp_path: Path) -> None:
    """Without a builder: what it copies and runs, in a directory in place of the image's root."""
    source, opt = tmp_path / "source", tmp_path / "opt"
    source.mkdir()
    for *names, target in (words.split() for words in of("COPY") if "--from" not in words):
        for name in names:
            to = source / target / ("" if len(names) > 1 else ".")
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / target, dirs_exist_ok=True)
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, to)
    name, _, extras = of("ARG")[0].partition("=")
    for step in of("RUN"):
        command = step.replace("/opt/", f"{opt}/").replace("python -m", f"{sys.executable} -m")
        environment = os.environ | {name: extras}
        subprocess.run(["bash", "-ec", command], cwd=source, env=environment, check=True)
    made = opt / "reliablepub" / "bin" / "reliablepub"
    help_of_relay = [made, *json.loads(of("CMD", "relay")[0])[:1], "--help"]
    assert b"--health-port" in subprocess.run(help_of_relay, capture_output=True, check=True).stdout
    words = [
        {"0.0.0.0": "127.0.0.1"}.get(word, word) for word in json.loads(of("CMD", "broker")[0])
    ]
    words[words.index("--control-port") + 1] = "0"
    with subprocess.Popen([made, *words, "--port", "0"], stdout=subprocess.PIPE, text=True) as fake:
        assert fake.stdout is not None
        arrives(fake.stdout.readline().strip())
        fake.terminate()
