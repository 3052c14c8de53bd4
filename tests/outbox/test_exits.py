"""What else an application does with its database: exits, triggers, settings of its connection."""

import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest

from reliablepub import Link, Message, Outbox, Publisher, ScheduleChange
from reliablepub.errors import OutboxError, OutboxUnsure, PublisherFailed
from reliablepub.testing import FakeBroker
from tests.waiting import until

Isolation: TypeAlias = Literal["DEFERRED"] | None
LATER = datetime.now(UTC) + timedelta(hours=1)
CALLS: dict[str, Callable[[Outbox, sqlite3.Connection], object]] = {
    "enqueue": lambda outbox, app: outbox.enqueue(Message(b"", routing_key="q"), connection=app),
    "cancel": lambda outbox, app: outbox.cancel("k", connection=app),
    "create": lambda outbox, app: outbox.create(connection=app),
}


class Interrupted(sqlite3.Connection):
    """Ends the process, as a handler of SIGTERM does, before one of its statements."""

    left: int | None = None

    def cursor(self, *_: Any, **__: Any) -> sqlite3.Cursor:  # type: ignore[override]
        return super().cursor(_Cursor)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        self.count()
        return super().execute(*arguments)

    def count(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGTERM)


class _Cursor(sqlite3.Cursor):
    def execute(self, *arguments: Any) -> sqlite3.Cursor:  # type: ignore[override]
        assert isinstance(self.connection, Interrupted)
        self.connection.count()
        return super().execute(*arguments)


@contextmanager
def ending(app: sqlite3.Connection) -> Iterator[None]:
    def end(*_: object) -> None:
        app.close()
        raise SystemExit(7)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("isolation", [None, "DEFERRED"])
@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_an_exit_is_not_replaced(
    tmp_path: Path, call: str, isolation: Isolation, *, is_begun: bool
) -> None:
    path = tmp_path / "o.db"
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b"", routing_key="q", not_before=LATER), key="k")
        for statement in count(1):
            app = sqlite3.connect(path, isolation_level=isolation, factory=Interrupted)
            with closing(app), ending(app):
                if is_begun:
                    app.execute("BEGIN")
                app.left = statement
                try:
                    CALLS[call](outbox, app)
                except SystemExit:
                    continue
            break
        assert statement > 5
        assert outbox.audit().is_right


IGNORE = "CREATE TRIGGER nosy BEFORE {} BEGIN SELECT RAISE(IGNORE); END"


@pytest.mark.parametrize("on", ["INSERT ON reliablepub_messages", "UPDATE ON reliablepub_ledger"])
def test_a_trigger_of_another_program_keeps_no_message_out_without_an_error(
    tmp_path: Path, on: str
) -> None:
    path = tmp_path / "o.db"
    with Outbox(path) as outbox, closing(sqlite3.connect(path)) as app:
        outbox.create()
        app.execute(IGNORE.format(on))
        for connection in (None, app):
            with pytest.raises(OutboxError, match=r"RAISE\(IGNORE\)\); drop that trigger"):
                outbox.enqueue(Message(b"", routing_key="q"), connection=connection)
        app.rollback()
        with FakeBroker() as broker:
            broker.declare_queue("q")
            publisher = Publisher(broker.url, outbox=path)
            until(lambda: publisher.status.link is Link.CONNECTED)
            with pytest.raises((PublisherFailed, OutboxUnsure), match="drop that trigger"):
                publisher.publish(b"", routing_key="q")
            with pytest.raises(PublisherFailed):
                publisher.close()
            assert not broker.published
        app.execute("DROP TRIGGER nosy")
        assert outbox.audit().is_right
        assert outbox.status().open == 0


@pytest.mark.parametrize("on", ["DELETE ON reliablepub_messages", "INSERT ON reliablepub_keys"])
def test_a_trigger_of_another_program_keeps_nothing_there_or_out(tmp_path: Path, on: str) -> None:
    with Outbox(tmp_path / "o.db") as outbox, closing(sqlite3.connect(tmp_path / "o.db")) as app:
        outbox.enqueue(Message(b"", routing_key="q"), key="k")
        app.execute(IGNORE.format(on))
        call = outbox.cancel if "DELETE" in on else partial(outbox.enqueue, Message(b""))
        with pytest.raises(OutboxError, match="drop that trigger"):
            call(key="k" if "DELETE" in on else "other")
        app.execute("DROP TRIGGER nosy")
        assert outbox.audit().is_right


def test_an_application_that_trusts_no_schema_can_cancel(tmp_path: Path) -> None:
    path = tmp_path / "o.db"
    with Outbox(path) as outbox, closing(sqlite3.connect(path)) as app:
        app.execute("PRAGMA trusted_schema = OFF")
        outbox.enqueue(Message(b"", routing_key="q", not_before=LATER), key="k", connection=app)
        assert outbox.reschedule("k", LATER, connection=app) is ScheduleChange.MADE
        assert outbox.cancel("k", connection=app) is ScheduleChange.MADE
        assert app.execute("PRAGMA trusted_schema").fetchone() == (0,)
