"""What shows a password or a key to others: refused, or warned of in one line."""

import io
import json
import os
import re
import ssl
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from reliablepub import ConfigurationError, Message, Outbox, OutboxError, OutboxKeys, Publisher
from reliablepub.cli import main
from reliablepub.cli.output import print_note
from reliablepub.cli.progress import Bar
from reliablepub.outbox.encryption import exposure
from reliablepub.testing import FakeBroker
from reliablepub.transport import address as address_module
from reliablepub.transport.address import check_login, parse_addresses
from tests.certificates import signed

REMOTE = "amqp://orders:hush@broker.example/"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert "hush" not in result.output
    return result.exit_code, result.stderr


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "o.db"
    Outbox(path).enqueue(Message(b"x", routing_key="q"))
    return path


def relay(path: Path, *arguments: object) -> tuple[int, str]:
    """A relay that ends at once, because another one is there."""
    with Publisher("amqp://127.0.0.1:1/", outbox=path, close_timeout_s=0):
        return run("relay", "--outbox", path, *arguments)


def test_certificates_for_a_connection_without_tls_are_refused(path: Path) -> None:
    authorities = "/etc/ssl/certs/ca-certificates.crt"
    to = ("--url", "amqp://localhost:1/", "--tls-ca", authorities)
    for command in (
        ("relay", "--outbox", path, *to),
        ("publish", path, "--routing-key", "q", *to),
        ("doctor", "--outbox", path, *to),
    ):
        code, said = run(*command)
        assert code == 2
        assert "certificates for TLS were given, but the URL is amqp://" in said
    with pytest.raises(ConfigurationError, match="certificates for TLS were given"):
        Publisher("amqp://localhost:1/", outbox=None, ssl_context=ssl.create_default_context())


@pytest.mark.parametrize("order", [1, -1])
def test_a_list_of_both_kinds_is_refused(path: Path, order: int) -> None:
    urls = ["amqps://a:hush@a/", "amqp://a:hush@b/"][::order]
    with pytest.raises(ConfigurationError, match="some URLs are amqps and some are amqp"):
        Publisher(urls, outbox=None)
    code, said = run("doctor", "--outbox", path, "--url", urls[0], "--url", urls[1])
    assert code == 2
    assert "some URLs are amqps" in said


@pytest.mark.parametrize(
    ("url", "is_exposed"),
    [
        (REMOTE, True),
        ("amqp://orders:hush@10.0.0.7:5672/", 1),
        ("amqp://orders:hush@[fe80::1]/", 1),
        ("amqps://orders:hush@broker.example/", 0),
        ("amqp://orders:hush@localhost/", 0),
        ("amqp://orders:hush@a.localhost/", 0),
        ("amqp://orders:hush@127.8.9.1/", 0),
        ("amqp://orders:hush@[::1]/", 0),
        ("amqp://guest:guest@broker.example/", 0),
    ],
)
def test_a_password_that_others_can_read_on_the_way_is_warned_of_once(
    url: str, is_exposed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_module, "_warned_of", set())
    for _ in range(2):
        check_login(parse_addresses(url), None, None)
    assert len(caplog.records) == int(is_exposed)
    assert "hush" not in caplog.text


def test_publishers_and_commands_warn(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_module, "_warned_of", set())
    url = "amqp://orders:hush@192.0.2.1/"
    with Publisher(url, outbox=None, close_timeout_s=0):
        pass
    words = "the password and every message go to amqp://192.0.2.1:5672 unencrypted"
    assert words in caplog.text
    assert re.search(rf"WARNING +{re.escape(words)}", relay(path, "--url", url)[1])


def test_a_password_in_a_file_is_none_on_the_command_line(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.touch(0o600)
    secret.write_text("hush")
    said = relay(path, "--url", "amqp://orders@localhost/", "--password-file", secret)[1]
    assert "can see a password in --url" not in said
    assert "WARNING" not in said
    for user, is_seen in (("orders:hush@", True), ("guest:guest@", False), ("", False)):
        said = relay(path, "--url", f"amqp://{user}localhost/")[1]
        assert ("can see a password in --url" in said) is is_seen


def test_no_note_repeats_the_password_of_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    print_note("not reopened: cannot parse 'amqp://b:hu@sh@h/' and 'postgresql://h?password=hu@sh'")
    told = capsys.readouterr().err
    assert told == (
        "not reopened: cannot parse 'amqp://b:...@h/' and 'postgresql://h?password=...\n"
    ), "the rest of a word may belong to the password"


MISPLACED = ("amqp://b:a,hush@h/", "postgresql://a h/?password=a hush", "host=h password='a hush'")


@pytest.mark.parametrize("value", MISPLACED)
@pytest.mark.parametrize("option", ["--password-file", "--config", "--outbox-keys", "--window"])
def test_no_error_repeats_a_password_that_was_given_to_another_option(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = ("relay", "--url", "amqp://localhost:1/", "--outbox", "o.db")
    code, said = run(*to, option, value)
    assert code == 2 or "key file" in said
    monkeypatch.setenv(f"RELIABLEPUB_{option[2:].replace('-', '_').upper()}", value)
    code, said = run(*to)
    assert code == 2 or "key file" in said


def test_nor_does_a_note_above_the_bars_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Bar(1) as bar:
        bar.say("cannot parse 'amqp://b:hu@sh@h/'")
    assert "amqp://b:...@h/" in terminal.getvalue()
    assert "hu@sh" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("outbox", "is_seen"),
    [
        ("postgresql://app:hush@127.0.0.1:1/shop", 1),
        ("postgresql://app@127.0.0.1:1/shop?password=hush", 1),
        ("postgresql://app@127.0.0.1:1/shop?sslpassword=hush", 1),
        ("postgresql://app@127.0.0.1:1/shop", 0),
    ],
)
def test_a_password_of_an_outbox_on_the_command_line_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, outbox: str, is_seen: int
) -> None:
    words = "can see a password in --outbox (ps); use ~/.pgpass, PGPASSWORD or RELIABLEPUB_OUTBOX"
    to = ("relay", "--url", "amqp://127.0.0.1:1/")
    outbox += ("&" if "?" in outbox else "?") + "sslmode=none"  # which no waiting heals
    code, said = run(*to, "--outbox", outbox)
    assert (code, words in said) == (4, is_seen)
    monkeypatch.setenv("RELIABLEPUB_OUTBOX", outbox)
    assert "can see a password" not in run(*to)[1]


@pytest.mark.parametrize(
    ("mode", "warnings"), [(0o600, 0), (0o400, 0), (0o440, 0), (0o644, 1), (0o620, 1), (0o602, 1)]
)
def test_a_file_with_a_secret_that_others_can_read_is_warned_of(
    path: Path, mode: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    password, keys = path.with_name("password"), path.with_name("keys")
    password.write_text("hush")
    keys.write_text(f"a {'00' * 32}\n")
    for file in (password, keys):
        file.chmod(mode)
        assert bool(exposure(file)) == warnings
    to = ("--url", "amqp://orders@localhost/", "--password-file", password)
    said = relay(path, *to, "--outbox-keys", keys)[1]
    for file in (password, keys):
        words = f"warning: other users of this machine can read or replace {file} (mode {mode:04o})"
        assert (words in said) == warnings
    caplog.clear()
    OutboxKeys.read(keys)
    assert len(caplog.records) == warnings


def test_a_file_with_a_secret_that_another_user_owns_is_warned_of(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    password, keys = path.with_name("password"), path.with_name("keys")
    password.write_text("hush")
    keys.write_text(f"a {'00' * 32}\n")
    to = ("--url", "amqp://orders@localhost/", "--password-file", password, "--outbox-keys", keys)
    for file in (password, keys):
        file.chmod(0o600)
    me, real = os.geteuid(), Path.stat
    owner = me

    def stat(file: Path, **options: bool) -> os.stat_result:
        found = real(file, **options)
        if file not in (password, keys):
            return found
        return os.stat_result((*found[:4], owner, *found[5:]))

    monkeypatch.setattr(Path, "stat", stat)
    for owner, is_warned_of in ((me, False), (0, False), (me + 7, True)):
        said = relay(path, *to)[1]
        for file in (password, keys):
            words = f"user {owner}, who owns {file}, can read or replace it, and it holds a secret"
            assert (f"warning: {words}; chown {me} {file}" in said) is is_warned_of
        caplog.clear()
        OutboxKeys.read(keys)
        assert len(caplog.records) == is_warned_of


def test_a_remedy_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    secret = tmp_path / "my key; x"
    secret.write_text("hush")
    secret.chmod(0o644)
    assert exposure(secret).endswith(f"; chmod 600 '{secret}'")

    outbox = tmp_path / "my outbox.db"
    with Outbox(outbox) as opened:
        opened.create()
    outbox.chmod(0o644)
    found = CliRunner().invoke(main, ["outbox", "check", "--outbox", str(outbox), "--json"])
    [remedy] = [row["remedy"] for row in json.loads(found.stdout) if row["check"] == "access"]
    assert remedy.startswith(f"they can read message bodies: chmod 600 '{outbox}' '{outbox}-wal'")
    outbox.with_name("my outbox.db-wal").touch()
    outbox.chmod(0o600)
    outbox.with_name("my outbox.db-wal").chmod(0o640)
    with pytest.raises(OutboxError, match=f"; chmod 600 '{outbox}-wal', "):
        Publisher("amqp://localhost/", outbox=outbox, close_timeout_s=0)


def test_the_key_of_a_certificate_is_a_secret_too(path: Path, tmp_path: Path) -> None:
    both = signed(tmp_path, "DNS:localhost")
    to = ("--url", "amqps://localhost:1/", "--tls-certificate", both)
    for mode, is_exposed in ((0o644, True), (0o600, False)):
        both.chmod(mode)
        assert (f"can read or replace {both}" in relay(path, *to)[1]) is is_exposed


def test_a_file_that_is_not_there_is_no_secret(tmp_path: Path) -> None:
    assert exposure(tmp_path / "none") == ""


def test_on_this_machine_nothing_is_said(path: Path) -> None:
    with FakeBroker() as broker:
        broker.declare_queue("q")
        assert "warning" not in run("relay", "--outbox", path, "--url", broker.url, "--drain")[1]


def test_a_folder_that_others_can_write_to_is_warned_of(path: Path) -> None:
    words = "every user can write to directory"
    for mode, is_exposed in ((0o700, False), (0o1777, True)):
        path.parent.chmod(mode)
        assert (words in relay(path, "--url", "amqp://localhost/")[1]) is is_exposed
        found = CliRunner().invoke(main, ["outbox", "check", "--outbox", str(path)]).stdout
        assert (words in found) is is_exposed
        to = ("--url", "amqp://localhost:1/", "--routing-key", "q")
        said = run("publish", path.with_name("none"), "--outbox", path, *to)[1]
        assert (words in said) is is_exposed
