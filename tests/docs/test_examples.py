"""What readers copy from the examples, beyond what these print."""

import runpy
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

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
