"""Markdown as something that can be run: blocks, commands and links of one document.

Knows: fences, hidden set-up comments, inline code and links. Must never know: what is said.

How a document is run: every ```` ```python ```` block, in order, in one namespace, in an empty
folder. The address ``amqp://guest:guest@localhost/`` becomes that of a fake broker, also without
its password, and the URL
``postgresql://app@localhost/shop`` that of an empty database; ``http://localhost:15673`` becomes
that of the fake broker's control port. What the reader
is expected to have (queues, tables) is made by a comment that only the source shows::

    <!-- setup
    broker.declare_queue("invoices")
    -->

Commands in ``console`` and ``sh`` blocks run in between, in the same folder (`shell`). A block that
needs Spark is called ``py``; tests/spark runs it.

Functions of a block that are called ``test_...`` are called, with a ``fake_broker`` or ``tmp_path``
if they ask for one.
"""

import code
import inspect
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reliablepub.observe.metrics import Metrics
from reliablepub.testing import FakeBroker
from reliablepub.testing.control import ControlServer
from tests.docs.shell import commands_of, run_command

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
KINDS = ["Tutorial", "Develop", "Run in production", "Migrate", "Reference", "Explanation"]
"""Of pages, in the order of the site."""
PLACEHOLDER = "amqp://guest:guest@localhost/"
FIRST_STEP = "tutorial.md#1-start-a-broker"
CONTROL = "http://localhost:15673"
DATABASE = "postgresql://app@localhost/shop"

_PART = re.compile(
    r"^```(?P<language>\w+)\n(?P<block>.*?)^```$|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"`((?:reliablepub|make) [^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block, or a hidden set-up."""

    language: str
    text: str
    line: int


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text()
    for found in _PART.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["setup"] is not None:
            yield Block("setup", found["setup"], line)
        else:
            yield Block(found["language"], found["block"], line)


def needs_postgres(document: Path) -> bool:
    return any(DATABASE in b.text for b in blocks(document) if b.language in ("python", "setup"))


def run_as_seen(document: Path, folder: Path) -> None:
    """Run its Python without the set-up; the tutorial's first step comes first, if it is linked."""
    tutorial = ROOT / "docs" / "tutorial.md"
    seen = [block for block in blocks(document) if block.language == "python"]
    if any(link == FIRST_STEP for link in links(document)):
        seen.insert(0, next(block for block in blocks(tutorial) if block.language == "python"))
    copy = folder / document.name
    copy.write_text("\n".join(f"```python\n{block.text}```\n" for block in seen))
    run(copy, folder)


def run(document: Path, folder: Path, database: str = DATABASE, *, pasted: bool = False) -> None:
    """Run the Python and the commands of a document; the working folder is an empty one already.

    Args:
        document: its path.
        folder: the working folder.
        database: URL of an empty database.
        pasted: give the Python to an interactive interpreter, line by line.
    """
    with FakeBroker() as broker, ControlServer(broker, "127.0.0.1", 0) as control:
        namespace: dict[str, Any] = {"__name__": "__document__", "broker": broker}
        bare = {url: url.replace("guest:guest@", "guest@") for url in (PLACEHOLDER, broker.url)}
        replaced = {PLACEHOLDER: broker.url, DATABASE: database, CONTROL: control.url}
        replaced[bare[PLACEHOLDER]] = bare[broker.url]
        environment: dict[str, str] = {}
        for block in blocks(document):
            if block.language in ("console", "sh"):
                for command in commands_of(block.language, block.text):
                    if command.is_run:
                        run_command(command, replaced, environment)
            if block.language not in ("python", "setup"):
                continue
            before = set(namespace)
            text = block.text
            for old, new in replaced.items():
                text = text.replace(old, new)
            if pasted and block.language == "python":
                _Interpreter(namespace).paste(text)
            else:
                # Line numbers as in the document, so that a traceback points into it.
                source = "\n" * block.line + text
                exec(compile(source, str(document), "exec", dont_inherit=True), namespace)
            for name in sorted(set(namespace) - before):
                if name.startswith("test_"):
                    _call_test(namespace[name], folder)
        _tidy(namespace)


class _Interpreter(code.InteractiveConsole):
    """Python's prompt, which ends a block of code at an empty line; errors are raised."""

    def paste(self, text: str) -> None:
        is_open = False
        for line in (*text.splitlines(), ""):
            is_open = self.push(line)
        assert not is_open, "the prompt still waits for a line"

    def showtraceback(self) -> None:
        raise  # noqa: PLE0704 - called while the error is handled

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        raise  # noqa: PLE0704 - called while the error is handled


def _tidy(namespace: dict[str, Any]) -> None:
    """Close databases, and free the names of metrics: a page may run twice in a process."""
    for value in namespace.values():
        if isinstance(value, Metrics):
            value.unregister()
        if isinstance(value, sqlite3.Connection):
            value.close()


def _call_test(test: Callable[..., None], folder: Path) -> None:
    with FakeBroker() as fake_broker:
        offered = {"fake_broker": fake_broker, "tmp_path": folder}
        test(**{name: offered[name] for name in inspect.signature(test).parameters})


def commands(document: Path) -> Iterator[list[str]]:
    """Every ``reliablepub ...`` and ``make ...`` shown, as words; continued lines are joined."""
    text = document.read_text()
    shown = [found[1] for found in INLINE.finditer(text)]
    for block in blocks(document):
        if block.language in ("console", "sh"):
            joined = block.text.replace("\\\n", " ")
            shown += [line.removeprefix("$ ") for line in joined.splitlines()]
    for line in shown:
        words = line.split("#")[0].split()
        if words and words[0] in ("reliablepub", "make"):
            yield words


def links(document: Path) -> Iterator[str]:
    """Links to other files of the project, with their fragments."""
    without_fences = _FENCE.sub("", document.read_text())
    for found in _LINK.finditer(without_fences):
        yield found[1]


def anchors(document: Path) -> set[str]:
    """The fragments that a document's headings make, as forges make them."""
    without_fences = _FENCE.sub("", document.read_text())
    return {
        re.sub(r"[^\w\- ]", "", found[1].lower()).replace(" ", "-")
        for found in _HEADING.finditer(without_fences)
    }
