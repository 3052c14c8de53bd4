"""A signal handler forks within a transaction, and returns in the child as well.

The connection, its transaction and the locks are the parent's.
"""

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from reliablepub.errors import OutboxForked
from reliablepub.message import Message
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.rows import plain_row_of
from reliablepub.outbox.sqlite import enqueue
from reliablepub.outbox.sqlite.location import Place
from tests.sqlite import writer_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

REFUSED, EXITED, RETURNED = 7, 8, 9
"""How a child ends."""


class Forking:
    """Replaces a function, and forks at its first call, as a handler would that interrupts it.

    Attributes:
        children: how the children have ended.
    """

    def __init__(
        self, real: Callable[..., Any], in_the_child: Callable[[], None] = lambda: None
    ) -> None:
        self._real = real
        self._in_the_child = in_the_child
        self._parent = os.getpid()
        self.children: list[int] = []

    def __call__(self, *args: Any) -> Any:
        if not self.children:
            pid = os.fork()
            if pid:
                self.children.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            else:
                self.children.append(0)
                self._in_the_child()
        return self._real(*args)

    def run(self, work: Callable[[], object]) -> None:
        """Do something in which it forks; the child ends after it."""
        try:
            work()
        except OutboxForked:
            how = REFUSED
        except SystemExit:
            how = EXITED
        else:
            how = RETURNED
        if os.getpid() != self._parent:
            os._exit(how)
        assert how == RETURNED


def leave() -> None:
    raise SystemExit


@pytest.mark.parametrize(
    ("in_the_child", "end"), [(lambda: None, REFUSED), (leave, EXITED)], ids=["goes on", "exits"]
)
def test_the_child_ends_the_transaction_neither_way(
    path: Path, monkeypatch: pytest.MonkeyPatch, in_the_child: Callable[[], None], end: int
) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"before"))
        connection = writer_of(outbox).opened()
        statements: list[str] = []
        forking = Forking(plain_row_of, in_the_child)
        monkeypatch.setattr(enqueue, "plain_row_of", forking)

        def work() -> None:
            connection.set_trace_callback(statements.append)
            try:
                outbox.enqueue(Message(b"of the parent"))
            finally:
                if {"COMMIT", "ROLLBACK"} & {*statements} and forking.children == [0]:
                    os._exit(RETURNED)

        forking.run(work)
        assert forking.children == [end]
        assert "COMMIT" in statements
        assert outbox.status().open == 2


def test_a_child_that_was_forked_before_the_transaction_begins_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"before"))
        forking = Forking(Place.check_before_commit)

        def check(place: Place) -> None:  # a method, unlike `forking`
            forking(place)

        monkeypatch.setattr(Place, "check_before_commit", check)
        forking.run(lambda: outbox.enqueue(Message(b"of the parent")))
        assert forking.children == [REFUSED]
        assert outbox.status().open == 2


def test_a_child_that_waits_for_the_lock_does_not_take_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Outbox(path) as outbox, closing(sqlite3.connect(path, isolation_level=None)) as other:
        outbox.enqueue(Message(b"before"))
        other.execute("BEGIN IMMEDIATE")
        forking = Forking(time.sleep)

        def sleep(seconds: float) -> None:
            if other.in_transaction:
                other.rollback()
            forking(seconds)

        monkeypatch.setattr("reliablepub.outbox.sqlite.transactions.time.sleep", sleep)
        forking.run(lambda: outbox.enqueue(Message(b"of the parent")))
        assert forking.children == [REFUSED]
        assert outbox.status().open == 2
