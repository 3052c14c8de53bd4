"""Options from a file: weaker than a variable, which is weaker than a flag; nothing in vain."""

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from reliablepub import Outbox
from reliablepub.cli import main
from reliablepub.cli.config import SHARED, TABLES, config_option, variable_of
from reliablepub.cli.options import url_option
from reliablepub.cli.publish.command import publish
from reliablepub.cli.relay.command import relay
from tests.cli.conftest import refused


@click.command("relay")
@config_option
@url_option
@click.option("--window", type=int, default=1, envvar="TEST_WINDOW")
@click.option("--drain", is_flag=True)
def shown(
    urls: tuple[str, ...],
    window: int,
    drain: bool,  # noqa: FBT001 - click's
    **_: object,
) -> None:
    click.echo(f"{urls} {window} {drain}")


def show(folder: Path, text: str, *arguments: str, **environment: str) -> str:
    """What a command has understood."""
    path = folder / "relay.toml"
    path.write_text(text)
    variables = {"RELIABLEPUB_CONFIG": str(path), **environment}
    result = CliRunner().invoke(shown, arguments, env=variables)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


URLS = 'url = ["amqp://a/", "amqp://b/"]\n'
HERE = "('amqp://a/', 'amqp://b/')"


def test_a_flag_counts_more_than_a_variable_and_that_more_than_the_file(tmp_path: Path) -> None:
    text = f"{URLS}[relay]\nwindow = 2\ndrain = true\n"
    assert show(tmp_path, text) == f"{HERE} 2 True"
    assert show(tmp_path, text, TEST_WINDOW="3") == f"{HERE} 3 True"
    assert show(tmp_path, text, "--window", "4", TEST_WINDOW="3") == f"{HERE} 4 True"
    assert show(tmp_path, URLS) == f"{HERE} 1 False"
    assert show(tmp_path, URLS, RELIABLEPUB_URL="amqp://c/") == "('amqp://c/',) 1 False"
    assert show(tmp_path, 'url = "amqp://d/"') == "('amqp://d/',) 1 False"


def test_the_commands_own_table_counts_more_than_what_is_shared(tmp_path: Path) -> None:
    text = "window = 5\n" + URLS
    assert show(tmp_path, text) == f"{HERE} 5 False"
    assert show(tmp_path, f"{text}[relay]\nwindow = 6\n[publish]\nwindow = 7") == f"{HERE} 6 False"


def test_a_password_comes_from_a_file_of_its_own(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("a/b@c\n")
    text = f'password-file = "{secret}"\nurl = ["amqp://x@a:1/v", "amqp://b"]\n'
    assert show(tmp_path, text) == (
        "('amqp://x:a%2Fb%40c@a:1/v', 'amqp://guest:a%2Fb%40c@b') 1 False"
    )


def test_two_passwords_are_refused_with_their_origins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "password"
    secret.touch(0o600)
    secret.write_text("hush")
    monkeypatch.setenv("RELIABLEPUB_PASSWORD_FILE", str(secret))
    result = CliRunner().invoke(main, ["relay", "--url", "amqp://u:hush@h", "--outbox", "o.db"])
    assert result.exit_code == 2
    words = "the URL (of --url) has a password, and a password file is given too (of the variable "
    assert f"{words}RELIABLEPUB_PASSWORD_FILE): give one of them" in result.stderr
    monkeypatch.delenv("RELIABLEPUB_PASSWORD_FILE")
    monkeypatch.setenv("RELIABLEPUB_URL", "amqp://u:hush@h")
    config = tmp_path / "relay.toml"
    config.write_text(f'[relay]\npassword-file = "{secret}"\n')
    result = CliRunner().invoke(main, ["relay", "--config", str(config), "--outbox", "o.db"])
    words = "the URL (of the variable RELIABLEPUB_URL) has a password, and a password file is given"
    assert f"{words} too (of the configuration)" in result.stderr


def test_a_password_that_is_configured_no_more_is_forgotten(tmp_path: Path) -> None:
    """A relay reads its options again after SIGHUP, below the same group."""
    path, group = tmp_path / "relay.toml", click.Context(main)
    (tmp_path / "password").write_text("hush")
    found = []
    for text in (f'password-file = "{tmp_path / "password"}"\n', ""):
        path.write_text(text + 'url = "amqp://a/"\n')
        context = shown.make_context("relay", ["--config", str(path)], parent=group)
        found.append(context.params["urls"])
    assert found == [("amqp://guest:hush@a/",), ("amqp://a/",)]


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """A relay reads its options again after SIGHUP; the pipe is at its end by then."""
    reader, writer = os.pipe()
    os.write(writer, b"url = 'amqp://a/'\nwindow = 2\n")
    os.close(writer)
    path, group = tmp_path / "piped.toml", click.Context(main)
    path.symlink_to(f"/dev/fd/{reader}")  # a name that no other test has
    found = []
    for _ in range(2):
        context = shown.make_context("relay", ["--config", str(path)], parent=group)
        found.append((context.params["urls"], context.params["window"]))
    os.close(reader)
    assert found == [(("amqp://a/",), 2)] * 2


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("RELIABLEPUB_WINDWO", "the variable RELIABLEPUB_WINDWO is not used; did you mean "),
        ("RELIABLEPUB_RELAY_SERVICE_HOST", ""),
    ],
)
def test_a_variable_that_is_nearly_one_of_an_option_is_told(
    tmp_path: Path, name: str, note: str
) -> None:
    Outbox(tmp_path / "o.db").create()
    arguments = ["relay", "--drain", "--url", "amqp://[::1]:1/", "--outbox", str(tmp_path / "o.db")]
    result = CliRunner().invoke(main, arguments, env={name: "5"})
    assert result.exit_code == 0
    assert ("is not used" in result.stderr) == bool(note)
    assert note in result.stderr


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("windows = 1", "unknown key 'windows'; did you mean 'window'?"),
        ("[relay]\nkeep_confirmed = 1", "unknown key 'keep_confirmed'; did you mean"),
        ("[rellay]\nwindow = 1", "unknown table 'rellay'; did you mean 'relay'?"),
        ("relay = 1", "unknown key 'relay'; it is a table: [relay]"),
        ("xyzzy = 1", "unknown key 'xyzzy'; there are accept-plaintext, connection-name, json, "),
        ("[relay]\nwindow = {a = 1}", "window is of type dict, which no option takes"),
        ("window = [1]", "window is a list; it takes one value"),
        ("window = 'many'", "Invalid value for '--window'"),
        ("window = ", "is not valid TOML: Invalid value"),
        (f"a = {'[' * 3_000}", "is not valid TOML"),
        (f"window = {'1' * 5_000}", "is not valid TOML: Exceeds the limit"),
        ("url = 'amqp://x:hush@y/'", "url holds a password"),
        ("outbox = 'postgresql://x:hush@y/z'", "outbox holds a password"),
        ("outbox = 'postgresql://x:hush?@y/z'", "outbox holds a password"),
        ("outbox = 'postgresql://x:hush#@y/z'", "outbox holds a password"),
        ("outbox = 'postgresql://x:[hush@y/z'", "outbox holds a password"),
        ("outbox = 'postgresql://x@w:hush@y/z'", "outbox holds a password"),
        ("outbox = 'postgresql://x:hush@y,z:1/z?user=a@b'", "outbox holds a password"),
        ("outbox = 'postgresql://x@y/z?password=hush'", "put it into ~/.pgpass or PGPASSWORD"),
        ("password-file = 'nowhere'", "cannot read the password file nowhere: No such file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("relay.toml").write_text(text)
    arguments = ["relay", "--config", "relay.toml", "--outbox", "o.db"]
    result = CliRunner().invoke(main, arguments, env={"RELIABLEPUB_URL": "amqp://nowhere/"})
    assert (result.exit_code, result.stdout) == (2, "")
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1
    assert "hush" not in result.stderr


@pytest.mark.parametrize(
    "outbox",
    [
        "postgresql://x@y:5432/z",
        "postgresql://y/z?user=x@w",
        "postgresql://x@y:5432/z?sslrootcert=/etc/ca@x.pem",
        "postgresql://y:1,[::1]:2/z?options=-c%20a.b=c:d@e",
        "postgresql:///z?host=/run/a:b@c",
        "/var/lib/a:b@c.db",
    ],
)
def test_an_outbox_with_a_colon_or_an_at_sign_but_no_password_is_taken(
    tmp_path: Path, outbox: str
) -> None:
    (tmp_path / "relay.toml").write_text(f"outbox = '{outbox}'")
    context = click.Context(relay, info_name="relay")
    config = next(one for one in relay.params if one.name == "config")
    config.process_value(context, str(tmp_path / "relay.toml"))
    assert context.default_map is not None
    assert context.default_map["database"] == outbox


def test_a_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    refused(
        CliRunner().invoke(main, ["relay", "--config", str(tmp_path / "no.toml")]),
        "no.toml: No such file",
    )


@pytest.mark.parametrize("command", [publish, relay])
def test_every_option_has_the_variable_of_its_name(command: click.Command) -> None:
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.envvar == variable_of(option.opts[0])
    assert variable_of("--keep-confirmed") == "RELIABLEPUB_KEEP_CONFIRMED"


def test_a_variable_of_a_name_is_read(tmp_path: Path) -> None:
    variables = {"RELIABLEPUB_URL": "amqp://nowhere/", "RELIABLEPUB_KEEP_CONFIRMED": "long"}
    refused(
        CliRunner().invoke(main, ["relay", "--outbox", str(tmp_path / "o")], env=variables),
        "Invalid value for '--keep-confirmed': 'long'",
    )


def test_what_is_shared_is_what_each_command_has() -> None:
    commands: dict[str, click.Command] = {"publish": publish, "relay": relay}
    assert tuple(sorted(commands)) == TABLES
    options = [
        {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
        for command in commands.values()
    ]
    assert {f"--{name}" for name in SHARED} == set.intersection(*options) - {"--config"}


def test_a_time_may_be_one_of_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("records").write_text("one\n")
    for at, code in (("2038-12-24T18:00:00+01:00", 3), ("2038-12-24T18:00:00", 2)):
        Path("c.toml").write_text(f"[publish]\nnot-before = {at}\nrouting-key = 'q'\n")
        arguments = ["publish", "records", "--config", "c.toml", "--outbox", "o.db"]
        result = CliRunner().invoke(main, [*arguments, "--url", "amqp://127.0.0.1:1/"])
        assert result.exit_code == code, result.stderr
    assert "is not a time with an offset" in result.stderr


@pytest.mark.parametrize("is_in_table", [False, True])
def test_every_command_finds_the_outbox_of_the_relay(tmp_path: Path, *, is_in_table: bool) -> None:
    Outbox(tmp_path / "o.db").enqueue(b"x")
    where = f'outbox = "{tmp_path / "o.db"}"\nurl = "amqp://127.0.0.1:1/"\n'
    table = '[relay]\njson = true\nlog-format = "json"\nwindow = 7\n'
    text = table + where if is_in_table else f"json = true\n{where}{table}"
    config = tmp_path / "relay.toml"
    config.write_text(text)
    for environment, more in (
        ({"RELIABLEPUB_CONFIG": str(config)}, ()),
        ({}, ("--config", config)),
    ):
        for words in (("outbox", "status"), ("outbox", "list"), ("watch", "--count", "1")):
            result = CliRunner().invoke(main, [*words, *map(str, more)], env=environment)
            assert result.exit_code == 0, result.stderr
        status = CliRunner().invoke(main, ["outbox", "status", *map(str, more)], env=environment)
        assert "stored" in status.stdout
        assert not status.stdout.startswith("{")  # what the relay prints is its own
        result = CliRunner().invoke(main, ["doctor", *map(str, more)], env=environment)
        assert "127.0.0.1:1" in result.stdout
    other = CliRunner().invoke(
        main, ["outbox", "status", "--outbox", str(tmp_path / "other.db")], env=environment
    )
    assert other.exit_code == 4


def test_an_unknown_key_is_told_by_every_command(tmp_path: Path) -> None:
    config = tmp_path / "relay.toml"
    config.write_text('outbux = "o.db"\n')
    result = CliRunner().invoke(main, ["outbox", "status", "--config", str(config)])
    assert (result.exit_code, "did you mean 'outbox'" in result.stderr) == (2, True)
