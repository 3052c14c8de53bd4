"""The group: help, plug-ins, and errors in one line; and that docs/cli.md leaves nothing out."""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from reliablepub.cli import app, main
from reliablepub.cli.app import _ending
from reliablepub.cli.commands import Exit
from reliablepub.errors import ConfigurationError, OutboxDiskFull, PublisherClosed, RelayHeldUp
from tests.cli.conftest import Cli
from tests.cli.exit_codes import assert_documented, exit_codes

DOCUMENT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
OWN = tuple(app._BUILT_IN)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Our commands and their subcommands, each under its full name."""
    context = click.Context(main)
    for name in OWN:
        command = main.get_command(context, name)
        assert command is not None
        yield f"reliablepub {name}", command
        if isinstance(command, click.Group):
            for inner_name in command.list_commands(context):
                inner = command.get_command(context, inner_name)
                assert inner is not None
                yield f"reliablepub {name} {inner_name}", inner


COMMANDS = [pytest.param(name, command, id=name) for name, command in commands()]


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_every_command_has_help_with_an_example(name: str, command: click.Command) -> None:
    assert command.help
    assert "Example" in command.help
    for option in command.params:
        assert not isinstance(option, click.Option) or option.help, f"{name} {option.name}"


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_help_fits_on_a_terminal_of_80_columns(
    name: str, command: click.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = CliRunner().invoke(main, [*name.split()[1:], "--help"]).stdout
    assert [line for line in told.splitlines() if len(line) > 80] == []
    assert "..." not in told.replace("amqps://...", "").replace("--url ...", "").replace(
        "[ARGS]...", ""
    ).replace("ID...", "")


def section(title: str) -> str:
    """What the page says under a heading, up to the next one."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found.group(1)


def json_keys(command: str) -> set[str]:
    """The names that the page gives for ``--json``: the code in the paragraph on it."""
    (told,) = re.findall(r"`--json` prints (.*?)\n\n", section(command), re.DOTALL)
    return set(re.findall(r"`(\w+)`", told))


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_every_command_has_a_section_or_its_group_has(name: str) -> None:
    titles = re.findall(r"^#+ (reliablepub .*)$", DOCUMENT, re.MULTILINE)
    assert name in titles or name.rpartition(" ")[0] in titles


def test_every_documented_command_exists() -> None:
    shown = re.findall(r"^#+ (reliablepub .*)$", DOCUMENT, re.MULTILINE)
    assert set(shown) <= {name for name, _ in commands()}


def test_the_documented_keys_are_those_of_the_summary(cli: Cli) -> None:
    result = cli("publish", "-", "--routing-key", "all", "--json", input="x\n").json
    section = DOCUMENT.split("## reliablepub publish")[1].split("\n## ")[0]
    table = section.split("| key | meaning |")[1]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert re.findall(r"`(\w+)`", "".join(cells)) == list(result)


# ---------------------------------------------------------------------- exit codes

EXITING = [
    pytest.param(name, command, id=name)
    for name, command in commands()
    if not isinstance(command, click.Group)
]


def documented_codes(text: str) -> dict[int, str]:
    """The rows of the table of exit codes, in their order."""
    rows = re.findall(r"^\| (\d) \| (.+) \|$", text, re.MULTILINE)
    assert len(rows) == len(dict(rows))
    return {int(code): meaning for code, meaning in rows}


@pytest.mark.parametrize(("name", "command"), EXITING)
def test_the_help_lists_the_exit_codes_of_every_command(name: str, command: click.Command) -> None:
    codes = exit_codes(command.help or "")
    assert list(codes) == sorted(codes)
    # Any command can be misused and interrupted; one that opens an outbox may find it unusable.
    has_outbox = any("--outbox" in option.opts for option in command.params)
    assert set(codes) >= {0, 2, 3} | ({4} if has_outbox else set())
    assert set(codes) <= set(Exit)


@pytest.mark.parametrize(("name", "command"), EXITING)
def test_every_exit_that_a_command_names_is_in_its_help(name: str, command: click.Command) -> None:
    assert command.callback is not None
    source = Path(inspect.getfile(command.callback)).read_text()
    module = command.callback.__module__
    listed = set(exit_codes(command.help or ""))
    for _, other in commands():
        if other.callback is not None and other.callback.__module__ == module:
            listed |= set(exit_codes(other.help or ""))
    assert {Exit[found] for found in re.findall(r"\bExit\.([A-Z_]+)\b", source)} <= listed, name


def test_the_exit_codes_of_every_command_are_those_of_the_code_and_the_document() -> None:
    codes = exit_codes(main.help or "")
    documented = documented_codes(section("Exit codes"))
    assert documented == codes
    assert list(documented) == list(codes)  # the first that applies counts
    assert set(codes) == set(Exit)


def test_an_exit_code_that_the_help_does_not_list_is_noticed() -> None:
    assert_documented(("outbox", "status", "--outbox", "outbox.db"), 4)
    with pytest.raises(AssertionError, match="reliablepub outbox status ended with 1"):
        assert_documented(("outbox", "status", "--outbox", "outbox.db"), 1)


# ---------------------------------------------------------------------- help


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, arguments, prog_name="reliablepub")
    return result.exit_code, result.stdout, result.stderr


def test_help_lists_built_in_commands_and_the_exit_codes() -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    for name in OWN:
        assert re.search(rf"^  {name} ", out, re.MULTILINE)
    assert "4  the outbox cannot be used" in out


@pytest.mark.parametrize("command", ["", "outbox retry", "outbox", "demo"])
def test_help_needs_no_docstrings(command: str) -> None:
    texts = [
        subprocess.run(
            [sys.executable, *options, "-m", "reliablepub", *command.split(), "--help"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for options in ((), ("-OO",))
    ]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) > 10


def test_the_version_is_printed() -> None:
    code, out, _ = invoke("--version")
    assert code == 0
    assert out.startswith("reliablepub ")


@pytest.mark.parametrize("arguments", [(), ("outbox",)])
def test_without_a_command_the_help_is_shown(arguments: tuple[str, ...]) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: ")


def test_an_unknown_command_is_one_line() -> None:
    assert invoke("nope") == (2, "", "Error: No such command 'nope'; see reliablepub --help\n")


# ---------------------------------------------------------------------- plug-ins


def plug_in(monkeypatch: pytest.MonkeyPatch, value: str, name: str = "extra") -> None:
    entry = EntryPoint(name, value, app.PLUG_INS)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: (entry,))


def test_a_plug_in_is_a_command_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "reliablepub.cli.outbox.figures:status")
    code, out, _ = invoke("extra", "--help")
    assert code == 0
    assert "Count the messages" in out


def test_no_plug_in_takes_the_place_of_a_built_in_command(monkeypatch: pytest.MonkeyPatch) -> None:
    before = invoke("publish", "--help")
    plug_in(monkeypatch, "reliablepub.cli.outbox.figures:status", "publish")
    assert invoke("publish", "--help") == before
    assert "Count the messages" not in before[1]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("reliablepub.nowhere:x", "ModuleNotFoundError: No module named 'reliablepub.nowhere'"),
        ("reliablepub.cli.outbox:nothing", "AttributeError"),
        ("reliablepub.cli.output:age", "is not a click command"),
    ],
)
def test_a_broken_plug_in_says_so_and_other_commands_work(
    monkeypatch: pytest.MonkeyPatch, value: str, problem: str
) -> None:
    plug_in(monkeypatch, value)
    code, out, err = invoke("extra", "--any", "thing")
    assert (code, out) == (2, "")
    assert err.startswith("Error: the command 'extra' cannot be loaded (")
    assert problem in err
    assert err.count("\n") == 1
    code, out, _ = invoke("--help")
    assert code == 0
    assert "publish" in out


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutboxDiskFull("the disk\nis full"), 4),
        (PublisherClosed("it has failed"), 4),
        (ConfigurationError("no such thing"), 2),
        (OSError("cannot"), 2),
        (KeyboardInterrupt(), 3),
        (ZeroDivisionError(), 1),
    ],
)
def test_expected_errors_are_one_line_and_others_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail() -> None:
        raise error

    command = click.Command("extra", callback=fail)
    monkeypatch.setattr(app, "_plug_ins", lambda: {"extra": object()})
    monkeypatch.setattr(app, "_load", lambda _: command)
    if isinstance(error, ZeroDivisionError):
        assert CliRunner().invoke(main, ["extra"]).exception is error, "it is not hidden"
        return
    exit_code, _, err = invoke("extra")
    assert exit_code == code
    assert len(re.findall("^Error: .+$", err, re.MULTILINE)) == 1
    assert err.strip().count("\n") == 0


# ---------------------------------------------------------------------- completion


def completed(*words: str) -> list[str]:
    """What bash would offer for the last of these words."""
    environment = {
        "_RELIABLEPUB_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    result = CliRunner(env=environment).invoke(main, prog_name="reliablepub")
    assert result.exit_code == 0, result.stderr
    return [line.partition(",")[2] for line in result.stdout.splitlines()]


def test_bash_completes_commands_options_and_states() -> None:
    assert "outbox" in completed("reliablepub", "ou")
    assert completed("reliablepub", "outbox", "ex") == ["explain", "export"]
    assert "--older-than" in completed("reliablepub", "outbox", "list", "--older")
    assert completed("reliablepub", "outbox", "list", "--state", "par") == ["parked"]


def test_the_documented_line_makes_a_script_for_bash() -> None:
    assert '"$(_RELIABLEPUB_COMPLETE=bash_source reliablepub)"' in DOCUMENT
    environment = {"_RELIABLEPUB_COMPLETE": "bash_source"}
    script = CliRunner(env=environment).invoke(main, prog_name="reliablepub").stdout
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "complete " in script


# ---------------------------------------------------------------------- for machines

NO_JSON = (
    *("reliablepub outbox", "reliablepub topology"),  # groups
    "reliablepub outbox export",  # what it prints is JSON
    "reliablepub outbox create",  # prints SQL
    "reliablepub outbox upgrade",  # the same
    "reliablepub dashboard",  # serves pages
    "reliablepub outbox metrics",  # prints what Prometheus reads
    "reliablepub shipped",  # prints a file
)


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_every_command_speaks_json(name: str, command: click.Command) -> None:
    assert any("--json" in option.opts for option in command.params) is (name not in NO_JSON)


def test_a_mistyped_command_is_answered_with_the_nearest() -> None:
    for args, near in ((["publsh"], "publish"), (["outbox", "lst"], "list")):
        result = CliRunner().invoke(main, args)
        assert result.exit_code == Exit.BAD_INPUT
        assert f"(did you mean {near!r}?); see main" in result.stderr
    assert "did you mean" not in CliRunner().invoke(main, ["xyzzy"]).stderr
    nested = CliRunner().invoke(main, ["explain", "17"])
    assert (nested.exit_code, "(did you mean 'outbox explain'?)" in nested.stderr) == (2, True)


def test_a_missing_option_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELIABLEPUB_OUTBOX", raising=False)
    missing = CliRunner().invoke(main, ["outbox", "list"])
    words = (
        "Missing option '--outbox', or the variable RELIABLEPUB_OUTBOX; see main outbox list --help"
    )
    assert (missing.exit_code, missing.stderr) == (2, f"Error: {words}\n")


def test_no_line_of_a_list_of_commands_is_cut() -> None:
    for args in ([], ["outbox"], ["topology"]):
        listed = CliRunner().invoke(main, [*args, "--help"]).stdout.partition("Commands:")[2]
        assert listed.strip()
        assert "..." not in listed


def test_a_relay_whose_hook_does_not_return_is_started_again() -> None:
    """The shipped unit starts no relay again that ends with 2."""
    assert _ending(RelayHeldUp("the hook does not return")) == ("the hook does not return", 4)
