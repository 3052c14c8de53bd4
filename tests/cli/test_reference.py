"""The page on the command line: each command that it shows is run, on every kind of trouble."""

import shlex
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from reliablepub import Message
from reliablepub.cli import main
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.exit_codes import assert_documented
from tests.cli.trouble import make_trouble
from tests.docs.documents import PLACEHOLDER, ROOT, blocks

PAGE = ROOT / "docs" / "cli.md"
KEYS = "2026-11 " + "ab" * 32 + "\n"
CODES = {
    "doctor": (2, 4),  # the exchanges that messages name are not there
    "outbox check": (4,),  # message 9
    "outbox audit": (4,),
    "outbox keys --resume": (2,),  # no message holds this key
    "outbox salvage": (1,),  # message 9
    "outbox rekey": (2,),  # messages that are not encrypted, or damaged
}
ENDLESS = {"relay": ["--drain"], "watch": ["--count", "1"]}


def shown() -> Iterator[str]:
    for block in blocks(PAGE):
        if block.language == "sh":
            yield from block.text.replace("\\\n", " ").splitlines()


def test_every_command_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("reliablepub.cli.choosing.can_be_answered", lambda: True)
    Path("keys").write_text(KEYS)
    lines = list(shown())
    assert len(lines) > 25
    with FakeBroker() as broker, closing(make_trouble(tmp_path / "outbox.db")):
        broker.declare_exchange("orders", "fanout")
        broker.declare_queue("all")
        broker.bind("all", "orders")
        fill("outbox.db", *(Message(b"%d" % number, exchange="orders") for number in range(11, 19)))
        run(["outbox", "park", "17", "18", "--outbox", "outbox.db"], broker.url)
        _copy("outbox.db", "damaged.db")
        for line in lines:
            words = shlex.split(line.partition(" > ")[0])
            if words[0] == "reliablepub":
                run(words[1:], broker.url)
            else:
                subprocess.run(["sh", "-c", line], check=True)


def _copy(source: str, target: str) -> None:
    """Copy an outbox as SQLite does, with what is in the log."""
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


def run(words: list[str], url: str) -> None:
    name = " ".join(words[: 2 if words[0] == "outbox" else 1])
    shown_as = " ".join(words)
    if any(word.startswith("postgresql:") for word in words) and "--sql" not in words:
        return  # docs/postgres.md runs it, with a server
    words = [word.replace(PLACEHOLDER, url) for word in words] + ENDLESS.get(words[0], [])
    if words[0] in ("publish", "relay"):  # the other outbox has a relay
        words = [word.replace("outbox.db", "another.db") for word in words]
    result = CliRunner().invoke(main, words, input="y\n")
    assert result.exception is None or isinstance(result.exception, SystemExit), shown_as
    expected = CODES.get(" ".join(words[:3])) or CODES.get(name, (0,))
    assert result.exit_code in expected, (shown_as, result.output)
    assert_documented(tuple(words), result.exit_code)
