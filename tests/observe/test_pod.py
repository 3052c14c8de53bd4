"""The pod that is shipped: its relay has options that there are; its probes restart what hangs."""

import sqlite3
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from reliablepub import Publisher
from reliablepub.cli import main
from reliablepub.cli.config import CONFIG_VARIABLE
from reliablepub.observe import health as health_module
from reliablepub.observe.health import Health, HealthServer
from reliablepub.relay.status import Link
from reliablepub.testing import FakeBroker
from tests.docs.test_documents import assert_command
from tests.observe.test_shipped import FOLDER
from tests.waiting import until

LOCKED_S = 7
"""Longer than a turn waits for SQLite's lock."""


def pod() -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the workload."""
    config, workload = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    return config, workload


def relay() -> dict[str, Any]:
    """The container of the relay."""
    _, workload = pod()
    containers: list[dict[str, Any]] = workload["spec"]["template"]["spec"]["containers"]
    (found,) = (one for one in containers if one["name"] == "relay")
    return found


def test_its_relay_has_options_that_there_are(tmp_path: Path) -> None:
    config, _ = pod()
    program, *words = relay()["command"]
    assert program == "reliablepub"
    ((name, text),) = config["data"].items()
    (variable,) = relay()["env"]
    assert variable["name"] == CONFIG_VARIABLE
    assert variable["value"].endswith(f"/{name}")
    assert_command([*words, "--config", variable["value"]])
    password = tmp_path / "password"
    password.write_text("hush")
    (tmp_path / name).write_text(text.replace("/run/secrets/relay/password", str(password)))
    command = main.get_command(main.make_context("reliablepub", ["relay"]), "relay")
    assert command is not None
    with command.make_context("relay", ["--config", str(tmp_path / name)]) as context:
        given = context.params
    (port,) = relay()["ports"]
    assert given["health_port"] == port["containerPort"]
    assert given["health_host"] == "0.0.0.0"
    assert given["name"] == "orders"


def test_its_parts_fit_together() -> None:
    config, workload = pod()
    template = workload["spec"]["template"]
    assert workload["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    claims = workload["spec"]["volumeClaimTemplates"]
    volumes = {one["name"] for one in template["spec"]["volumes"]}
    volumes |= {one["metadata"]["name"] for one in claims}
    for container in template["spec"]["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    maps = [one["configMap"]["name"] for one in template["spec"]["volumes"] if "configMap" in one]
    assert maps == [config["metadata"]["name"]]
    (port,) = relay()["ports"]
    for name in ("livenessProbe", "readinessProbe"):
        assert relay()[name]["httpGet"]["port"] == port["name"]


def test_it_has_the_least_rights_that_kubernetes_asks_for() -> None:
    """Those of the Pod Security Standard "restricted", and no token of the API."""
    _, workload = pod()
    spec = workload["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        rights = spec["securityContext"] | container["securityContext"]
        assert rights["runAsNonRoot"]
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
    assert relay()["securityContext"]["readOnlyRootFilesystem"]


class Probe:
    """A probe of the pod, as Kubernetes makes it."""

    def __init__(self, name: str, url: str) -> None:
        settings = relay()[name]
        self._url = url + settings["httpGet"]["path"]
        self._timeout_s = settings["timeoutSeconds"]

    def __call__(self) -> int:
        try:
            with urllib.request.urlopen(self._url, timeout=self._timeout_s) as answer:
                return int(answer.status)
        except HTTPError as error:
            with error:
                return error.code


class Hang:
    """A hook that does not return until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def on_stored(self, _events: object) -> None:
        self.released.wait(60)


@contextmanager
def probed(
    broker: FakeBroker, path: Path, *hooks: object
) -> Iterator[tuple[Publisher, Probe, Probe]]:
    """A relay, and both of its probes."""
    with (
        Publisher(broker.url, outbox=path, hooks=hooks, close_timeout_s=0) as publisher,
        HealthServer("127.0.0.1", 0, Health(lambda: publisher.status), "none") as server,
    ):
        live, ready = Probe("livenessProbe", server.url), Probe("readinessProbe", server.url)
        until(lambda: ready() == 200)
        yield publisher, live, ready


def test_a_lock_of_the_application_is_no_reason_to_restart(broker: FakeBroker, path: Path) -> None:
    with probed(broker, path) as (publisher, live, _):
        with closing(sqlite3.connect(path, isolation_level=None)) as application:
            application.execute("BEGIN IMMEDIATE")
            stores = threading.Thread(target=store, args=(publisher,))
            stores.start()
            until = time.monotonic() + LOCKED_S
            while time.monotonic() < until:
                assert live() == 200
                time.sleep(0.1)
            application.execute("ROLLBACK")
        stores.join(60)
        publisher.publish(b"x", routing_key="q").result(60)


def store(publisher: Publisher) -> None:
    """Publish, which is refused while the outbox is locked."""
    try:
        publisher.publish(b"x", routing_key="q")
    except Exception:  # noqa: BLE001 - it is refused, or not, by what comes first
        return


def test_a_broker_that_is_away_restarts_nothing_and_takes_nothing_out_of_service(
    broker: FakeBroker, path: Path
) -> None:
    with probed(broker, path) as (publisher, live, ready):
        broker.stop()
        until(lambda: publisher.status.link is not Link.CONNECTED)
        assert (live(), ready()) == (200, 200)


def test_a_hook_that_hangs_is_a_reason_to_restart(
    broker: FakeBroker, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "LIVE_WITHIN_S", 3.0)
    monkeypatch.setattr(health_module, "READY_WITHIN_S", 1.5)
    hang = Hang()
    with probed(broker, path, hang) as (publisher, live, ready):
        stores = threading.Thread(target=store, args=(publisher,))
        stores.start()
        until(lambda: ready() == 503)
        until(lambda: live() == 503)
        hang.released.set()
        until(lambda: (live(), ready()) == (200, 200))
        stores.join(60)
