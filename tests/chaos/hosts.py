"""Relays and enqueuers of one outbox in PostgreSQL, each in a process of its own, to be killed.

`Hosts` begins and kills them. Each life writes down what
it knows, at once and outside of the process. It knows the public interface; it must never know what
is checked.

A relay:      standby 12.5     another one owns the outbox
              owner 12.5       it has begun to relay
              lost 12.5 why    it has stopped relaying, by itself
An enqueuer:  tried 17         it begins to store message 17 by itself
              within 17        it puts message 17 into a transaction that has a row of its own
              stored 17        it was told that the message, or its transaction, is stored
              refused 17       it was told that it is not, or has rolled it back
"""

import ctypes
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from tenacity import stop_never, wait_fixed

from reliablepub import (
    Message,
    Outbox,
    OutboxError,
    OutboxInUse,
    OutboxUnsure,
    Publisher,
    PublishError,
    ReliablePubError,
    Retries,
    RetryPolicy,
)
from reliablepub.outbox.postgres.sql import queries
from reliablepub.outbox.postgres.store import PostgresStore
from tests.chaos.networks import enter
from tests.chaos.nursery import Nursery, main

QUEUE: Final = "orders"
NUMBERS: Final = 100_000
"""Numbers of messages that belong to one life of an enqueuer."""
DATA: Final = "CREATE TABLE data (number integer)"
"""The application's own table: what is in it was committed."""
PATIENT: Final = Retries(stop_never, wait_fixed(0.2))
OPTIONS: Final[dict[str, Any]] = {
    "window_max": 100,
    "confirm_timeout_s": 2.0,
    "heartbeat_s": 2,
    "close_timeout_s": 0.0,
    "keep_confirmed_s": 86_400.0,
    "retry": RetryPolicy(nacked=PATIENT, returned=PATIENT, refused=PATIENT),
}
_ROLLED_BACK: Final = 0.3
_SLOW_S: Final = (0.2, 1.5)
_DIES_WITH_PARENT: Final = 1


@dataclass(frozen=True)
class Life:
    """What a process does until it is killed.

    Attributes:
        outbox: URL of the database.
        log: the file to write to.
        broker: URL; empty for an enqueuer.
        number: of the enqueuer's life, from 1.
        rate_per_s: how often an enqueuer stores something.
        mutant: what is broken in the code; empty for nothing.
        network: the network that it lives in; empty for that of the test.
    """

    outbox: str
    log: str
    broker: str = ""
    network: str = ""
    number: int = 0
    rate_per_s: float = 25.0
    mutant: str = ""


def message(number: int) -> Message:
    """The n-th message: each second one of a life has the ordering key of that life."""
    body = b"%d " % number * (1 + number % 40)
    key = f"k{number // NUMBERS}" if number % 2 else None
    return Message(body, routing_key=QUEUE, message_id=f"n{number}", ordering_key=key)


# ---------------------------------------------------------------------------- a relay


def relay(life: Life, log: int) -> None:
    """Relay whenever the outbox has no other owner, as a service that is restarted would."""
    while True:
        try:
            with Publisher(life.broker, outbox=life.outbox, **OPTIONS) as publisher:
                _write(log, "owner", time.monotonic())
                while True:
                    publisher.flush(0)  # raises once the relay has failed
                    time.sleep(0.05)
        except OutboxInUse:
            _write(log, "standby", time.monotonic())
        except (PublishError, ReliablePubError) as error:
            why = error.__cause__ or error
            _write(log, "lost", time.monotonic(), type(why).__name__, " ".join(str(why).split()))
        time.sleep(0.1)


# ---------------------------------------------------------------------------- an enqueuer


class Enqueuer:
    """Stores messages alone, in transactions, and in slow transactions beside these."""

    def __init__(self, life: Life, log: int) -> None:
        self._url = life.outbox
        self._log = log
        self._rng = random.Random(life.number)
        self._rate_per_s = life.rate_per_s
        self._outbox = Outbox(life.outbox)
        self._next = life.number * NUMBERS
        self._fast: psycopg.Connection[Any] | None = None
        self._slow: psycopg.Connection[Any] | None = None
        self._slow_has: list[int] = []
        self._slow_ends_at = 0.0

    def run(self) -> None:
        while True:
            time.sleep(self._rng.expovariate(self._rate_per_s))
            self._end_slow()
            kind = self._rng.random()
            if kind < 0.45:
                self._alone()
            elif kind < 0.9 or self._slow_has:
                self._together()
            else:
                self._begin_slow()

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _alone(self) -> None:
        number = self._number()
        _write(self._log, "tried", number)
        key = f"once {number}" if self._rng.random() < 0.3 else None
        try:
            self._outbox.enqueue(message(number), key=key)
        except OutboxUnsure:
            return
        except OutboxError:
            _write(self._log, "refused", number)
            return
        _write(self._log, "stored", number)

    def _together(self) -> None:
        numbers = [self._number() for _ in range(self._rng.randint(1, 4))]
        try:
            self._fast = _connected(self._fast, self._url)
            self._put(self._fast, numbers)
            self._end(self._fast, numbers)
        except psycopg.OperationalError:
            time.sleep(0.1)

    def _begin_slow(self) -> None:
        """Leave a transaction open, without ordering keys: other messages overtake it."""
        self._next += self._next % 2
        numbers = [self._number() + 1]
        self._next += 1
        try:
            self._slow = _connected(self._slow, self._url)
            self._put(self._slow, numbers)
        except psycopg.OperationalError:
            return
        self._slow_has = numbers
        self._slow_ends_at = time.monotonic() + self._rng.uniform(*_SLOW_S)

    def _end_slow(self) -> None:
        if self._slow_has and time.monotonic() >= self._slow_ends_at:
            numbers, self._slow_has = self._slow_has, []
            assert self._slow is not None
            with suppress(psycopg.OperationalError):
                self._end(self._slow, numbers)

    def _put(self, connection: psycopg.Connection[Any], numbers: list[int]) -> None:
        for number in numbers:
            _write(self._log, "within", number)
            connection.execute("INSERT INTO data VALUES (%s)", [number])
            self._outbox.enqueue(message(number), connection=connection)

    def _end(self, connection: psycopg.Connection[Any], numbers: list[int]) -> None:
        if self._rng.random() < _ROLLED_BACK:
            connection.rollback()
            what = "refused"
        else:
            connection.commit()
            what = "stored"
        for number in numbers:
            _write(self._log, what, number)


def _connected(connection: psycopg.Connection[Any] | None, url: str) -> psycopg.Connection[Any]:
    if connection is None or connection.closed:
        return psycopg.connect(url)
    return connection


def _write(log: int, *words: object) -> None:
    os.write(log, (" ".join(map(str, words)) + "\n").encode())


# ---------------------------------------------------------------------------- broken code


def without_fence() -> None:
    """A relay takes the next turn although another relay has taken the last one."""
    follow, take = PostgresStore._follow, PostgresStore._take_turn

    def blind(store: PostgresStore, turn: int, _: int, token: bytes, intervention: int) -> None:
        follow(store, turn, store.run, token, intervention)

    def forced(store: PostgresStore, *arguments: Any, **options: Any) -> Any:
        with suppress(OutboxError):
            store._look()
        return take(store, *arguments, **options)

    PostgresStore._follow = blind  # type: ignore[method-assign, assignment]
    PostgresStore._take_turn = forced  # type: ignore[method-assign, assignment]
    _replace("take_turn", "WHEN t.run = %(run)b AND t.token = %(known)b", "WHEN %(known)b <> ''")
    _replace("take_turn", "THEN t.run", "THEN %(run)b::integer")


def with_last_id() -> None:
    """A relay looks for what is above the highest id that it has seen."""
    _replace("look", "xid >= %(xmax)b::text::xid8", "id > %(last_id)b AND %(xmax)b::text <> ''")
    _replace("look", "unnest(%(xip)b::text[]::xid8[])", "unnest('{}'::xid8[])")


def _replace(name: str, what: str, by: str) -> None:
    statements = queries("reliablepub")
    assert what in statements[name], f"{name} has changed: change the mutant"
    statements[name] = statements[name].replace(what, by)


MUTANTS: Final = {"": lambda: None, "without fence": without_fence, "last id": with_last_id}


# ---------------------------------------------------------------------------- processes


class Hosts(Nursery):
    """Relays and enqueuers, each with a process; they end with this one."""

    def __init__(self) -> None:
        super().__init__(__name__)

    def begin(self, life: Life) -> int:
        """Begin a life; its process id."""
        return self.fork(life)

    def kill(self, pid: int) -> None:
        """SIGKILL to one life."""
        os.kill(pid, signal.SIGKILL)


def _fork(life: Life) -> int:
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    log = os.open(life.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        MUTANTS[life.mutant]()
        if life.network:
            enter(life.network)
        if life.broker:
            relay(life, log)
        else:
            Enqueuer(life, log).run()
    except BaseException as error:  # noqa: BLE001 - the test finds it there
        _write(log, "died", type(error).__name__, " ".join(str(error).split()))
        sys.excepthook(*sys.exc_info())
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # this process does not wait for their ends
    main(lambda **fields: _fork(Life(**fields)))
