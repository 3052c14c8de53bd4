"""The relay, a real outbox and a scripted broker, moved at random, and crashed at any moment.

After every step the file is compared with what the callers were promised and the broker really did.
"""

import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from reliablepub._core.session import Session
from reliablepub.errors import OutboxDiskFull
from reliablepub.message import Message
from reliablepub.outbox import Outbox
from reliablepub.outbox.entry import Entry
from reliablepub.outbox.store import SqliteStore
from reliablepub.outcome import OutcomeKind
from reliablepub.relay.clock import Clock
from reliablepub.relay.handover import Chunk, Inbox
from reliablepub.relay.limits import Limits
from reliablepub.relay.relay import Relay
from tests.relay.scripted import Time, Told, WatchedStore, patient
from tests.relay.scripted_broker import ScriptedBroker

WINDOW_MAX = 6
KINDS = st.sampled_from(["good", "good", "good", "good", "poison", "lost", "full", "huge"])


class RelayMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="relay-model-")) / "outbox.db"
        self.time = Time()
        self.count = 0
        self.handed_over: list[tuple[Told, list[str]]] = []
        self.enqueued: set[str] = set()
        self.parked: set[str] = set()
        self.crashes = 0
        self.is_disk_full = False
        self.store: SqliteStore | None = None
        self.begin()

    def begin(self) -> None:
        self.store = SqliteStore(self.path, clock=lambda: self.time.wall)
        watched = WatchedStore(self.store, [])
        watched.fails = lambda turn: OutboxDiskFull("full") if self.is_disk_full else None
        self.broker = ScriptedBroker(lambda id_: id_ in self.open_ids())
        self.session: Session[Entry] = Session(
            window_max=WINDOW_MAX, window_bytes_max=10_000, confirm_timeout_s=30.0
        )
        self.inbox = Inbox(lambda: None)
        self.relay = Relay(
            store=watched,
            transport=self.broker,
            session=self.session,
            inbox=self.inbox,
            policy=patient(2, 3.0),
            limits=Limits(40, 100_000, 10, 10_000),
            clock=Clock(lambda: self.time.now, lambda: self.time.wall),
        )

    # ------------------------------------------------------------------ what is on disk

    def ids_in(self, table: str) -> set[str]:
        assert self.store is not None
        rows = self.store._connection.execute(f"SELECT message_id FROM reliablepub_{table}")
        return {row[0] for row in rows}

    def open_ids(self) -> set[str]:
        return self.ids_in("messages")

    @property
    def promised(self) -> set[str]:
        """Every message whose caller was told that it is stored."""
        own = {id_ for told, ids in self.handed_over if told.is_stored for id_ in ids}
        return own | self.enqueued

    # ------------------------------------------------------------------ rules

    @rule(kinds=st.lists(KINDS, min_size=1, max_size=8))
    def hand_over(self, kinds: list[str]) -> None:
        ids = [self.fresh(kind) for kind in kinds]
        told = Told()
        self.inbox.put(Chunk([Message(b"x", message_id=id_) for id_ in ids], told, told))
        self.handed_over.append((told, ids))

    @rule(kind=KINDS)
    def enqueue_elsewhere(self, kind: str) -> None:
        with Outbox(self.path) as outbox:
            self.enqueued.add(outbox.enqueue(Message(b"x", message_id=self.fresh(kind))))

    def fresh(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    @rule(after_s=st.sampled_from([0.0, 0.02, 0.06, 0.3, 5.0, 40.0]), is_flushing=st.booleans())
    def turn(self, after_s: float, is_flushing: bool) -> None:  # noqa: FBT001 - hypothesis names it
        self.time.now += after_s
        self.relay.turn(is_flushing=is_flushing)
        self.relay.handle(self.broker.listen(None))

    @rule(is_accepted=st.booleans())
    def connection(self, is_accepted: bool) -> None:  # noqa: FBT001
        if is_accepted:
            self.broker.accept()
        else:
            self.broker.refuse()

    @rule()
    def get_going(self) -> None:
        """Connect and open channels, so that random steps get somewhere."""
        for _ in range(3):
            self.turn(20.0, is_flushing=False)
            self.broker.accept()
            self.broker.open_channels()

    @rule(count=st.integers(1, 8))
    def read(self, count: int) -> None:
        self.broker.read(count)

    @rule(data=st.data(), multiple=st.booleans())
    def confirm(self, data: Any, multiple: bool) -> None:  # noqa: FBT001
        self.broker.confirm(
            lambda owed: data.draw(st.permutations(owed))[: data.draw(st.integers(1, 4))],
            multiple=multiple,
        )

    @rule()
    def lose_connection(self) -> None:
        self.broker.drop("reset by peer")

    @rule()
    def fill_or_free_the_disk(self) -> None:
        self.is_disk_full = not self.is_disk_full

    @rule()
    def crash(self) -> None:
        """As by kill -9: nothing of the process remains but the file; the kernel frees the lock."""
        assert self.store is not None
        acked, accepted, refused = self.broker.acked, self.broker.accepted, self.broker.refused
        self.store._connection.close()
        self.store._lease.release()
        self.crashes += 1
        self.begin()
        self.broker.acked, self.broker.accepted, self.broker.refused = acked, accepted, refused

    # ------------------------------------------------------------------ invariants

    @invariant()
    def nothing_promised_is_lost(self) -> None:
        gone = self.promised - self.open_ids() - self.ids_in("parked")
        assert gone <= self.broker.acked, f"lost: {gone - self.broker.acked}"

    @invariant()
    def nobody_is_told_what_is_not_true(self) -> None:
        parked = self.ids_in("parked")
        open_ids = self.open_ids()
        for told, ids in self.handed_over:
            assert set(told.outcomes) <= set(ids)
            if told.error is not None:
                assert not (open_ids | parked | set(self.broker.accepted)) & set(ids)
            for id_, kind in told.kinds.items():
                if kind is OutcomeKind.CONFIRMED:
                    assert id_ in self.broker.acked
                    assert id_ not in parked
                else:
                    assert id_ in parked

    @invariant()
    def what_is_parked_was_refused_and_stays(self) -> None:
        parked = self.ids_in("parked")
        assert self.parked <= parked
        self.parked = parked
        for id_ in parked:
            assert not id_.startswith("good"), "an innocent message was parked"
            if not id_.startswith("huge"):
                assert self.broker.refused.get(id_, 0) >= 2, "parked before its budget was spent"

    @invariant()
    def nothing_is_published_that_nobody_put_in(self) -> None:
        put = {id_ for _, ids in self.handed_over for id_ in ids} | self.enqueued
        assert set(self.broker.accepted) <= put

    @invariant()
    def the_window_holds(self) -> None:
        assert self.session.in_flight <= WINDOW_MAX

    @invariant()
    def the_ledger_adds_up(self) -> None:
        assert self.store is not None
        row = self.store._connection.execute(
            "SELECT open_difference, parked_difference, expired_difference, bytes_difference,"
            " stored FROM reliablepub_audit"
        ).fetchone()
        assert row[:4] == (0, 0, 0, 0)
        assert row[4] >= len(self.promised)

    # ------------------------------------------------------------------ in the end all is well

    def teardown(self) -> None:
        assert self.store is not None
        self.is_disk_full = False
        for _ in range(5_000):  # each poisoned one costs several channels
            self.turn(7.0, is_flushing=True)
            self.broker.accept()
            self.broker.open_channels()
            self.broker.read(100)
            self.broker.confirm(lambda owed: owed, multiple=False)
            if not self.open_ids() and not self.broker.events:
                break
        self.turn(1.0, is_flushing=True)
        assert self.open_ids() == set(), "it never ran empty"
        self.nothing_promised_is_lost()
        self.nobody_is_told_what_is_not_true()
        self.the_ledger_adds_up()
        loaded = self.relay._loaded
        assert (loaded._messages, loaded._bytes) == (0, 0)
        assert (loaded._waiters, loaded._due) == ({}, set())
        assert self.relay._verdicts.ranges._by_epoch == {}
        self.nobody_waits_in_vain()
        self.store.close()
        with closing(sqlite3.connect(self.path)) as connection:
            left = connection.execute("SELECT count(*) FROM reliablepub_in_flight")
            assert left.fetchone() == (0,)
        shutil.rmtree(self.path.parent)

    def nobody_waits_in_vain(self) -> None:
        """Who handed over to the relay that lived to the end has heard of every message."""
        if self.crashes == 0:
            for told, ids in self.handed_over:
                assert told.is_stored or told.error is not None
                assert not told.is_stored or set(told.outcomes) == set(ids)


def test_the_relay_keeps_its_word_whatever_happens() -> None:
    run_state_machine_as_test(
        RelayMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            phases=set(Phase) - {Phase.explain},  # it takes minutes
        ),
    )
