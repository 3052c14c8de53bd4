"""The page for on-call operators: its commands are run in order, on every kind of trouble."""

import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from reliablepub import Message
from reliablepub.cli import main
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.trouble import make_trouble
from tests.docs.documents import ROOT, blocks

PAGE = ROOT / "docs" / "on-call.md"
CODES = {
    "doctor": (2, 4),  # the exchanges that messages name are not there
    "outbox check": (4,),  # message 9
    "relay": (4,),  # there is one already
}


def shown() -> Iterator[str]:
    for block in blocks(PAGE):
        if block.language == "sh":
            yield from block.text.splitlines()


def test_every_command_of_the_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RELIABLEPUB_OUTBOX", "outbox.db")
    monkeypatch.setattr("reliablepub.cli.choosing.can_be_answered", lambda: True)
    said: dict[str, str] = {}
    fill("outbox.db.rescued-1", Message(b"what a relay had when its files were moved"))
    with FakeBroker() as broker, closing(make_trouble(tmp_path / "outbox.db")):
        monkeypatch.setenv("RELIABLEPUB_URL", broker.url)
        lines = list(shown())
        assert len(lines) > 15
        for line in lines:
            words = shlex.split(line)
            assert words[0] == "reliablepub"
            result = CliRunner().invoke(main, words[1:], input="y\n")
            assert result.exception is None or isinstance(result.exception, SystemExit), line
            name = " ".join(words[1 : 3 if words[1] == "outbox" else 2])
            assert result.exit_code in CODES.get(name, (0,)), (line, result.output)
            said[line] = result.output
    story = said["reliablepub outbox explain 4"]
    for line in ("Why: returned: 312 NO_ROUTE", "Delivered? not written", "Next: "):
        assert line in story
    assert "would be put back" in said["reliablepub outbox retry --reason NO_ROUTE --dry-run"]
    assert "1 message rerouted" in said["reliablepub outbox reroute 3 --to-exchange orders"]
    assert (tmp_path / "body.bin").read_bytes() == b'{"n": "\xc3\xbc"}'


def test_the_words_that_the_page_looks_for_are_those_of_status(tmp_path: Path) -> None:
    make_trouble(tmp_path / "o.db").close()
    arguments = ["outbox", "status", "--over", "0", "--outbox", str(tmp_path / "o.db")]
    names = {
        line.split("  ")[0] for line in CliRunner().invoke(main, arguments).output.splitlines()
    }
    wanted = {"relay", "broker", "parked", "expired", "held_keys", "waiting", "on disk", "open"}
    assert wanted <= names
    for name in wanted:
        assert f"`{name}" in PAGE.read_text()
