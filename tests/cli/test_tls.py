"""Certificates on the command line: for each command that connects; in one line if unusable."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from reliablepub import Message
from reliablepub.cli import main
from reliablepub.cli.options import tls_context, tls_options
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.certificates import broker_with, signed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`both.pem`, its parts `one.crt` and `one.key`, and `ca.crt`, who signed it."""
    both = signed(tmp_path_factory.mktemp("tls"), "DNS:localhost", "IP:127.0.0.1")
    (both.with_name("one.key")).write_text(both.read_text().partition("-----BEGIN CERT")[0])
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:x", "-in", "one.key"]
    subprocess.run([*command, "-out", "sealed.key"], cwd=both.parent, check=True)
    return both.parent


@pytest.fixture
def broker(folder: Path) -> Iterator[FakeBroker]:
    """It asks for a certificate, and has a queue `q`."""
    broker = broker_with(folder / "both.pem", asks=True)
    yield broker
    broker.stop()


def run(*arguments: str | Path, **variables: str | Path) -> tuple[int, str]:
    environment = {name: str(value) for name, value in variables.items()}
    result = CliRunner().invoke(main, [str(word) for word in arguments], env=environment)
    return result.exit_code, result.output


def test_every_command_that_connects_has_them(
    broker: FakeBroker, folder: Path, tmp_path: Path
) -> None:
    to = ("--url", broker.url, "--tls-ca", folder / "ca.crt", "--tls-certificate")
    shown = (*to, folder / "one.crt", "--tls-key", folder / "one.key")
    outbox, lines, topology = (tmp_path / name for name in ("o.db", "lines", "topology.toml"))
    lines.write_text("1\n2\n")
    topology.write_text('[[queue]]\nname = "q"\n')

    code, said = run("publish", lines, "--routing-key", "q", *shown)
    assert (code, len(broker.messages("q"))) == (0, 2), said
    fill(outbox, Message(b"3", routing_key="q"))
    code, said = run("relay", "--drain", "--outbox", outbox, *to, folder / "both.pem")
    assert (code, len(broker.messages("q"))) == (0, 3), said
    assert run("doctor", "--outbox", outbox, *shown)[0] == 0
    assert run("topology", "check", topology, *shown)[0] == 0
    variables = {
        "RELIABLEPUB_TLS_CA": folder / "ca.crt",
        "RELIABLEPUB_TLS_CERTIFICATE": folder / "both.pem",
    }
    assert run("topology", "check", topology, "--url", broker.url, **variables)[0] == 0
    code, said = run("doctor", "--outbox", outbox, "--url", broker.url)
    assert code == 2
    assert "--tls-ca" in said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--tls-key one.key", "give --tls-certificate too"),
        ("--tls-ca nowhere", "the authorities in nowhere cannot be used: No such file"),
        ("--tls-ca one.key", "in one.key cannot be used: not a PEM file of that kind"),
        ("--tls-certificate one.crt", "in one.crt cannot be used: not a PEM file of that kind"),
        (
            "--tls-certificate one.crt --tls-key ca.key",
            "one.crt with ca.key cannot be used: not a PEM file",
        ),
        ("--tls-certificate one.crt --tls-key sealed.key", "is encrypted; give an unencrypted key"),
    ],
)
def test_what_cannot_be_used_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, problem: str
) -> None:
    monkeypatch.chdir(folder)
    lines = folder / "lines"
    lines.write_text("1\n")
    code, said = run("publish", lines, "--routing-key=q", "--url=amqps://b/", *arguments.split())
    assert code == 2
    assert problem in said
    assert said.count("\n") == 1


def test_without_them_the_library_decides() -> None:
    command = tls_options(click.Command("extra", params=[]))
    assert tls_context(command.make_context("extra", [])) is None
