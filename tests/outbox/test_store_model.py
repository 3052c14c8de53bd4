"""Both stores against a naive model: the same steps, and after each of them the same answers."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from reliablepub.message import Message
from reliablepub.outbox import Outbox
from reliablepub.outbox.entry import Attempt, Entry, Sent, Store, Turn
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.store import SqliteStore
from reliablepub.outcome import Outcome, OutcomeKind

REFUSALS = st.sampled_from([OutcomeKind.RETURNED, OutcomeKind.REFUSED, OutcomeKind.EXPIRED])
HEADERS = st.sampled_from([None, {"n": 1}, {"raw": b"\xff"}])
NEW = st.lists(
    st.tuples(st.binary(max_size=9), st.sampled_from(["", "x", "ü"]), HEADERS), max_size=4
)


@dataclass
class Row:
    message: Message
    due_at: float | None = None
    nacked: int = 0
    uncertain: int = 0


class StoreMachine(RuleBasedStateMachine):
    """A dict of open rows and some counts: what any store must look like from outside."""

    is_durable = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "outbox.db"
        self.store = self.open()
        self.rows: dict[int, Row] = {}
        self.entries: dict[int, Entry] = {}
        self.in_flight: dict[int, Sent] = {}
        self.counts = dict.fromkeys(("stored", "confirmed", "parked", "expired"), 0)
        self.position = self.last_id = self.tag = 0
        self.run = 1

    def open(self) -> Store:
        return MemoryStore()

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def pick(self, data: Any, label: str) -> list[Entry]:
        """Some entries, settled ones among them: a late verdict must change nothing."""
        ids = st.lists(st.sampled_from(sorted(self.entries)), max_size=4, unique=True)
        return [self.entries[n] for n in data.draw(ids, label)] if self.entries else []

    @rule(new=NEW, data=st.data(), kind=REFUSALS, due_at=st.one_of(st.none(), st.integers(0, 9)))
    def turn(self, new: list[Any], data: Any, kind: OutcomeKind, due_at: float | None) -> None:
        """One turn of everything at once."""
        stored = [
            Entry(Message(body, key, key, headers, f"m-{self.last_id + n}"), 1.0)
            for n, (body, key, headers) in enumerate(new, 1)
        ]
        confirmed, given_up, later, sent = (
            self.pick(data, label) for label in ("confirmed", "parked", "rescheduled", "sent")
        )
        for entry in later:
            entry.due_at = due_at
            entry.nacked += 1
        attempts = [Attempt(e, "e", self.tag, Outcome(kind, 312, "NO"), 2.0) for e in given_up]
        ranges = [Sent("e", self.tag + 1, sent)] if sent else []
        turn = Turn(
            new=stored,
            sources={"s": len(stored)} if stored else {},
            confirmed=confirmed,
            parked=attempts,
            rescheduled=later,
            attempts=attempts,
            sent=ranges,
        )
        self.tag += len(sent)
        snapshot = self.store.commit(turn)
        self._expect(stored, confirmed, given_up, later, kind)
        assert [e.id for e in stored] == list(
            range(self.last_id - len(stored) + 1, self.last_id + 1)
        )
        assert snapshot == self.store.snapshot()

    def _expect(
        self,
        stored: list[Entry],
        confirmed: list[Entry],
        given_up: list[Entry],
        later: list[Entry],
        kind: OutcomeKind,
    ) -> None:
        for entry in stored:
            self.last_id += 1
            self.entries[self.last_id] = entry
            self.rows[self.last_id] = Row(entry.message)
            self.counts["stored"] += 1
            self.position += 1
        for entry in confirmed:
            if self.rows.pop(entry.id, None):
                self.counts["confirmed"] += 1
        for entry in given_up:
            if self.rows.pop(entry.id, None):
                self.counts["expired" if kind is OutcomeKind.EXPIRED else "parked"] += 1
        for entry in later:
            if row := self.rows.get(entry.id):
                row.due_at, row.nacked = entry.due_at, entry.nacked

    @invariant()
    def the_ledger_adds_up(self) -> None:
        counters = self.store.snapshot().counters
        for name, count in self.counts.items():
            assert getattr(counters, name) == count, name
        assert counters.open == len(self.rows)
        assert counters.open_bytes == sum(row.message.size for row in self.rows.values())
        assert self.store.position("s") == self.position
        assert self.store.snapshot().last_id == self.last_id

    @invariant()
    def every_open_entry_can_be_read(self) -> None:
        ready = self.store.read_ready(1, self.last_id, limit=1000, bytes_max=10**9)
        assert {e.id: (e.message, e.nacked) for e in ready} == {
            n: (row.message, row.nacked) for n, row in self.rows.items() if row.due_at is None
        }
        assert [e.id for e in ready] == sorted(e.id for e in ready)
        assert self.store.lowest_open() == min(self.rows, default=None)

    @invariant()
    def what_is_due_comes_earliest_first(self) -> None:
        waiting = sorted((r.due_at, n) for n, r in self.rows.items() if r.due_at is not None)
        loaded = {n for n in self.rows if n % 3 == 0}
        waiting = [(due_at, n) for due_at, n in waiting if n not in loaded]
        due, next_due_at = self.store.read_due(4, limit=2, bytes_max=1 << 30, loaded=loaded)
        now = [n for due_at, n in waiting if due_at <= 4][:2]
        assert [e.id for e in due] == now
        assert next_due_at == (waiting[len(now)][0] if len(waiting) > len(now) else None)


class FileMachine(StoreMachine):
    """On a file, everything must also survive closing, and other processes may add."""

    is_durable = True

    def open(self) -> Store:
        return SqliteStore(self.path)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()
        self.run += 1
        assert self.store.run == self.run
        ready = self.store.read_ready(1, self.last_id, limit=1000, bytes_max=10**9)
        due, _ = self.store.read_due(1e12, limit=1000, bytes_max=1 << 30, loaded=())
        assert {e.id for e in (*ready, *due)} == set(self.rows)
        self.entries |= {e.id: e for e in (*ready, *due)}

    @rule(body=st.binary(max_size=9))
    def enqueue_elsewhere(self, body: bytes) -> None:
        message = Message(body, message_id=f"o-{self.last_id + 1}")
        self.store.changed_elsewhere()
        with Outbox(self.path) as outbox:
            outbox.enqueue(message)
        assert self.store.changed_elsewhere()
        self.last_id += 1
        self.counts["stored"] += 1
        self.rows[self.last_id] = Row(message)
        self.entries[self.last_id] = Entry(message, 1.0, self.last_id)

    @rule(ids=st.lists(st.integers(1, 20), max_size=3, unique=True))
    def retry(self, ids: list[int]) -> None:
        parked = {p.id: p for p in Outbox(self.path).parked()}
        with Outbox(self.path) as outbox:
            assert outbox.retry(ids) == len(parked.keys() & set(ids))
        for n in parked.keys() & set(ids):
            self.counts[parked[n].state] -= 1
            found, _ = self.store.read_due(1e12, limit=1000, bytes_max=1 << 30, loaded=())
            (entry,) = (e for e in found if e.id == n)
            assert entry.nacked == 0
            self.entries[n] = entry
            self.rows[n] = Row(entry.message, entry.due_at)

    @invariant()
    def the_audit_finds_no_difference(self) -> None:
        store = self.store
        assert isinstance(store, SqliteStore)
        row = store._connection.execute(
            "SELECT open_difference, parked_difference, expired_difference, bytes_difference"
            " FROM reliablepub_audit"
        ).fetchone()
        assert row == (0, 0, 0, 0)


@pytest.mark.parametrize("machine", [StoreMachine, FileMachine])
def test_stores_behave_like_the_model(machine: type[StoreMachine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=20, deadline=None)
    )
