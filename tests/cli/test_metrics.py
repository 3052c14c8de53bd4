"""`reliablepub outbox metrics`: what a second process exports of an outbox."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from reliablepub import Message, Outbox
from reliablepub.cli import main
from tests.asking import fill
from tests.cli.conftest import Cli, refused


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values by name and label ``outbox``."""
    return {
        (sample.name, sample.labels["outbox"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_it_tells_that_messages_are_open_and_no_relay_runs(cli: Cli) -> None:
    fill(cli.folder / "o.db", Message(b"x", routing_key="all"))
    ended = cli("outbox", "metrics", "--outbox", "o.db", "--name", "orders")
    assert (ended.code, ended.err) == (0, "")
    found = samples(ended.out)
    assert found["reliablepub_open_messages", "orders"] == 1
    assert found["reliablepub_outbox_relayed", "orders"] == 0
    assert found["reliablepub_build_info", "orders"] == 1
    assert ("reliablepub_connected", "orders") not in found


def test_a_file_is_replaced_as_a_whole(cli: Cli) -> None:
    Outbox(cli.folder / "o.db").create()
    target = cli.folder / "orders.prom"
    target.write_text("old")
    ended = cli("outbox", "metrics", "--outbox", "o.db", "--to", target)
    assert (ended.code, ended.out) == (0, "")
    full = str(cli.folder / "o.db")
    assert samples(target.read_text())["reliablepub_outbox_readable", full] == 1
    assert list(cli.folder.glob("*.prom*")) == [target]
    refused(
        cli("outbox", "metrics", "--outbox", "o.db", "--to", Path("no") / "such.prom"),
        "cannot write no/such.prom: No such file or directory",
    )


@pytest.mark.parametrize("is_hard", [False, True])
def test_a_planted_link_is_not_written_through(tmp_path: Path, *, is_hard: bool) -> None:
    """The collector's directory may belong to another user, and root may run this from cron."""
    Outbox(tmp_path / "o.db").create()
    target, victim = tmp_path / "orders.prom", tmp_path / "victim"
    victim.write_text("precious")
    planted = Path(f"{target}.{os.getpid()}")
    if is_hard:
        planted.hardlink_to(victim)
    else:
        planted.symlink_to(victim)
    outbox = ["--outbox", str(tmp_path / "o.db")]
    found = CliRunner().invoke(main, ["outbox", "metrics", *outbox, "--to", str(target)])
    assert found.exit_code == 0
    assert victim.read_text() == "precious"
    assert "reliablepub_outbox_readable" in target.read_text()
    assert not target.is_symlink()


def test_an_outbox_that_is_not_there_is_a_metric(cli: Cli) -> None:
    ended = cli("outbox", "metrics", "--outbox", "no.db", "--name", "o")
    assert ended.code == 4
    assert samples(ended.out)["reliablepub_outbox_readable", "o"] == 0
    assert not (cli.folder / "no.db").exists()
