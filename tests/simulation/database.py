"""An outbox in PostgreSQL for a schedule: a real server, and a process that may die at each step.

It knows what belongs to the life of a process there: its connection, and its ownership. Time is the
schedule's, except that a shard is taken over at once, because the server has a clock of its own. It
must never know what is right or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from unittest import mock

import psycopg

from reliablepub.outbox.database import Relaying
from reliablepub.outbox.entry import Store
from reliablepub.outbox.postgres.database import PostgresSession
from reliablepub.outbox.postgres.server import Link, Row, Server, Step, Values
from reliablepub.outbox.postgres.store import PostgresStore

_OWNERSHIP = "reliablepub.outbox.postgres.ownership"


class _Fuse(Protocol):
    def step(self, where: str) -> None: ...


class _Glitches(Protocol):
    def strike(self, what: str) -> bool: ...


class SteppingLink(Link):
    """A connection with a step before every statement, and before and after every commit.

    With a glitch it is lost, before or after the server has done what it was asked.
    """

    fuse: _Fuse
    glitches: _Glitches
    opened: list[Any]

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.opened.append(self)

    def rows(self, name: str, values: Values | None = None) -> list[Row]:
        self.fuse.step("between statements")
        return super().rows(name, values)

    def transact(self, steps: Sequence[Step]) -> list[list[Row]]:
        self.fuse.step("before COMMIT")
        found = super().transact(steps)
        self.fuse.step("after COMMIT")
        return found

    def _run(self, name: str, values: Values) -> list[Row]:
        self._glitch("a statement")
        return super()._run(name, values)

    def batch(self, steps: Sequence[Step]) -> list[list[Row]]:
        self._glitch("a batch")
        found = super().batch(steps)
        self._glitch("the answer to a batch")
        return found

    def _glitch(self, what: str) -> None:
        if not self.glitches.strike(what):
            return
        self.close()
        raise psycopg.OperationalError("the connection was lost")


def open_store(
    url: str, fuse: _Fuse, glitches: _Glitches, opened: list[Any], clock: Callable[[], float]
) -> Store:
    """Take the outbox over from a process that is gone."""
    names = {"fuse": fuse, "glitches": glitches, "opened": opened}
    kind = type("SteppingLink", (SteppingLink,), names)
    with (
        mock.patch("reliablepub.outbox.postgres.store.Link", kind),
        mock.patch(f"{_OWNERSHIP}.EXPIRY_S", 0.0),
    ):
        return PostgresStore(Server.of(url), clock=clock)


@contextmanager
def known_relay(is_there: Callable[[], bool]) -> Iterator[None]:
    """Let operators know at once whether a relay lives."""

    def relays(_: PostgresSession) -> list[Relaying]:
        return [Relaying(0, 1 if is_there() else None, {})]

    with mock.patch.object(PostgresSession, "relays", relays):
        yield


class Connection:
    """A connection to read with, which understands the SQL of a file."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)

    def execute(self, query: str, values: tuple[object, ...] = ()) -> psycopg.Cursor[Any]:
        text = query.replace("reliablepub_", "reliablepub.").replace("?", "%s")
        return self._connection.execute(text.encode(), values)

    def close(self) -> None:
        self._connection.close()
