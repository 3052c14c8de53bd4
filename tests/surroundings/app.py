"""An application in a process of its own, that puts messages in by one of several doors.

It tells each call at once, on its standard output: `stored 17 TIME`, or `raised 17 OutboxMoved`.
Between two rounds of calls it waits for a line on its standard input, so that a test can do
something to its host meanwhile. It must never know what is done to it.
"""

import asyncio
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Self

from reliablepub import AsyncPublisher, Message, Outbox, Publisher, ReliablePubError

NOWHERE: Final = "amqp://127.0.0.1:1"
"""There is no broker: whatever was stored must be found in the outbox."""
CALLS: Final = 5
"""In each round."""
RELAYING: Final = ("publish", "publish_many", "async")
DOORS: Final = (*RELAYING, "enqueue", "within", "within_anew", "within_rollback")

Store = Callable[[str], object]
"""Stores one message with this id, or raises."""


class App:
    """Talks to the process. Leaving kills it.

    Args:
        door: by which messages are put in.
        path: of the outbox.
    """

    def __init__(self, door: str, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.surroundings.app", door, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def round(self, first: str = "") -> "Told":
        """Let it make some calls, and return what became of them.

        Args:
            first: the program of Python to run in it before.

        Raises:
            Ended: it has ended on its own.
        """
        self.begin(first)
        return self.told()

    def begin(self, *firsts: str) -> None:
        """Let it make as many rounds of calls, one after the other; does not wait for them."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("".join(first + "\n" for first in firsts))
            self._process.stdin.flush()

    def told(self) -> "Told":
        """What became of the calls of the next round.

        Raises:
            Ended: it has ended on its own.
        """
        assert self._process.stdout is not None
        told = Told()
        for line in self._process.stdout:
            word, *rest = line.split()
            if word == "done":
                return told
            if word == "stored":
                told.stored.append(rest[0])
                told.began[rest[0]] = float(rest[1])
            else:
                told.raised[rest[0]] = rest[1]
        assert self._process.stderr is not None
        raise Ended(self._process.stderr.read())

    def kill(self) -> None:
        """As a crash would: nothing is closed."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


class Ended(Exception):
    """The application has ended on its own; what it has written to its standard error."""


@dataclass
class Told:
    """What became of the calls of one round.

    Attributes:
        stored: ids of messages whose call has returned.
        raised: ids of those whose call has raised, and what.
        began: when each of the stored ones was called (monotonic clock, of all processes).
    """

    stored: list[str] = field(default_factory=list)
    raised: dict[str, str] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every call has ended in one of the two ways."""
        return len(self.stored) + len(self.raised) == CALLS


# ------------------------------------------------------------------------------ in the process


def rounds(store: Store) -> None:
    """Make calls, and tell what became of each, until the standard input ends."""
    for number, first in enumerate(sys.stdin):
        exec(first, {})
        for n in range(CALLS):
            id_, began = f"{number}-{n}", time.monotonic()
            try:
                store(id_)
            except (ReliablePubError, sqlite3.Error) as error:
                print("raised", id_, type(error).__name__, flush=True)
            else:
                print("stored", id_, began, flush=True)
        print("done", flush=True)


def copy_folder(path: str) -> None:
    """Copy the directory of an outbox, as far as its files stay.

    The status file is written under another name first; and a relay that misses its locks opens
    the outbox again, which removes the log.
    """
    with suppress(shutil.Error):
        shutil.copytree(Path(path).parent, path + "-copies")


def publish(path: Path) -> None:
    with Publisher(NOWHERE, outbox=path, close_timeout_s=0.0) as publisher:
        rounds(lambda id_: publisher.publish(b"", message_id=id_))


def publish_many(path: Path) -> None:
    with Publisher(NOWHERE, outbox=path, close_timeout_s=0.0) as publisher:
        rounds(lambda id_: publisher.publish_many([Message(b"", message_id=id_)]))


def publish_async(path: Path) -> None:
    async def main() -> None:
        async with AsyncPublisher(NOWHERE, outbox=path, close_timeout_s=0.0) as publisher:
            loop = asyncio.get_running_loop()

            def store(id_: str) -> None:
                going = publisher.publish(b"", message_id=id_)
                asyncio.run_coroutine_threadsafe(going, loop).result()

            await asyncio.to_thread(rounds, store)

    asyncio.run(main())


def enqueue(path: Path) -> None:
    with Outbox(path) as outbox:
        rounds(lambda id_: outbox.enqueue(Message(b"", message_id=id_)))


def within(path: Path, journal: str = "wal", *, anew: bool = False) -> None:
    """In the application's own transactions, on one connection that stays open.

    Args:
        path: of the outbox.
        journal: mode of the journal.
        anew: whether each call makes an `Outbox` of its own.
    """
    outbox = Outbox(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode = {journal}")

    def store(id_: str) -> None:
        with connection:
            connection.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT)")
            connection.execute("INSERT INTO orders VALUES (?)", (id_,))
            called = Outbox(path) if anew else outbox
            called.enqueue(Message(b"", message_id=id_), connection=connection)

    rounds(store)
    connection.close()


if __name__ == "__main__":
    mains: list[Callable[[Path], None]] = [publish, publish_many, publish_async, enqueue, within]
    mains += [partial(within, anew=True), partial(within, journal="delete")]
    mains[DOORS.index(sys.argv[1])](Path(sys.argv[2]))
