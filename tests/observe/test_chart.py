"""The chart renders the manifest that is shipped, so what holds of that one holds of the chart."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observe.test_deployment import parts

CHART = Path(__file__).parents[2] / "examples" / "chart"
HELM = Path(sys.prefix) / "bin" / "helm"
CHECKSUM = "checksum/config"

pytestmark = pytest.mark.skipif(
    not HELM.exists() and "CI" not in os.environ, reason="helm is on PyPI for Linux on x86-64 alone"
)


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"HELM_{name}_HOME", str(tmp_path))


def helm(*words: str) -> str:
    done = subprocess.run([HELM, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(tmp_path: Path, **values: Any) -> dict[str, dict[str, Any]]:
    """What a release called ``orders-relay`` installs, by kind."""
    changed = tmp_path / "values.yaml"
    changed.write_text(yaml.safe_dump(values))
    text = helm("template", "orders-relay", str(CHART), "--values", str(changed))
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


def config(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return tomllib.loads(found["ConfigMap"]["data"]["relay.toml"])


def checksum(found: dict[str, dict[str, Any]]) -> str:
    return str(found["Deployment"]["spec"]["template"]["metadata"]["annotations"].pop(CHECKSUM))


def test_helm_has_no_complaint() -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def test_without_changes_it_is_the_manifest_that_is_shipped(tmp_path: Path) -> None:
    found = rendered(tmp_path)
    assert len(checksum(found)) == 64
    assert found == parts()


def test_its_version_is_the_project_s() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == version("reliablepub")


def test_each_value_has_its_place(tmp_path: Path) -> None:
    url = "amqps://o%22'b@mq.example.com:5671/%2F?heartbeat=5"
    found = rendered(
        tmp_path,
        image="registry.example.com/reliablepub@sha256:00",
        url=url,
        outbox='postgresql://relay@db/shop?application_name="x"',
        secret="passwords",
        authorities="ours",
        name='a "b"',
        options={"window": 1_000_000, "rate": 0.5, "trace": True, "tls-name": "mq"},
        replicas=3,
        resources={"requests": {"cpu": 1}},
        pod={"imagePullSecrets": [{"name": "registry"}], "nodeSelector": {"disk": "ssd"}},
        networkPolicy={"metricsFrom": "prometheus", "ports": [5433]},
    )
    read = config(found)
    assert (read["url"], read["outbox"][-3:], read["relay"]["name"]) == (url, '"x"', 'a "b"')
    assert read["relay"]["window"] == 1_000_000
    assert isinstance(read["relay"]["window"], int)
    assert (read["relay"]["rate"], read["relay"]["trace"]) == (0.5, True)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"].endswith("@sha256:00")
    assert container["resources"]["requests"] == {"cpu": 1, "memory": "64Mi"}
    assert container["env"][1]["valueFrom"]["secretKeyRef"]["name"] == "passwords"
    assert pod["volumes"][1]["secret"]["secretName"] == "passwords"
    assert (pod["imagePullSecrets"], pod["nodeSelector"]) == (
        [{"name": "registry"}],
        {"disk": "ssd"},
    )
    (volume,) = (one for one in pod["volumes"] if one.get("configMap") == {"name": "ours"})
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == volume["name"])
    assert read["tls-ca"] == f"{mount['mountPath']}/ca.crt"
    assert found["Deployment"]["spec"]["replicas"] == 3
    policy = found["NetworkPolicy"]["spec"]
    assert policy["egress"][1]["ports"] == [{"protocol": "TCP", "port": 5433}]
    (peer,) = policy["ingress"][0]["from"]
    assert "prometheus" in peer["namespaceSelector"]["matchLabels"].values()


def test_a_policy_of_the_network_can_be_left_out(tmp_path: Path) -> None:
    assert set(parts()) - set(rendered(tmp_path, networkPolicy=None)) == {"NetworkPolicy"}


def test_a_change_of_the_configuration_and_no_other_starts_new_relays(tmp_path: Path) -> None:
    before = checksum(rendered(tmp_path))
    assert checksum(rendered(tmp_path, replicas=3, pod={"nodeSelector": {}})) == before
    assert checksum(rendered(tmp_path, options={"window": 5})) != before


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"url": "amqps://orders:hush@mq/shop"}, "url"),
        ({"outbox": "postgresql://relay:hush@db/shop"}, "outbox"),
        ({"outbox": "postgresql://db/shop?password=hush"}, "outbox"),
        ({"outbox": "orders.db"}, "outbox"),
        ({"replicas": 1}, "replicas"),
        ({"replica": 3}, "replica"),
    ],
)
def test_a_password_in_a_url_and_what_cannot_be_are_refused(
    tmp_path: Path, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(AssertionError) as refused:
        rendered(tmp_path, **values)
    assert "don't meet the specifications of the schema" in str(refused.value)
    assert named in str(refused.value)
    assert "hush" not in str(refused.value)
