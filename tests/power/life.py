"""Lives of an outbox, each in a process of its own: everything that changes its files.

Knows: both front doors, operators, applications that share the file; and what is to be promised,
which it marks in the log of the file system (`forgetful`). Must never know: what is checked.

    asked m7       it is about to be stored
    promised m7    the call that stores it has returned
    released m7    from now on it may be gone: an operator is about to discard or prune it
    gone m7        that call has returned
"""

import ctypes
import os
import random
import signal
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tenacity import stop_never, wait_fixed

from reliablepub import Message, Outbox, Publisher, Retries, RetryPolicy
from reliablepub.errors import OutboxDiskFailed, OutboxUnsure
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.admin.pruning import Times, prune
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite import checkpoints, connections, space
from reliablepub.outbox.sqlite.space import PAGE_BYTES
from reliablepub.relay.relay import Relay
from tests.chaos.nursery import main
from tests.outbox import shim as vfs
from tests.policies import ONCE
from tests.power.mounts import Orders, Trouble

RETRY: Final = RetryPolicy(
    nacked=Retries(stop_never, wait_fixed(3600)),  # stays open, and waits
    returned=ONCE,  # is parked
    breaker=None,
)
KEYS: Final = {"q": 6, "nowhere": 2, "limited": 2}
"""Where messages go, and how often: to a queue, to none, to one that is full."""


@dataclass(frozen=True)
class Life:
    """What is done to an outbox until its process ends.

    Attributes:
        url: of the broker.
        marks: folder of the file system that keeps marks.
        outbox: the file.
        first: number of its first message.
        turns: how many things to do.
        seed: decides which.
        mutant: the rule to break; empty for none.
        has_trouble: whether a sync may fail.
    """

    url: str
    marks: str
    outbox: str
    first: int
    turns: int
    seed: int
    mutant: str = ""
    has_trouble: bool = False


def body(message_id: str) -> bytes:
    """The body of a message: its own, and of any size up to three pages."""
    number = int(message_id[1:])
    return b"%06d" % number * (2, 80, 800, 4000)[number % 4]


class _Living:
    def __init__(self, life: Life) -> None:
        self._life = life
        self._orders = Orders(Path(life.marks))
        self._random = random.Random(life.seed)
        self._numbers = iter(range(life.first, 10**6))
        self._lock = threading.Lock()
        self._path = Path(life.outbox)

    def live(self) -> None:
        rng = self._random
        does: list[Callable[[], object]] = []
        if rng.random() < 0.7:
            kept_s = rng.choice((0.0, 0.05, 3600.0))
            does += self._as_publisher(
                Publisher(self._life.url, outbox=self._path, retry=RETRY, keep_confirmed_s=kept_s)
            )
        self._outbox = Outbox(self._path)
        does += [self._enqueue, self._enqueue, self._within, self._operate, self._reopen]
        does[0]()
        for _ in range(self._life.turns):
            rng.choice(does)()
        if rng.random() < 0.5:
            os.kill(os.getpid(), signal.SIGKILL)
        self._outbox.close()
        if does[0] == self._publish:
            self._publisher.close(timeout_s=rng.choice((0.0, 0.5)))

    def _as_publisher(self, publisher: Publisher) -> list[Callable[[], object]]:
        self._publisher = publisher
        does: list[Callable[[], object]] = [*[self._publish] * 3, *[self._publish_at_once] * 2]
        does.append(lambda: publisher.flush(0.02))
        if self._life.has_trouble:
            does.append(self._with_trouble)
        return does

    def _new(self) -> Message:
        with self._lock:
            message_id = f"m{next(self._numbers)}"
            key = self._random.choices(list(KEYS), list(KEYS.values()))[0]
        return Message(body(message_id), routing_key=key, message_id=message_id)

    def _told(self, message: Message, work: Callable[[], object]) -> None:
        self._orders.mark(f"asked {message.message_id}")
        try:
            work()
        except (OutboxDiskFailed, OutboxUnsure):  # also for a while after a sync has failed
            return
        self._orders.mark(f"promised {message.message_id}")

    # ------------------------------------------------------------------ storing

    def _publish(self) -> None:
        m = self._new()
        self._told(
            m,
            lambda: self._publisher.publish(
                m.body, routing_key=m.routing_key, message_id=m.message_id
            ),
        )

    def _publish_at_once(self) -> None:
        """From several threads, so that a commit holds several messages."""
        threads = [threading.Thread(target=self._publish) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _with_trouble(self) -> None:
        self._orders.trouble(
            Trouble(("fsync",), 5, first=1, last=self._random.choice((1, 2)), suffix="-wal")
        )
        self._publish()
        self._orders.heal()

    def _enqueue(self) -> None:
        message = self._new()
        self._told(message, partial(self._outbox.enqueue, message))

    def _within(self) -> None:
        """In the application's own transaction, which is rolled back now and then."""
        message = self._new()
        with closing(sqlite3.connect(self._path, timeout=30)) as app:
            app.execute("PRAGMA synchronous = FULL")
            app.execute("BEGIN IMMEDIATE")
            self._outbox.enqueue(message, connection=app)
            if self._random.random() < 0.2:
                app.execute("ROLLBACK")
            else:
                self._told(message, partial(app.execute, "COMMIT"))

    # ------------------------------------------------------------------ operators

    def _operate(self) -> None:
        database = outbox_at(self._path)
        if self._random.random() < 0.2:
            now = time.time()
            prune(database, Times(confirmed_before=now, history_before=now, now=now))
            return
        rows = [row for view in ("open", "parked") for row in self._outbox.rows(view)]
        some = self._random.sample(rows, min(3, len(rows)))
        ids = [int(str(row["id"])) for row in some]
        if self._random.random() < 0.5:
            intervene(database, ids, Intervention(Action.RETRY))
            return
        self._orders.mark(" ".join(["released", *(str(row["message_id"]) for row in some)]))
        effect = intervene(database, ids, Intervention(Action.DISCARD))
        left = {*effect.in_flight, *effect.unfit, *effect.damaged}
        gone = [row["message_id"] for row in some if int(str(row["id"])) not in left]
        self._orders.mark(" ".join(["gone", *map(str, gone)]))

    def _reopen(self) -> None:
        self._outbox.close()
        self._outbox = Outbox(self._path)


# ---------------------------------------------------------------------- mutants


def _syncs_less() -> None:
    """With `synchronous=NORMAL` a commit is not synced."""
    prepare = connections._prepare

    def careless(connection: sqlite3.Connection, path: Path, *, is_relay: bool) -> None:
        prepare(connection, path, is_relay=is_relay)
        connection.execute("PRAGMA synchronous = NORMAL")

    connections._prepare = careless


_OPEN_FOLDER: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def _syncs_no_folder() -> None:
    """SQLite opens the folder to sync it: where that fails, it goes on without."""
    _kept.append(_OPEN_FOLDER(lambda _path, _fd: vfs.CANTOPEN))
    vfs.replace_system_call("openDirectory", _kept[-1])


_kept: list[Any] = []


def _tells_early() -> None:
    """The caller is told before the commit."""
    commit = Relay._commit_and_send

    def early(relay: Relay, taken_in: Any, *arguments: Any, **options: Any) -> None:
        for chunk in taken_in:
            chunk.stored()
        commit(relay, taken_in, *arguments, **options)

    Relay._commit_and_send = early  # type: ignore[assignment,method-assign]


MUTANTS: Final = {
    "synchronous=NORMAL": _syncs_less,
    "no fsync of the directory": _syncs_no_folder,
    "stored is told before COMMIT": _tells_early,
}


def _fork(life: Life) -> int:
    """Let it live; how it ended: 0, or -SIGKILL."""
    pid = os.fork()
    if pid == 0:
        checkpoints.CHECKPOINT_BYTES = 12 * PAGE_BYTES  # type: ignore[misc]
        space.Ballast.__init__.__kwdefaults__ = {"size": 8192}
        if life.mutant:
            MUTANTS[life.mutant]()
        try:
            _Living(life).live()
        except Exception:  # noqa: BLE001 - the process is a copy, and must not go on as one
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main(lambda **fields: _fork(Life(**fields)))
