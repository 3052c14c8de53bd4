"""Which relay owns a shard of the outbox, by the log of turns.

Knows: turns, their order and their age. Must never know: what a turn changes.

Each commit of a relay inserts the turn after the last one that it knows. If another process has
inserted that turn, the primary key refuses it, and the whole transaction fails. So a relay that has
lost its shard, for instance while it was paused, changes nothing. The insert also fails if the turn
before it has another token than the relay knows: the database has failed over to a replica that
lagged, and another process has taken a turn of that number.

A sign of life of the owner is a turn, a statement on its connection, which others see in the
activity of the server, or the start of the server. An owner whose activity others do not see, as
behind a PgBouncer, takes a turn before each full look (`PostgresStore.changed_elsewhere`) by which
its last one is older than `BEAT_S`. A shard is free in four cases:

- Its last turn says so.
- The last sign of life is older than `EXPIRY_S` by the clock of the database.
- A process has waited `EXPIRY_S` by its own clock without seeing a new one: the clock of the
  database may have been set back.
- The server process of its last turn ended more than `CUT_OFF_S` ago: a process that dies loses its
  connection at once. An owner that lost its connection and lives takes a turn on a new one before
  that. Behind PgBouncer, the server process outlives the owner, so this case never occurs.

If there is a new sign of life while a process looks, the owner lives, however old it is: its
transaction may have taken long. So by the age of a turn, a process takes a shard over only after it
has watched that turn for most of `EXPIRY_S`. An owner whose commit took longer, or that waited for
the turn of an operator, takes its next turn in this time.

A process that was stopped in the middle of a turn (SIGSTOP, a frozen virtual machine) may hold the
lock of that turn: who takes the shard over ends its connection.

The owner waits at most 1 s for the lock of a table (20 ms for that of its status), and takes its
turn before a full look, so that a lock on a table that a turn need not touch makes it no older.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import psycopg

from reliablepub.errors import OutboxError, OutboxInUse
from reliablepub.outbox.postgres.server import Link, Row, Step, emptied, outbox_error

BEAT_S: Final = 0.8
EXPIRY_S: Final = 3.0
CUT_OFF_S: Final = 0.5
_WATCHED: Final = 0.8
"""Part of `EXPIRY_S` for which a process watches a turn: longer than a relay at rest needs."""
_ACTIVE: Final = 0.3
"""Part of `EXPIRY_S`: an owner at rest gives a sign of life more often."""
_LOOK_S: Final = 0.1
_LOCKED_MAX: Final = 15
"""How often a relay that starts waits for a lock on the next turn of a shard, 1 s each time."""
KEPT_TURNS: Final = 1_000
"""Number of turns that are kept besides the newest one."""


def is_lost_turn(error: psycopg.Error) -> bool:
    """Whether a transaction failed because its turn belongs to another process."""
    if isinstance(error, psycopg.errors.UniqueViolation):
        return error.diag.constraint_name == "turns_pkey"
    is_empty = isinstance(error, psycopg.errors.NotNullViolation)
    return is_empty and error.diag.table_name == "turns"


class _Watch:
    """What a process has seen of the shards since it began to wait."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._first: dict[int, bytes] = {}
        self._turns: dict[int, tuple[int, float]] = {}  # the newest, and since when it is
        self._linked_at: dict[int, float] = {}  # when the owner's connection was last seen

    def is_cut_off(self, shard: int, now_s: float, *, is_linked: bool) -> bool:
        """Note whether the owner has its connection; return whether it has ended for good."""
        if is_linked:
            self._linked_at[shard] = now_s
        return now_s - self._linked_at.setdefault(shard, now_s) > CUT_OFF_S

    def has_moved(self, shard: int, turn: int, at: bytes, now_s: float) -> bool:
        """Note the newest turn of a shard; return whether the owner has taken one."""
        # The turn of an operator may have kept the owner from its own; many do not for ever.
        is_early = now_s - self._begun < 2 * EXPIRY_S
        known = self._turns.setdefault(shard, (turn, now_s))
        if known[0] != turn and is_early:
            self._turns[shard] = turn, now_s
        return self._first.setdefault(shard, at) != at

    def is_old(self, shard: int, age_s: float, now_s: float) -> bool:
        """Whether a turn of this age is old, and was watched for long enough to tell."""
        is_watched = now_s - self._turns[shard][1] >= _WATCHED * EXPIRY_S
        return is_watched and max(age_s, now_s - self._begun) > EXPIRY_S


def take_over(
    link: Link, token: str, now: float, own: tuple[int, int] | None, began_anew: str
) -> tuple[int, int, int, int]:
    """Become the owner of the first free shard; wait for an owner that may have died.

    Return the shard, the run and its first turn, and the number of shards.
    """
    watch = _Watch()
    process: dict[str, object] = {"pid": os.getpid(), "host": socket.gethostname()}
    process |= {"now": now, "began_anew": began_anew}
    locked: Counter[int] = Counter()
    while True:
        newest = link.read("newest_turns", {"active_s": _ACTIVE * EXPIRY_S})
        if not newest:
            raise emptied(link.server)
        now_s = time.monotonic()
        lived = 0
        for shard, turn, run, is_free, at, age_s, is_unlinked, is_active in newest:
            is_own = own == (shard, run)  # so no other relay has come since: taken at once
            has_moved = watch.has_moved(shard, turn, at, now_s)
            is_silent = not has_moved and watch.is_old(shard, age_s, now_s)
            is_cut_off = watch.is_cut_off(shard, now_s, is_linked=not is_unlinked)
            if is_free or is_own or is_silent or is_cut_off:
                try:
                    new_run = _take(link, shard, turn, token, process)
                except psycopg.errors.LockNotAvailable as error:
                    if is_own:  # the holder may be the own transaction that was cut off
                        raise outbox_error(link.server, error) from error
                    locked[shard] += 1
                    stopped = {"shard": shard, "turn": turn, "expiry_s": EXPIRY_S}
                    with suppress(OutboxError):  # some servers let nobody end a connection
                        link.read("end_stopped", stopped)
                else:
                    if new_run is not None:
                        return shard, new_run, turn + 1, len(newest)
            lived += is_active or (has_moved and not is_unlinked) or locked[shard] >= _LOCKED_MAX
        if lived == len(newest):
            raise _held_up(link, max(locked)) if +locked else _in_use(link, newest)
        time.sleep(_LOOK_S)


def _take(
    link: Link, shard: int, turn: int, token: str, process: Mapping[str, object]
) -> int | None:
    """Take the turn after another one; return its run, or None if another process was faster."""
    [(run,)] = link.read("begin_run", {**process, "shard": shard})
    values: dict[str, object] = {"shard": shard, "turn": turn + 1, "run": run, "token": token}
    try:
        values["backend"] = link.backend
        briefly: Step = ("SET LOCAL lock_timeout = 1000", {})
        link.transact([briefly, ("take_over", values)])
    except psycopg.Error as error:
        if is_lost_turn(error):
            return None
        if isinstance(error, psycopg.errors.LockNotAvailable):
            raise  # the transaction that has inserted the turn has not ended
        raise outbox_error(link.server, error) from error
    return int(run)


def _held_up(link: Link, shard: int) -> OutboxInUse:
    return OutboxInUse(
        f"outbox {link.server}: a transaction holds the next turn of shard {shard}, and does not "
        "end: that of an operator, of an application that cancels or reschedules a message, or of "
        "a relay that starts; look for it in pg_stat_activity and pg_prepared_xacts"
    )


def _in_use(link: Link, newest: list[Row]) -> OutboxInUse:
    _, _, run, *_ = newest[0]
    [(_, pid, host)] = link.read("owner", {"run": run}) or [(run, "?", b"?")]
    who = f"process {pid} on {host.decode()}"
    if (pid, host.decode()) == (os.getpid(), socket.gethostname()):
        who = "another publisher of this process"
    if len(newest) > 1:
        who = f"a relay in each of its {len(newest)} shards, {who} in the first"
    return OutboxInUse(
        f"outbox {link.server} is relayed by {who}; only one relay may own a shard: stop it, "
        "only enqueue here, or wait for its end with `reliablepub relay --standby`"
    )
