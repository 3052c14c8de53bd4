"""Both stores against a naive model: the same steps, and after each of them the same answers."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from reliablepub._core.events import Batch
from reliablepub.message import Message
from reliablepub.outbox.entry import Attempt, Changes, Entry, Store
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.rows import MessageRow, entry_of
from reliablepub.outcome import Outcome, OutcomeKind
from tests.asking import fill

REFUSALS = st.sampled_from([OutcomeKind.RETURNED, OutcomeKind.REFUSED, OutcomeKind.EXPIRED])
HEADERS = st.sampled_from([None, {"n": 1}, {"raw": b"\xff"}])
KEYS = st.sampled_from([None, None, "k", "l"])
TIMES = st.one_of(st.none(), st.integers(0, 9))
NEW = st.lists(
    st.tuples(st.binary(max_size=9), st.sampled_from(["", "x", "ü"]), HEADERS, TIMES, TIMES, KEYS),
    max_size=4,
)


@dataclass
class Row:
    message: Message
    due_at: float | None = None
    nacked: int = 0
    uncertain: int = 0
    expires_at: float | None = None


class StoreMachine(RuleBasedStateMachine):
    """A dict of open rows and some counts: what any store must look like from outside."""

    is_durable = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.where: str | Path = Path(self.folder.name) / "outbox.db"
        self.store = self.open()
        self.rows: dict[int, Row] = {}
        self.entries: dict[int, Entry] = {}
        self.in_flight: dict[int, Batch[Entry]] = {}
        self.holding: dict[int, str | None] = {}
        self.counts = dict.fromkeys(("stored", "confirmed", "parked", "expired", "discarded"), 0)
        self.position = self.last_id = self.tag = 0
        self.run = 1

    def open(self) -> Store:
        return MemoryStore()

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def is_first(self, id_: int) -> bool:
        key = self.rows[id_].message.ordering_key
        earlier = [n for n, row in self.rows.items() if n < id_ and row.message.ordering_key == key]
        return key is None or not (earlier or self.is_held(id_))

    def is_awaited(self, id_: int, at: float) -> bool:
        """Whether neither it nor the first one of its key waits for a time that was chosen."""
        key = self.rows[id_].message.ordering_key
        same = [n for n, row in self.rows.items() if key and row.message.ordering_key == key]
        rows = self.rows[id_], self.rows[min(same, default=id_)]
        return all(row.due_at is None or row.due_at <= at or row.nacked for row in rows)

    def is_held(self, id_: int) -> bool:
        key = self.rows[id_].message.ordering_key
        return key is not None and any(n < id_ and k == key for n, k in self.holding.items())

    def pick(self, data: Any, label: str) -> list[Entry]:
        """Some entries, settled ones among them: a late verdict must change nothing."""
        ids = st.lists(st.sampled_from(sorted(self.entries)), max_size=4, unique=True)
        return [self.entries[n] for n in data.draw(ids, label)] if self.entries else []

    @rule(new=NEW, data=st.data(), kind=REFUSALS, due_at=TIMES)
    def turn(self, new: list[Any], data: Any, kind: OutcomeKind, due_at: float | None) -> None:
        """One turn of everything at once."""
        stored = [
            Entry(
                Message(
                    body, key, key, headers, f"m-{self.last_id + n}", ordering_key=ordering_key
                ),
                1.0,
                due_at=not_before,
                expires_at=expires_at,
            )
            for n, (body, key, headers, not_before, expires_at, ordering_key) in enumerate(new, 1)
        ]
        confirmed, given_up, thrown_away, later, sent = (
            self.pick(data, label)
            for label in ("confirmed", "parked", "discarded", "rescheduled", "sent")
        )
        for entry in later:
            entry.due_at = due_at
            entry.nacked += 1
        attempts = [Attempt(e, "e", self.tag, Outcome(kind, 312, "NO"), 2.0) for e in given_up]
        ranges = [Batch(9, self.tag + 1, sent)] if sent else []
        turn = Changes(
            new=stored,
            sources={"s": len(stored)} if stored else {},
            confirmed=confirmed,
            parked=attempts,
            discarded=[Attempt(e, "e", self.tag, Outcome(kind), 2.0) for e in thrown_away],
            rescheduled=later,
            attempts=attempts,
            sent=ranges,
        )
        self.tag += len(sent)
        snapshot = self.store.commit(turn)
        self._expect(turn)
        assert [e.id for e in stored] == list(
            range(self.last_id - len(stored) + 1, self.last_id + 1)
        )
        assert snapshot == self.store.snapshot()

    def _expect(self, turn: Changes) -> None:  # noqa: C901 - a list of everything
        for entry in turn.new:
            self.last_id += 1
            self.entries[self.last_id] = entry
            self.rows[self.last_id] = Row(entry.message, entry.due_at, expires_at=entry.expires_at)
            self.counts["stored"] += 1
            self.position += 1
        for entry in turn.confirmed:
            if self.rows.pop(entry.id, None):
                self.counts["confirmed"] += 1
        for attempt in turn.parked:
            if self.rows.pop(attempt.entry.id, None):
                is_expired = attempt.outcome.kind is OutcomeKind.EXPIRED
                self.counts["expired" if is_expired else "parked"] += 1
                if not is_expired and self.is_durable:
                    self.holding[attempt.entry.id] = attempt.entry.message.ordering_key
        for attempt in turn.discarded:
            if self.rows.pop(attempt.entry.id, None):
                self.counts["discarded"] += 1
        for entry in turn.rescheduled:
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
        ready = self.store.read_ready(1, self.last_id, limit=1000, bytes_max=10**9)[0]
        assert {e.id: (e.message, e.nacked) for e in ready} == {
            n: (row.message, row.nacked)
            for n, row in self.rows.items()
            if row.due_at is None and self.is_first(n)
        }
        assert [e.id for e in ready] == sorted(e.id for e in ready)
        free = [n for n in self.rows if not self.is_held(n)]
        assert self.store.lowest_awaited(0, 1e12) == min(free, default=None)
        awaited = [
            n for n, row in self.rows.items() if n > 2 and n in free and self.is_awaited(n, 4)
        ]
        assert self.store.lowest_awaited(3, 4.0) == min(awaited, default=None)

    @invariant()
    def what_is_due_or_late_comes_earliest_first(self) -> None:
        loaded = {n for n in self.rows if n % 3 == 0}
        for name, read in (
            ("due_at", self.store.read_due),
            ("expires_at", self.store.read_expired),
        ):
            times = ((getattr(row, name), n) for n, row in self.rows.items() if n not in loaded)
            waiting = sorted((at, n) for at, n in times if at is not None)
            found, next_at = read(4, limit=2, bytes_max=1 << 30, loaded=loaded)
            now = [n for at, n in waiting if at <= 4][:2]
            if name == "due_at":
                assert [e.id for e in found] == [n for n in now if self.is_first(n)]
                for n in now:
                    if not self.is_first(n):
                        self.rows[n].due_at = None  # from now on it only waits for its turn
            else:
                assert [e.id for e in found] == now
            assert next_at == (waiting[len(now)][0] if len(waiting) > len(now) else None)

    @invariant()
    def the_first_of_a_key_is_found_if_it_is_to_go_now(self) -> None:
        found, looked_at = self.store.read_first(["l", "k"], 4, bytes_max=1 << 30)
        first = {row.message.ordering_key: n for n, row in self.rows.items() if self.is_first(n)}
        expected = [first[key] for key in ("l", "k") if key in first]
        assert [e.id for e in found] == [
            n for n in expected if (due_at := self.rows[n].due_at) is None or due_at <= 4
        ]
        assert looked_at == 2


class FileMachine(StoreMachine):
    """On disk, everything must also survive closing, and other processes may add."""

    is_durable = True

    def open(self) -> Store:
        return outbox_at(self.where).open_store(keep_confirmed_s=0.0, keys=None)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()
        self.run += 1
        assert self.store.run == self.run
        ready = self.store.read_ready(1, self.last_id, limit=1000, bytes_max=10**9)[0]
        due, _ = self.store.read_due(1e12, limit=1000, bytes_max=1 << 30, loaded=())
        assert {e.id for e in (*ready, *due)} == {n for n in self.rows if self.is_first(n)}
        self.entries |= {e.id: e for e in (*ready, *due)}
        for n, row in self.rows.items():
            row.due_at = row.due_at if self.is_first(n) else None

    @rule(body=st.binary(max_size=9))
    def enqueue_elsewhere(self, body: bytes) -> None:
        message = Message(body, message_id=f"o-{self.last_id + 1}")
        self.store.changed_elsewhere()
        fill(self.where, message)
        assert self.store.changed_elsewhere()
        self.last_id += 1
        self.counts["stored"] += 1
        self.rows[self.last_id] = Row(message)
        self.store.snapshot()
        [[entry], _] = self.store.read_ready(self.last_id, self.last_id, limit=1, bytes_max=100)
        self.entries[self.last_id] = entry

    @rule(ids=st.lists(st.integers(1, 20), max_size=3, unique=True))
    def retry(self, ids: list[int]) -> None:
        parked = {p.id: p for p in Outbox(self.where).parked()}
        chosen = sorted(parked.keys() & set(ids))
        with Outbox(self.where) as outbox:
            assert outbox.retry([*chosen, 999]) == len(chosen)
        assert [touched.id for touched in self.store.touched()] == chosen
        for n in chosen:
            self.counts[parked[n].state] -= 1
            with outbox_at(self.where).reading() as session:
                found = session.run("any_message", {"chosen": [n]}).fetchone()
            entry = entry_of(MessageRow._make(found))
            assert entry.nacked == 0
            self.entries[n] = entry
            late = self.entries[n].expires_at  # long ago
            assert (late is None or late < 10, entry.expires_at) == (True, None)
            self.rows[n] = Row(entry.message, entry.due_at)
            self.holding.pop(n, None)
            key = entry.message.ordering_key
            if key is not None:  # which is let go: its first message falls due
                first = min(i for i, r in self.rows.items() if r.message.ordering_key == key)
                if self.rows[first].due_at is None:
                    self.rows[first].due_at = 0.0

    @invariant()
    def the_audit_finds_no_difference(self) -> None:
        with outbox_at(self.where).reading() as session:
            assert session.run("audit").fetchone() == (0, 0, 0, 0)


class PostgresMachine(FileMachine):
    """The same in PostgreSQL, in a schema for each history."""

    database = ""

    def open(self) -> Store:
        if isinstance(self.where, Path):
            self.where = f"{self.database}?schema=m{uuid4().hex}"
            Outbox(self.where).create()
        return super().open()


@pytest.mark.timeout(600)  # a machine with other work to do
@pytest.mark.parametrize("examples", [4, pytest.param(40, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "machine",
    [StoreMachine, FileMachine, pytest.param(PostgresMachine, marks=pytest.mark.postgres)],
)
def test_stores_behave_like_the_model(
    machine: type[StoreMachine],
    examples: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In PostgreSQL a history takes ten times as long as in a file: there are fewer of them."""
    examples, steps = 8 * examples, 20
    if machine is PostgresMachine:
        PostgresMachine.database = request.getfixturevalue("postgres_url")
        # Nothing turns here, so nothing tells operators that the relay lives.
        monkeypatch.setattr("reliablepub.outbox.postgres.database.EXPIRY_S", 600.0)
        examples, steps = examples // 8, 12
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )
