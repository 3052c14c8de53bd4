"""`Outbox.enqueue_many` on both databases: order, chunks, transactions, what errors leave."""

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import ClientCursor, RawCursor
from psycopg.rows import dict_row

from reliablepub import InvalidMessage, Message, Outbox, OutboxFull, OutboxKeys, OutboxUnsure
from reliablepub.hooks import MessagesRejected
from reliablepub.outbox.opening import Where, outbox_at
from reliablepub.outbox.outbox import _CHUNK_BYTES, _CHUNK_MESSAGES
from tests.between import before
from tests.outbox.cuts import Cut, end_connections

MANY = 2 * _CHUNK_MESSAGES + 7
Connect = Callable[[], Any]


@pytest.fixture
def outbox(where: Where) -> Iterator[Outbox]:
    with Outbox(where) as opened:
        opened.create()
        yield opened


@pytest.fixture
def connect(where: Where) -> Connect:
    if isinstance(where, Path):
        return lambda: sqlite3.connect(where)
    return lambda: psycopg.connect(str(where))


def messages(count: int) -> Iterator[Message]:
    return (Message(b"%d" % n, routing_key="q", message_id=f"m-{n}") for n in range(count))


def stored(outbox: Outbox) -> list[object]:
    return [row["message_id"] for row in outbox.rows("open")]


def test_messages_are_stored_in_their_order(outbox: Outbox) -> None:
    ids = outbox.enqueue_many(messages(MANY))
    assert ids == [f"m-{n}" for n in range(MANY)]
    assert stored(outbox) == ids
    assert outbox.status().stored == MANY
    assert outbox.audit().is_right


def test_nothing_is_stored_of_nothing(outbox: Outbox) -> None:
    assert outbox.enqueue_many([]) == []
    assert outbox.status().stored == 0


def test_each_message_gets_an_id_and_the_stamps_of_the_hooks(where: Where) -> None:
    class Tenant:
        def stamp(self, message: Message) -> Message:
            return replace(message, headers={"tenant": "t"})

    Outbox(where).create()
    with Outbox(where, hooks=[Tenant()]) as outbox:
        ids = outbox.enqueue_many([Message(b"1"), Message(b"2")])
    assert len(set(ids)) == 2
    assert [entry.message.headers for entry in entries(where)] == [{"tenant": "t"}] * 2


def entries(where: Where, keys: OutboxKeys | None = None) -> list[Any]:
    store = outbox_at(where).open_store(keep_confirmed_s=0, keys=keys)
    with closing(store):
        last = store.snapshot().last_id
        return store.read_ready(1, last, limit=10_000, bytes_max=10**9)[0]


def test_every_property_arrives(where: Where, outbox: Outbox) -> None:
    plain = Message(b"1", message_id="plain")
    rich = Message(
        b"2",
        "x",
        "k",
        message_id="rich",
        headers={"n": 1, "at": datetime(2026, 1, 1, tzinfo=UTC)},
        content_type="text/plain",
        expires_in_s=3600,
        persistent=False,
        ordering_key="key",
    )
    later = Message(b"3", message_id="later", not_before=datetime(2100, 1, 1, tzinfo=UTC))
    outbox.enqueue_many([plain, rich, later])
    found = {entry.message.message_id: entry for entry in entries(where)}
    assert found["plain"].message == plain
    assert found["rich"].message.headers == rich.headers
    assert found["rich"].expires_at == pytest.approx(found["rich"].stored_at + 3600, abs=1)
    assert "later" not in found
    assert stored(outbox) == ["plain", "rich", "later"]


def test_encrypted_messages_are_bound_to_their_rows(where: Where, outbox: Outbox) -> None:
    keys = OutboxKeys({"k": bytes(32)})
    with Outbox(where, keys=keys) as sealing:
        sealing.enqueue_many(messages(3))
    assert [entry.message.body for entry in entries(where, keys)] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_they_go_with_the_transaction_of_the_application(
    where: Where, outbox: Outbox, connect: Connect, *, is_sealed: bool
) -> None:
    keys = OutboxKeys({"k": bytes(32)}) if is_sealed else None
    with Outbox(where, keys=keys) as joining, closing(connect()) as connection:
        joining.enqueue_many(messages(MANY), connection=connection)
        assert stored(outbox) == []
        connection.rollback()
        ids = joining.enqueue_many(messages(MANY), connection=connection)
        connection.commit()
    assert stored(outbox) == ids
    assert outbox.audit().is_right
    assert len(entries(where, keys)) == MANY


def test_messages_may_be_made_of_rows_that_the_connection_reads(
    outbox: Outbox, connect: Connect
) -> None:
    """The application's settings for rows hold while it makes the next chunk."""
    with closing(connect()) as connection:
        connection.row_factory = sqlite3.Row if outbox._database.file else dict_row
        connection.execute("CREATE TABLE orders (id INTEGER)")
        connection.execute("INSERT INTO orders VALUES (1)")

        def made() -> Iterator[Message]:
            for n in range(MANY):
                row = connection.execute("SELECT id FROM orders").fetchone()
                yield Message(b"", message_id=f"{row['id']}-{n}")

        ids = outbox.enqueue_many(made(), connection=connection)
        connection.commit()
    assert ids[-1] == f"1-{MANY - 1}"
    assert stored(outbox) == ids


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_message_that_cannot_be_made_keeps_the_chunks_before_it(
    outbox: Outbox, connect: Connect, *, is_joined: bool
) -> None:
    def made() -> Iterator[Message]:
        yield from messages(_CHUNK_MESSAGES + 5)
        raise KeyError

    with closing(connect()) as connection:
        with pytest.raises(KeyError) as raised:
            outbox.enqueue_many(made(), connection=connection if is_joined else None)
        assert raised.value.__notes__ == [f"{_CHUNK_MESSAGES} messages before it are stored"]
        assert outbox.status().stored == (0 if is_joined else _CHUNK_MESSAGES)
        connection.commit()
    assert outbox.status().stored == _CHUNK_MESSAGES
    assert outbox.audit().is_right


def test_a_chunk_is_bounded_in_bytes(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[int] = []
    before(monkeypatch, outbox, "_enqueue", lambda new, **options: chunks.append(len(new)))
    third = Message(bytes(_CHUNK_BYTES // 3))
    outbox.enqueue_many([third, third, third, Message(bytes(_CHUNK_BYTES + 1)), Message(b"")])
    assert chunks == [2, 1, 1, 1]


def test_what_is_not_a_message_is_refused(outbox: Outbox) -> None:
    with pytest.raises(InvalidMessage, match="one is of type bytes, not Message"):
        outbox.enqueue_many([Message(b""), b"body"])  # type: ignore[list-item]
    assert outbox.status().stored == 0


@pytest.mark.parametrize("limit", ["open_messages_max", "open_bytes_max"])
def test_a_chunk_that_exceeds_a_limit_is_not_stored(where: Where, limit: str) -> None:
    rejected: list[int] = []

    class Counts:
        def rejected(self, event: MessagesRejected) -> None:
            rejected.append(event.count)

    Outbox(where).create()
    size = next(messages(1)).size
    limits = {limit: 5 if limit == "open_messages_max" else 5 * size}
    with Outbox(where, hooks=[Counts()], **limits) as outbox:  # type: ignore[arg-type]
        outbox.enqueue_many(messages(3))
        with pytest.raises(OutboxFull, match="3 messages from m-0 on were not stored") as raised:
            outbox.enqueue_many(messages(3))
        assert raised.value.__notes__ == ["0 messages before it are stored"]
        assert rejected == [3]
        outbox.enqueue_many(messages(2))
        assert outbox.status().stored == 5


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("factory", [None, ClientCursor, RawCursor])
def test_any_cursor_of_psycopg_will_do(
    postgres_outbox: str, factory: Any, *, autocommit: bool
) -> None:
    with (
        Outbox(postgres_outbox) as outbox,
        psycopg.connect(
            postgres_outbox, autocommit=autocommit, cursor_factory=factory
        ) as connection,
    ):
        body = bytes(range(256))
        outbox.enqueue(Message(body, message_id="one"), connection=connection)
        outbox.enqueue_many(
            [Message(body, message_id=f"m-{n}") for n in range(3)], connection=connection
        )
        assert len(stored(outbox)) == (4 if autocommit else 0)
    assert [entry.message.body for entry in entries(postgres_outbox)] == [body] * 4


def test_text_that_postgresql_cannot_store_keeps_its_chunk_out(postgres_outbox: str) -> None:
    with Outbox(postgres_outbox) as outbox:
        with pytest.raises(InvalidMessage, match=r"U\+0000"):
            outbox.enqueue_many([Message(b"", message_id="a"), Message(b"", message_id="\0")])
        assert stored(outbox) == []


@pytest.mark.parametrize(("is_sealed", "trips"), [(False, 1), (True, 2)])
def test_a_thousand_messages_take_one_round_trip(
    postgres_outbox: str, tmp_path: Path, *, is_sealed: bool, trips: int
) -> None:
    """And one more for their numbers, if these are encrypted with them."""
    keys = OutboxKeys({"k": bytes(32)}) if is_sealed else None
    with (
        Outbox(postgres_outbox, keys=keys) as outbox,
        psycopg.connect(postgres_outbox) as connection,
        (tmp_path / "trace").open("w+") as trace,
    ):
        connection.execute("SELECT 1")  # begins the transaction
        connection.pgconn.trace(trace.fileno())
        outbox.enqueue_many(messages(_CHUNK_MESSAGES), connection=connection)
        connection.pgconn.untrace()
        trace.seek(0)
        assert len(re.findall(r"\tF\t\d+\tSync", trace.read())) == trips


def test_an_idle_connection_that_was_lost_is_replaced(postgres_outbox: str) -> None:
    with Outbox(postgres_outbox) as outbox:
        outbox.enqueue_many(messages(2))
        end_connections(postgres_outbox)
        outbox.enqueue_many(Message(b"", message_id=f"later-{n}") for n in range(2))
        assert {"later-0", "later-1"} <= set(stored(outbox))


def test_a_commit_whose_answer_is_lost_is_made_again_or_unsure(
    postgres_outbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Outbox(postgres_outbox) as outbox:
        Cut(monkeypatch, "store", step="enqueue_many", behind=True)
        outbox.enqueue_many(messages(2))
        assert stored(outbox) == ["m-0", "m-1"] * 2
        Cut(monkeypatch, "store", step="enqueue_many", behind=True, times=9)
        with pytest.raises(OutboxUnsure, match="2 messages from m-0 on"), suppress(KeyError):
            outbox.enqueue_many(messages(2))
