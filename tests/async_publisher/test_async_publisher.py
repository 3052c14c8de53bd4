"""The asynchronous front door: what tasks get, whatever happens behind it."""

import asyncio
import gc
import inspect
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from reliablepub import (
    AsyncPublisher,
    InvalidMessage,
    Message,
    Nacked,
    NotAnOutbox,
    Outbox,
    OutboxDiskFull,
    OutboxFull,
    Publisher,
    PublisherClosed,
    PublisherFailed,
    PublisherForked,
    StillOpen,
    WrongEventLoop,
)
from reliablepub.front import relay_client
from reliablepub.front.bridge import BURST
from reliablepub.front.relay_client import CHUNKS_UNDER_WAY, RelayClient
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.relay.handover import CHUNK_MESSAGES_MAX
from reliablepub.relay.relay import Relay
from reliablepub.testing import FakeBroker, faults
from tests.async_publisher.conftest import Run, in_each_loop
from tests.between import before
from tests.missing import needed
from tests.policies import AT_ONCE
from tests.waiting import until, until_async

AWAY = "amqp://127.0.0.1:1/"


def messages(count: int) -> list[Message]:
    return [Message(b"x", routing_key="q") for _ in range(count)]


_of_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _forget_the_threads_of_other_tests() -> None:
    _of_others.clear()
    _of_others.update(threading.enumerate())


def relay_threads() -> list[threading.Thread]:
    """The relays that this test has started."""
    threads = set(threading.enumerate()) - _of_others
    return [thread for thread in threads if thread.name == "reliablepub-relay"]


# -------------------------------------------------------------------- mirrors


@pytest.mark.parametrize("verb", ["__init__", "publish", "flush"])
def test_arguments_are_those_of_publisher(verb: str) -> None:
    ours = dict(inspect.signature(getattr(AsyncPublisher, verb)).parameters)
    theirs = dict(inspect.signature(getattr(Publisher, verb)).parameters)
    if verb == "__init__":  # instead of a URL, it may be given a connection
        assert ours.pop("url").default is ours.pop("connection").default is None
        del theirs["url"]
    assert ours == theirs


def test_without_asyncio_it_says_what_to_use_instead() -> None:
    opening = AsyncPublisher(AWAY, outbox=None).open()
    with pytest.raises(WrongEventLoop, match=r"in trio, use `Publisher` from threads"):
        opening.send(None)


# -------------------------------------------------------------------- receipts


@in_each_loop
async def test_a_receipt_is_awaited_as_often_as_one_likes(broker: FakeBroker, path: Path) -> None:
    async with AsyncPublisher(broker.url, outbox=path) as publisher:
        receipt = await publisher.publish(b"x", routing_key="q")
        assert Outbox(path).status().stored == 1
        first, second = await asyncio.gather(receipt, receipt.result(60))
        assert first == second == await receipt
        assert first.message_id == receipt.message_id
        assert receipt.is_settled
        assert repr(receipt) == f"<AsyncReceipt {receipt.message_id} confirmed>"


@in_each_loop
async def test_a_receipt_raises_what_the_broker_said_each_time(
    broker: FakeBroker, path: Path
) -> None:
    broker.inject(faults.Nack())
    async with AsyncPublisher(broker.url, outbox=path, retry=AT_ONCE) as publisher:
        receipt = await publisher.publish(b"x", routing_key="q")
        for _ in range(2):
            with pytest.raises(Nacked):
                await receipt


@in_each_loop
async def test_a_wait_that_ends_first_says_that_it_is_still_open(path: Path) -> None:
    publisher = await AsyncPublisher(AWAY, outbox=path).open()
    receipt = await publisher.publish(b"x", message_id="m")
    with pytest.raises(StillOpen, match=r"message m is still open after 0.05 s"):
        await receipt.result(0.05)
    with pytest.raises(StillOpen):
        await receipt.result(0)
    batch = await publisher.publish_many(messages(3))
    with pytest.raises(StillOpen, match="a batch"):
        await batch.wait(0.05)
    assert (await publisher.flush(0.05)).open == 4
    waiting = asyncio.create_task(receipt.result())
    await asyncio.sleep(0)
    assert (await publisher.aclose(0)).open == 4
    with pytest.raises(PublisherClosed, match="ended before the outcome of message m"):
        await waiting
    with pytest.raises(PublisherClosed):
        await receipt
    with pytest.raises(PublisherClosed):
        await batch


# -------------------------------------------------------------------- many


@in_each_loop
async def test_many_messages_from_every_kind_of_iterable(broker: FakeBroker, path: Path) -> None:
    async def rows(count: int) -> AsyncIterator[Message]:
        for message in messages(count):
            await asyncio.sleep(0)
            yield message

    async with AsyncPublisher(broker.url, outbox=path) as publisher:
        for batch, expected in [
            (await publisher.publish_many(messages(1_200)), 1_200),
            (await publisher.publish_many(iter(messages(7))), 7),
            (await publisher.publish_many(rows(1_200), source="rows"), 1_200),
            (await publisher.publish_many([]), 0),
        ]:
            assert (await batch).confirmed == batch.stored == expected
        assert (await publisher.flush()).open == 0
    assert Outbox(path).position("rows") == 1_200


@in_each_loop
async def test_a_stream_that_breaks_says_how_much_of_it_is_stored(path: Path) -> None:
    def broken() -> Iterator[Message]:
        yield from messages(1_100)
        raise ZeroDivisionError

    async with AsyncPublisher(AWAY, outbox=path, close_timeout_s=0) as publisher:
        with pytest.raises(ZeroDivisionError) as caught:
            await publisher.publish_many(broken(), source="s")
        assert caught.value.__notes__ == ["1000 messages before it are stored"]
        strange: Any = [*messages(1), b"not a message"]
        with pytest.raises(InvalidMessage, match="one is of type bytes, not Message; Message"):
            await publisher.publish_many(strange)
    assert Outbox(path).position("s") == Outbox(path).status().stored == 1_000


@in_each_loop
async def test_a_slow_disk_holds_back_the_stream_and_not_the_loop(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    go_on, taken = threading.Event(), 0

    def counted() -> Iterator[Message]:
        nonlocal taken
        for message in messages(20_000):
            taken += 1
            yield message

    async with AsyncPublisher(AWAY, outbox=path, close_timeout_s=0) as publisher:
        before(monkeypatch, SqliteStore, "commit", lambda *_: go_on.wait(60))
        before(monkeypatch, SqliteStore, "commit", lambda *_: threads.add(threading.get_ident()))
        task = asyncio.create_task(publisher.publish_many(counted()))
        await until_async(lambda: threads)
        await asyncio.sleep(0.1)  # the stream goes on as far as it may
        assert taken <= (CHUNKS_UNDER_WAY + 1) * CHUNK_MESSAGES_MAX + 1
        assert threading.get_ident() not in threads
        task.cancel()
        go_on.set()
        await asyncio.wait([task])


@in_each_loop
async def test_a_stream_that_is_cancelled_leaves_nothing_in_the_inbox(path: Path) -> None:
    async with AsyncPublisher(
        AWAY, outbox=path, open_messages_max=1, close_timeout_s=0
    ) as publisher:
        await publisher.publish(b"x")
        tasks = [
            asyncio.create_task(one)
            for one in (publisher.publish(b"x"), publisher.publish_many(messages(9_000)))
        ]
        inbox = publisher._client.relay.inbox
        await until_async(lambda: len(inbox.chunks) > CHUNKS_UNDER_WAY)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert [len(chunk.messages) for chunk in inbox.chunks if not chunk.is_claimed] == [1]
        tasks[0].cancel()
        await asyncio.wait(tasks)


# -------------------------------------------------------------------- a full outbox


@pytest.mark.parametrize("full_timeout_s", [0, 0.1])
@in_each_loop
async def test_a_full_outbox_raises_in_time(path: Path, full_timeout_s: float) -> None:
    publisher = AsyncPublisher(
        AWAY, outbox=path, open_messages_max=1, full_timeout_s=full_timeout_s
    )
    async with publisher:
        await publisher.publish(b"x")
        with pytest.raises(OutboxFull):
            await publisher.publish(b"x")
        assert (await publisher.aclose(0)).open == 1


@in_each_loop
async def test_a_message_that_never_fits_is_turned_away() -> None:
    async with AsyncPublisher(AWAY, outbox=None, open_bytes_max=1_000) as publisher:
        with pytest.raises(OutboxFull, match="never fit"):
            await publisher.publish(b"x" * 2_000)


@in_each_loop
async def test_a_full_outbox_holds_back_until_there_is_room(broker: FakeBroker, path: Path) -> None:
    broker.inject(faults.HoldConfirms())
    async with AsyncPublisher(broker.url, outbox=path, open_messages_max=1) as publisher:
        await publisher.publish(b"x", routing_key="q")
        second = asyncio.create_task(publisher.publish(b"x", routing_key="q"))
        await asyncio.sleep(0.2)
        assert not second.done()
        broker.release_confirms()
        await (await second)


@in_each_loop
async def test_a_full_outbox_keeps_no_message_whose_task_was_cancelled(
    broker: FakeBroker, path: Path
) -> None:
    broker.inject(faults.HoldConfirms())
    async with AsyncPublisher(broker.url, outbox=path, open_messages_max=1) as publisher:
        await publisher.publish(b"x", routing_key="q")
        for _ in range(30):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(publisher.publish(b"late", routing_key="q"), 0.01)
        broker.release_confirms()
        await (await publisher.publish(b"y", routing_key="q"))
    assert [message.body for message in broker.messages("q")] == [b"x", b"y"]


@in_each_loop
async def test_a_full_disk_is_told_to_each_caller(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncPublisher(AWAY, outbox=path, close_timeout_s=0) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(SqliteStore, "commit", Mock(side_effect=OutboxDiskFull("no space left")))
            errors = await asyncio.gather(
                *(publisher.publish(b"x") for _ in range(3)), return_exceptions=True
            )
        assert [type(error) for error in errors] == [OutboxDiskFull] * 3
        assert len({id(error) for error in errors}) == 3


# -------------------------------------------------------------------- opening and closing


@in_each_loop
async def test_opening_what_is_no_outbox_fails_and_leaves_nothing(path: Path) -> None:
    await asyncio.to_thread(path.write_bytes, b"not an outbox" * 100)
    publisher = AsyncPublisher(AWAY, outbox=path)
    with pytest.raises(NotAnOutbox):
        await publisher.open()
    assert relay_threads() == []
    with pytest.raises(PublisherClosed, match="has failed"):
        await publisher.publish(b"x")


@in_each_loop
async def test_a_publisher_that_could_not_be_opened_can_be_closed(path: Path) -> None:
    class Watcher:
        failures = 1

        def watch(self, _publisher: object) -> None:
            self.failures -= 1
            if self.failures >= 0:
                raise RuntimeError("can't start new thread")

    publisher = AsyncPublisher(AWAY, outbox=path, hooks=[Watcher()])
    with pytest.raises(RuntimeError, match="new thread"):
        await publisher.open()
    assert (await asyncio.wait_for(publisher.aclose(), 30)).open == 0
    publisher = AsyncPublisher(AWAY, outbox=path, hooks=[watcher := Watcher()])
    with pytest.raises(RuntimeError, match="new thread"):
        await publisher.open()
    await asyncio.wait_for(publisher.open(), 30)
    assert watcher.failures == -1
    await publisher.aclose(0)


@in_each_loop
async def test_it_must_be_opened_first_and_not_used_after(path: Path) -> None:
    publisher = AsyncPublisher(AWAY, outbox=path)
    with pytest.raises(PublisherClosed, match="not open"):
        await publisher.publish(b"x")
    assert not path.exists()  # noqa: ASYNC240 - nothing else goes on here
    async with publisher:
        assert await publisher.open() is publisher
    with pytest.raises(PublisherClosed, match="is closed"):
        await publisher.publish(b"x")
    assert (await publisher.aclose()).open == 0
    assert (await AsyncPublisher(AWAY, outbox=path).aclose()).open == 0
    assert relay_threads() == []


@in_each_loop
async def test_closing_waits_for_confirms_and_several_may_close_at_once(
    broker: FakeBroker, path: Path
) -> None:
    publisher = await AsyncPublisher(broker.url, outbox=path).open()
    receipt = await publisher.publish_many(messages(100))
    first, second = await asyncio.gather(publisher.aclose(), publisher.aclose())
    assert first.open == second.open == 0
    assert receipt.confirmed == 100


@in_each_loop
async def test_opening_and_closing_do_not_hold_up_the_loop(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []
    loop_goes_on = threading.Event()
    for slow in ("snapshot", "close"):
        before(monkeypatch, SqliteStore, slow, lambda _: waited.append(loop_goes_on.wait(60)))
    asyncio.get_running_loop().call_later(0.05, loop_goes_on.set)
    publisher = AsyncPublisher(AWAY, outbox=path)
    await publisher.open()
    loop_goes_on.clear()
    asyncio.get_running_loop().call_later(0.05, loop_goes_on.set)
    await publisher.aclose()
    assert waited
    assert all(waited)  # or the loop could not have set it


@in_each_loop
async def test_opening_that_is_cancelled_closes_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_opening, is_cancelled = threading.Event(), threading.Event()
    before(monkeypatch, SqliteStore, "snapshot", lambda _: is_cancelled.wait(60))
    before(monkeypatch, SqliteStore, "snapshot", lambda _: is_opening.set())
    opening = asyncio.create_task(AsyncPublisher(AWAY, outbox=path).open())
    await until_async(is_opening.is_set)
    opening.cancel()
    is_cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until_async(lambda: not relay_threads())
    async with AsyncPublisher(AWAY, outbox=path):  # the outbox is free
        pass


@in_each_loop
async def test_openings_that_are_cancelled_leave_nothing_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot, go_on = MemoryStore.snapshot, threading.Event()
    monkeypatch.setattr(MemoryStore, "snapshot", lambda s: (go_on.wait(60), snapshot(s))[1])
    before = len(relay_client._not_closed)
    for _ in range(20):
        opening = asyncio.create_task(AsyncPublisher(AWAY, outbox=None).open())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        go_on.set()
        await until_async(lambda: not relay_threads())
        go_on.clear()
    go_on.set()
    async with AsyncPublisher(AWAY, outbox=None, close_timeout_s=0):
        assert len(relay_client._not_closed) <= before + 1


@in_each_loop
async def test_closing_that_is_cancelled_goes_on_closing(path: Path) -> None:
    publisher = await AsyncPublisher(AWAY, outbox=path).open()
    await publisher.publish(b"x")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await publisher.aclose(0.3)
    assert (await publisher.aclose()).open == 1
    assert relay_threads() == []


@in_each_loop
async def test_a_relay_that_dies_is_told_to_every_task(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Relay.turn
    is_dying = threading.Event()

    def dying(relay: Relay, *, is_flushing: bool = False) -> float | None:
        if is_dying.is_set():
            raise OSError(5, "the disk is gone")
        return turn(relay, is_flushing=is_flushing)

    monkeypatch.setattr(Relay, "turn", dying)

    async def go_on(publisher: AsyncPublisher) -> None:
        while True:  # the turn that is under way may still store one
            await publisher.publish(b"y")

    publisher = await AsyncPublisher(AWAY, outbox=path).open()
    receipt = await publisher.publish(b"x")
    waiting = [asyncio.create_task(receipt.result()), asyncio.create_task(publisher.flush())]
    await asyncio.sleep(0.01)
    is_dying.set()
    with pytest.raises(PublisherClosed, match="the disk is gone"):
        await go_on(publisher)
    for task in waiting:
        with pytest.raises(PublisherClosed):
            await task
    with pytest.raises(PublisherFailed, match="the disk is gone"):
        await publisher.publish(b"z")
    with pytest.raises(PublisherFailed, match="the disk is gone"):
        await publisher.aclose()


# -------------------------------------------------------------------- loops and processes


def test_anyio_s_cancel_scopes_are_as_harmless_as_any(broker: FakeBroker, path: Path) -> None:
    anyio = needed("anyio")  # comes with the examples' frameworks

    async def main() -> None:
        broker.inject(faults.HoldConfirms(times=100))
        async with AsyncPublisher(broker.url, outbox=path) as publisher:
            receipt = await publisher.publish(b"x", routing_key="q")
            with anyio.move_on_after(0.05) as scope:
                await receipt
            assert scope.cancelled_caught
            async with anyio.create_task_group() as group:
                for _ in range(20):
                    group.start_soon(publisher.publish_many, messages(100))
                await anyio.sleep(0.001)
                group.cancel_scope.cancel()
            broker.release_confirms()
            await receipt
            assert (await publisher.flush(60)).open == 0

    anyio.run(main)
    status = Outbox(path).status()
    assert status.stored == status.confirmed == len(broker.messages("q"))


def test_it_belongs_to_the_loop_that_opened_it(run: Run[Any], path: Path) -> None:
    publisher = AsyncPublisher(AWAY, outbox=path)
    run(publisher.open())
    receipt = run(publisher.publish(b"x"))

    async def elsewhere() -> None:
        for verb in (
            publisher.publish(b"y"),
            publisher.publish_many([]),
            publisher.flush(),
            publisher.open(),
            publisher.aclose(),
            receipt.result(),
        ):
            with pytest.raises(WrongEventLoop):
                await verb

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    thread.join()
    assert run(publisher.aclose(0)).open == 1


def test_any_loop_closes_what_an_ended_loop_has_left_open(broker: FakeBroker, path: Path) -> None:
    publisher = AsyncPublisher(broker.url, outbox=path)

    async def begin() -> None:
        await publisher.open()
        await publisher.publish(b"x", routing_key="q")

    async def end() -> None:
        with pytest.raises(WrongEventLoop, match=r"has ended; await its aclose\(\) here"):
            await publisher.publish(b"y", routing_key="q")
        assert (await publisher.aclose(30)).open == 0
        async with AsyncPublisher(broker.url, outbox=path):
            pass
        await publisher.aclose()  # does nothing more

    asyncio.run(begin())
    asyncio.run(end())


def test_a_loop_that_closes_under_it_harms_nothing(broker: FakeBroker, path: Path) -> None:
    publisher = AsyncPublisher(broker.url, outbox=path)

    async def main() -> None:
        await publisher.open()
        broker.inject(faults.HoldConfirms(times=10))
        receipts = [await publisher.publish(b"x", routing_key="q") for _ in range(10)]
        abandoned = asyncio.gather(*receipts)
        await asyncio.sleep(0)
        assert not abandoned.done()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.set_exception_handler(lambda *_: None)  # the loop complains of tasks that are pending
    loop.close()
    broker.release_confirms()
    until(lambda: not publisher.status.open)
    [relay] = relay_threads()
    assert relay.is_alive()
    publisher._client.begin_close(0)  # as at the end of the interpreter
    publisher._client.end_close()


def in_the_child(publisher: AsyncPublisher, said: Any) -> None:
    async def main() -> None:
        for verb in (publisher.publish(b"x"), publisher.flush(), publisher.aclose()):
            try:
                await verb
            except PublisherForked:
                said.send("forked")
        os.kill(os.getpid(), signal.SIGKILL)  # without the finalizers of pytest

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused(path: Path) -> None:
    async def main() -> None:
        async with AsyncPublisher(AWAY, outbox=path, close_timeout_s=0) as publisher:
            here, there = multiprocessing.Pipe()
            child = multiprocessing.get_context("fork").Process(
                target=in_the_child, args=(publisher, there)
            )
            child.start()
            said = [await asyncio.to_thread(here.recv) for _ in range(3)]
            child.join()
            assert said == ["forked"] * 3
            await publisher.publish(b"x")

    asyncio.run(main())
    gc.collect()
    assert Outbox(path).status().open == 1


# -------------------------------------------------------------------- consideration for the loop


def test_a_thousand_tasks_that_begin_together_do_not_hold_the_loop(
    run: Run[None], broker: FakeBroker, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = 0
    handed_over: list[tuple[int, str]] = []

    def note(_: RelayClient, chunk: list[Message], *__: Any, **___: Any) -> None:
        handed_over.append((turn, str(chunk[0].message_id)))

    before(monkeypatch, RelayClient, "hand_over", note)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def main() -> None:
        async with AsyncPublisher(broker.url, outbox=path) as publisher:
            counting = asyncio.create_task(count_turns())
            tasks = [
                asyncio.create_task(publisher.publish(b"x", routing_key="q", message_id=str(n)))
                for n in range(1_000)
            ]
            await asyncio.sleep(0)
            for task in tasks[100:200]:
                task.cancel()
            await asyncio.wait(tasks)
            counting.cancel()
            assert (await publisher.flush(60)).open == 0

    run(main())
    assert max(Counter(turn for turn, _ in handed_over).values()) <= BURST
    assert [int(id_) for _, id_ in handed_over] == [*range(100), *range(200, 1_000)]


@in_each_loop
async def test_tasks_that_publish_in_one_turn_of_the_loop_wake_the_relay_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncPublisher(AWAY, outbox=path, close_timeout_s=0) as publisher:
        relay, woken = publisher._client.relay, list[bool]()
        before(monkeypatch, relay, "wake", lambda: woken.append(True))
        taking_in = threading.Lock()
        take = relay.inbox.take

        def slowly(fits: Any) -> Any:
            with taking_in:
                return take(fits)

        monkeypatch.setattr(relay.inbox, "take", slowly)
        with taking_in:
            tasks = [asyncio.create_task(publisher.publish(b"x")) for _ in range(BURST)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(woken) == 1
        await asyncio.gather(*tasks)


@in_each_loop
async def test_what_is_refused_while_the_publisher_closes_is_not_sent(
    broker: FakeBroker, path: Path
) -> None:
    broker.inject(faults.HoldConfirms())
    async with AsyncPublisher(
        broker.url, outbox=path, open_messages_max=1, full_timeout_s=0.1
    ) as publisher:
        await publisher.publish(b"", routing_key="q", message_id="first")
        waits = asyncio.create_task(publisher.publish(b"", routing_key="q", message_id="second"))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(publisher.aclose())
        with pytest.raises(OutboxFull):
            await waits
        broker.release_confirms()  # which makes room while it closes
        await closing
    assert [m.properties.message_id for m in broker.messages("q")] == ["first"]
