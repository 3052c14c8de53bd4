"""One publisher in a process of its own: what a message costs it, and how much memory it takes.

``python -m tests.speed.alone JOB`` takes a `Job` as JSON and prints a line of JSON for each mark.
It knows the front door. It must never know why it is asked.
"""

import itertools
import json
import logging
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tenacity import stop_after_attempt, wait_none

from reliablepub import BatchReceipt, Message, Outbox, Publisher, Retries, RetryPolicy

ROOT = Path(__file__).parent.parent.parent
WARM_UP = 2_000
WAIT_S = 300.0
GIVE_UP_AT_ONCE = RetryPolicy(returned=Retries(stop_after_attempt(1), wait_none()))
_LOOK_S = 0.005
_LOOK_EVERY = 64
_A_TRANSACTION = 100
_OPEN_MAX = 100_000
"""So that it is soon over when time is up, where the disk is faster than the broker."""
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Job:
    """What to publish, and when to stop.

    Attributes:
        kind: publish and wait for the outcomes; only store; send what is stored already; or
            enqueue for the relay of another process, in transactions of its own.
        marks: so many messages, then so many in all, ...; a figure is taken at each.
        lasts_s: stop after that, at whatever mark.
    """

    kind: Literal["publish", "store", "drain", "enqueue"]
    url: str
    outbox: str | None
    keys: list[str]
    marks: list[int]
    lasts_s: float
    exchange: str = ""
    body_bytes: int = 1_024
    window: int = 1_000


@dataclass(frozen=True)
class Figure:
    """What was measured between two marks.

    Attributes:
        messages: how many there have been in all.
        per_second: since the mark before.
        cpu_us: CPU time per message, likewise.
        memory_mib: most memory so far, less what the process had before the first message.
        in_flight: most messages in flight so far.
        opened_s: what it took to open the publisher; with a backlog, until the first confirm.
        began_at: when the first of them was dealt with (seconds of the monotonic clock, which all
            processes share).
        ended_at: when the last of them was.
    """

    messages: int
    per_second: float
    cpu_us: float
    memory_mib: float
    in_flight: int
    opened_s: float
    began_at: float
    ended_at: float


def run(job: Job, timeout_s: float = 3_600.0) -> list[Figure]:
    """Have a process do the job."""
    command = [sys.executable, "-m", "tests.speed.alone", json.dumps(asdict(job))]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True
    )
    return [Figure(**json.loads(line)) for line in done.stdout.splitlines()]


@contextmanager
def relay(url: str, outbox: str) -> Iterator[int]:
    """`reliablepub relay` for the block, which ends it at once; its process id."""
    command = [str(Path(sys.executable).with_name("reliablepub")), "relay", "--url", url]
    with subprocess.Popen([*command, "--outbox", outbox], stderr=subprocess.DEVNULL) as process:
        try:
            yield process.pid
        finally:
            process.kill()


class Meter:
    """Takes figures."""

    def __init__(self, publisher: Publisher | None, opened_s: float) -> None:
        self._publisher, self._opened_s = publisher, opened_s
        self._messages = 0
        self._in_flight = 0
        self.begin()

    def begin(self) -> None:
        """From here on."""
        _forget_peak()
        self._memory = _memory("VmRSS")
        self._go_on()

    def _go_on(self) -> None:
        self._since, self._cpu_s = time.monotonic(), time.process_time()

    def look(self) -> None:
        """At what changes meanwhile."""
        if self._publisher is not None:
            self._in_flight = max(self._in_flight, self._publisher.status.in_flight)

    def figure(self, messages: int) -> Figure:
        """As of now, when so many have been dealt with in all."""
        count = max(1, messages - self._messages)
        began_at, ended_at = self._since, time.monotonic()
        cpu_s = time.process_time() - self._cpu_s
        memory = _memory("VmHWM") - self._memory
        self._messages = messages
        self._go_on()
        return Figure(
            messages=messages,
            per_second=count / (ended_at - began_at),
            cpu_us=cpu_s / count * 1e6,
            memory_mib=memory / _MIB,
            in_flight=self._in_flight,
            opened_s=self._opened_s,
            began_at=began_at,
            ended_at=ended_at,
        )


def _forget_peak() -> None:
    """Let `VmHWM` begin anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _memory(field: str) -> int:
    """Bytes, of proc(5), status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def _figures(job: Job) -> Iterator[Figure]:
    since = time.perf_counter()
    if job.kind == "enqueue":
        yield _enqueued(job, since)
        return
    with Publisher(
        job.url,
        outbox=job.outbox,
        window_min=job.window,
        window_max=job.window,
        window_bytes_max=64 * _MIB,
        open_messages_max=_OPEN_MAX if job.kind == "publish" else None,
        open_bytes_max=1024 * 1024 * _MIB,
        retry=GIVE_UP_AT_ONCE,
        close_timeout_s=0.0,
    ) as publisher:
        if job.kind == "drain":
            yield _drained(job, publisher, since)
        else:
            yield from _handed_over(job, publisher, since)


def _handed_over(job: Job, publisher: Publisher, since: float) -> Iterator[Figure]:
    """Message after message, from mark to mark."""
    meter = Meter(publisher, time.perf_counter() - since)
    body, keys = bytes(job.body_bytes), itertools.cycle(job.keys)
    until = time.perf_counter() + job.lasts_s

    def batch(count: int) -> Iterator[Message]:
        for number in range(count):
            if time.perf_counter() > until:
                return
            if number % _LOOK_EVERY == 0:
                meter.look()
            yield Message(body, exchange=job.exchange, routing_key=next(keys))

    def dealt_with(count: int) -> int:
        receipt = publisher.publish_many(batch(count))
        return _settled(receipt) if job.kind == "publish" else receipt.stored

    dealt_with(1)
    meter.begin()
    messages = 0
    for mark in job.marks:
        messages += dealt_with(mark - messages)
        yield meter.figure(messages)
        if messages < mark:
            return


def _settled(receipt: BatchReceipt) -> int:
    receipt.wait(WAIT_S)
    return receipt.confirmed + receipt.failed


def _drained(job: Job, publisher: Publisher, since: float) -> Figure:
    """What is in the outbox already: as many as asked for, or as time allows."""
    stored = publisher.status.open
    _wait_for(lambda: publisher.status.open < stored, since + WAIT_S)
    meter = Meter(publisher, time.perf_counter() - since)
    left = publisher.status.open
    enough, until = left - job.marks[-1], time.perf_counter() + job.lasts_s
    _wait_for(lambda: publisher.status.open <= enough, until)
    return meter.figure(left - publisher.status.open)


def _enqueued(job: Job, since: float) -> Figure:
    """As many as time allows, a hundred in each transaction of the application's."""
    assert job.outbox is not None
    keys, messages = itertools.cycle(job.keys), 0
    outbox = Outbox(job.outbox, open_messages_max=None, open_bytes_max=None)
    with outbox, closing(sqlite3.connect(job.outbox)) as db:
        meter = Meter(None, time.perf_counter() - since)
        until = time.perf_counter() + job.lasts_s
        while time.perf_counter() < until:
            for _ in range(_A_TRANSACTION):
                message = Message(bytes(job.body_bytes), job.exchange, next(keys))
                outbox.enqueue(message, connection=db)
            db.commit()
            messages += _A_TRANSACTION
        return meter.figure(messages)


def _wait_for(condition: Callable[[], bool], until: float) -> None:
    """Until it holds, or time is up."""
    while not condition() and time.perf_counter() < until:
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    logging.disable()
    for figure in _figures(Job(**json.loads(sys.argv[1]))):
        print(json.dumps(asdict(figure)), flush=True)
