"""PostgreSQL store: one turn of the relay is one transaction.

Knows: the statements of a turn and their order, what other processes have stored, what to do when a
commit is cut off. Must never know: AMQP, why an entry has its outcome.

A turn takes one round trip, or two if it stores new messages, whose ids are drawn first.

Reading marks nothing: a row leaves ``messages`` in the transaction that records its final outcome.
Other processes add rows at any time, and ids become visible in the order of the commits. So the
store keeps the snapshot of its last look: rows that are not visible in it are new.

When the connection is lost during a commit, the turn is retried under its number. If that succeeds,
the transaction that was cut off can never commit. If the number is taken by that transaction, it
has committed.

A run of the relay is a run on one server. If the server was started again, if another one answers,
if a turn is gone, or if a commit stays unsure, the store begins another run, and has the relay
forget what it has read: which messages are open and due, the rows tell.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Final, NamedTuple, NoReturn

import psycopg

from reliablepub.errors import (
    InvalidMessage,
    OutboxError,
    OutboxInUse,
    OutboxLocked,
    OutboxUnreachable,
    OutboxUnsure,
    PublisherForked,
)
from reliablepub.message import Message
from reliablepub.outbox.database import IS_LAST
from reliablepub.outbox.encryption import OutboxKeys, fingerprints
from reliablepub.outbox.entry import (
    TRANSIENT,
    Changes,
    Counters,
    DamagedRow,
    Entry,
    HeldExchange,
    Intervened,
    Release,
    RunEnded,
    Snapshot,
    Touched,
    new_id,
    size_of,
)
from reliablepub.outbox.patience import Patience
from reliablepub.outbox.postgres import columns
from reliablepub.outbox.postgres.bell import Bell
from reliablepub.outbox.postgres.clock import ServerClock
from reliablepub.outbox.postgres.columns import arrays, texts_of
from reliablepub.outbox.postgres.ownership import (
    BEAT_S,
    EXPIRY_S,
    KEPT_TURNS,
    is_lost_turn,
    take_over,
)
from reliablepub.outbox.postgres.retention import BRIEFLY, DELETING_S, Retention
from reliablepub.outbox.postgres.server import (
    Link,
    Row,
    Server,
    Step,
    check_texts,
    emptied,
    reaction_to,
    reported,
)
from reliablepub.outbox.rows import (
    ID_MAX,
    LEFT_IN_FLIGHT,
    PASSED_MAX,
    SCANNED_MAX,
    MessageRow,
    Page,
    Unopened,
    attempt_of,
    divided,
    given_up_of,
    id_runs,
    in_flight_of,
    plain_row_of,
    row_of,
    schedule_of,
    tags_of,
)

PART_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of new messages in one statement."""
_COMPARE_S: Final = 20.0
"""How often a relay that runs compares the sequences with the rows."""
_INDEX_ROWS: Final = 1_000
_TRIES: Final = 5


class _Overtaken(Exception):
    """Another process has taken the turn."""


class _Turn(NamedTuple):
    """The columns of ``newest_turn`` and ``turns_since``."""

    turn: int
    run: int
    token: bytes
    intervention: int
    stored: int
    confirmed: int
    parked: int
    expired: int
    discarded: int
    open_bytes: int

    @property
    def counters(self) -> Counters:
        """The ledger."""
        return Counters(*self[4:])


@dataclass(slots=True)
class _Seen:
    """The last look at what other processes have stored."""

    text: str  # the snapshot in PostgreSQL's form: ``xmin:xmax:xip``
    last_id: int  # the highest that was visible, or was stored by this relay
    late: list[tuple[int, int]]  # ranges of ids up to an earlier `last_id`, visible only since
    count: int = 0  # rows that no turn has counted yet
    size: int = 0  # bytes of these rows
    intervention: int = 0  # number of the newest one


_LOGGER: Final = logging.getLogger("reliablepub.outbox")
_MOVED: Final = (
    "outbox %s was relayed in another cluster or database before: it was moved, restored or "
    "copied, and its open messages are published from here. If it is a copy of production, stop "
    "this relay, and park them with `reliablepub outbox park --all`"
)


class PostgresStore:
    """A shard of an outbox in PostgreSQL, opened by its relay. `Store` documents each method."""

    rest_s: Final = 0.5
    """Statements over a network cost money and power."""

    def __init__(
        self,
        server: Server,
        *,
        keep_confirmed_s: float = 0.0,  # 0 keeps none
        keys: OutboxKeys | None = None,
        clock: Callable[[], float] | None = None,  # seconds since 1970; None for the server's
        patience: Patience | None = None,
    ) -> None:
        self._server = server
        self._keep_confirmed_s = keep_confirmed_s
        self._keys = keys
        self._server_clock = ServerClock()
        self._clock = clock or self._server_clock
        self._pid = os.getpid()
        self._is_closed = False
        self._damaged: list[DamagedRow] = []
        self._unopened = Unopened()
        self._unfit: dict[int, str] = {}  # ids of damaged rows that are not parked yet: the reasons
        self._link = Link(server, is_relays=True, patience=patience)
        self._bell = Bell(self._link)
        self._token = new_id()
        self._commits = 0
        self._over_because = ""  # why this run has ended, until another has begun
        self._missed = 0  # id of the message for which a run has ended
        try:
            self._begin(None)
        except BaseException:
            self._bell.close()
            self._link.close()
            raise

    def _begin(self, own: tuple[int, int] | None) -> None:
        """Begin a run: take a shard over, record what the last owner left in flight, and count."""
        read_at = time.monotonic()
        [(server, told_at)] = self._link.rows("server")
        self._server_known = server.decode()
        self._server_clock.read(told_at, read_at)
        now = self._clock()
        # `own` is the shard and the run of this process until now; None at the start.
        taken = take_over(self._link, self._token, now, own, self._over_because)
        self._shard, self._run, self._turn, self._shards = taken
        self._known = self._token  # the token of that turn
        self._bell.shard = self._shard
        self._forgotten = 0  # the last turn that was deleted, as it became old
        self._is_changed = False  # in a way that the relay has not been told
        self._is_ledger_old = False  # an operator has taken the newest turn
        self._unfit.clear()
        self._retention = Retention(self._link, self._keep_confirmed_s, now, self._shards)
        self._seen = _Seen("1:1:", 0, [])
        self._raise_sequences()
        self._touched = ID_MAX  # interventions before this run do not matter
        [(is_moved, is_unknown, is_first)] = self._read("is_moved", turn=self._turn)
        if is_moved and not is_first:
            _LOGGER.warning(_MOVED, self._server, extra={"event": "another_cluster"})
        recount: list[Step] = [("forget_foreign_xids", {}), ("recount", {})]
        count = recount if is_moved or is_unknown else []
        left: dict[str, object] = {"at": now, "reply_text": LEFT_IN_FLIGHT}
        self._take_turn(
            [
                *count,
                ("count_new", {}),
                ("count_left_in_flight", {}),
                ("remember_left_in_flight", left),
                ("clear_in_flight", {}),
                ("forget_old_runs", {}),
                ("rebase_retries", {"now": now}),
                ("beat", {}),
            ]
        )
        self._touched = self._seen.intervention
        # Not the current snapshot, in which more rows may be visible than the turn has counted.
        [(snapshot,)] = self._read("counted", turn=self._turn)
        [(last_id,)] = self._link.read("last_id", {})
        self._seen.text, self._seen.last_id = snapshot.decode(), last_id
        self._over_because = ""  # last: until then, the relay must be told of the new run

    def _raise_sequences(self) -> None:
        """Raise sequences that are behind their rows, as after a move by logical replication."""
        self._compared_at = time.monotonic()
        for row in self._link.read("sequences_behind", {}):
            name, most = row[0].decode(), row[1]
            try:
                self._link.rows("raise_sequence", {"name": name, "most": most})
            except OutboxError as error:
                if isinstance(error, TRANSIENT):
                    raise
                raise OutboxError(
                    f"outbox {self._server}: the sequence {name} is behind its rows, as after a "
                    "move by logical replication: run as the owner of the outbox SELECT setval("
                    f"'{name}', {most}) ({error})"
                ) from error

    def check(self, message: Message) -> None:
        """Check a new message; any thread may call this."""
        check_texts(texts_of(message))
        if self._shards > 1 and message.ordering_key is not None:
            raise InvalidMessage(
                "ordering_key",
                f"outbox {self._server} has {self._shards} shards, and a publisher stores only in "
                "the shard that it relays, which would break the order of the key; store this "
                "message with Outbox.enqueue, or create an outbox with one shard",
            )

    @property
    def run(self) -> int:
        """Number of this relay's run on this outbox, higher than that of every earlier run."""
        return self._run

    # ------------------------------------------------------------------ rows of other processes

    def wall(self) -> float:
        """The time by the server's clock, seconds since 1970."""
        return self._clock()

    @property
    def bell(self) -> Bell | None:
        """Rings when an enqueuer commits; None where the kernel has no epoll."""
        return self._bell if self._bell.fileno() >= 0 else None

    def snapshot(self) -> Snapshot:
        """Read the current ledger and highest id. Other processes may have stored entries."""
        self._go_on()
        self._is_changed = True  # a change is the reason for this call; if it fails, it is kept
        self._look()
        # Rows that this relay has not counted may be in an operator's count already: only a turn of
        # this relay tells.
        if self._is_ledger_old:
            with suppress(Intervened, OutboxLocked):
                self._take_turn([("count_new", {})])
        self._is_changed = False
        late, self._seen.late = tuple(self._seen.late), []
        return replace(self._snapshot(), late=late)

    def changed_elsewhere(self) -> bool:
        """Whether another process has written to the store since the last call."""
        self._go_on()
        if time.monotonic() - self._compared_at > _COMPARE_S:
            self._raise_sequences()
        self._beat()  # before the look, which may wait for a lock and fail
        self._look()
        self._beat()  # if that was the first statement of a new connection
        if self._unfit:
            with suppress(Intervened):
                self._park_damaged()
                self._is_changed = True  # so that the relay asks for `damaged`
        is_changed, self._is_changed = self._is_changed, False
        if is_changed:
            self._bell.rise()
        return is_changed

    def may_have_changed(self) -> bool:
        """Whether another process may have written since the last `changed_elsewhere`."""
        try:
            self._check_usable()
            self._look()
        except OutboxError:  # `changed_elsewhere` will raise it
            return True
        return self._is_changed or self._must_beat

    @property
    def _must_beat(self) -> bool:
        """Whether other processes do not see that this relay lives, but by its next turn."""
        is_silent = not self._link.is_visible and time.monotonic() - self._turn_at > BEAT_S
        return is_silent or self._link.connections != self._turn_by

    def _beat(self) -> None:
        """Take a turn that changes and reads no other table, if this relay must."""
        if self._must_beat:
            with suppress(Intervened):
                self._take_turn([])

    def _look(self) -> None:
        """Find rows that were not visible before, and turns of others; note whether there are any.

        What a look has found is found only once: nothing fails behind that but the sequences.
        """
        seen = self._seen
        _, xmax, xip = seen.text.split(":")
        values = {
            "shard": self._shard,
            "xmax": xmax,
            "xip": xip.split(",") if xip else [],
            "last_id": seen.last_id,
        }
        read_at = time.monotonic()
        looked = self._link.read("look", values)
        if not looked:
            raise emptied(self._server)
        [(turn, run, token, intervention, text, *found, last_drawn, server, at)] = looked
        count, size, last_id, late, last_xid = found
        self._server_clock.read(at, read_at)
        before = self._turn
        self._follow(turn, run, token, intervention)
        if server.decode() != self._server_known:
            self._end_run("the server was restarted, or is another server")
        is_behind = last_drawn < seen.last_id
        if self._turn != before:
            self._is_changed = self._is_ledger_old = True
            last_id = max(last_id or 0, last_drawn)  # an operator may have imported messages
        seen.text = _on_disk(text.decode(), max(int(xmax), (last_xid or 0) + 1))
        seen.count, seen.size = seen.count + count, seen.size + size
        seen.last_id = max(seen.last_id, last_id or 0)
        seen.late += [(first, first + n - 1) for first, n in id_runs(late or [])]
        if count > 0:
            self._is_changed = True
        if is_behind:
            self._raise_sequences()

    def _follow(self, turn: int, run: int, token: bytes, intervention: int) -> None:
        """Record the newest turn, which may be an operator's."""
        # The newest turn              | this relay
        # is of no run                 | was dismissed by an operator, and stops
        # lacks this relay's last turn | has lost commits, and ends its run
        # is of a later run            | was replaced, and stops
        # is an operator's             | reads the ledger anew
        if not run:
            raise OutboxInUse(
                f"outbox {self._server}: this relay was silent for more than {EXPIRY_S:g} s, and "
                "an operator has changed a message that it had in flight; it stops"
            )
        since = self._turns_since(self._turn) if turn > self._turn else []
        known = since[0].token if since else token
        if run <= self._run and (turn < self._turn or known.decode() != self._known):
            self._end_run(
                f"it has lost commits: turn {self._turn} of this relay is gone; did the database "
                "fail over to a replica that lagged?"
            )
        if run != self._run:
            [(_, pid, host)] = self._link.read("owner", {"run": run}) or [(0, "?", b"?")]
            raise OutboxInUse(
                f"outbox {self._server} was taken over by process {pid} on {host.decode()}; this "
                "relay stops"
            )
        self._turn, self._known = turn, token.decode()
        self._seen.intervention = max(self._seen.intervention, intervention)

    def _end_run(self, because: str) -> NoReturn:
        """End this run, and raise `OutboxUnreachable`; the next look begins another."""
        self._over_because = because
        raise OutboxUnreachable(
            f"outbox {self._server}: {because}; the relay starts a new run, and nothing was "
            "changed: try again"
        )

    def _go_on(self) -> None:
        """If this run is over, begin another on the same shard, and raise `RunEnded`."""
        self._check_open()
        because = self._over_because
        if not because:
            return
        since = self._turns_since(self._turn)
        is_whole = bool(since) and since[0].token.decode() == self._known
        # Without the last turn, a relay on the new primary may have got the number of this run.
        owner = self._link.read("owner", {"run": self._run})
        mine = [(self._run, self._pid, socket.gethostname().encode())]
        self._begin((self._shard, self._run) if is_whole or owner == mine else None)
        raise RunEnded(f"outbox {self._server}: {because}", has_lost=not is_whole)

    @property
    def _is_untold(self) -> bool:
        """Whether the relay must ask `touched` before it commits or reads on."""
        return self._seen.intervention > self._touched

    # ------------------------------------------------------------------ turns

    def commit(self, changes: Changes) -> Snapshot:
        """Store the changes of one turn in one transaction, and set the ids of new entries."""
        self._check_usable()
        if changes.is_empty:
            return self._snapshot()
        if self._is_untold:
            raise Intervened
        try:
            self._draw_ids(changes.new)
            steps = self._steps(changes, self._clock())
            is_storing = bool(changes.new or changes.rebase)
            results = self._take_turn(steps, is_storing=is_storing)
        except BaseException:
            for entry in changes.new:
                entry.id = 0
            raise
        if changes.new:
            self._seen.last_id = max(self._seen.last_id, changes.new[-1].id)
        self._tell_released(changes.released, results)
        return self._snapshot()

    def _tell_released(
        self, released: Sequence[Release], results: Sequence[list[Row]] | None
    ) -> None:
        """Set what was released; the statements of the releases were the last of the turn."""
        if results is None:  # more entries may be held: let the relay release again
            for release in released:
                release.count, release.last = release.limit, release.after
        else:
            first = len(results) - len(released)
            for release, result in zip(released, results[first:], strict=True):
                [(release.count, release.last)] = result
        for release in released:
            if release.is_counted:
                with suppress(OutboxError):  # the turn is committed: the relay reckons
                    release.left = self._count_held(release)

    def _draw_ids(self, new: Sequence[Entry]) -> None:
        """Set the ids of new entries: their encryption and their tags in flight need them."""
        assert not any(entry.id for entry in new), "an entry is stored already"
        if new:
            [(drawn,)] = self._link.rows("draw_ids", {"count": len(new)})
            for entry, id_ in zip(new, drawn, strict=True):
                entry.id = id_

    def _steps(self, changes: Changes, now: float) -> list[Step]:
        """Return the statements of a turn.

        Those that release held entries come last: the turn may reschedule an entry that it
        releases.
        """
        return [
            *self._removals(changes, now),
            *self._additions(changes),
            *self._records(changes, now),
            *(("release", _release_values(r)) for r in changes.released),
        ]

    def _removals(self, changes: Changes, now: float) -> Iterator[Step]:
        """Yield the statements that delete confirmed entries; new rows reuse their space."""
        if changes.confirmed:
            ids = _identities(changes.confirmed) | {"now": now}
            is_kept = self._keep_confirmed_s > 0
            yield "confirm_and_keep" if is_kept else "confirm", ids
            if self._retention.is_pruning:
                yield self._retention.prune(now, 2 * len(changes.confirmed))

    def _additions(self, changes: Changes) -> Iterator[Step]:
        """Yield the statements that change times, and then those that store new entries."""
        if changes.rebase is not None:
            yield "rebase", {"by": changes.rebase.by}
        plain, others = divided(changes.new)
        for part in _parts(plain):
            values = arrays(columns.PLAIN, (plain_row_of(entry, self._keys) for entry in part))
            yield "insert_plain_messages", values
        for part in _parts(others):
            values = arrays(columns.FULL, (row_of(entry, self._keys) for entry in part))
            yield "insert_messages", values
        for name, count in changes.sources.items():
            yield "advance_source", {"name": name, "count": count}
        if changes.rescheduled:
            yield "reschedule", arrays(columns.SCHEDULE, map(schedule_of, changes.rescheduled))

    def _records(self, changes: Changes, now: float) -> Iterator[Step]:
        """Yield the statements that give up entries, and record attempts and tags."""
        if changes.parked:
            given_up = arrays(columns.GIVEN_UP, map(given_up_of, changes.parked))
            gone = _identities([parked.entry for parked in changes.parked])
            yield "park_messages", given_up | gone
        if changes.discarded:
            yield "discard", _identities([gone.entry for gone in changes.discarded])
        if changes.attempts:
            yield "insert_attempts", arrays(columns.ATTEMPT, map(attempt_of, changes.attempts))
        if changes.finished:
            tags = (tags_of(batch, self._run) for batch in changes.finished)
            yield "delete_in_flight", arrays(columns.TAGS, tags)
        if changes.sent:
            sent = arrays(columns.SENT, (in_flight_of(batch, self._run) for batch in changes.sent))
            yield "insert_in_flight", sent | {"now": now}

    def _take_turn(
        self, steps: Sequence[Step], *, is_storing: bool = False
    ) -> list[list[Row]] | None:
        """Commit statements as the next turn; return the rows of each, None if the answer was lost.

        With `is_storing` they store messages or move times, which must not happen twice. When this
        raises, nothing was stored; after `OutboxUnsure` that is unknown, and this run is over.
        """
        self._commits += 1
        token = f"{self._token}/{self._commits}"
        failure: OutboxError
        is_unsure = False  # an earlier try may have been committed
        for _ in range(_TRIES):
            try:
                return self._try_turn(steps, token)
            except _Overtaken:
                failure = OutboxLocked(
                    f"outbox {self._server}: other processes keep changing it; try again"
                )
                is_unsure = False  # without its turn, no earlier try can commit
            except (psycopg.Error, *TRANSIENT) as error:
                failure, may_be_stored, is_passing = reaction_to(self._server, error)
                is_unsure |= may_be_stored
                if not is_passing:
                    break
        raise self._cut_off(failure, is_storing=is_storing) if is_unsure else failure

    def _try_turn(self, steps: Sequence[Step], token: str) -> list[list[Row]] | None:
        """Commit statements as the next turn, unless an earlier try has, whose answer was lost."""
        try:
            *results, [newest] = self._link.transact(self._all_steps(steps, token))
        except psycopg.Error as error:
            if not is_lost_turn(error):
                raise
        else:
            self._committed(_Turn(*newest), is_counting=bool(steps))
            return results[len(results) - len(steps) :]
        since = self._turns_since(self._turn)
        if len(since) > 1 and since[1].token.decode() == token:
            with reported(self._server):  # a commit that was cut off may not be on a replica yet
                self._link.flush()
            self._committed(since[1], is_counting=bool(steps))
            return None
        self._look()
        if self._is_untold:
            raise Intervened
        raise _Overtaken

    def _all_steps(self, steps: Sequence[Step], token: str) -> list[Step]:
        turn = {"shard": self._shard, "run": self._run, "turn": self._turn + 1}
        fence = {"token": token, "known": self._known, "server": self._server_known}
        head: list[Step] = [("take_turn", {**turn, **fence, "backend": self._link.backend})]
        steps = [(name, {**values, **turn}) for name, values in steps]  # all are of this shard
        if self._seen.count and steps:  # first: rows must be counted before they are subtracted
            head.append(("count_new", turn))
        if self._turn - self._forgotten >= 2 * KEPT_TURNS:
            upto = self._turn - KEPT_TURNS
            head.append(("forget_turns", {**turn, "from": self._forgotten, "upto": upto}))
        return [*head, *steps, ("newest_turn", {"shard": self._shard})]

    def _committed(self, turn: _Turn, *, is_counting: bool) -> None:
        self._turn, self._known = turn.turn, turn.token.decode()
        self._turn_at, self._turn_by = time.monotonic(), self._link.connections
        if self._turn - self._forgotten > 2 * KEPT_TURNS:
            self._forgotten = self._turn - 1 - KEPT_TURNS
        self._seen.intervention = turn.intervention
        self._counters = turn.counters
        if is_counting:
            self._seen.count = self._seen.size = 0
            self._is_ledger_old = False

    def _turns_since(self, turn: int) -> list[_Turn]:
        return [_Turn(*row) for row in self._read("turns_since", turn=turn)]

    def _cut_off(self, error: OutboxError, *, is_storing: bool) -> OutboxError:
        """Return the error for a turn that may have been committed."""
        # Recording outcomes again changes nothing: this run goes on, and sends nothing in flight
        # again. The tags may be stored.
        if not is_storing:
            return error if isinstance(error, OutboxUnreachable) else OutboxUnreachable(str(error))
        self._over_because = self._over_because or "a commit was cut off"
        unsure = OutboxUnsure(
            f"outbox {self._server}: the connection was lost during the commit, so it is unknown "
            f"whether the message is stored; look for it when the database is back ({error})"
        )
        unsure.__cause__ = error
        return unsure

    def _read(self, name: str, **values: object) -> list[Row]:
        """Run a query of this shard, as of the last look."""
        return self._link.read(name, {"shard": self._shard, "seen": self._seen.text, **values})

    def _snapshot(self) -> Snapshot:
        counters, seen = self._counters, self._seen
        stored, size = counters.stored + seen.count, counters.open_bytes + seen.size
        return Snapshot(seen.last_id, replace(counters, stored=stored, open_bytes=size))

    def _count_held(self, release: Release) -> int:
        [(count,)] = self._read("count_held", **_release_values(release))
        return int(count)

    def relieve(self) -> str:
        """Delete what was kept for long enough, and return nothing.

        Only the server can measure its disk, and reports when it is full.
        """
        if self._retention.is_due():
            # No error ends the relay: it can do without. The next look or commit reports the loss
            # of the shard or of the database.
            with suppress(OutboxError, Intervened):
                self._delete_old()
        return ""

    def _delete_old(self) -> None:
        self._check_usable()
        if self._is_untold:
            return  # unread interventions may be old by a clock that was set
        until = time.monotonic() + DELETING_S
        steps = self._retention.look(self._clock())
        while steps:
            counts = self._take_turn(steps) or [[]] * len(steps)  # none if the answer was lost
            self._retention.has_deleted()
            full = [
                step
                for step, count in zip(steps, counts, strict=True)
                if count == [(step[1].get("limit"),)]
            ]
            steps = [steps[0], *full] if full and time.monotonic() < until else []

    # ------------------------------------------------------------------ reading

    def read_ready(
        self, first_id: int, last_id: int, *, limit: int, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """Read entries with ``first_id <= id <= last_id`` that are due now, lowest ids first."""
        self._check_usable()
        if self._seen.late:  # found since `snapshot`: it would be read now, and again once told
            return [], first_id - 1
        page = Page(limit, bytes_max, self._keys)
        first = self._next_id_stored(first_id, last_id)
        if first is None:
            return [], last_id
        first_id, last_id = first, min(last_id, first + SCANNED_MAX - 1)
        for _ in range(0, PASSED_MAX, limit) if limit else ():
            limits = {"last_id": last_id, "limit": limit, "bytes_max": bytes_max}
            found = self._read("ready", first_id=first_id, **limits)
            size = 0
            for *row_values, is_first in found:
                row = MessageRow(*row_values)
                if is_first:
                    size += row.size
                    if not page.take(row):
                        return self._readable(page), first_id - 1
                first_id = row.id + 1
            if len(found) < limit and size <= bytes_max:
                return self._readable(page), last_id
            if page.entries or page.damaged:
                break
        return self._readable(page), first_id - 1

    def read_due(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Read entries whose ``due_at`` has passed and whose id is not in ``loaded``."""
        page = Page(limit, bytes_max, self._keys)
        return self._read_timed(page, "waiting", now, loaded)

    def read_expired(
        self, now: float, *, limit: int, bytes_max: int, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        """Read entries whose ``expires_at`` has passed and whose id is not in ``loaded``."""
        page = Page(limit, bytes_max, self._keys)
        return self._read_timed(page, "expiring", now, loaded)

    def _read_timed(
        self, page: Page, query: str, now: float, loaded: Container[int]
    ) -> tuple[list[Entry], float | None]:
        self._check_usable()
        found, next_at = self._timed(page, query, now, loaded)
        if found:
            by_id: dict[int, tuple[MessageRow, bool]] = {}
            for *row_values, is_first in self._link.read("messages", {"ids": list(found)}):
                row = MessageRow(*row_values)
                by_id[row.id] = row, is_first
            for id_, at in found.items():
                if id_ not in by_id:
                    continue  # an operator removed it after the index was read
                row, is_first = by_id[id_]
                if query == "waiting" and not is_first:
                    page.not_next.append(id_)
                elif not page.take(row):
                    next_at = at
                    break
        self._look()
        if self._is_untold:
            raise Intervened
        return self._readable(page), next_at

    def _timed(
        self, page: Page, query: str, now: float, loaded: Container[int]
    ) -> tuple[dict[int, float], float | None]:
        """Return ids with their times, from the index alone, and the time of the next one."""
        found: dict[int, float] = {}
        after, size = (-inf, 0), 0
        while True:
            read = self._read(query, after_at=after[0], after_id=after[1], limit=_INDEX_ROWS)
            for id_, at, row_size in read:
                if id_ in loaded:
                    continue
                if at > now or len(found) >= page.limit or size > page.bytes_max:
                    return found, at
                found[id_] = at
                size += row_size
            if len(read) < _INDEX_ROWS:
                return found, None
            id_, at, _ = read[-1]
            after = at, id_

    def read_first(
        self, keys: Sequence[str], now: float, *, bytes_max: int
    ) -> tuple[list[Entry], int]:
        """Read the first open entry of each ordering key, if it is due and its key is not held."""
        self._check_usable()
        page = Page(len(keys), bytes_max, self._keys)
        looked_at, size = len(keys), 0
        values = {"keys": list(keys), "now": now, "limit": len(keys), "bytes_max": bytes_max}
        for *row_values, position in self._read("firsts_of_keys", **values) if keys else ():
            row = MessageRow(*row_values)
            if not page.take(row):
                looked_at = position
                break
            size += row.size
            if size > bytes_max:  # the server has left out those after it
                looked_at = position + 1
                break
        return self._readable(page), looked_at

    def _readable(self, page: Page) -> list[Entry]:
        """Return the entries of a page, and keep its other rows from being read again.

        Damaged rows are parked. Rows that are not next of their ordering key lose their due time.
        """
        self._unopened.judge(page)
        self._unfit.update(page.damaged)
        # If this fails, the rows are not changed and not sent.
        with suppress(*TRANSIENT, Intervened):
            self._park_damaged()
            if page.not_next:
                self._take_turn([("wait_for_key", {"ids": page.not_next})])
        return page.entries

    def _park_damaged(self) -> None:
        """Park the rows that were found damaged. If this fails, the next look does it."""
        # Not another run: while their table is locked, each would send again what is in flight.
        if not self._unfit:
            return
        words = [reason.replace("\0", "\ufffd") for reason in self._unfit.values()]
        values = {"ids": list(self._unfit), "reasons": words, "at": self._clock()}
        self._take_turn([("park_damaged", values)])
        for id_, *texts, doubt in self._link.read("damaged", {"ids": values["ids"]}):
            message_id, exchange, key, why = (text.decode(errors="replace") for text in texts)
            self._damaged.append(DamagedRow(id_, message_id, exchange, key, why, doubt))
        self._unfit.clear()

    def lowest_awaited(self, first_id: int, at: float) -> int | None:
        """Return the lowest open id, from ``first_id`` on, that was to be sent by ``at``."""
        self._check_usable()
        first = self._next_id_stored(first_id, ID_MAX)
        if first is None:
            return None
        last = min(first + SCANNED_MAX - 1, ID_MAX)
        found = self._read("lowest_awaited", first_id=first, last_id=last, at=at)
        return int(found[0][0]) if found else self._next_id_stored(last + 1, ID_MAX)

    def missed(self, id_: int) -> None:
        """End this run, once, so that the next one reads all rows: another program changed some."""
        if id_ != self._missed:
            self._missed = id_
            self._over_because = f"message {id_} is open and due, and no read has found it"

    def _next_id_stored(self, first_id: int, last_id: int) -> int | None:
        """Return the lowest open id of a range, in whichever shard.

        A search for one of this shard would read the whole backlog of the others.
        """
        [(found,)] = self._link.read("next_id_stored", {"first_id": first_id, "last_id": last_id})
        return None if found is None else int(found)

    def held_exchanges(self, limit: int) -> list[HeldExchange]:
        """Return at most ``limit`` exchanges that have `HELD` entries."""
        found = self._read("held_exchanges", limit=limit)
        return [HeldExchange(name.decode(), count, since) for name, count, since in found]

    def damaged(self) -> list[DamagedRow]:
        """Return the rows that were found damaged and parked since the last call."""
        found, self._damaged = self._damaged, []
        return found

    def touched(self) -> list[Touched]:
        """Return interventions in messages since the last call, or since the store was opened."""
        found = self._link.read("touched", {"after": self._touched})
        touched = []
        for number, id_, *texts, is_open, is_kept, may_have_arrived, of_key in found:
            self._touched = max(self._touched, number)
            message_id, exchange, key, action, person, note = (text.decode() for text in texts)
            what = (id_, message_id, exchange, key, action, person, note)
            states = (is_open, is_kept, may_have_arrived)
            ordering_key = None if of_key is None else of_key.decode()
            touched.append(Touched(*what, *states, ordering_key=ordering_key))
        self._touched = max(self._touched, self._seen.intervention)
        return touched

    def position(self, source: str) -> int:
        """Return how many entries of a named source were ever stored."""
        found = self._link.read("position", {"name": source})
        return int(found[0][0]) if found else 0

    # ------------------------------------------------------------------ status; the end

    def show(self, status: Mapping[str, object]) -> None:
        """Write the relay's status. No decision depends on it."""
        content = json.dumps({"pid": self._pid, **status, "keys": fingerprints(self._keys)})
        values = {"shard": self._shard, "run": self._run, "content": content}
        with suppress(OutboxError), reported(self._server):
            self._link.transact([BRIEFLY, ("show", values)])

    def close(self, last: Mapping[str, object] | None = None) -> None:
        """Close the connection, and let another relay take over. Committed entries remain."""
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        # If this fails, another relay takes over when the last turn is old.
        with suppress(OutboxError, Intervened):
            end: Step = ("end_run", {"now": self._clock()})
            self._take_turn([("free_turn", {}), end])
            if last is None:
                self._read("unshow", run=self._run)
            else:
                self.show(dict(last) | {IS_LAST: True})
        self._bell.close()
        self._link.close()

    def _check_usable(self) -> None:
        self._check_open()
        if self._over_because:
            self._end_run(self._over_because)

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise PublisherForked(
                f"outbox {self._server} was opened before the fork; open it in the child"
            )
        if self._is_closed:
            raise OutboxError(f"outbox {self._server} is closed")


def _identities(entries: Sequence[Entry]) -> dict[str, object]:
    """Return what tells messages from all others, for the statements that remove them."""
    return {
        "ids": [entry.id for entry in entries],
        "stored_ats": [float(entry.stored_at) for entry in entries],
    }


def _parts(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Divide new entries into parts of at most `PART_BYTES`, unless a single message is larger.

    PostgreSQL ends a connection whose client sends 1 GiB in one statement.
    """
    part: list[Entry] = []
    size = 0
    for entry in entries:
        size += size_of(entry)
        if part and size > PART_BYTES:
            yield part
            part, size = [], size_of(entry)
        part.append(entry)
    if part:
        yield part


def _on_disk(snapshot: str, xmax: int) -> str:
    """Return a snapshot up to the last transaction whose row it shows.

    The transactions after it have no row, and may have ended without a flush of the server's log.
    If a backend crashes, the server recovers under the same start time, so this run goes on, and
    gives their numbers to new transactions, whose rows are new.
    """
    xmin, _, running = snapshot.split(":")
    xip = [xid for xid in running.split(",") if xid and int(xid) < xmax]
    return f"{min(int(xmin), xmax)}:{xmax}:{','.join(xip)}"


def _release_values(release: Release) -> dict[str, object]:
    """Return the values of ``release`` and ``count_held``."""
    return {
        "exchange": release.exchange,
        "routing_key": release.routing_key,
        "after": release.after,
        "limit": release.limit,
    }
