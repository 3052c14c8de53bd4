"""A Prometheus of the tests' own: Debian's package, started on loopback with short intervals."""

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import pytest
import yaml

from tests.rabbitmq import free_ports

SERVER: Final = shutil.which("prometheus")
TOOL: Final = shutil.which("promtool")
SCRAPE_S: Final = 0.5

Alert = tuple[str, str]
"""Name of a firing alert, and the outbox that it is about."""


def required() -> None:
    """Skip the test where there is no Prometheus; where CI is set, fail instead."""
    if SERVER is None or TOOL is None:
        said = "no Prometheus: run `make prometheus`"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)


class Prometheus:
    """A server that scrapes targets and evaluates rules, twice a second.

    Args:
        folder: for its configuration, targets and data.
        rules: the file of rules.
    """

    def __init__(self, folder: Path, rules: str) -> None:
        self._folder = folder
        self._targets: dict[str, list[str]] = {}
        (folder / "rules.yml").write_text(rules)
        self._write_targets()
        config = {
            "global": {
                "scrape_interval": f"{SCRAPE_S * 1000:.0f}ms",
                "scrape_timeout": f"{SCRAPE_S * 1000:.0f}ms",
                "evaluation_interval": f"{SCRAPE_S * 1000:.0f}ms",
            },
            "rule_files": [str(folder / "rules.yml")],
            "scrape_configs": [
                {
                    "job_name": "reliablepub",
                    "file_sd_configs": [
                        {"files": [str(folder / "targets.json")], "refresh_interval": "1s"}
                    ],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "log").open("w")
        assert SERVER is not None
        self._process = subprocess.Popen(
            [
                SERVER,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def __enter__(self) -> Self:
        self.until(self._is_ready, "Prometheus is ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def scrape(self, name: str, address: str) -> None:
        """Scrape one more target: ``host:port``, with the label ``instance`` of this name."""
        self._targets[name] = [address]
        self._write_targets()

    def forget(self, name: str) -> None:
        """Remove a target, as when its pod is deleted."""
        del self._targets[name]
        self._write_targets()

    def _write_targets(self) -> None:
        groups = [
            {"targets": targets, "labels": {"instance": name}}
            for name, targets in self._targets.items()
        ]
        beside = self._folder / "targets.new"
        beside.write_text(json.dumps(groups))
        beside.replace(self._folder / "targets.json")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query.

        Raises:
            HTTPError: Prometheus refuses the expression.
        """
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def firing(self) -> set[Alert]:
        """The alerts that fire now."""
        return {
            (one["metric"]["alertname"], one["metric"].get("outbox", ""))
            for one in self.query('ALERTS{alertstate="firing"}')
        }

    def until(self, holds: Callable[[], bool], words: str, timeout_s: float = 90.0) -> None:
        """Wait until something holds.

        Raises:
            AssertionError: it does not within the time.
        """
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"this did not come true: {words}"
            time.sleep(SCRAPE_S / 2)

    def until_fires(self, alert: str, outbox: str) -> None:
        """Wait until an alert fires for an outbox."""
        self.until(lambda: (alert, outbox) in self.firing(), f"{alert} fires for {outbox}")

    def until_resolved(self, alert: str, outbox: str) -> None:
        """Wait until an alert does not fire for an outbox any more."""
        self.until(lambda: (alert, outbox) not in self.firing(), f"{alert} of {outbox} is resolved")
