"""The front door: what callers get, whatever happens behind it."""

import atexit
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from reliablepub import (
    AsyncPublisher,
    ConfigurationError,
    Expired,
    InvalidMessage,
    Link,
    Message,
    Nacked,
    Outbox,
    OutboxDiskFull,
    OutboxFull,
    OutboxInUse,
    Publisher,
    PublisherClosed,
    PublisherFailed,
    PublisherForked,
    Refused,
    ReliablePubError,
    Status,
    StillOpen,
)
from reliablepub.front.receipt import Issued
from reliablepub.hooks import MessagesRejected
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.relay.handover import Chunk
from reliablepub.relay.relay import Relay
from reliablepub.relay.thread import Flush, RelayThread
from reliablepub.testing import FakeBroker, faults
from tests.lazy import Lazy
from tests.policies import AT_ONCE
from tests.sqlite import sql
from tests.waiting import until

NEVER = datetime(2100, 1, 1, tzinfo=UTC)
AWAY = "amqp://127.0.0.1:1/"


@pytest.fixture
def broker(fake_broker: FakeBroker) -> FakeBroker:
    fake_broker.declare_queue("q")
    return fake_broker


@pytest.fixture
def publisher(broker: FakeBroker, path: Path) -> Iterator[Publisher]:
    publisher = Publisher(broker.url, outbox=path, retry=AT_ONCE)
    yield publisher
    with contextlib.suppress(PublisherFailed):  # of a test that has broken it
        publisher.close(0)


def messages(count: int) -> list[Message]:
    return [Message(b"x", routing_key="q") for _ in range(count)]


# -------------------------------------------------------------------- what is published


def test_a_whole_message_is_published_as_it_is(publisher: Publisher, broker: FakeBroker) -> None:
    named = Message(b"x", routing_key="q", message_id="order-17", type="order")
    assert publisher.publish(named).result(60).message_id == "order-17"
    assert publisher.publish(Message(b"y", routing_key="q")).message_id
    with pytest.raises(InvalidMessage, match="routing_key: was given beside a Message"):
        publisher.publish(named, routing_key="other")
    publisher.flush(60)
    assert [one.body for one in broker.messages("q")] == [b"x", b"y"]


def test_a_publisher_is_made_from_the_environment(
    broker: FakeBroker, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="RELIABLEPUB_URL is not set; it takes amqp://"):
        Publisher.from_env()
    monkeypatch.setenv("RELIABLEPUB_URL", f"{AWAY} {broker.url.replace(':guest@', '@')}")
    with pytest.raises(ConfigurationError, match="RELIABLEPUB_OUTBOX is not set; it takes a path"):
        Publisher.from_env()
    monkeypatch.setenv("RELIABLEPUB_OUTBOX", str(path))
    for file, name, content in (
        (path.with_name("password"), "RELIABLEPUB_PASSWORD_FILE", "guest\n"),
        (path.with_name("keys"), "RELIABLEPUB_OUTBOX_KEYS", f"first {'0f' * 32}\n"),
    ):
        file.write_text(content)
        file.chmod(0o600)
        monkeypatch.setenv(name, str(file))
    with Publisher.from_env(close_timeout_s=0) as publisher:
        publisher.publish(b"secret", routing_key="q").result(60)
        publisher.publish(b"secret", routing_key="q", not_before=NEVER)
    assert b"secret" not in path.read_bytes(), "it is encrypted"


def test_headers_that_are_changed_while_a_message_waits_harm_no_other(
    publisher: Publisher, broker: FakeBroker
) -> None:
    """They refuse changes, yet an application may find a way around that."""
    publisher.publish(b"x", routing_key="q").result(60)
    broker.block()
    publisher.publish(b"x", routing_key="q")  # RabbitMQ tells only those who publish
    until(lambda: publisher.status.link is Link.BLOCKED)
    changed = Message(b"z", routing_key="q", headers={"n": 1}, message_id="changed")
    first, second = publisher.publish(changed), publisher.publish(b"y", routing_key="q")
    headers: Any = changed.headers
    dict.__setitem__(headers, "n", object())
    broker.unblock()
    with pytest.raises(Refused, match="cannot be encoded: TypeError"):
        first.result(60)
    second.result(60)


# -------------------------------------------------------------------- receipts


def test_a_receipt_raises_what_the_broker_said_each_time(
    publisher: Publisher, broker: FakeBroker
) -> None:
    broker.inject(faults.Nack())
    receipt = publisher.publish(b"x", routing_key="q")
    for _ in range(2):
        with pytest.raises(Nacked, match=receipt.message_id):
            receipt.result(60)
    assert receipt.is_settled


def test_control_c_in_a_callback_on_the_callers_thread_is_not_lost(publisher: Publisher) -> None:
    def press(_receipt: object) -> None:
        signal.raise_signal(signal.SIGINT)

    receipt = publisher.publish(b"x", routing_key="q")
    # The relay has ended the turn that settled it, so it does not call the callback.
    assert publisher.flush(60).is_flushed
    with pytest.raises(KeyboardInterrupt):
        receipt.add_done_callback(press)


def test_each_caller_of_a_receipt_gets_an_error_of_its_own(
    publisher: Publisher, broker: FakeBroker
) -> None:
    """Raised again and again, one error would keep the frames of all its callers."""
    broker.inject(faults.Nack())
    receipt = publisher.publish(b"x", routing_key="q")
    lengths, contexts = set(), set()
    for _ in range(9):
        try:
            int("the caller's")
        except ValueError as own:
            with pytest.raises(Nacked) as caught:
                receipt.result(60)
            contexts.add(caught.value.__context__ is own)
            lengths.add(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert len(lengths) <= 2, "the first call waits, in a frame more"
    assert contexts == {True}


def test_a_wait_that_ends_first_says_that_it_is_still_open(
    publisher: Publisher, broker: FakeBroker
) -> None:
    broker.inject(faults.HoldConfirms())
    receipt = publisher.publish(b"x", routing_key="q")
    with pytest.raises(StillOpen):
        receipt.result(0.05)
    broker.release_confirms()
    receipt.result(60)


def test_a_receipt_calls_back_on_the_relays_thread(
    publisher: Publisher, broker: FakeBroker
) -> None:
    broker.inject(faults.HoldConfirms())
    receipt = publisher.publish(b"x", routing_key="q")
    threads: SimpleQueue[str] = SimpleQueue()
    receipt.add_done_callback(lambda _: 1 / 0)  # logged, and the next one is called
    receipt.add_done_callback(lambda done: threads.put(threading.current_thread().name))
    receipt.add_done_callback(lambda done: threads.put(done.result(0).message_id))
    assert threads.empty()
    broker.release_confirms()
    assert threads.get(timeout=60) == "reliablepub-relay"
    assert threads.get(timeout=60) == receipt.message_id
    publisher.publish(b"x", routing_key="q").result(60)


def test_a_settled_receipt_calls_back_at_once(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    receipt = publisher.publish(b"x", exchange="missing")
    with pytest.raises(Refused):
        receipt.result(60)
    called: list[object] = []
    receipt.add_done_callback(called.append)
    assert called == [receipt]
    receipt.add_done_callback(lambda _: 1 / 0)
    assert "calls_back_at_once.<locals>.<lambda> of a receipt has raised" in caplog.text
    with pytest.raises(Refused):
        receipt.result(0)


def test_a_relay_that_still_rings_leaves_a_late_callback_to_its_caller(
    publisher: Publisher,
) -> None:
    receipt = publisher.publish(b"x", routing_key="q")
    receipt.result(60)
    waiting = receipt._waiting

    class Rung(list[Callable[[], None]]):
        """The relay's ring comes just after a call was added."""

        def append(self, call: Callable[[], None]) -> None:
            super().append(call)
            relay = threading.Thread(target=waiting.ring)
            relay.start()
            relay.join()

    waiting._calls = Rung()
    threads: list[threading.Thread] = []
    receipt.add_done_callback(lambda _: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]


def test_callbacks_of_a_race_are_each_called_once(publisher: Publisher) -> None:
    called: SimpleQueue[str] = SimpleQueue()
    receipts = []
    for _ in range(200):
        receipt = publisher.publish(b"x", routing_key="q")
        receipt.add_done_callback(lambda done: called.put(done.message_id))
        receipts.append(receipt)
    publisher.flush(60)
    ids = [called.get(timeout=60) for _ in receipts]
    assert sorted(ids) == sorted(receipt.message_id for receipt in receipts)
    assert called.empty()


def test_a_dropped_receipt_is_kept_only_for_its_callback(broker: FakeBroker) -> None:
    """While a message waits on disk, which may be for days."""
    called: SimpleQueue[str] = SimpleQueue()
    with Publisher(broker.url, outbox=None) as publisher:
        soon = datetime.now(UTC) + timedelta(seconds=0.5)
        dropped = weakref.ref(publisher.publish(b"x", routing_key="q", not_before=soon))
        receipt = publisher.publish(b"x", routing_key="q", not_before=soon)
        receipt.add_done_callback(lambda done: called.put(done.message_id))
        receipt.add_done_callback(lambda done: called.put(done.message_id))
        id_ = receipt.message_id
        del receipt
        until(lambda: publisher.status.counters.stored == 2)
        gc.collect()
        assert dropped() is None
        assert {called.get(timeout=60), called.get(timeout=60)} == {id_}
        until(lambda: publisher.status.counters.confirmed == 2)
        assert not publisher._client.relay._kept


def test_a_receipt_of_a_closed_publisher_does_not_wait_for_ever(path: Path) -> None:
    publisher = Publisher(AWAY, outbox=path)
    receipt = publisher.publish(b"x")
    assert publisher.close(0).open == 1
    with pytest.raises(PublisherClosed):
        receipt.result()
    assert Outbox(path).status().open == 1


@pytest.mark.parametrize(
    ("others", "end"),
    [
        (0, lambda publisher: publisher.flush(30)),
        (0, lambda publisher: publisher.close(30)),
        (1, lambda publisher: publisher.close(0)),
    ],
)
def test_the_status_after_a_wait_does_not_count_what_was_just_cancelled(
    path: Path, others: int, end: Callable[[Publisher], Status]
) -> None:
    with Outbox(path) as outbox, Publisher(AWAY, outbox=path, close_timeout_s=0) as publisher:
        for n in range(1 + others):
            outbox.enqueue(Message(b"", routing_key="q"), key=f"{n}")
        until(lambda: publisher.status.open == 1 + others)
        assert outbox.cancel("0")
        assert end(publisher).open == others


def test_the_status_of_a_flush_that_has_waited_knows_what_has_ended_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Outbox(path) as outbox, Publisher(AWAY, outbox=path, close_timeout_s=0) as publisher:
        outbox.enqueue(Message(b"", routing_key="q"), key="0")
        until(lambda: publisher.status.open == 1)
        look = Flush.look

        def after_a_cancel(flush: Flush, relay: Relay) -> bool:
            if flush.upto is not None:  # since its first look
                outbox.cancel("0")
            return look(flush, relay)

        monkeypatch.setattr(Flush, "look", after_a_cancel)
        assert publisher.flush(30).open == 0


def test_a_flush_waits_for_what_another_process_has_just_stored(
    path: Path, publisher: Publisher, broker: FakeBroker
) -> None:
    with Outbox(path) as outbox:
        for n in range(1, 11):
            outbox.enqueue(Message(b"", routing_key="q"))
            assert publisher.flush(20).is_flushed
            assert len(broker.published) == n


def test_a_broker_that_confirms_nothing_is_left_for_the_next_of_several(
    broker: FakeBroker, path: Path
) -> None:
    """A node that its cluster has lost goes on to take publishes, and to send heartbeats."""
    broker.inject(faults.DropConfirm(keep=True))
    with FakeBroker() as other:
        other.declare_queue("q")
        with Publisher([broker.url, other.url], outbox=path, confirm_timeout_s=0.2) as publisher:
            assert publisher.publish_many(messages(10)).wait(60).confirmed == 10
        assert len(other.messages("q")) == 10


def test_a_batch_counts_its_outcomes(publisher: Publisher, broker: FakeBroker) -> None:
    broker.inject(faults.Nack(times=3))
    receipt = publisher.publish_many(messages(1200)).wait(60)
    assert (receipt.stored, receipt.confirmed, receipt.failed, receipt.open) == (1200, 1197, 3, 0)
    assert [type(failure) for failure in receipt.failures] == [Nacked] * 3


def test_a_batch_keeps_no_more_failures_than_it_may(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reliablepub.front.receipt.FAILURES_KEPT", 5)
    receipt = publisher.publish_many(Message(b"", routing_key="nowhere") for _ in range(20))
    receipt.wait(60)
    assert (receipt.failed, len(receipt.failures)) == (20, 5)


# -------------------------------------------------------------------- who may publish, and when


def test_many_threads_publish_at_once(publisher: Publisher, broker: FakeBroker) -> None:
    def work() -> None:
        for receipt in [publisher.publish(b"x", routing_key="q") for _ in range(20)]:
            receipt.result(60)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert publisher.status.counters.stored == 320
    assert len({m.properties["message_id"] for m in broker.messages("q")}) == 320


def test_a_closed_publisher_accepts_nothing(publisher: Publisher) -> None:
    publisher.close(1)
    with pytest.raises(PublisherClosed):
        publisher.publish(b"x")
    with pytest.raises(PublisherClosed):
        publisher.publish_many(messages(1))


def test_a_thread_that_gets_the_id_of_an_ended_relay_is_not_taken_for_it(path: Path) -> None:
    """The system gives the id of an ended thread to the next thread that starts."""
    publisher = Publisher(AWAY, outbox=path, close_timeout_s=0)
    receipt = publisher.publish(b"x", routing_key="q")
    settled = publisher.publish(b"x", routing_key="q", expires_in_s=0.001)
    with pytest.raises(Expired):
        settled.result(60)
    relay = publisher._client.relay._thread
    publisher.close()
    found: list[object] = []
    go_on = threading.Event()

    def use() -> None:
        if threading.get_ident() == relay.ident:
            for call in (lambda: publisher.publish(b"y", routing_key="q"), receipt.result):
                try:
                    found.append(call())
                except ReliablePubError as error:
                    found.append(type(error))
            found.append(publisher.close().open)
            settled.add_done_callback(lambda _: 1 / 0)
            found.append(publisher.status.callback_errors)
        go_on.wait(60)

    threads = [threading.Thread(target=use) for _ in range(9)]
    for one in threads:
        one.start()
    go_on.set()
    for one in threads:
        one.join()
    if not found:
        pytest.skip("this system gives no id twice")
    assert found == [PublisherClosed, PublisherClosed, 1, 0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_error_of_a_block_in_a_forked_child_is_not_hidden(publisher: Publisher) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with publisher:
                sys.exit(7)
        except SystemExit:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_logs_on_a_thread_that_gets_the_id_of_the_parents_relay(
    path: Path, monkeypatch: pytest.MonkeyPatch, root_logger: logging.Logger
) -> None:
    """The parent's relay is not in the child, and takes no records there."""
    with Publisher(AWAY, outbox=path, close_timeout_s=0) as publisher:
        relay = publisher._client.relay._thread
        pid = os.fork()
        if pid == 0:
            said: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record: said.append(record.name)  # type: ignore[method-assign]
            root_logger.handlers[:] = [handler]
            names = ("reliablepub.link", "reliablepub.outbox", "pika.connection")
            for name in names:
                logger = logging.getLogger(name)
                record = logger.makeRecord(name, logging.ERROR, __file__, 1, "x", (), None)
                record.thread = relay.ident
                logger.handle(record)
            os._exit(0 if said == list(names) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_is_told_and_the_parent_goes_on(publisher: Publisher) -> None:
    waiting = Issued("m", publisher._client.relay)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(PublisherForked):
            publisher.publish(b"x")
            os._exit(1)
        with contextlib.suppress(PublisherClosed):
            waiting.result()  # no relay of this process will settle it
            os._exit(2)
        os._exit(42)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    publisher.publish(b"x", routing_key="q").result(60)


def test_an_interpreter_that_ends_without_close_loses_nothing(path: Path) -> None:
    code = (
        "import sys, reliablepub\n"
        "p = reliablepub.Publisher(sys.argv[1], outbox=sys.argv[2], close_timeout_s=0.1)\n"
        "for _ in range(50): p.publish(b'x')\n"
    )
    subprocess.run([sys.executable, "-c", code, AWAY, str(path)], check=True, timeout=100)
    assert Outbox(path).status().open == 50


def test_nothing_of_a_closed_publisher_waits_for_the_end_of_the_interpreter() -> None:
    before = atexit._ncallbacks()
    for _ in range(3):
        Publisher(AWAY, outbox=None).close(0)
    assert atexit._ncallbacks() == before


# -------------------------------------------------------------------- a full outbox


@pytest.mark.parametrize("full_timeout_s", [0, 0.1])
def test_a_full_outbox_raises_when_asked_to_and_not_at_the_next_look(
    path: Path, full_timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(AWAY, outbox=path, open_messages_max=1, full_timeout_s=full_timeout_s)
    publisher.publish(b"x")
    until(lambda: publisher.status.open == 1)  # the relay shows that a moment after the commit
    monkeypatch.setattr("reliablepub.front.publisher.LOOK_S", 600.0)
    with pytest.raises(OutboxFull):
        publisher.publish(b"x")
    assert publisher.close(0).open == 1


def test_a_full_outbox_blocks_until_there_is_room(broker: FakeBroker, path: Path) -> None:
    broker.inject(faults.HoldConfirms())
    publisher = Publisher(broker.url, outbox=path, open_messages_max=1)
    publisher.publish(b"x", routing_key="q")
    timer = threading.Timer(0.3, broker.release_confirms)
    since = time.monotonic()
    timer.start()
    receipt = publisher.publish(b"x", routing_key="q")
    assert time.monotonic() - since >= 0.2
    receipt.result(60)
    timer.join()
    publisher.close(1)


def test_chunks_are_cut_to_the_limits(broker: FakeBroker, path: Path) -> None:
    publisher = Publisher(broker.url, outbox=path, open_messages_max=7, open_bytes_max=1_000)
    assert publisher.publish_many(messages(30)).wait(60).confirmed == 30
    publisher.close(1)


def test_a_message_larger_than_the_outbox_is_refused(path: Path) -> None:
    publisher = Publisher(AWAY, outbox=path, open_bytes_max=1_000)
    with pytest.raises(OutboxFull, match="never fit") as raised:
        publisher.publish(bytes(2_000))
    assert not raised.value.retryable
    publisher.close(0)


def test_a_message_that_is_refused_does_not_stay_in_memory(path: Path) -> None:
    def chunks() -> int:
        return sum(type(thing) is Chunk for thing in gc.get_objects())

    publisher = Publisher(AWAY, outbox=path, open_bytes_max=1_000)
    gc.collect()
    gc.disable()
    try:
        before = chunks()
        with pytest.raises(OutboxFull):
            publisher.publish(bytes(2_000))
        assert chunks() <= before
    finally:
        gc.enable()
        publisher.close(0)


def test_what_follows_a_chunk_that_found_no_room_is_not_stored_either(path: Path) -> None:
    publisher = Publisher(AWAY, outbox=path, open_messages_max=700, full_timeout_s=0.1)
    with pytest.raises(OutboxFull) as raised:
        publisher.publish_many(messages(700 + 100 + 50), source="file")
    assert publisher.close(0).open == 500
    assert raised.value.__notes__ == ["500 messages before it are stored"]
    store = SqliteStore(path)
    assert store.position("file") == 500
    store.close()


def test_what_follows_a_chunk_that_failed_is_not_stored_either(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, commits_of_new = SqliteStore.commit, 0

    def flaky(store: SqliteStore, turn: Changes) -> Any:
        nonlocal commits_of_new
        commits_of_new += bool(turn.new)
        if turn.new and commits_of_new == 2:
            raise OutboxDiskFull("the disk is full")
        return commit(store, turn)

    monkeypatch.setattr(SqliteStore, "commit", flaky)

    class Hook:
        rejected_count = 0

        def rejected(self, event: MessagesRejected) -> None:
            self.rejected_count += event.count

    hook, made = Hook(), 0

    def counted() -> Iterator[Message]:
        nonlocal made
        for message in messages(20_000):
            made += 1
            yield message

    publisher = Publisher(AWAY, outbox=path, hooks=[hook])
    with pytest.raises(OutboxDiskFull) as raised:
        publisher.publish_many(counted(), source="file")
    stored = publisher.close(0).open
    assert hook.rejected_count == (made - stored) // 500 * 500, "all that were handed over"
    assert raised.value.__notes__ == [f"{stored} messages before it are stored"]
    assert stored < 20_000
    assert stored % 500 == 0


def test_an_iterable_that_raises_in_the_middle_says_how_many_are_stored(path: Path) -> None:
    def broken() -> Iterator[Message]:
        yield from messages(1_234)
        raise ValueError("bad line")

    publisher = Publisher(AWAY, outbox=path)
    with pytest.raises(ValueError, match="bad line") as raised:
        publisher.publish_many(broken())
    stored = publisher.close(0).open
    assert stored == 1_000
    assert raised.value.__notes__ == [f"{stored} messages before it are stored"]


def test_hooks_are_told_of_a_message_for_which_a_publisher_closes_too_early(path: Path) -> None:
    class Hook:
        def __init__(self) -> None:
            self.told: list[object] = []

        def rejected(self, event: object) -> None:
            self.told.append(event)

    hook = Hook()
    with Publisher(AWAY, outbox=path, hooks=[hook], close_timeout_s=0) as publisher:
        # Another thread closes it after the call has found it open.
        publisher._client.relay.inbox.close(PublisherClosed("it is closing"))
        with pytest.raises(PublisherClosed):
            publisher.publish(b"x", routing_key="q")
    assert len(hook.told) == 1


@pytest.mark.parametrize("count", [100, 20_000])
def test_a_call_that_is_interrupted_while_it_waits_says_how_many_are_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """By Ctrl-C, for instance, or by Celery's soft time limit, most likely in such a wait."""
    commit, is_armed = SqliteStore.commit, False

    def slow(store: SqliteStore, turn: Changes) -> Any:
        nonlocal is_armed
        if turn.new and not is_armed:
            is_armed = True
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        time.sleep(0.4)
        return commit(store, turn)

    def interrupt(*_: object) -> None:
        raise TimeoutError("the time is up")

    publisher, many = Publisher(AWAY, outbox=path), messages(count)
    gc.collect()  # Python drops what a signal handler raises while an object is being removed
    monkeypatch.setattr(SqliteStore, "commit", slow)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(TimeoutError) as raised:
            publisher.publish_many(many)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    stored = publisher.close(0).open
    assert raised.value.__notes__ == [f"{stored} messages before it are stored"]
    assert stored > 0


def test_a_call_that_is_interrupted_twice_leaves_nothing_to_be_stored_later(path: Path) -> None:
    """Ctrl-C again, because the call has not ended at once."""
    left = ["again", "first"]

    def interrupt(*_: object) -> None:
        if left:
            raise TimeoutError(left.pop())

    before = signal.signal(signal.SIGALRM, interrupt)
    publisher = Publisher(AWAY, outbox=path, open_messages_max=10)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
        with pytest.raises(TimeoutError, match="again"):
            publisher.publish_many(messages(30))  # it waits for room
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    inbox = publisher._client.relay.inbox
    assert all(chunk.is_withdrawn or chunk.void_because for chunk in list(inbox.chunks))
    assert publisher.close(0).open == 10


def test_two_callers_of_a_failed_turn_do_not_share_their_error(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OutboxDiskFull("the disk is full")
    monkeypatch.setattr(SqliteStore, "commit", Mock(side_effect=error))
    raised = []
    for _ in range(2):
        with pytest.raises(OutboxDiskFull) as caught:
            publisher.publish_many(messages(1))
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert [len(one.__notes__) for one in raised] == [1, 1]


# -------------------------------------------------------------------- the relay dies


def test_a_waiting_caller_learns_the_cause_when_the_relay_dies(
    publisher: Publisher, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.inject(faults.HoldConfirms())
    receipt = publisher.publish(b"x", routing_key="q")
    monkeypatch.setattr(Relay, "turn", Mock(side_effect=ZeroDivisionError("a bug")))
    with pytest.raises(PublisherClosed, match="a bug"):
        # The first one may be taken by the last good turn.
        list(map(publisher.publish_many, [[Message(b"x")]] * 2))
    with pytest.raises(PublisherClosed):
        receipt.result()
    with pytest.raises(PublisherFailed, match="a bug"):
        publisher.flush()
    for _ in range(2):
        with pytest.raises(PublisherFailed, match="a bug"):
            publisher.close()


# -------------------------------------------------------------------- leaving nothing behind


@pytest.mark.parametrize("step", ["start", "wait_started"])
def test_an_interrupted_constructor_leaves_no_relay_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real = getattr(RelayThread, step)

    def interrupted(self: RelayThread, *rest: object) -> None:
        real(self, *rest)
        self._started.wait()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RelayThread, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            Publisher(AWAY, outbox=path)

    def is_free() -> bool:
        try:
            Publisher(AWAY, outbox=path, close_timeout_s=0).close()
        except OutboxInUse:
            return False
        return True

    until(is_free)


def test_a_relay_that_another_has_replaced_says_so_in_one_warning(
    broker: FakeBroker, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The messages are published, so nobody is to be woken."""
    publisher = Publisher(broker.url, outbox=path)
    sql(path, "INSERT INTO reliablepub_runs (pid, host, started_at) VALUES (4711, 'h', 0)")
    until(lambda: publisher.status.link is Link.FAILED)
    with pytest.raises(PublisherFailed) as caught:
        publisher.flush(30)
    assert isinstance(caught.value.__cause__, OutboxInUse)
    [said] = [record for record in caplog.records if "4711" in record.getMessage()]
    assert (said.levelname, vars(said)["event"], said.exc_info) == ("WARNING", "replaced", None)
    with contextlib.suppress(PublisherFailed):
        publisher.close()


def test_twenty_publishers_leave_no_thread_and_no_descriptor(
    broker: FakeBroker, path: Path
) -> None:
    def cycle() -> None:
        with Publisher(broker.url, outbox=path) as publisher:
            publisher.publish(b"x", routing_key="q").result(60)

    def descriptors() -> int:
        broker.wait_for(lambda: broker.connections == 0, timeout_s=60)
        return len(list(Path("/proc/self/fd").iterdir()))

    cycle()
    before, threads = descriptors(), set(threading.enumerate())
    for _ in range(20):
        cycle()
    until(lambda: descriptors() <= before)
    until(lambda: set(threading.enumerate()) <= threads)


NO_LIMITS = [0, -1, float("inf"), float("nan")]
WRONG = {
    "window_max": NO_LIMITS,
    "window_bytes_max": NO_LIMITS,
    "confirm_timeout_s": NO_LIMITS,
    "heartbeat_s": [*NO_LIMITS, 0.5, 10.0, 65_536, True],  # over which pika would fail
}


@pytest.mark.parametrize("front_door", [Publisher, AsyncPublisher])
@pytest.mark.parametrize("name", WRONG)
def test_a_limit_that_limits_nothing_is_refused_before_a_file_is_made(
    front_door: type[Publisher | AsyncPublisher], name: str, path: Path
) -> None:
    for value in WRONG[name]:
        arguments: dict[str, Any] = {"outbox": path, name: value}
        with pytest.raises(ConfigurationError, match=name):
            front_door(AWAY, **arguments)
    assert not path.exists()


# -------------------------------------------------------------------- what is refused at once


@pytest.mark.parametrize("source", ["\ud800", 7, pytest.param(Lazy("s"), id="lazy")])
def test_a_source_that_cannot_be_stored_is_refused_and_others_go_on(
    publisher: Publisher, source: Any
) -> None:
    with pytest.raises(InvalidMessage, match="source"):
        publisher.publish_many(messages(3), source=source)
    assert publisher.publish_many(messages(3), source="s").wait(30).confirmed == 3


def test_a_publisher_without_references_still_flushes(broker: FakeBroker) -> None:
    code = (
        "import gc, sys; from reliablepub import Publisher;"
        "Publisher(sys.argv[1], outbox=None).publish(b'x', routing_key='q'); gc.collect()"
    )
    subprocess.run([sys.executable, "-c", code, broker.url], check=True, timeout=100)
    assert len(broker.messages("q")) == 1


GREENLETS = """
from gevent import monkey
monkey.patch_all()
import sys, gevent
from reliablepub import Publisher
with Publisher(sys.argv[1], outbox="o.db") as publisher:
    def send():
        publisher.publish(b"", routing_key="q").result(timeout_s=60)
    gevent.joinall([gevent.spawn(send) for _ in range(50)], raise_error=True)
"""


def test_greenlets_share_a_publisher(broker: FakeBroker, tmp_path: Path) -> None:
    """The relay's thread is a greenlet then, too."""
    command = [sys.executable, "-Wignore", "-c", GREENLETS, broker.url]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert len(broker.messages("q")) == 50
