"""Lives of a publisher, each in a process of its own, to be killed.

A life publishes numbered messages and writes down what it is told, at once and outside of the
process. It knows both front doors; it must never know what is checked.

    stored 17      publish() has returned
    confirmed 17   its receipt says so
    failed 17      its receipt says so
"""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Final

from tenacity import stop_after_attempt, stop_never, wait_none

from reliablepub import AsyncPublisher, Message, Publisher, PublishError, Retries, RetryPolicy
from tests.chaos.failpoints import arm
from tests.chaos.nursery import main
from tests.policies import ONCE

WINDOW_MAX: Final = 50
PIECE: Final = 5


@dataclass(frozen=True)
class Life:
    """What a publisher does until it is killed, or through.

    Attributes:
        is_async: by which door.
        url: of the broker.
        outbox: the file.
        told: the file to write down what it is told.
        first: number of its first message.
        count: how many to publish.
        failpoint: where it dies; empty for nowhere.
        nth: when it comes there for the n-th time.
        kill_after_s: when it is killed from outside; None for never.
        seed: chooses where each message goes.
    """

    is_async: bool
    url: str
    outbox: str
    told: str
    first: int
    count: int
    failpoint: str = ""
    nth: int = 1
    kill_after_s: float | None = None
    seed: int = 0


def message(number: int) -> Message:
    """The n-th message: where it goes depends on its number alone, and its body is its own."""
    body = b"%d " % number * (1 + number % 40)
    kind = number % 20
    if kind == 7:
        return Message(body, routing_key="nowhere", message_id=f"n{number}")
    if kind == 13:
        return Message(body, exchange="missing", routing_key="q", message_id=f"n{number}")
    if kind in (3, 9):
        return Message(body, routing_key="limited", message_id=f"n{number}")
    return Message(body, routing_key="q", message_id=f"n{number}")


OPTIONS: Final = {
    "window_max": WINDOW_MAX,
    "close_timeout_s": 20.0,
    "retry": RetryPolicy(
        nacked=Retries(stop_never, wait_none()),
        returned=Retries(stop_after_attempt(2), wait_none()),
        refused=ONCE,
    ),
}


def live(life: Life) -> None:
    """Publish, piece by piece, and hear what became of it."""
    if life.failpoint:
        arm(life.failpoint, life.nth)
    told = os.open(life.told, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    numbers = range(life.first, life.first + life.count)
    pieces = [numbers[first : first + PIECE] for first in range(0, life.count, PIECE)]
    if life.is_async:
        asyncio.run(_live_async(life, pieces, told))
    else:
        _live_sync(life, pieces, told)


def _tell(told: int, what: str, number: int) -> None:
    os.write(told, b"%s %d\n" % (what.encode(), number))


def _live_sync(life: Life, pieces: list[range], told: int) -> None:
    with Publisher(life.url, outbox=life.outbox, **OPTIONS) as publisher:  # type: ignore[arg-type]
        for piece in pieces:
            receipts = []
            for number in piece:
                m = message(number)
                receipts.append(
                    publisher.publish(
                        m.body,
                        exchange=m.exchange,
                        routing_key=m.routing_key,
                        message_id=m.message_id,
                    )
                )
                _tell(told, "stored", number)
            for number, receipt in zip(piece, receipts, strict=True):
                try:
                    receipt.result(30)
                    _tell(told, "confirmed", number)
                except PublishError:
                    _tell(told, "failed", number)


async def _live_async(life: Life, pieces: list[range], told: int) -> None:
    async with AsyncPublisher(life.url, outbox=life.outbox, **OPTIONS) as publisher:  # type: ignore[arg-type]

        async def publish(number: int) -> None:
            m = message(number)
            receipt = await publisher.publish(
                m.body, exchange=m.exchange, routing_key=m.routing_key, message_id=m.message_id
            )
            _tell(told, "stored", number)
            try:
                await receipt.result(30)
                _tell(told, "confirmed", number)
            except PublishError:
                _tell(told, "failed", number)

        for piece in pieces:
            await asyncio.gather(*map(publish, piece))


# ---------------------------------------------------------------------- the process that forks


def _fork(life: Life) -> int:
    """Let it live; how it ended: 0, or -SIGKILL."""
    pid = os.fork()
    if pid == 0:
        random.seed(life.seed)
        live(life)
        os._exit(0)
    if life.kill_after_s is not None:
        time.sleep(life.kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main(lambda **fields: _fork(Life(**fields)))
