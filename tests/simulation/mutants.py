"""Publishers that break the promise, each in one way: the checker is worth what it finds in these.

Each mutant is the code under test with one rule taken out. It knows the code's inside; it must
never know the checker.
"""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Final

import pytest

from reliablepub._core import quarantine
from reliablepub._core.confirms import ConfirmLedger
from reliablepub._core.events import ConfirmedEach, Ended, Settlement
from reliablepub._core.evidence import Evidence, Verdict
from reliablepub._core.lane import Lane
from reliablepub._core.ordering import KeyOrder
from reliablepub._core.session import Session
from reliablepub.outbox.admin.interventions import Action, _Step
from reliablepub.outbox.entry import Changes, Entry
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import store
from reliablepub.outbox.sqlite.sql import QUERIES
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import CONFIRMED, Outcome, OutcomeKind
from reliablepub.policy import GiveUp, Retries
from reliablepub.relay import callbacks
from reliablepub.relay.handover import Chunk, Inbox, Room
from reliablepub.relay.intake import Intake
from reliablepub.relay.loaded import Loaded
from reliablepub.relay.pauses import Pauses
from reliablepub.relay.relay import Relay
from reliablepub.relay.settling import Removals, Settling
from reliablepub.relay.withdrawals import Withdrawals
from reliablepub.transport.base import CannotEncode

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: Final[dict[str, Mutant]] = {}


def mutant(mutate: Mutant) -> Mutant:
    MUTANTS[mutate.__name__.replace("_", " ")] = mutate
    return mutate


# ---------------------------------------------------------------------- what a confirm means


@mutant
def an_ack_means_all(patch: pytest.MonkeyPatch) -> None:
    real: Any = ConfirmLedger.handle_confirm

    def handle(self: Any, tag: int, outcome: Outcome, *, multiple: bool) -> Any:
        return real(self, tag, outcome, multiple=True)

    patch.setattr(ConfirmLedger, "handle_confirm", handle)


@mutant
def multiple_is_not_expanded(patch: pytest.MonkeyPatch) -> None:
    real: Any = ConfirmLedger.handle_confirm

    def handle(self: Any, tag: int, outcome: Outcome, *, multiple: bool) -> Any:
        return real(self, tag, outcome, multiple=False)

    patch.setattr(ConfirmLedger, "handle_confirm", handle)


@mutant
def multiple_stops_one_short(patch: pytest.MonkeyPatch) -> None:
    real: Any = ConfirmLedger.handle_confirm

    def handle(self: Any, tag: int, outcome: Outcome, *, multiple: bool) -> Any:
        is_short = multiple and tag > 1
        return real(self, tag - 1 if is_short else tag, outcome, multiple=multiple)

    patch.setattr(ConfirmLedger, "handle_confirm", handle)


@mutant
def tags_are_shifted_by_one(patch: pytest.MonkeyPatch) -> None:
    real: Any = ConfirmLedger.handle_confirm

    def handle(self: Any, tag: int, outcome: Outcome, *, multiple: bool) -> Any:
        return real(self, min(tag + 1, self.last_tag), outcome, multiple=multiple)

    patch.setattr(ConfirmLedger, "handle_confirm", handle)


@mutant
def a_nack_is_an_ack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("reliablepub._core.session.NACKED", CONFIRMED)


@mutant
def a_return_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConfirmLedger, "handle_return", lambda *_: None)


@mutant
def tag_0_means_all(patch: pytest.MonkeyPatch) -> None:
    real: Any = ConfirmLedger.handle_confirm

    def handle(self: Any, tag: int, outcome: Outcome, *, multiple: bool) -> Any:
        return real(self, tag or self.last_tag, outcome, multiple=multiple)

    patch.setattr(ConfirmLedger, "handle_confirm", handle)


@mutant
def a_tag_beyond_the_last_means_all(patch: pytest.MonkeyPatch) -> None:
    real: Any = ConfirmLedger.handle_confirm

    def handle(self: Any, tag: int, outcome: Outcome, *, multiple: bool) -> Any:
        return real(self, min(tag, max(1, self.last_tag)), outcome, multiple=multiple)

    patch.setattr(ConfirmLedger, "handle_confirm", handle)


@mutant
def an_unknown_return_is_ignored(patch: pytest.MonkeyPatch) -> None:
    real: Any = ConfirmLedger.handle_return

    def handle(self: Any, tag: int, reply_code: int, reply_text: str) -> None:
        if tag:
            real(self, tag, reply_code, reply_text)

    patch.setattr(ConfirmLedger, "handle_return", handle)


@mutant
def a_late_confirm_of_an_old_epoch_counts(patch: pytest.MonkeyPatch) -> None:
    def lane(self: Any, epoch: int) -> Any:
        return self._main if self._main.ledger is not None else None

    patch.setattr(Session, "_lane", lane)


# ---------------------------------------------------------------------- what follows from it


@mutant
def uncertain_is_treated_as_confirmed(patch: pytest.MonkeyPatch) -> None:
    real: Any = Settling.attempts_ended

    def attempts_ended(self: Any, ended: Sequence[Ended[Entry]], *times: float) -> Any:
        told = [
            ConfirmedEach(one.epoch, [one.tag], [one.key], [(one.batch, 1)] if one.batch else [])
            if isinstance(one, Settlement) and one.outcome.kind is OutcomeKind.UNCERTAIN
            else one
            for one in ended
        ]
        return real(self, told, *times)

    patch.setattr(Settling, "attempts_ended", attempts_ended)


@mutant
def an_outage_spends_the_budget(patch: pytest.MonkeyPatch) -> None:
    real: Any = Settling.decide

    def decide(self: Any, settlement: Settlement[Entry], now: float, wall: float) -> None:
        if settlement.outcome.kind is OutcomeKind.UNCERTAIN:
            settlement.key.refused += 1
        real(self, settlement, now, wall)

    patch.setattr(Settling, "decide", decide)


@mutant
def a_retry_has_another_id(patch: pytest.MonkeyPatch) -> None:
    real: Any = Settling.decide

    def decide(self: Any, settlement: Settlement[Entry], now: float, wall: float) -> None:
        real(self, settlement, now, wall)
        entry = settlement.key
        if settlement.outcome.kind is OutcomeKind.UNCERTAIN:
            entry.message = entry.message.with_message_id(f"{entry.message.message_id}-again")

    patch.setattr(Settling, "decide", decide)


@mutant
def parked_without_a_reason(patch: pytest.MonkeyPatch) -> None:
    real: Any = store.write_changes

    def write(connection: Any, turn: Changes, *rest: Any, **options: Any) -> Any:
        turn.parked = [replace(a, outcome=Outcome(a.outcome.kind)) for a in turn.parked]
        return real(connection, turn, *rest, **options)

    patch.setattr("reliablepub.outbox.sqlite.store.write_changes", write)


@mutant
def resent_on_the_same_channel(patch: pytest.MonkeyPatch) -> None:
    def retire(self: Any, lane: Any, reason: str, now: float) -> None:
        again = list(lane.ledger._outstanding.values())
        lane.ledger._outstanding.clear()
        lane.ledger._returned.clear()
        lane._batches.clear()
        lane.in_flight = lane.in_flight_bytes = 0
        lane.buffer.extendleft(reversed(again))

    patch.setattr(Session, "_retire", retire)


@mutant
def no_confirm_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "handle_timeout", lambda *_: None)


@mutant
def sending_goes_on_while_blocked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "_can_write", property(lambda self: self.is_connected))


@mutant
def the_window_is_ignored(patch: pytest.MonkeyPatch) -> None:
    real: Any = Lane.transmit

    def transmit(self: Any, *, room: int, **rest: Any) -> Any:
        return real(self, room=room + 1, **rest)

    patch.setattr(Lane, "transmit", transmit)


@mutant
def confirmed_messages_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Removals, "take", lambda *_, **__: None)


@mutant
def all_suspects_are_guilty(patch: pytest.MonkeyPatch) -> None:
    real: Any = Lane.suspects
    patch.setattr(Lane, "suspects", property(lambda self: real.fget(self)[:1]))


@mutant
def a_refusal_needs_no_evidence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evidence, "verdict", lambda *_: Verdict.REFUSED)


@mutant
def what_passed_anywhere_is_evidence(patch: pytest.MonkeyPatch) -> None:
    real = Evidence.verdict

    def verdict(evidence: Any, key: Any, outcome: Any) -> Verdict:
        found = real(evidence, key, outcome)
        return Verdict.REFUSED if evidence._credits.total() else found

    patch.setattr(Evidence, "verdict", verdict)


@mutant
def half_of_the_suspects_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    real: Any = quarantine._halves
    patch.setattr(quarantine, "_halves", lambda items: real(items)[:1])


@mutant
def suspects_are_not_halved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quarantine, "_halves", lambda items: [items])


# ---------------------------------------------------------------------- a slow link, one channel


@mutant
def what_is_still_leaving_is_overdue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "still_leaving", lambda *_: None)


@mutant
def a_second_channel_is_tried_again_and_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "_is_sharing", property(lambda _: False, lambda *_: None), raising=False)


# ---------------------------------------------------------------------- how long people are patient


@mutant
def patience_is_spent_twice_as_fast(patch: pytest.MonkeyPatch) -> None:
    real: Any = callbacks._spent

    def spent(*args: Any) -> Any:
        refusals, age_s = real(*args)
        return refusals, 2 * age_s

    patch.setattr(callbacks, "_spent", spent)


@mutant
def what_waits_for_a_destination_is_not_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pauses, "release", lambda *_: None)


@mutant
def times_stay_when_the_clock_is_set(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(QUERIES, "rebase", "SELECT :by")
    patch.setattr(Entry, "rebase", lambda *_: None)


# ---------------------------------------------------------------------- the order of a turn


@mutant
def deleted_before_the_ack(patch: pytest.MonkeyPatch) -> None:
    real: Any = SqliteStore.commit

    def commit(self: Any, turn: Changes) -> Any:
        turn.confirmed += [entry for sent in turn.sent for entry in sent.keys]
        return real(self, turn)

    patch.setattr(SqliteStore, "commit", commit)


@mutant
def sent_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    real: Any = Session.poll_transmit

    def poll_transmit(self: Any, now: float) -> Any:
        batches = real(self, now)
        relay = relays[-1]
        for batch in batches:
            messages = [entry.message for entry in batch.keys]
            with suppress(CannotEncode):
                relay._transport.send(batch.epoch, batch.first_tag, messages)
        return batches

    relays: list[Relay] = []
    construct = Relay.__init__

    def init(self: Any, **parts: Any) -> None:
        construct(self, **parts)
        relays.append(self)

    patch.setattr(Relay, "__init__", init)
    patch.setattr(Relay, "_send", lambda *_: None)
    patch.setattr(Session, "poll_transmit", poll_transmit)


@mutant
def callers_are_answered_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    real: Any = Inbox.take

    def take(self: Any, fits: Any) -> Any:
        chunks = real(self, fits)
        for chunk in chunks:
            chunk.stored()
            chunk.done = _Deaf()
        return chunks

    patch.setattr(Inbox, "take", take)


class _Deaf:
    def set(self) -> None:
        pass


@mutant
def a_failed_commit_moves_the_tags(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "take_back", lambda *_: None)


@mutant
def a_failed_commit_is_not_told(patch: pytest.MonkeyPatch) -> None:
    real: Any = Intake.undo

    def undo(self: Any, taken_in: Any, turn: Changes, error: Any) -> None:
        for taken in taken_in:
            taken.done = _Deaf()
        real(self, taken_in, turn, error)

    patch.setattr(Intake, "undo", undo)


# ---------------------------------------------------------------------- what is on disk


@mutant
def a_turn_is_two_transactions(patch: pytest.MonkeyPatch) -> None:
    real: Any = SqliteStore.commit

    def commit(self: Any, turn: Changes) -> Any:
        half = len(turn.new) // 2
        if half:
            first, turn.new = turn.new[:half], turn.new[half:]
            real(self, Changes(new=first))
        return real(self, turn)

    patch.setattr(SqliteStore, "commit", commit)


@mutant
def counted_outside_the_transaction(patch: pytest.MonkeyPatch) -> None:
    real: Any = SqliteStore.commit
    change = "UPDATE reliablepub_ledger SET open_bytes = open_bytes + ?"

    def commit(self: Any, turn: Changes) -> Any:
        size = sum(entry.message.size for entry in turn.new)
        with self._writer as connection:
            connection.execute(change, (size,))
        snapshot = real(self, turn)
        with self._writer as connection:
            connection.execute(change, (-size,))
        return snapshot

    patch.setattr(SqliteStore, "commit", commit)


@mutant
def a_postponed_message_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Loaded, "postpone", Loaded.drop)


@mutant
def a_message_falls_due_twice(patch: pytest.MonkeyPatch) -> None:
    real: Any = Loaded._read_due

    def read_due(self: Any, wall: float) -> Any:
        self._due.clear()
        return real(self, wall)

    patch.setattr(Loaded, "_read_due", read_due)


@mutant
def what_others_enqueue_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SqliteStore, "changed_elsewhere", lambda _: False)


@mutant
def what_an_earlier_run_left_is_not_read(patch: pytest.MonkeyPatch) -> None:
    real: Any = Loaded.__init__

    def init(self: Any, store: Any, *, last_id: int, **rest: Any) -> None:
        real(self, store, last_id=0, **rest)
        self._backlog._seen = last_id

    patch.setattr(Loaded, "__init__", init)


@mutant
def the_outbox_has_no_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "__call__", lambda *_: True)


@mutant
def what_a_person_has_taken_is_sent(patch: pytest.MonkeyPatch) -> None:
    def unload(withdrawals: Withdrawals) -> list[Any]:
        withdrawals.store.touched()
        return []

    patch.setattr(Withdrawals, "unload", unload)


@mutant
def a_person_takes_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("reliablepub.outbox.sqlite.status_file.holder_pid", lambda _: None)


@mutant
def what_shall_be_parked_is_discarded(patch: pytest.MonkeyPatch) -> None:
    real: Any = Retries.verdict

    def verdict(self: Any, *args: Any) -> Any:
        said = real(self, *args)
        return GiveUp.DISCARD if said is GiveUp.PARK else said

    patch.setattr(Retries, "verdict", verdict)


@mutant
def a_retry_by_a_person_loses_the_row(patch: pytest.MonkeyPatch) -> None:
    real: Any = Outbox.retry

    def retry(self: Any, *args: Any) -> Any:
        count = real(self, *args)
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("DELETE FROM reliablepub_messages WHERE due_at IS NOT NULL")
        return count

    patch.setattr(Outbox, "retry", retry)


# ---------------------------------------------------------------------- whose turn it is


@mutant
def a_key_goes_on_past_what_is_parked(patch: pytest.MonkeyPatch) -> None:
    for query in ("ready", "is_first_of_key", "first_of_key", "wait_for_key"):
        patch.setitem(QUERIES, query, QUERIES[query].replace("p.is_skipped = 0", "FALSE"))


@mutant
def a_retry_loses_its_turn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyOrder, "leave", lambda self, key, *_, **__: self.want(key))
    for query in ("ready", "is_first_of_key", "first_of_key"):
        earlier = "e.ordering_key = m.ordering_key"
        patch.setitem(QUERIES, query, QUERIES[query].replace(earlier, f"{earlier} AND FALSE"))


@mutant
def a_look_that_failed_is_not_repeated(patch: pytest.MonkeyPatch) -> None:
    real: Any = Relay._cannot_read

    def cannot_read(self: Any, *details: Any) -> None:
        real(self, *details)
        self._is_unread = False

    patch.setattr(Relay, "_cannot_read", cannot_read)


@mutant
def those_whose_turn_it_is_not_fill_every_page(patch: pytest.MonkeyPatch) -> None:
    real: Any = KeyOrder.admit

    def admit(self: Any, key: str, number: int) -> Any:
        is_admitted = real(self, key, number)
        self._passed_of.clear()
        self.passed.clear()
        return is_admitted

    patch.setattr(KeyOrder, "admit", admit)


@mutant
def a_skip_lets_nobody_go(patch: pytest.MonkeyPatch) -> None:
    real: Any = _Step._apply_all

    def apply(self: Any, ids: list[int], state: str) -> Any:
        came_to = real(self, ids, state)
        for id_ in ids if self._intervention.action is Action.SKIP else ():
            rows = self._session.select(
                "UPDATE reliablepub_messages SET due_at = NULL WHERE due_at = 0"
                " AND ordering_key = (SELECT ordering_key FROM reliablepub_parked WHERE id = :id)"
                " RETURNING id",
                {"id": id_},
            )
            list(rows)  # sqlite-utils 3 runs the statement when its rows are read
        return came_to

    patch.setattr(_Step, "_apply_all", apply)


@mutant
def what_is_skipped_is_deleted(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(
        QUERIES,
        "skip",
        "DELETE FROM reliablepub_parked WHERE id IN (SELECT value FROM json_each(:chosen))",
    )


# ---------------------------------------------------------------------- what callers are told


@mutant
def an_outcome_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    real: Any = Settling._confirmed

    def confirmed(self: Any, run: ConfirmedEach[Entry], *rest: Any) -> None:
        real(self, run, *rest)
        if run.keys[-1].waiter is not None:
            run.keys[-1].waiter.all_confirmed(run.keys[-1:])

    patch.setattr(Settling, "_confirmed", confirmed)


@mutant
def parking_is_told_before_it_is_done(patch: pytest.MonkeyPatch) -> None:
    real: Any = Settling.decide

    def decide(self: Any, settlement: Settlement[Entry], now: float, wall: float) -> None:
        before = len(self.changes.parked)
        real(self, settlement, now, wall)
        entry = settlement.key
        if len(self.changes.parked) > before and entry.waiter is not None:
            waiter, entry.waiter = entry.waiter, None
            waiter.given_up(entry, settlement.outcome)

    patch.setattr(Settling, "decide", decide)


@mutant
def a_chunk_is_stored_behind_one_that_failed(patch: pytest.MonkeyPatch) -> None:
    def failed(self: Any, error: BaseException) -> None:
        self.error = error
        self.done.set()

    patch.setattr(Chunk, "failed", failed)


@mutant
def what_a_caller_took_back_is_stored(patch: pytest.MonkeyPatch) -> None:
    real: Any = Chunk.withdraw

    def withdraw(self: Any) -> bool:
        messages = self.messages
        if not real(self):
            return False
        self.messages, self.done = messages, _Deaf()
        self._claims.append(None)
        return True

    patch.setattr(Chunk, "withdraw", withdraw)
