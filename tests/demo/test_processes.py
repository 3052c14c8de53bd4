"""The demo's processes: what is read from them, and that a failure is shown."""

from pathlib import Path

import click
import pytest

from reliablepub import Message, Outbox
from reliablepub.demo.command import Process
from reliablepub.testing import FakeBroker
from tests.asking import fill


def test_a_relay_drains_what_is_open(tmp_path: Path, fake_broker: FakeBroker) -> None:
    fake_broker.declare_queue("flights")
    path = tmp_path / "outbox.db"
    fill(path, Message(b"1", routing_key="flights"))
    arguments = ("relay", "--drain", "--outbox", str(path))
    with Process(*arguments, url=fake_broker.url, log=tmp_path / "log") as relay:
        relay.check()
    assert Outbox(path).status().open == 0
    assert len(fake_broker.messages("flights")) == 1


def test_the_users_variables_are_not_for_the_demo(
    tmp_path: Path, fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELIABLEPUB_PASSWORD_FILE", str(tmp_path / "none"))
    test_a_relay_drains_what_is_open(tmp_path, fake_broker)


def test_a_command_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    arguments = ("outbox", "status", "--outbox", str(tmp_path / "none.db"))
    with (
        Process(*arguments, log=tmp_path / "log") as command,
        pytest.raises(
            click.ClickException, match=r"`reliablepub outbox` ended with code 4:\nError"
        ),
    ):
        command.check()


def test_a_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    script = tmp_path / "faults.toml"
    script.write_text("[[fault]]\nkind = 'no such fault'\n")
    arguments = ("broker", "--port", "0", "--faults", str(script))
    with (
        Process(*arguments, log=tmp_path / "log") as command,
        pytest.raises(click.ClickException, match=r"(?s)`reliablepub broker` did not.*no such"),
    ):
        command.url()


def test_leaving_ends_the_process(tmp_path: Path) -> None:
    with Process("broker", "--port", "0", log=tmp_path / "log") as command:
        assert command.url().startswith("amqp://")
        assert command.is_running
    assert not command.is_running
