"""Lost connections to PostgreSQL: at a statement (`Cut`), or all; and refused ones (`server_down`).

Knows: the methods of `Link` by which all statements are run. Must never know: what a test expects.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal
from unittest.mock import Mock

import psycopg
import pytest

from reliablepub import OutboxUnreachable
from reliablepub.outbox.postgres.server import _RECONNECT_S, Link, Server


def lost() -> psycopg.Error:
    return psycopg.OperationalError("the connection is lost")


class Cut:
    """Fails the next calls of a method of `Link`: by default, its connection is lost.

    Args:
        monkeypatch: ends it.
        at: the method.
        step: only calls that run the statement of this name.
        behind: the server has run the statements, and only their answer is lost.
        times: how many calls.
        error: makes what is raised. The connection is lost unless this is given.
        then: what the call after these raises; the server does not run it.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        at: Literal["transact", "store", "read", "rows"] = "transact",
        *,
        step: str = "",
        behind: bool = False,
        times: int = 1,
        error: Callable[[], Exception] = lost,
        then: Exception | None = None,
    ) -> None:
        self.left = times
        self._then = then
        call = getattr(Link, at)

        def cut(link: Link, *arguments: Any) -> Any:
            if step and step not in _names(*arguments):
                return call(link, *arguments)
            if not self.left:
                failure, self._then = self._then, None
                if failure is not None:
                    raise failure
                return call(link, *arguments)
            self.left -= 1
            if behind:
                call(link, *arguments)
            if error is lost:
                link.close()
            raise error()

        monkeypatch.setattr(Link, at, cut)


def _names(steps: Any, *_: Any) -> set[str]:
    """Names of the statements of a call."""
    if isinstance(steps, tuple):  # of `store`
        return {steps[0]}
    return {steps} if isinstance(steps, str) else {name for name, _ in steps}


def end_connections(url: str) -> None:
    """Have the server end all connections to a database."""
    with closing(psycopg.connect(url, autocommit=True)) as operator:
        operator.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )


@contextmanager
def server_down(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse new connections, until a relay tries again after the block."""
    with monkeypatch.context() as patch:
        patch.setattr(Server, "connect", Mock(side_effect=OutboxUnreachable("the server is down")))
        yield
    time.sleep(_RECONNECT_S)
