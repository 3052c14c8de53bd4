"""Runs every command, and imports every public module, with whatever extras are installed.

Knows: public modules, the names of the libraries that extras bring. Must never know: pytest, or
private modules: it also runs where the wheel alone is installed::

    python commands.py     # prints what failed, and exits with 1
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click

from reliablepub import Message, Outbox
from reliablepub.cli import main
from reliablepub.testing import FakeBroker

ALWAYS = (
    *("reliablepub", "reliablepub.hooks", "reliablepub.testing", "reliablepub.testing.faults"),
    *("reliablepub.cli", "reliablepub.observe", "reliablepub.integrations"),
)
NEEDS = {
    "reliablepub.integrations.celery": ("celery",),
    "reliablepub.integrations.django": ("django",),
    "reliablepub.integrations.dramatiq": ("dramatiq",),
    "reliablepub.integrations.sqlalchemy": ("sqlalchemy",),
    "reliablepub.integrations.starlette": ("starlette",),
    "reliablepub.integrations.taskiq": ("taskiq_aio_pika",),
    "reliablepub.observe.metrics": ("prometheus_client",),
    "reliablepub.observe.tracing": ("opentelemetry",),
    "spark_sink": ("pyspark",),
}
"""Libraries without which a public module cannot be imported."""


def has(*libraries: str) -> bool:
    def is_found(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:  # told so by what stands in for an environment without it
            return False

    return all(map(is_found, libraries))


def run(*arguments: str) -> tuple[int, str]:
    """Run a command in this process; its exit code (-1: a traceback), and all that it prints."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    code: object = None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code
        except Exception as error:  # noqa: BLE001 - the traceback that a user would see
            print(f"{type(error).__name__}: {error}")
            code = -1
    said.seek(0)
    return code if isinstance(code, int) else 0, said.read()


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The arguments that name each command; the group itself has none."""
    yield path
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        try:
            found = group.get_command(ctx, name)
        except ImportError:
            found = None  # its help says so again
        if isinstance(found, click.Group):
            yield from commands(found, (*path, name))
        else:
            yield (*path, name)


def of_imports() -> Iterator[str]:
    for name in (*ALWAYS, *NEEDS):
        expected = has(*NEEDS.get(name, ()))
        try:
            import_module(name)
        except ImportError as error:
            if expected:
                yield f"import {name}: {error}"
        else:
            if not expected:
                yield f"import {name}: found without {NEEDS[name]}; mend this table"


def of_help() -> Iterator[str]:
    for path in commands(main):
        code, said = run(*path, "--help")
        if code or "Usage: reliablepub" not in said:
            yield f"reliablepub {' '.join(path)} --help: {code}, {said}"


def of_work(folder: Path) -> Iterator[str]:
    """What a user does first, on a file."""
    where = ("--outbox", str(folder / "outbox.db"))
    with FakeBroker() as broker:
        broker.declare_queue("q")
        with Outbox(folder / "outbox.db") as outbox:
            outbox.enqueue(Message(b"", routing_key="q"))
        for arguments in (
            ("outbox", "create", *where),
            ("outbox", "status", *where),
            ("relay", "--drain", "--url", broker.url, *where),
            ("outbox", "check", *where),
            ("outbox", "audit", *where),
            ("doctor", "--url", broker.url, *where),
        ):
            code, said = run(*arguments)
            if code:
                yield f"reliablepub {' '.join(arguments)}: {code}, {said}"
        if len(broker.messages("q")) != 1:
            yield "relay --drain has not published the message"


def of_extras(folder: Path) -> Iterator[str]:
    """A command that needs an extra works with it, and names it without it."""
    server = "postgresql://app@db.invalid/shop"
    for extra, library, arguments in (
        ("observe", "prometheus_client", ("metrics", "--outbox", str(folder / "outbox.db"))),
        ("postgres", "psycopg", ("create", "--sql", "--outbox", server)),
    ):
        code, said = run("outbox", *arguments)
        is_named = f"install reliablepub with the extra {extra}" in said
        if (code, is_named) != ((0, False) if has(library) else (2, True)):
            yield f"reliablepub outbox {' '.join(arguments)}: {code}, {said}"


def failures() -> list[str]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        return [*of_imports(), *of_help(), *of_work(folder), *of_extras(folder)]


if __name__ == "__main__":
    failed = failures()
    print("\n".join(failed) or "well")
    sys.exit(bool(failed))
