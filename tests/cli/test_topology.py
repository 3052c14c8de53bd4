"""`reliablepub topology`: a file, one line for each problem, and exit codes."""

from pathlib import Path

from reliablepub.testing import FakeBroker
from tests.cli.conftest import Cli, refused

FILE = """
[[exchange]]
name = "orders"
type = "topic"
[[queue]]
name = "billing"
[[binding]]
exchange = "orders"
queue = "billing"
routing_key = "#"
"""


def test_declared_it_can_be_checked(cli: Cli, fake: FakeBroker, tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    file.write_text(FILE)
    found = cli("topology", "check", file, "--url", fake.url)
    assert found.code == 2
    assert found.err.splitlines() == [
        "Error: exchange 'orders': 404 NOT_FOUND - no exchange 'orders' in vhost '/'",
        "Error: queue 'billing': 404 NOT_FOUND - no queue 'billing' in vhost '/'",
    ]
    as_json = cli("topology", "check", file, "--url", fake.url, "--json")
    assert (as_json.code, as_json.json["queues"]) == (2, 1)
    assert [problem.partition(":")[0] for problem in as_json.json["problems"]] == [
        *("exchange 'orders'", "queue 'billing'")
    ]
    declared = cli("topology", "declare", file, "--url", fake.url)
    assert (declared.code, declared.out) == (0, "declared: 1 exchange, 1 queue, 1 binding\n")
    checked = cli("topology", "check", file, "--url", fake.url)
    assert (checked.code, checked.out) == (0, "found: 1 exchange, 1 queue, 1 binding\n")


def test_a_file_that_makes_no_sense_is_bad_input(
    cli: Cli, fake: FakeBroker, tmp_path: Path
) -> None:
    file = tmp_path / "topology.toml"
    file.write_text("[[exchange]]\nnam = 'x'")
    refused(cli("topology", "check", file, "--url", fake.url), "has 'nam'; known are name")


def test_without_a_command_it_shows_what_there_is(cli: Cli) -> None:
    refused(cli("topology"), "declare")


def test_a_token_in_a_file_that_has_expired_is_named(
    cli: Cli, fake: FakeBroker, tmp_path: Path
) -> None:
    file, token = tmp_path / "topology.toml", tmp_path / "token"
    file.write_text(FILE)
    token.touch(0o600)
    url = fake.url.replace("guest:guest@", "whoever@")
    given = ("topology", "declare", file, "--url", url, "--password-file", token)
    token.write_text(fake.issue_token(-60))
    refused(cli(*given), f"no credentials: the token in {token} expired 6")
    token.write_text(fake.issue_token(60))
    assert cli(*given).code == 0


def test_a_file_is_utf_8_in_every_locale(cli: Cli, fake: FakeBroker, tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    file.write_bytes('[[queue]]\nname = "schlüssel"\n'.encode())
    cli.environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert cli("topology", "declare", file, "--url", fake.url).code == 0
    file.write_bytes(b"\xff")
    found = cli("topology", "check", file, "--url", fake.url)
    assert (found.code, "is not valid TOML: 'utf-8' codec" in found.error) == (2, True)
