"""Who has only the file reads no body and no header; who lacks the key loses nothing."""

import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from reliablepub import Link, Publisher
from reliablepub.errors import (
    ConfigurationError,
    OutboxDiskFull,
    OutboxError,
    OutboxSealed,
    PublisherClosed,
    PublisherFailed,
)
from reliablepub.message import Message
from reliablepub.outbox.admin import rekeying
from reliablepub.outbox.admin.inspection import read_contents
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.admin.rekeying import missing_key
from reliablepub.outbox.admin.transfer import BadLine, export_lines, import_lines
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Changes, Entry
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.rows import MISTYPED, checksum_of, to_text
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.testing import FakeBroker
from tests.asking import connect, fill, opened, park, read, read_due, sql
from tests.sqlite import edit_lax
from tests.stores import DURABLE, Where, outbox_of
from tests.waiting import until

OLD = bytes(range(32))
NEW = bytes(range(32, 64))
MARKS = "SELECT properties FROM reliablepub.messages"
SECRET: dict[str, Any] = {"body": b"card 4111", "headers": {"who": "Ms Secret"}, "app_id": "hush"}


BOTH = OutboxKeys({"new": NEW, "old": OLD})


@pytest.fixture
def keys() -> OutboxKeys:
    return OutboxKeys({"old": OLD})


def message(number: int = 1) -> Message:
    return Message(**SECRET, exchange="orders", routing_key="key", message_id=f"m-{number}")


def everything(where: Where) -> bytes:
    """All bytes of a file and of those beside it; or all rows with messages, as text."""
    if isinstance(where, Path):
        return b"".join(file.read_bytes() for file in where.parent.iterdir() if file.is_file())
    tables = ("messages", "parked", "confirmed")
    return str([sql(where, f"SELECT * FROM reliablepub.{table}") for table in tables]).encode()


def test_neither_a_file_nor_a_log_nor_a_table_shows_anything(
    where: Where, keys: OutboxKeys
) -> None:
    with opened(where, keys=keys) as store:
        store.commit(Changes(new=[Entry(message(1), 1.0), Entry(message(2), 1.0)]))
        first = store.read_ready(1, 1, limit=1, bytes_max=999)[0][0]
        park(store, first)
    with Outbox(where, keys=keys) as outbox:
        outbox.enqueue(message(3))
        outbox.enqueue(message(4), key="k")
        with closing(connect(where)) as app:
            outbox.enqueue(message(5), connection=app)
            app.commit()
        log = everything(where)
    for data in (log, everything(where)):
        for secret in (b"4111", b"Secret", b"hush"):
            assert secret not in data
        assert b"orders" in data, "people look for messages by their address"
    with opened(where, keys=keys) as store:
        assert read(store) == [message(number) for number in range(2, 6)]
    assert Outbox(where).retry() == 1
    with opened(where, keys=keys) as store:
        assert read_due(store) == [message(1)]


def test_whatever_it_is_read_for_it_is_what_was_accepted(where: Where, keys: OutboxKeys) -> None:
    keyed = Message(**SECRET, message_id="m-1", ordering_key="k")
    entry = Entry(keyed, 1.0, due_at=5.0, expires_at=9.0)
    limits: dict[str, Any] = {"limit": 9, "bytes_max": 9999, "loaded": ()}
    with opened(where, keys=keys) as store:
        store.commit(Changes(new=[entry]))
        for found in (
            store.read_due(5.0, **limits)[0],
            store.read_expired(9.0, **limits)[0],
            store.read_first(["k"], 5.0, bytes_max=9999)[0],
        ):
            assert [e.message for e in found] == [keyed]
        log = everything(where)
    for secret in (b"4111", b"Secret", b"hush"):
        assert secret not in log


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (None, "encrypted with key 'old', and that key was not given"),
        (OutboxKeys({"new": NEW}), "encrypted with key 'old', and that key was not given"),
        (
            OutboxKeys({"old": NEW}),
            "is not the one it was encrypted with.*; nothing is lost: give the right key$",
        ),
    ],
)
def test_without_the_right_key_nothing_is_lost(
    where: Where, keys: OutboxKeys | None, words: str
) -> None:
    right = OutboxKeys({"old": OLD})
    fill(where, message(), keys=right)
    with opened(where, keys=keys) as store:
        with pytest.raises(OutboxSealed, match=words) as caught:
            read(store)
        assert str(caught.value).startswith("message m-1 (row 1) ")
        assert not caught.value.retryable
        counters = store.snapshot().counters
        assert (counters.open, counters.parked) == (1, 0)
    with opened(where, keys=right) as store:
        assert read(store) == [message()]


def test_a_relay_without_the_key_says_so_and_stops(path: Path, keys: OutboxKeys) -> None:
    fill(path, message(), keys=keys)
    with FakeBroker() as broker:
        broker.declare_queue("all")
        with (
            pytest.raises(PublisherClosed, match="encrypted with key 'old'"),
            Publisher(broker.url, outbox=path) as publisher,
        ):
            publisher.flush(60)
        assert not broker.messages("all")
    assert Outbox(path).status().open == 1


def test_a_relay_with_the_key_sends_what_was_accepted(where: Where, keys: OutboxKeys) -> None:
    with FakeBroker() as broker:
        broker.declare_queue("all")
        fill(where, Message(**SECRET, routing_key="all"), keys=keys)
        with Publisher(broker.url, outbox=where, outbox_keys=keys) as publisher:
            publisher.publish(b"another", routing_key="all").result(60)
            publisher.flush(60)
        assert [bytes(m.body) for m in broker.messages("all")] == [b"card 4111", b"another"]
    assert b"another" not in everything(where)


def parked_for(path: Path, keys: OutboxKeys | None) -> dict[int, str]:
    """What a relay with these keys parks, and why; it publishes nothing."""
    with opened(path, keys=keys) as store:
        assert read(store) == []
        return {row.id: row.reason for row in store.damaged()}


def edit(where: Where, **columns: Any) -> None:
    """Change the one row as an intruder would: with a checksum that fits."""
    for name, value in columns.items():
        sql(where, f"UPDATE reliablepub.messages SET {name} = ?", value)
    names = "message_id, exchange, routing_key, properties, ordering_key"
    [(*texts, body)] = sql(where, f"SELECT {names}, body FROM reliablepub.messages")
    as_bytes: Any = tuple(text if text is None else text.encode() for text in texts)
    checksum = checksum_of(as_bytes, body)
    sql(where, "UPDATE reliablepub.messages SET checksum = ?", checksum)
    assert Outbox(where).audit().is_right


def store_as_version_1(where: Where, *, name: str = "old", key: bytes = OLD) -> None:
    """A message as it was encrypted before rows were bound to their addresses."""
    fill(where, message())
    text = to_text(message()).encode()
    plain = len(text).to_bytes(4, "big") + text + message().body
    nonce = bytes(12)
    body = nonce + AESGCM(key).encrypt(nonce, plain, b"1\0m-1")
    edit(where, properties=f'{{"$key":"{name}"}}', body=body)


CHANGED = (
    "it was changed since it was encrypted with key 'old': its address, its number or its content "
    "is not what was accepted"
)
PLAIN = (
    "it is not encrypted, and keys are given: a process without them has stored it, or an "
    "intruder; if it is yours, encrypt it (`reliablepub outbox rekey --accept-plaintext`) and "
    "retry it"
)


@pytest.mark.parametrize(
    "columns",
    [
        {"routing_key": "elsewhere"},
        {"exchange": "mine"},
        {"exchange": "ordersk", "routing_key": "ey"},  # the same letters
        {"message_id": "m-2"},
        {"ordering_key": "k"},
        {"id": 9},
        {"body": b""},
        {"properties": '{"$key":"old","v":1,"v":2}', "exchange": "mine"},
    ],
    ids=str,
)
def test_an_address_that_was_edited_is_parked_and_the_others_go_out(
    where: Where, keys: OutboxKeys, columns: dict[str, Any]
) -> None:
    with Outbox(where, keys=keys) as outbox:
        outbox.enqueue(message())
        if "body" in columns:
            ((body,),) = sql(where, "SELECT body FROM reliablepub.messages")
            columns = {"body": body[:-1] + bytes([body[-1] ^ 1])}
        edit(where, **columns)
        outbox.enqueue(message(3))
    with opened(where, keys=keys) as store:
        assert read(store) == [message(3)]
        assert [row.reason for row in store.damaged()] == [CHANGED]


def test_a_row_of_the_new_version_cannot_be_made_one_of_the_old(
    path: Path, keys: OutboxKeys
) -> None:
    fill(path, message(), keys=keys)
    edit(path, properties='{"$key":"old"}', routing_key="elsewhere")
    with (
        opened(path, keys=keys) as store,
        pytest.raises(OutboxSealed, match="is not the one it was encrypted with"),
    ):
        read(store)


@pytest.mark.parametrize(
    "properties",
    [
        *('{"$key":', '{"$key":[1]}', '{"$key":{}}', '{"$key":null}', '{"$key":""}'),
        *(r'{"$key":"\u0000"}', '{"$key":"old","v":' + "[" * 9000),
    ],
    ids=["cut", "list", "table", "null", "empty", "NUL", "deep"],
)
@pytest.mark.parametrize("has_keys", [True, False])
def test_a_name_of_a_key_that_is_none_is_damage(
    path: Path, keys: OutboxKeys, properties: str, *, has_keys: bool
) -> None:
    fill(path, message(), keys=keys)
    edit(path, properties=properties)
    assert list(parked_for(path, keys if has_keys else None)) == [1]


def test_what_is_not_encrypted_is_parked_where_keys_are_given(path: Path, keys: OutboxKeys) -> None:
    fill(path, message())
    assert parked_for(path, keys) == {1: PLAIN}
    assert Outbox(path).retry() == 1
    accepting = OutboxKeys({"old": OLD}, accept_plaintext=True)
    with opened(path, keys=accepting) as store:
        assert read_due(store) == [message()]


def test_what_was_encrypted_the_old_way_can_be_read(path: Path, keys: OutboxKeys) -> None:
    store_as_version_1(path)
    with opened(path, keys=keys) as store:
        assert read(store) == [message()]
    with (
        opened(path, keys=OutboxKeys({"old": NEW})) as store,
        pytest.raises(OutboxSealed, match="the row was moved"),
    ):
        read(store)
    elsewhere = Intervention(Action.REROUTE, routing_key="elsewhere")
    assert intervene(outbox_at(path), [1], elsewhere, keys=keys).changed == 1
    edit(path, routing_key="key")  # it is bound to its address now
    with opened(path, keys=keys) as store:
        assert read_due(store) == []
        assert [row.reason for row in store.damaged()] == [CHANGED]


def test_what_was_edited_is_not_rerouted(path: Path, keys: OutboxKeys) -> None:
    fill(path, message(), keys=keys)
    edit(path, exchange="mine")
    back = Intervention(Action.REROUTE, exchange="other")
    assert intervene(outbox_at(path), [1], back, keys=keys).damaged == [1]


def test_everything_is_encrypted_anew_beside_a_relay(where: Where) -> None:
    store_as_version_1(where)
    old, new = OutboxKeys({"old": OLD}), OutboxKeys({"new": NEW})
    both = BOTH
    fill(where, *map(message, range(2, 5)), keys=old)
    fill(where, message(5))  # not encrypted
    with opened(where, keys=both, keep_confirmed_s=9e9) as store:
        store.show({})
        first, second, third, fourth = store.read_ready(1, 4, limit=4, bytes_max=10**9)[0]
        park(store, second)
        store.commit(Changes(confirmed=[third]))
        with Outbox(where, keys=both) as outbox:
            result = outbox.rekey()
            assert (result.changed, result.left) == (4, {5: PLAIN})
            assert outbox.rekey().changed == 0
            assert outbox.audit().is_right
        assert [missing_key(outbox_at(where), both, keys) for keys in (old, new)] == ["new", None]
        store.commit(Changes(confirmed=[first]))  # what it holds in memory is the same message
        assert read(store, 4, 4) == [fourth.message]
    elsewhere = Intervention(Action.REROUTE, routing_key="elsewhere")
    assert intervene(outbox_at(where), [4], elsewhere, keys=both).changed == 1
    assert Outbox(where).retry() == 1
    with opened(where, keys=new) as store:
        retried, rerouted = sorted(read_due(store), key=lambda one: str(one.message_id))
        assert (retried, rerouted.body) == (message(2), message(4).body)
        assert rerouted.routing_key == "elsewhere"
        assert read(store) == []
        assert {row.id: row.reason for row in store.damaged()} == {5: PLAIN}
        store.commit(Changes())
    Outbox(where).retry()
    assert Outbox(where, keys=OutboxKeys({"new": NEW}, accept_plaintext=True)).rekey().changed == 1
    tables = ("messages", "parked", "confirmed")
    query = " UNION ".join(f"SELECT properties FROM reliablepub.{table}" for table in tables)
    assert sql(where, query) == [('{"$key":"new","v":2}',)]


def test_to_encrypt_anew_takes_every_key(path: Path, keys: OutboxKeys) -> None:
    fill(path, message(), keys=keys)
    with pytest.raises(OutboxSealed, match="'old', and that key was not given"):
        Outbox(path, keys=OutboxKeys({"new": NEW})).rekey()
    with pytest.raises(ConfigurationError, match="rekey needs the keys"):
        Outbox(path).rekey()


def test_keys_are_rotated_without_a_gap(path: Path) -> None:
    """The steps of the guide: at each of them the relay is one step behind, or one ahead."""
    steps = [{"old": OLD}, {"old": OLD, "new": NEW}, {"new": NEW, "old": OLD}]
    number, last = 0, "SELECT properties FROM reliablepub.messages ORDER BY id DESC LIMIT 1"
    for before, after in pairwise(steps):
        for enqueuer, relay in ((before, after), (after, before), (after, after)):
            number += 1
            fill(path, message(number), keys=OutboxKeys(enqueuer))
            assert sql(path, last) == [(f'{{"$key":"{next(iter(enqueuer))}","v":2}}',)], "the first"
            with opened(path, keys=OutboxKeys(relay)) as store:
                assert message(number) in read(store)
    with Outbox(path, keys=OutboxKeys(steps[-1])) as outbox:
        outbox.rekey()
    with opened(path, keys=OutboxKeys({"new": NEW})) as store:
        assert len(read(store)) == number


@pytest.mark.parametrize("kind", DURABLE)
def test_a_key_that_the_relay_lacks_holds_up_no_others(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, keys: OutboxKeys
) -> None:
    where, new = outbox_of(kind, request, tmp_path), OutboxKeys({"new": NEW})
    assert where is not None
    Outbox(where).create()

    def stored(keys: OutboxKeys, *numbers: int) -> None:
        for n in numbers:
            Outbox(where, keys=keys).enqueue(Message(b"x", routing_key="q", message_id=f"m-{n}"))

    stored(keys, 1)
    stored(new, 2)
    stored(keys, 3)
    with FakeBroker() as broker:
        broker.declare_queue("q")
        publisher = Publisher(broker.url, outbox=where, outbox_keys=keys)
        counters = publisher.flush(timeout_s=30).counters
        assert (counters.confirmed, counters.parked) == (2, 1)
        [parked] = Outbox(where).parked()
        assert parked.reply_text.endswith(
            "with key 'new', and that key was not given; nothing is lost: give it too, and retry it"
        )
        stored(new, *range(4, 104))  # a hundred more: the relay's keys are wrong
        until(lambda: publisher.status.link is Link.FAILED)
        with pytest.raises(PublisherFailed, match="that key was not given"):
            publisher.close()
        assert Outbox(where).status().parked <= 100
        Outbox(where).retry()
        both = OutboxKeys({"old": OLD, "new": NEW})
        with Publisher(broker.url, outbox=where, outbox_keys=both) as publisher:
            assert publisher.flush(timeout_s=30).counters.confirmed == 103
        stored(new, 200)
        only = Publisher(broker.url, outbox=where, outbox_keys=keys)
        until(lambda: only.status.link is Link.FAILED)  # it can read no other
        with pytest.raises(PublisherFailed):
            only.close()
    assert (Outbox(where).status().open, Outbox(where).status().parked) == (1, 0)


def test_a_flipped_bit_is_damage_and_not_a_wrong_key(path: Path, keys: OutboxKeys) -> None:
    fill(path, message(), keys=keys)
    sql(path, "UPDATE reliablepub.messages SET body = CAST(body || x'00' AS BLOB)")
    with opened(path, keys=keys) as store:
        assert read(store) == []
        assert store.snapshot().counters.parked == 1


def test_rerouting_takes_the_key_and_audit_and_salvage_do_not(path: Path, keys: OutboxKeys) -> None:
    fill(path, message(1), message(2), keys=keys)
    elsewhere = Intervention(Action.REROUTE, routing_key="elsewhere")
    for wrong in (None, OutboxKeys({"new": NEW})):
        with pytest.raises(OutboxSealed, match="that key was not given"):
            intervene(outbox_at(path), [1], elsewhere, keys=wrong)
    assert Outbox(path).audit().is_right
    assert intervene(outbox_at(path), [1], elsewhere, keys=keys).changed == 1
    assert Outbox(path).audit().is_right
    new = path.with_name("new.db")
    assert Outbox(new).salvage(path).open == 2
    with opened(new, keys=keys) as store:
        assert read(store)[0].body == b"card 4111"
        found = {m.message_id: m.routing_key for m in [*read(store), *read_due(store)]}
        assert found == {"m-1": "elsewhere", "m-2": "key"}


def test_with_its_key_a_message_is_shown_and_without_it_as_what_it_is_and_not_brought_elsewhere(
    where: Where, keys: OutboxKeys
) -> None:
    fill(where, message(), keys=keys)
    contents = read_contents(outbox_at(where), 1)
    assert contents is not None
    assert contents.columns["message_id"] == "m-1"
    assert "encrypted with key 'old'" in str(contents.problem)
    assert contents.is_sealed
    contents = read_contents(outbox_at(where), 1, keys)
    assert contents is not None
    assert (contents.body, contents.headers) == (b"card 4111", {"who": "Ms Secret"})
    encrypted: list[int] = []
    assert list(export_lines(outbox_at(where), [1, 2], encrypted)) == []
    assert encrypted == [1]


def test_what_an_earlier_version_has_exported_encrypted_is_not_brought_in(
    path: Path, keys: OutboxKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, message(), keys=keys)
    monkeypatch.setattr("reliablepub.outbox.admin.transfer.is_sealed", lambda _: False)
    lines = list(export_lines(outbox_at(path), [1]))
    with pytest.raises(BadLine) as caught:
        list(import_lines(outbox_at(path.with_name("new.db")), lines, "export"))
    assert str(caught.value) == (
        "line 1: message m-1 is encrypted, and bound to the outbox it was exported from; "
        "a copy of the file keeps it, or `reliablepub outbox salvage`"
    )


def test_a_key_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\nnew {NEW.hex()}\n\nold {OLD.hex()}\n")
    assert repr(OutboxKeys.read(file)) == "OutboxKeys('new', 'old')"


SHAPE = "each line of key file {} is a name, a space and 64 hexadecimal digits"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "OutboxKeys needs at least one key"),
        ("new", SHAPE),
        ("new 12", SHAPE),
        (f"{NEW.hex()} 202611", SHAPE),
        (f"new x{NEW.hex()[1:]}", SHAPE),
        (f"a b {NEW.hex()}", SHAPE),
        (f"# é\nnew {NEW.hex()}", SHAPE),
        (  # the second would take the place of the first, whose messages need it
            f"2026 {OLD.hex()}\n2026 {NEW.hex()}\n",
            "key file {} has two keys of the same name; rename one",
        ),
    ],
)
def test_a_key_file_that_is_wrong_is_not_shown(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        OutboxKeys.read(file)
    assert str(caught.value) == words.format(file)
    file.unlink()
    with pytest.raises(ConfigurationError) as caught:
        OutboxKeys.read(file)
    assert str(caught.value) == f"key file {file} cannot be read: No such file or directory"


NAMED = "key name {!r} must be 1 to 64 printable ASCII characters"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "OutboxKeys needs at least one key"),
        ({"": OLD}, NAMED.format("")),
        ({"é": OLD}, NAMED.format("é")),
        ({"a\n": OLD}, NAMED.format("a\n")),
        ({"x" * 65: OLD}, NAMED.format("x" * 65)),
        ({"a": b"short"}, "key 'a' has 5 bytes; it must have 32, for AES-256"),
        ({"a": bytes(33)}, "key 'a' has 33 bytes; it must have 32, for AES-256"),
    ],
)
def test_keys_that_cannot_be_used_are_refused(keys: dict[str, bytes], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OutboxKeys(keys)
    assert str(caught.value) == words


@pytest.mark.parametrize("name", ["x", "x" * 64])
def test_a_name_may_be_short_or_long(name: str) -> None:
    assert repr(OutboxKeys({name: OLD})) == f"OutboxKeys({name!r})"


def test_no_key_is_ever_shown(keys: OutboxKeys) -> None:
    assert repr(keys) == str(keys) == "OutboxKeys('old')"
    for attribute in vars(keys).values():
        assert OLD.hex() not in repr(attribute)
        assert repr(OLD)[2:-1] not in repr(attribute)


def test_without_cryptography_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(
        ConfigurationError,
        match=r"^an .* needs cryptography: install reliablepub with the extra encryption$",
    ):
        OutboxKeys({"old": OLD})


def test_each_message_has_a_nonce_of_its_own(path: Path, keys: OutboxKeys) -> None:
    fill(path, *(message() for _ in range(50)), keys=keys)
    query = "SELECT count(DISTINCT substr(body, 9, 12)) FROM reliablepub.messages"
    assert sql(path, query) == [(50,)]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (None, "has no key 'new'"),
        (OutboxKeys({"old": OLD}), "has no key 'new'"),
        (OutboxKeys({"old": OLD, "new": bytes(32)}), "has another key of the name 'new'"),
    ],
)
def test_nothing_is_encrypted_under_a_key_that_the_relay_lacks(
    where: Where, theirs: OutboxKeys | None, words: str
) -> None:
    fill(where, message(), keys=OutboxKeys({"old": OLD}))
    with Outbox(where, keys=BOTH) as outbox:
        with opened(where, keys=theirs) as store:
            store.show({})
            with pytest.raises(OutboxError, match=f"{words}, and would end at the first message"):
                outbox.rekey()
            assert sql(where, MARKS) == [('{"$key":"old","v":2}',)]
        with opened(where, keys=BOTH) as store:
            store.show({})
            assert outbox.rekey().changed == 1


def test_one_that_starts_meanwhile_ends_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = OutboxKeys({"old": OLD})
    fill(path, *map(message, range(3)), keys=old)
    monkeypatch.setattr(rekeying, "CHUNK", 1)
    stores: list[SqliteStore] = []

    def start(_seconds: float) -> None:
        if not stores:
            stores.append(SqliteStore(path, keys=old))
            stores[0].show({})

    monkeypatch.setattr("reliablepub.outbox.admin.interventions.time.sleep", start)
    with Outbox(path, keys=BOTH) as outbox, pytest.raises(OutboxError, match="has no key 'new'"):
        outbox.rekey()
    stores[0].close()
    assert len(sql(path, MARKS + " WHERE properties GLOB '*old*'")) == 3


def test_large_messages_are_encrypted_anew_in_small_transactions(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Outbox(path, keys=OutboxKeys({"old": OLD})) as outbox:
        for number in range(5):
            outbox.enqueue(Message(bytes(2 << 20), message_id=f"m-{number}"))
    with Outbox(path, keys=BOTH) as outbox:
        before = sql(path, "SELECT count(*) FROM reliablepub.messages")
        pauses: list[float] = []
        monkeypatch.setattr("reliablepub.outbox.admin.interventions.time.sleep", pauses.append)
        assert outbox.rekey().changed == 5
        assert len(pauses) == 3, "two messages of 2 MiB in each transaction"
        assert sql(path, "SELECT count(*) FROM reliablepub.messages") == before
        assert outbox.audit().is_right


@pytest.mark.parametrize("table", ["messages", "parked"])
@pytest.mark.parametrize(
    "change", ["nacked = x'31'", "stored_at = 'x'", "exchange = CAST(exchange AS BLOB)"]
)
def test_a_row_that_cannot_be_changed_does_not_stop_the_others(
    path: Path, table: str, change: str
) -> None:
    old = OutboxKeys({"old": OLD})
    fill(path, *map(message, range(1, 4)), keys=old)
    with opened(path, keys=old) as store:
        if table == "parked":
            found = store.read_ready(1, 3, limit=3, bytes_max=10**9)[0]
            park(store, *found)
    edit_lax(path, f"{change} WHERE id = 2", f"reliablepub_{table}")
    with Outbox(path, keys=BOTH) as outbox:
        result = outbox.rekey()
        assert result.changed == 2
        assert list(result.left) == [2]
        assert MISTYPED in result.left[2]


def test_a_full_disk_is_left_to_the_relay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path, message(), keys=OutboxKeys({"old": OLD}))
    monkeypatch.setattr("reliablepub.outbox.sqlite.space.free_bytes", lambda _: 0.0)
    with Outbox(path, keys=BOTH) as outbox, pytest.raises(OutboxDiskFull):
        outbox.rekey()
    assert sql(path, MARKS) == [('{"$key":"old","v":2}',)]
