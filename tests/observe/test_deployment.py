"""The two relays that are shipped for PostgreSQL, played as Kubernetes does: probes, rollouts."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from reliablepub import Message
from reliablepub.cli import main
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.observe.test_shipped import FOLDER
from tests.postgres import PostgresServer
from tests.waiting import until

pytestmark = pytest.mark.postgres


def parts() -> dict[str, dict[str, Any]]:
    """What is shipped, by kind."""
    text = (FOLDER / "kubernetes-postgresql.yaml").read_text()
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


def container() -> dict[str, Any]:
    (found,) = parts()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def config() -> str:
    ((_, text),) = parts()["ConfigMap"]["data"].items()
    return str(text)


def test_its_parts_fit_together() -> None:
    found = parts()
    spec = found["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    pod = spec["template"]["spec"]
    assert spec["selector"]["matchLabels"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"] == labels
    assert found["PodDisruptionBudget"]["spec"]["minAvailable"] < spec["replicas"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == set(volumes)
    assert volumes["config"]["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    secrets = {one["valueFrom"]["secretKeyRef"]["name"] for one in container()["env"][1:]}
    assert secrets == {volumes["password"]["secret"]["secretName"]}
    (port,) = container()["ports"]
    for name in ("livenessProbe", "readinessProbe"):
        assert container()[name]["httpGet"]["port"] == port["name"]
    (ingress,) = found["NetworkPolicy"]["spec"]["ingress"]
    assert ingress["ports"][0]["port"] == port["containerPort"]
    assert f"health-port = {port['containerPort']}" in config()


def test_it_has_the_least_rights_that_kubernetes_asks_for() -> None:
    pod = parts()["Deployment"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    rights = pod["securityContext"] | container()["securityContext"]
    assert rights["runAsNonRoot"]
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert rights["readOnlyRootFilesystem"]
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}


def test_its_options_are_those_of_the_relay(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hush")
    text = config().replace("/run/secrets/relay/password", str(tmp_path / "password"))
    (tmp_path / "relay.toml").write_text(text)
    command = main.get_command(main.make_context("reliablepub", ["relay"]), "relay")
    assert command is not None
    with command.make_context("relay", ["--config", str(tmp_path / "relay.toml")]) as context:
        assert context.params["standby"]
        assert context.params["health_host"] == "0.0.0.0"


class Pod:
    """A container of the Deployment, on a port of its own."""

    def __init__(self, folder: Path, number: int, environment: dict[str, str]) -> None:
        log = folder / f"{number}.log"
        program, *words = container()["command"]
        assert program == "reliablepub"
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "reliablepub", *words],
            env={**os.environ, **environment, "RELIABLEPUB_HEALTH_PORT": "0"},
            stderr=self._log,
        )
        until(lambda: "/live" in log.read_text(), 60)
        self._url = log.read_text().partition("health: ")[2].partition("/live")[0]

    def answers(self, probe: str) -> int:
        """What a probe of the manifest gets."""
        settings = container()[probe]
        path, timeout_s = settings["httpGet"]["path"], settings["timeoutSeconds"]
        try:
            with urllib.request.urlopen(self._url + path, timeout=timeout_s) as answer:
                return int(answer.status)
        except HTTPError as error:
            with error:
                return error.code

    @property
    def is_ready(self) -> bool:
        return self.answers("readinessProbe") == 200

    def end(self) -> int:
        """As Kubernetes ends a pod, within the time that the manifest gives it."""
        self._process.send_signal(signal.SIGTERM)
        patience_s = parts()["Deployment"]["spec"]["template"]["spec"]
        code = self._process.wait(patience_s["terminationGracePeriodSeconds"])
        self._log.close()
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()


@pytest.fixture
def start(
    tmp_path: Path, fake_broker: FakeBroker, postgres_outbox: str
) -> Iterator[Callable[[], Pod]]:
    text = config()
    (tmp_path / "password").write_text("guest")
    for line in text.splitlines():
        name, _, value = line.partition(" = ")
        url = fake_broker.url.replace("guest:guest@", "guest@")
        instead = {"url": url, "outbox": postgres_outbox, "password-file": tmp_path / "password"}
        if name in instead:
            text = text.replace(value, f'"{instead[name]}"')
    (tmp_path / "relay.toml").write_text(text.replace("0.0.0.0", "127.0.0.1"))
    (variable, secret) = container()["env"]
    environment = {variable["name"]: str(tmp_path / "relay.toml"), secret["name"]: "hush"}
    with ExitStack() as stack:
        pods: list[Pod] = []

        def begin() -> Pod:
            pods.append(Pod(tmp_path, len(pods), environment))
            stack.callback(pods[-1].close)
            return pods[-1]

        yield begin


def test_a_rollout_ends_and_one_always_relays(
    start: Callable[[], Pod], fake_broker: FakeBroker, postgres_outbox: str
) -> None:
    fake_broker.declare_queue("orders")
    sent = 0

    def relays() -> None:
        nonlocal sent
        sent += 1
        fill(postgres_outbox, Message(b"%d" % sent, routing_key="orders"))
        until(lambda: len(fake_broker.messages("orders")) == sent, 60)

    replicas = parts()["Deployment"]["spec"]["replicas"]
    old = [start() for _ in range(replicas)]
    until(lambda: all(pod.is_ready for pod in old), 60)
    relays()
    for pod in old:  # a surge of one, and none unavailable
        new = start()
        until(lambda: new.is_ready, 60)  # noqa: B023 - at once
        assert pod.end() == 0
        relays()


def test_an_outage_of_the_broker_changes_nothing_and_one_of_the_database_ends(
    start: Callable[[], Pod], fake_broker: FakeBroker, postgres_server: PostgresServer
) -> None:
    postgres_server.stop()  # a node that restarts may start the relay first
    pods = [start(), start()]
    assert {pod.answers("livenessProbe") for pod in pods} == {200}
    assert not any(pod.is_ready for pod in pods)
    postgres_server.start()
    until(lambda: all(pod.is_ready for pod in pods), 60)
    fake_broker.stop()
    assert all(pod.is_ready for pod in pods)
    postgres_server.stop()
    until(lambda: not any(pod.is_ready for pod in pods), 60)
    assert {pod.answers("livenessProbe") for pod in pods} == {200}
    postgres_server.start()
    until(lambda: all(pod.is_ready for pod in pods), 60)
    assert [pod.end() for pod in pods] == [0, 0]
