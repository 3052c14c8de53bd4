"""Arguments that no author expects: not UTF-8, or numbers without bound."""

import math
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from reliablepub import InvalidMessage, Message
from reliablepub.cli import main
from reliablepub.cli.signals import readable
from reliablepub.outbox.admin.interventions import Action, Intervention
from tests.asking import fill
from tests.cli.conftest import refused

NOT_UTF_8 = "\udcff"
"""What Python makes of the byte FF in an argument or a variable."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "o.db"
    fill(path, Message(b"{}", routing_key="q", message_id="m"))
    return path


def run(path: Path | str, *arguments: str, env: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(main, [*arguments, "--outbox", str(path)], env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize(
    "arguments",
    [
        "outbox list --exchange X",
        "outbox list --reason X",
        "outbox schedule --key X",
        "outbox show X",
        "outbox explain X",
        "outbox retry X",
        "outbox cancel X --yes",
        "outbox export X",
        "outbox keys --skip X",
        "outbox keys --resume X",
        "outbox park 1 --note X",
        "outbox prune --parked 1d --note X --yes",
        "outbox metrics --name X",
        "relay --url X",
        "relay --url amqp://127.0.0.1:1/ --health-port 0 --health-host X",
    ],
)
def test_a_text_that_is_not_utf_8_is_refused(path: Path, arguments: str) -> None:
    refused(
        run(path, *(NOT_UTF_8 if word == "X" else word for word in arguments.split())),
        "is not UTF-8; see ",
    )


def test_a_path_may_have_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / f"{NOT_UTF_8}.db"
    file = tmp_path / f"{NOT_UTF_8}.ndjson"
    assert run(path, "outbox", "create").exit_code == 0
    assert run(path, "outbox", "export", "--to", str(file)).exit_code == 0
    assert run(path, "outbox", "import", str(file)).exit_code == 0
    assert 'outbox="' in run(path, "outbox", "metrics").stdout


def test_an_operator_may_have_any_name(path: Path) -> None:
    assert run(path, "outbox", "park", "1", env={"LOGNAME": NOT_UTF_8}).exit_code == 0
    assert r"parked by \udcff@" in run(path, "outbox", "explain", "1").stdout


def test_a_note_must_fit_every_database() -> None:
    with pytest.raises(InvalidMessage, match="note: cannot be encoded as UTF-8"):
        Intervention(Action.PARK, note=NOT_UTF_8)


@pytest.mark.parametrize("command", ["show", "explain", "retry", "export"])
def test_a_row_number_may_have_any_length(path: Path, command: str) -> None:
    refused(run(path, "outbox", command, "9" * 5_000), "has no record of message '999")


@pytest.mark.parametrize("command", ["list", "keys", "duplicates", "schedule", "in-flight"])
def test_a_limit_is_one_that_every_database_takes(path: Path, command: str) -> None:
    assert run(path, "outbox", command, "--limit", str(10**9)).exit_code == 0
    refused(run(path, "outbox", command, "--limit", str(2**64)), "Invalid value for '--limit'")


@pytest.mark.parametrize(
    "arguments", ["outbox status --over", "watch --interval", "outbox list --older-than"]
)
@pytest.mark.parametrize("time", ["36526d", "9" * 400 + "d"])
def test_a_time_is_at_most_100_years(path: Path, arguments: str, time: str) -> None:
    refused(run(path, *arguments.split(), time), "is more than 100 years")


@pytest.mark.parametrize("seconds", [2.2e6, 1e300, math.inf])
def test_a_wait_may_be_longer_than_poll_allows(seconds: float) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    try:
        assert readable([reader], seconds) == {reader}
    finally:
        os.close(reader)


def test_metrics_need_the_name_of_a_file(path: Path) -> None:
    result = run(path, "outbox", "metrics", "--to", "")
    assert (result.exit_code, result.stderr.startswith("Error: cannot write .: ")) == (2, True)
    assert [file.name for file in path.parent.iterdir() if "prom" in file.name] == []


def test_metrics_do_not_replace_the_outbox(path: Path) -> None:
    beside = path.parent / "link.prom"
    beside.symlink_to(path)
    for to in (path, beside, path.parent / "." / path.name):
        refused(run(path, "outbox", "metrics", "--to", str(to)), "--to is the outbox itself")
    assert run(path, "outbox", "audit").exit_code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, as root may")
@pytest.mark.parametrize("command", ["list", "status"])
def test_an_outbox_that_may_not_be_read_is_one_that_cannot_be_used(
    path: Path, command: str
) -> None:
    for folder in (path.parent, path.parent.parent):
        folder.chmod(0o755)
    os.seteuid(65_534)
    try:
        result = run(path, "outbox", command)
    finally:
        os.seteuid(0)
    assert (result.exit_code, str(path) in result.stderr) == (4, True)


@pytest.mark.parametrize("password", ["s3cret", "s3/c#r?t", "s3c@s3cret", "s3 cret", "s3'cr\"\tet"])
@pytest.mark.parametrize(
    "arguments",
    [
        "relay --outbox o.db --url amqp://localhost URL",
        "doctor --outbox o.db --url amqp://localhost URL",
        "publish URL --routing-key q --url amqp://localhost",
        "publish f --routing-key q --url amqp://localhost --timeout URL",
        "topology check URL --url amqp://localhost",
        "URL",
    ],
)
def test_no_error_repeats_the_password_of_a_url(arguments: str, password: str) -> None:
    given = [word.replace("URL", f"amqp://b:{password}@h2/") for word in arguments.split(" ")]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert not any(part in result.output for part in ("s3", "cret"))
    assert "amqp://b:...@h2" in result.stderr
