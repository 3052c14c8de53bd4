"""Callbacks may call the publisher, block and log: no thread waits forever."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from reliablepub import (
    AsyncPublisher,
    Link,
    Message,
    Outbox,
    Publisher,
    PublisherFailed,
    RelayHeldUp,
    WrongEventLoop,
    WrongThread,
)
from reliablepub.front import bridge
from reliablepub.hooks import LinkChanged, MessageStored
from reliablepub.relay import thread
from reliablepub.relay.relay import Relay
from reliablepub.testing import FakeBroker
from tests.waiting import until, until_async

AWAY = "amqp://guest:guest@127.0.0.1:1"


@pytest.fixture
def broker(fake_broker: FakeBroker) -> FakeBroker:
    fake_broker.declare_queue("q")
    return fake_broker


@pytest.fixture
def outbox(tmp_path: Path) -> Path:
    return tmp_path / "outbox.db"


def lose_connection(broker: FakeBroker, publisher: Publisher) -> None:
    """Have the connection cut, and wait until there is another one."""
    connects = publisher.status.connects
    broker.drop_connections()
    until(lambda: publisher.status.connects > connects)


class Hook:
    """Calls something when a message has been stored."""

    def __init__(self, call: Callable[[], object] = lambda: None) -> None:
        self.call = call
        self.raised: list[BaseException] = []

    def on_stored(self, _events: Sequence[MessageStored]) -> None:
        try:
            self.call()
        except BaseException as error:
            self.raised.append(error)
            raise


# -------------------------------------------------------------------- callbacks that call us


def test_a_wait_for_the_relay_on_its_own_thread_raises(broker: FakeBroker, outbox: Path) -> None:
    told = threading.Event()
    hook = Hook(told.set)
    with Publisher(broker.url, outbox=outbox, hooks=[hook]) as publisher:
        later = datetime.now(UTC) + timedelta(days=1)
        receipt = publisher.publish(b"x", routing_key="q", not_before=later)
        assert told.wait(30), "otherwise this one is told to the first verb"
        for verb in (
            lambda: publisher.publish(b"y", routing_key="q"),
            lambda: publisher.publish_many([Message(b"y", routing_key="q")]),
            publisher.flush,
            publisher.close,
            receipt.result,
        ):
            hook.call = verb
            publisher.publish(b"x", routing_key="q").result(30)
            until(lambda: hook.raised)
            [error] = hook.raised
            assert isinstance(error, WrongThread)
            assert "Hook.on_stored) on the relay's own thread" in str(error)
            hook.raised.clear()
            hook.call = lambda: None
        # The error is counted a moment after the hook has raised it.
        until(lambda: publisher.status.callback_errors == 5)
        publisher.publish(b"x", routing_key="q").result(30)


def test_a_hook_may_look_and_may_enqueue(broker: FakeBroker, outbox: Path) -> None:
    """Neither waits for the relay."""
    hook = Hook()
    with Publisher(broker.url, outbox=outbox, hooks=[hook]) as publisher, Outbox(outbox) as own:
        hook.call = lambda: (publisher.status, own.enqueue(Message(b"more", routing_key="q")))
        publisher.publish(b"x", routing_key="q").result(30)
        hook.call = lambda: None
        assert publisher.flush(30).counters.confirmed == 2
        assert hook.raised == []


async def test_a_hook_cannot_use_an_asyncio_publisher_in_a_loop_of_its_own(
    broker: FakeBroker, outbox: Path
) -> None:
    hook = Hook()
    async with AsyncPublisher(broker.url, outbox=outbox, hooks=[hook]) as publisher:
        for verb in (
            lambda: asyncio.run(publisher.publish(b"y", routing_key="q")),
            lambda: asyncio.run(publisher.flush()),
            lambda: asyncio.run(publisher.aclose()),
        ):
            hook.call = verb
            await (await publisher.publish(b"x", routing_key="q"))
            assert isinstance(hook.raised.pop(), WrongEventLoop)
        hook.call = lambda: None
        await (await publisher.publish(b"x", routing_key="q"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "HELD_UP_S", 0.3)
    monkeypatch.setattr(bridge, "_LOOK_S", 0.05)


@pytest.mark.usefixtures("impatient")
async def test_a_hook_that_waits_for_the_loop_which_waits_for_the_relay_is_not_for_ever(
    broker: FakeBroker, outbox: Path
) -> None:
    hook = Hook()
    loop = asyncio.get_running_loop()
    async with AsyncPublisher(broker.url, outbox=outbox, hooks=[hook]) as publisher:

        def wait_for_the_loop() -> None:
            hook.call = lambda: None
            verb = publisher.publish(b"y", routing_key="q")
            asyncio.run_coroutine_threadsafe(verb, loop).result()

        hook.call = wait_for_the_loop
        await publisher.publish(b"x", routing_key="q")
        await until_async(lambda: hook.raised)
        assert isinstance(hook.raised.pop(), RelayHeldUp)
        await (await publisher.publish(b"z", routing_key="q"))
        status = await publisher.flush(30)
        assert (status.counters.stored, status.counters.confirmed) == (2, 2)


@pytest.mark.usefixtures("impatient")
def test_a_lock_of_the_applications_around_publish_and_in_a_hook_is_not_for_ever(
    broker: FakeBroker, outbox: Path
) -> None:
    lock, entered = threading.Lock(), threading.Event()

    def take_lock() -> None:
        entered.set()
        with lock:
            pass

    hook = Hook(take_lock)
    with Publisher(broker.url, outbox=outbox, hooks=[hook]) as publisher:
        with lock:
            receipt = publisher.publish(b"x", routing_key="q")
            assert entered.wait(30)
            for verb in (
                # Callers who store their messages themselves do so for a while.
                lambda: [publisher.publish(b"y", routing_key="q") for _ in range(50)],
                lambda: publisher.publish_many(Message(b"y", routing_key="q") for _ in range(9)),
                publisher.flush,
                lambda: (publisher.publish_many([]).wait(), receipt.result()),
                publisher.close,
            ):
                with pytest.raises(RelayHeldUp, match=r"Hook\.on_stored\) has not returned"):
                    verb()
        status = publisher.close(30)
        assert 1 <= status.counters.stored == status.counters.confirmed < 50


@pytest.mark.usefixtures("impatient")
def test_a_hook_that_calls_back_and_then_hangs_is_told_to_callers(
    broker: FakeBroker, outbox: Path
) -> None:
    """A callback within a callback ends before the outer one."""
    entered, release = threading.Event(), threading.Event()
    hook = Hook()
    with Publisher(broker.url, outbox=outbox, hooks=[hook]) as publisher:
        receipt = publisher.publish(b"x", routing_key="q")
        receipt.result(30)

        def call_back_and_hang() -> None:
            entered.set()
            receipt.add_done_callback(lambda _: None)
            release.wait(30)

        hook.call = call_back_and_hang
        publisher.publish(b"x", routing_key="q")
        assert entered.wait(30)
        try:
            with pytest.raises(RelayHeldUp, match=r"Hook\.on_stored\) has not returned"):
                publisher.publish_many([Message(b"y", routing_key="q")])
        finally:
            release.set()


@pytest.mark.usefixtures("impatient")
def test_the_error_of_a_block_is_not_hidden_by_a_callback_that_hangs(
    broker: FakeBroker, outbox: Path
) -> None:
    release = threading.Event()
    hook = Hook(lambda: release.wait(30))

    def fail() -> None:
        with Publisher(broker.url, outbox=outbox, hooks=[hook]) as publisher:
            publisher.publish(b"x", routing_key="q")
            raise KeyError("the application's")

    async def fail_there() -> None:
        options: Any = {"outbox": None, "hooks": [hook]}
        async with AsyncPublisher(broker.url, **options) as publisher:
            await publisher.publish(b"x", routing_key="q")
            raise KeyError("the application's")

    try:
        with pytest.raises(KeyError, match="the application's"):
            fail()
        with pytest.raises(KeyError, match="the application's"):
            asyncio.run(fail_there())
    finally:
        release.set()
    until(lambda: all(one.name != "reliablepub-relay" for one in threading.enumerate()))


@pytest.mark.usefixtures("impatient")
async def test_a_stream_that_breaks_while_a_callback_hangs_keeps_its_own_error(
    broker: FakeBroker, outbox: Path
) -> None:
    release = threading.Event()
    hook = Hook(lambda: release.wait(30))
    async with AsyncPublisher(broker.url, outbox=outbox, hooks=[hook]) as publisher:
        await publisher.publish(b"x", routing_key="q")

        async def stream() -> AsyncIterator[Message]:
            for _ in range(600):  # a chunk and a part of another
                yield Message(b"y", routing_key="q")
            raise KeyError("the application's")

        with pytest.raises(KeyError, match="the application's") as caught:
            await publisher.publish_many(stream())
        assert caught.value.__notes__ == ["0 messages before it are stored"]
        release.set()


# -------------------------------------------------------------------- callbacks that fork


@pytest.mark.parametrize("status", [0, 7])
@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_a_callback_has_forked_is_no_second_relay(
    broker: FakeBroker, outbox: Path, status: int, *, is_durable: bool
) -> None:
    children: list[int] = []

    def fork() -> None:
        children.append(os.fork())
        if not children[-1] and status:
            sys.exit(status)

    hook = Hook(fork)
    try:
        with Publisher(
            broker.url, outbox=outbox if is_durable else None, hooks=[hook]
        ) as publisher:
            publisher.publish(b"x", routing_key="q").result(30)
            until(lambda: children)
            hook.call = lambda: None
            _, code = os.waitpid(children[0], 0)
            assert os.waitstatus_to_exitcode(code) == status
            children.clear()
            for _ in range(100):
                publisher.publish(b"x", routing_key="q").result(30)
            assert (publisher.status.connects, publisher.status.violations) == (1, 0)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# -------------------------------------------------------------------- logging


def test_a_log_handler_that_raises_or_hangs_is_no_affair_of_the_relay(
    broker: FakeBroker, outbox: Path, root_logger: logging.Logger
) -> None:
    hang, release = threading.Event(), threading.Event()

    class Bad(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not record.name.startswith("reliablepub"):
                return
            if hang.is_set():
                release.wait(60)
            raise SystemExit("by a handler")

    bad = Bad()
    root_logger.addHandler(bad)
    try:
        with Publisher(broker.url, outbox=outbox) as publisher:
            for _ in range(2):
                lose_connection(broker, publisher)
                publisher.publish(b"x", routing_key="q").result(30)
                hang.set()
    finally:
        release.set()
        root_logger.removeHandler(bad)


def test_what_the_rooms_below_log_on_the_relays_thread_waits_for_no_handler_either(
    outbox: Path, root_logger: logging.Logger
) -> None:
    logger, said = logging.getLogger("reliablepub.outbox"), list[str]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{threading.current_thread().name}: {record.getMessage()}")

    handler, hook = Handler(), Hook(lambda: logger.warning("said %s", "below"))
    root_logger.addHandler(handler)
    with Publisher(AWAY, outbox=outbox, hooks=[hook], close_timeout_s=0) as publisher:
        handler.acquire()
        try:
            publisher.publish(b"x")
            publisher.publish(b"x")
        finally:
            handler.release()
        until(lambda: said.count("reliablepub-log: said below") == 2)
    logger.warning("on the caller's own")
    assert f"{threading.current_thread().name}: on the caller's own" in said
    root_logger.removeHandler(handler)


# -------------------------------------------------------------------- a relay that fails


def test_the_error_of_a_block_is_not_hidden_by_that_of_its_end(
    outbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        with Publisher(AWAY, outbox=outbox) as publisher:
            monkeypatch.setattr(Relay, "turn", Mock(side_effect=ZeroDivisionError("a bug")))
            until(lambda: publisher.status.link is Link.FAILED)
            raise KeyError("the application's")

    with pytest.raises(KeyError, match="the application's"):
        fail()
    with pytest.raises(PublisherFailed), Publisher(AWAY, outbox=None) as publisher:
        until(lambda: publisher.status.link is Link.FAILED)


# -------------------------------------------------------------------- signals and asyncio


async def test_a_signal_handler_that_begins_to_close_while_closing(outbox: Path) -> None:
    """`signal.signal`, not the loop's own way: it interrupts the loop wherever it is."""
    ended: list[int] = []
    publisher = await AsyncPublisher(AWAY, outbox=outbox, close_timeout_s=30).open()
    await publisher.publish(b"x")
    tasks: list[asyncio.Task[object]] = []

    def handler(*_: object) -> None:
        tasks.append(asyncio.get_running_loop().create_task(publisher.aclose(0.1)))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        closing = asyncio.create_task(publisher.aclose())
        while not tasks:  # noqa: ASYNC110 - the loop is to be busy
            await asyncio.sleep(0)
        ended.append((await closing).open)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    await asyncio.gather(*tasks)
    assert ended == [1]


def test_links_are_told_from_no_lock_of_ours(broker: FakeBroker, outbox: Path) -> None:
    """A hook and the thread that publishes may share a lock, as long as each only takes it."""
    lock, told = threading.Lock(), []

    class Links:
        def on_connected(self, events: Sequence[LinkChanged]) -> None:
            with lock:
                told.append(events)

    with Publisher(broker.url, outbox=outbox, hooks=[Links()]) as publisher:
        with lock:
            publisher.status  # noqa: B018 - which waits for nothing
        publisher.publish(b"x", routing_key="q").result(30)
    assert told
