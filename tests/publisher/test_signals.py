"""A handler may interrupt a call anywhere, and call the publisher itself: nothing waits for ever.

Python runs signal handlers in the main thread between two instructions of whatever it does. So a
trace function that calls the handler before the nth instruction is a signal at that place; all
places are tried, those inside of the standard library too. A deadlock is a test that times out.
"""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

import pytest

from reliablepub import Message, Outbox, OutboxError, Publisher, PublisherClosed
from reliablepub.testing import FakeBroker
from tests.waiting import until

AWAY = "amqp://guest:guest@127.0.0.1:1"
INSTRUCTIONS_MAX = 20_000


class Interruption:
    """Calls a handler before the nth instruction of the calling thread.

    Attributes:
        is_done: whether there were so many.
    """

    def __init__(self, at: int, handler: Callable[[], object]) -> None:
        self.is_done = False
        self._left = at
        self._handler = handler
        # CPython calls a trace function that is unset meanwhile without holding it: one object,
        # which lives as long as this one.
        self._tracer = self._trace

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._tracer)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.is_done:
            self._left -= 1
            if self._left == 0:
                self.is_done = True
                sys.settrace(None)
                self._handler()
        return self._tracer


def interrupted_everywhere(step: int = 1) -> Iterator[int]:
    """Where to interrupt: until the caller breaks, because there is no such place any more."""
    yield from range(1, INSTRUCTIONS_MAX, step)
    pytest.fail("the call never ends")


@pytest.fixture
def publisher(fake_broker: FakeBroker) -> Iterator[Publisher]:
    fake_broker.declare_queue("q")
    with Publisher(fake_broker.url, outbox=None, close_timeout_s=5) as publisher:
        publisher.publish(b"x", routing_key="q").result(30)
        yield publisher


VERBS: dict[str, Callable[[Publisher], object]] = {
    "publish": lambda p: p.publish(b"x", routing_key="q"),
    "flush": lambda p: p.flush(),
}


@pytest.mark.parametrize("inner", ["publish", "flush"])
@pytest.mark.parametrize("outer", ["publish", "flush"])
def test_a_handler_may_call_what_it_interrupts(
    publisher: Publisher, outer: str, inner: str
) -> None:
    calls = 0

    def handler() -> None:
        nonlocal calls
        VERBS[inner](publisher)
        calls += 1

    for at in interrupted_everywhere():
        with Interruption(at, handler) as interruption:
            VERBS[outer](publisher)
        if not interruption.is_done:
            break
        assert calls == at
    assert calls > 100
    assert publisher.status.counters.stored >= calls * ((outer == "publish") + (inner == "publish"))


@pytest.mark.parametrize("inner", ["result", "flush"])
def test_a_handler_may_interrupt_the_wait_for_an_outcome(publisher: Publisher, inner: str) -> None:
    calls = 0
    for at in interrupted_everywhere():
        receipt = publisher.publish(b"x", routing_key="q")
        verb = receipt.result if inner == "result" else publisher.flush
        with Interruption(at, verb) as interruption:
            receipt.result()
        if not interruption.is_done:
            break
        calls += 1
    assert calls > 10


@pytest.mark.parametrize("outer", ["publish", "flush", "close"])
def test_a_handler_may_close_whatever_it_interrupts(outer: str, tmp_path: Path) -> None:
    calls = 0
    for at in interrupted_everywhere(3 if outer == "close" else 7):
        publisher = Publisher(AWAY, outbox=None if at % 5 else tmp_path / "outbox.db")
        with (
            Interruption(at, lambda p=publisher: p.close(0)) as interruption,  # type: ignore[misc]
            contextlib.suppress(PublisherClosed),
        ):
            if outer == "close":
                publisher.close(0)
            elif outer == "flush":
                publisher.flush(0.001)
            else:
                publisher.publish(b"x")
        publisher.close(0)
        with pytest.raises(PublisherClosed):
            publisher.publish(b"after")
        if not interruption.is_done:
            break
        calls += 1
    assert calls > 30
    until(lambda: not [t for t in threading.enumerate() if t.name == "reliablepub-relay"])


def test_a_handler_may_interrupt_an_enqueue(tmp_path: Path) -> None:
    stored = refused = 0
    with Outbox(tmp_path / "outbox.db") as outbox:
        outbox.enqueue(Message(b""))

        def handler() -> None:
            nonlocal stored, refused
            try:
                outbox.enqueue(Message(b"handler"))
            except OutboxError as error:
                refused += "signal handler" in str(error)
            else:
                stored += 1

        for at in interrupted_everywhere(3):
            with Interruption(at, handler) as interruption:
                outbox.enqueue(Message(b"interrupted"))
            if not interruption.is_done:
                break
        assert refused > 10
        assert stored > 10
        assert outbox.status().open == 2 + refused + 2 * stored


@pytest.mark.parametrize("level", [None, "IMMEDIATE"])
def test_a_handler_may_interrupt_an_enqueue_on_a_connection_of_the_application(
    tmp_path: Path, level: Literal["IMMEDIATE"] | None
) -> None:
    stored = refused = 0
    outbox = Outbox(tmp_path / "outbox.db")
    with contextlib.closing(sqlite3.connect(outbox.path, isolation_level=level)) as db:
        outbox.enqueue(Message(b""), connection=db)
        db.commit()

        def handler() -> None:
            nonlocal stored, refused
            try:
                outbox.enqueue(Message(b"handler"), connection=db)
            except OutboxError as error:
                refused += "signal handler" in str(error)
            else:
                stored += 1

        for at in interrupted_everywhere(7):
            with Interruption(at, handler) as interruption:
                outbox.enqueue(Message(b"interrupted"), connection=db)
            db.commit()
            if not interruption.is_done:
                break
    assert refused > 10
    assert stored > 10
    assert outbox.status().open == 2 + refused + 2 * stored


SERVICE = """
    import os, signal, sys
    from reliablepub import Publisher

    def stop(*_):
        status = publisher.close(0.2)
        print("closed by the handler", status.open, flush=True)

    publisher = Publisher("amqp://guest:guest@127.0.0.1:1", outbox=sys.argv[1])
    publisher.publish(b"x")
    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    status = publisher.close(60)
    print("closed", status.open, flush=True)
"""


def test_sigterm_closes_a_publisher_that_is_being_closed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SERVICE), os.fspath(tmp_path / "outbox.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        try:
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert said.splitlines() == ["closed by the handler 1", "closed 1"]
    assert process.returncode == 0


def test_a_callback_that_adds_a_callback_waits_for_no_interrupted_thread(
    publisher: Publisher,
) -> None:
    def publish_and_wait() -> None:
        added = threading.Event()
        inner = publisher.publish(b"x", routing_key="q")
        inner.add_done_callback(lambda done: done.add_done_callback(lambda _: added.set()))
        assert added.wait(60)

    calls = 0
    for at in interrupted_everywhere():
        receipt = publisher.publish(b"x", routing_key="q")
        with Interruption(at, publish_and_wait) as interruption:
            receipt.add_done_callback(lambda _: None)
            receipt.result(30)
        if not interruption.is_done:
            break
        calls += 1
    assert calls > 100


def test_ctrl_c_is_raised_wherever_it_interrupts_a_callback(publisher: Publisher) -> None:
    """Its handler raises; what it interrupts may be the callback, or the call of the callback."""

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    receipt = publisher.publish(b"x", routing_key="q")
    receipt.result(30)
    calls = 0
    for at in interrupted_everywhere():
        interruption = Interruption(at, ctrl_c)
        is_raised = False
        try:
            with interruption:
                receipt.add_done_callback(lambda _: None)
        except KeyboardInterrupt:
            is_raised = True
        if not interruption.is_done:
            break
        assert is_raised, f"suppressed before instruction {at}"
        calls += 1
    assert calls >= 100


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_lock_that_another_thread_holds_at_a_fork_blocks_no_child(path: Path) -> None:
    code = f"""
        import os, threading
        from reliablepub import Publisher, StillOpen
        from reliablepub.front import receipt

        def hold():
            with receipt._first_to_wait:
                is_held.set()
                threading.Event().wait()

        is_held = threading.Event()
        threading.Thread(target=hold, daemon=True).start()
        is_held.wait()
        pid = os.fork()
        if pid == 0:
            with Publisher({AWAY!r}, outbox={str(path)!r}, close_timeout_s=0) as publisher:
                try:
                    publisher.publish(b"x", routing_key="q").result(0.01)
                except StillOpen:
                    os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        os._exit(0)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("verb", ["publish", "close"])
def test_a_handler_that_forks_leaves_no_child_that_waits_for_ever(path: Path, verb: str) -> None:
    """The child goes on with the call that was interrupted, without a relay."""
    code = f"""
        import os, signal, threading, time
        from reliablepub import Publisher, PublisherForked
        from reliablepub.relay.relay import Relay

        main = os.getpid()
        turn = Relay.turn
        pids = []
        is_calling = False

        def interrupting(*arguments, **options):
            if is_calling and not pids:
                time.sleep(0.2)  # until the call waits for this turn
                os.kill(main, signal.SIGALRM)
                while not pids:
                    time.sleep(0.01)
            return turn(*arguments, **options)

        Relay.turn = interrupting
        publisher = Publisher({AWAY!r}, outbox={str(path)!r}, close_timeout_s=0.3)
        signal.signal(signal.SIGALRM, lambda *_: pids.append(os.fork()))
        is_calling = True
        try:
            while not pids:  # a turn that had begun may have stored the first one
                publisher.{"publish(b'x', routing_key='q')" if verb == "publish" else "close()"}
        except PublisherForked:
            assert os.getpid() != main
        if os.getpid() != main:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 7
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
