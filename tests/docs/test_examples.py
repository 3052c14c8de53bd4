"""What readers copy from the examples, beyond what these print."""

import runpy
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from reliablepub.testing import FakeBroker

EXAMPLES = Path(__file__).parents[2] / "examples"


def function(example: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = runpy.run_path(str(EXAMPLES / example))[name]
    return found


def test_a_message_without_an_id_does_not_pass_for_another_one() -> None:
    handle_once = function("consume_once.py", "handle_once")
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE handled (message_id TEXT PRIMARY KEY)")
        db.execute("CREATE TABLE greetings (text TEXT)")
        assert [handle_once(db, "a", b"1"), handle_once(db, "a", b"1")] == [True, False]
        for absent in (None, ""):
            with pytest.raises(ValueError, match="no message_id"):
                handle_once(db, absent, b"2")


def test_a_relay_gets_its_url_by_the_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELIABLEPUB_PASSWORD_FILE", "none")
    began: list[Any] = []

    def check_output(command: list[str], *, env: dict[str, str] | None = None) -> bytes:
        began.append((command, env or {}))
        return b"{}"

    monkeypatch.setattr(subprocess, "check_output", check_output)
    function("web_workers.py", "relay")(tmp_path / "app.db", "amqp://u:hush@h/")
    [(command, environment)] = began
    assert "hush" not in " ".join(command)
    ours = {name: value for name, value in environment.items() if name.startswith("RELIABLEPUB_")}
    assert ours == {"RELIABLEPUB_URL": "amqp://u:hush@h/"}


@pytest.mark.postgres
def test_the_fastapi_service_runs_on_postgresql(postgres_url: str, fake_broker: FakeBroker) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "fastapi_orders.py")]
    done = subprocess.run(
        [*command, fake_broker.url, postgres_url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # A rollback does not give the number of a sequence back.
    published = "[{'order': 1, 'amount': 250}, {'order': 3, 'amount': 120}]"
    assert done.stdout.splitlines()[-1] == f"published: {published}"
