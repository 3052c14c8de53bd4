"""Operator actions on messages: retry, park, discard, reroute, skip; also while a relay runs.

Knows: the effect of each action on a row and on the ledger, which rows must not be changed, how a
large change is split into small transactions. Must never know: what a selection asks for, how a
relay publishes.

A relay holds messages in memory. So each change is recorded in ``reliablepub_interventions``, in
the transaction that makes it, under a growing number. The relay reads the newest number under the
write lock of each of its commits, drops the changed messages from memory, and only then sends. A
message that is in flight cannot be withdrawn: it is left unchanged and reported. Its tag, or a note
of its caller, is committed to ``reliablepub_in_flight`` before its bytes are written to the socket,
so no message in flight is missed.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from reliablepub.errors import InvalidMessage, OutboxDiskFull
from reliablepub.message import Message
from reliablepub.outbox.admin.selection import (
    GIVEN_UP_STATES,
    OPEN_STATES,
    STATES,
    Selection,
    those_that_match,
)
from reliablepub.outbox.database import NO_CHANGE, Database, Relaying, Session
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.rows import (
    ID_MAX,
    MISTYPED,
    REPLY_TEXT_MAX,
    MessageRow,
    Unreadable,
    rewritten,
)
from reliablepub.printable import printable

T = TypeVar("T")

CHUNK: Final = 500
"""Messages in one transaction: few, so that a relay waits only briefly for the write lock."""
PAUSE_S_MAX: Final = 0.2
FULL_S: Final = 5.0
"""Seconds for which a transaction that finds the disk full is tried again."""


def step_by_step(
    database: Database,
    steps: Iterable[Callable[[Session], T]],  # `Database.write` may call each again
    halve: Callable[[], bool] = lambda: False,  # makes the step smaller; False if it cannot be
) -> Iterator[T]:
    """Run each step in its own transaction, then release the write lock for as long as it took.

    The pause between two steps is at most `PAUSE_S_MAX`. A step that does not fit on a full disk is
    tried again for `FULL_S`, if it can be smaller, or if a relay runs.
    """

    def may_fit_later(error: BaseException) -> bool:
        if not isinstance(error, OutboxDiskFull):
            return False
        if halve():
            return True
        with database.reading() as session:
            return _is_relayed(session)  # it may free some space

    write = Retrying(
        retry=retry_if_exception(may_fit_later),
        stop=stop_after_delay(FULL_S),
        wait=wait_fixed(PAUSE_S_MAX),
        reraise=True,
    ).wraps(database.write)
    pause_s = 0.0
    for step in steps:
        time.sleep(pause_s)
        begun = time.monotonic()
        result = write(step)
        pause_s = min(PAUSE_S_MAX, time.monotonic() - begun)
        yield result


def _is_relayed(session: Session) -> bool:
    return Relaying.first(session.relays()).pid is not None


class Action(StrEnum):
    """Action of an operator on a message."""

    RETRY = "retry"
    PARK = "park"
    DISCARD = "discard"
    REROUTE = "reroute"
    SKIP = "skip"
    """Leave the message parked, and send the later messages of its ordering key."""


_OF_ANY_ROW: Final = (Action.PARK, Action.DISCARD)
"""Actions that need no column of the message to have the right type."""
_UNFIT: Final = (Unreadable, InvalidMessage, UnicodeDecodeError)
"""Errors of a damaged row, and of a message that cannot have the new address."""
EARLIER: Final = "an attempt before the message came to this outbox"

FIT: Final[dict[Action, tuple[str, ...]]] = {
    Action.RETRY: ("waiting", *GIVEN_UP_STATES),
    Action.PARK: OPEN_STATES,
    Action.DISCARD: STATES,
    Action.REROUTE: STATES,
    Action.SKIP: ("parked",),
}
"""States of a message in which each action is possible."""


@dataclass(frozen=True, slots=True)
class Intervention:
    """One decision of an operator about any number of messages."""

    action: Action
    exchange: str | None = None  # for `Action.REROUTE`; None keeps the old one
    routing_key: str | None = None  # as the exchange
    note: str = ""
    person: str = field(default_factory=lambda: printable(f"{_user()}@{socket.gethostname()}"))
    due_at: float | None = None  # when to send an open message, for `Action.RETRY`; None: now
    # Changes only messages that no queue can hold; a discard forgets their deduplication keys
    is_unsent: bool = False

    def __post_init__(self) -> None:
        """Check the address, and that every database can store the texts."""
        for name in ("exchange", "routing_key", "note", "person"):
            text = getattr(self, name) or ""
            if "\0" in text:
                raise InvalidMessage(name, "has the character U+0000")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidMessage(name, f"cannot be encoded as UTF-8: {error.reason}") from None
        Message(b"", self.exchange or "", self.routing_key or "")

    @property
    def states(self) -> tuple[str, ...]:
        """States of a message in which the intervention is possible."""
        return FIT[self.action] if self.due_at is None else OPEN_STATES


@dataclass(slots=True)
class Effect:
    """Result of an intervention. The lists hold ids: of unchanged messages, except `possible`."""

    changed: int = 0
    # Not answered by the broker yet; or sent by a dead relay, while another shard has a relay; or,
    # with `Intervention.is_unsent`, perhaps in a queue
    in_flight: list[int] = field(default_factory=list)
    # Gone, in a state that does not allow the action, or no longer in the selection
    unfit: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)  # or cannot have the new address
    possible: list[int] = field(default_factory=list)  # discarded, but perhaps in a queue

    def add(self, other: Effect) -> None:
        """Add the result of another transaction."""
        self.changed += other.changed
        self.in_flight += other.in_flight
        self.unfit += other.unfit
        self.damaged += other.damaged
        self.possible += other.possible


def intervene(
    database: Database,
    ids: Iterable[int],
    intervention: Intervention,
    *,
    selection: Selection | None = None,  # what it no longer matches stays unchanged
    keys: OutboxKeys | None = None,  # needed to reroute encrypted messages
    progress: Callable[[int], None] = lambda _: None,  # gets the number of ids done so far
    clock: Callable[[], float] = time.time,
) -> Effect:
    """Apply an intervention, a few hundred messages in each transaction.

    Other processes may use the outbox meanwhile. If it raises, earlier transactions stay committed.
    """
    with database.reading():
        pass  # raises if there is no outbox, because `write` would create one
    effect = Effect()
    chosen = list(dict.fromkeys(ids))
    first, size = 0, CHUNK

    def steps() -> Iterator[Callable[[Session], Effect]]:
        while first < len(chosen):
            yield step

    def step(session: Session) -> Effect:
        part = chosen[first : first + size]
        return _change_chosen(session, part, intervention, clock(), selection=selection, keys=keys)

    def halve() -> bool:
        nonlocal size
        is_one, size = size == 1, max(size // 2, 1)
        return not is_one

    with closing(database):
        for came_to in step_by_step(database, steps(), halve):
            effect.add(came_to)
            first = min(first + size, len(chosen))
            size = min(2 * size, CHUNK)
            progress(first)
    return effect


def _change_chosen(
    session: Session,
    ids: Sequence[int],
    intervention: Intervention,
    now: float,
    *,
    selection: Selection | None,
    keys: OutboxKeys | None,
) -> Effect:
    """Change the messages that still match, and forget the keys of those that were cancelled."""
    matching = set(ids) if selection is None else those_that_match(session, selection, ids)
    chosen = [id_ for id_ in ids if id_ in matching]
    effect = change(session, chosen, intervention, now, keys=keys)
    if intervention.is_unsent and intervention.action is Action.DISCARD:
        for id_ in set(chosen).difference(effect.in_flight, effect.unfit, effect.damaged):
            session.run("forget_keys_of", {"id": id_})
    effect.unfit += [id_ for id_ in ids if id_ not in matching]
    return effect


def foresee(
    database: Database,
    ids: Iterable[int],
    intervention: Intervention,
    *,
    keys: OutboxKeys | None = None,  # needed to reroute encrypted messages
) -> Effect:
    """Return what `intervene` would do at this moment. Nothing is changed."""
    with database.reading() as session:
        is_relayed = _is_relayed(session)
        step = _Step(session, intervention, 0.0, keys, is_relayed=is_relayed)
        return step.foresee(dict.fromkeys(ids))


def change(
    session: Session,
    ids: Sequence[int],
    intervention: Intervention,
    now: float,
    *,
    keys: OutboxKeys | None = None,
) -> Effect:
    """Apply an intervention within an open transaction that may write; keys are not forgotten."""
    # Checked under the write lock: a relay that starts later reads the changed rows.
    is_relayed = _is_relayed(session)
    if not is_relayed:
        # Without a relay nothing is in flight. Messages that the last relay left in flight are
        # first recorded as uncertain: the record must show that a queue may hold them.
        session.settle_left_in_flight(now, ids)
    return _Step(session, intervention, now, keys, is_relayed=is_relayed).change(ids)


class _Step:
    """The changes of one transaction."""

    def __init__(
        self,
        session: Session,
        intervention: Intervention,
        now: float,
        keys: OutboxKeys | None,
        *,
        is_relayed: bool,  # else no message can be in flight
    ) -> None:
        self._session = session
        self._intervention = intervention
        self._now = now
        self._keys = keys
        self._is_relayed = is_relayed
        rows = session.run("in_flight_ids") if is_relayed else ()
        self._in_flight = {id_ for (id_,) in rows}
        self._ledgers: dict[int, dict[str, int]] = {}  # one for each shard
        self._ledger = dict(NO_CHANGE)
        self._effect = Effect()

    def change(self, ids: Sequence[int]) -> Effect:
        """Change the messages that can be changed; return the result for all ids."""
        effect, is_unsent = self._effect, self._intervention.is_unsent
        for id_ in ids:
            found = self._session.run("state", {"id": id_}).fetchone()
            state, shard, is_changeable = found or (None, 0, True)
            if state not in self._intervention.states:
                effect.unfit.append(id_)
            elif id_ in self._in_flight or (is_unsent and self._is_possible(id_)):
                effect.in_flight.append(id_)
            else:
                self._ledger = self._ledgers.setdefault(shard, dict(NO_CHANGE))
                before, possible = dict(self._ledger), len(effect.possible)
                try:
                    with self._session.attempt():
                        self._apply(id_, state, is_changeable=is_changeable)
                except _UNFIT:
                    self._ledger.update(before)
                    del effect.possible[possible:]
                    effect.damaged.append(id_)
                else:
                    effect.changed += 1
        for shard, ledger in self._ledgers.items():
            self._session.run("change_ledger", ledger | {"shard": shard})
        return effect

    def foresee(self, ids: Iterable[int]) -> Effect:
        """Return what `change` would do; see the function of this name."""
        effect, action = self._effect, self._intervention.action
        # `change` first records these as uncertain, because a queue may hold them.
        left = set() if self._is_relayed else {id_ for (id_,) in self._session.run("in_flight_ids")}
        is_unsent, is_discard = self._intervention.is_unsent, action is Action.DISCARD
        for id_ in ids:
            found = self._session.run("state", {"id": id_}).fetchone()
            # In PostgreSQL only the turn that `change` takes gives a new message its state.
            message = {} if found else next(self._session.rows("one_message", {"id": id_}), {})
            if (found[0] if found else message.get("state")) not in self._intervention.states:
                effect.unfit.append(id_)
                continue
            asks = is_unsent or is_discard
            is_possible = asks and (id_ in left or self._is_possible(id_))
            if id_ in self._in_flight or (is_unsent and is_possible):
                effect.in_flight.append(id_)
                continue
            try:
                self._checked(id_, is_changeable=found is None or found[2])
            except _UNFIT:
                effect.damaged.append(id_)
                continue
            effect.changed += 1
            effect.possible += [id_] if is_possible else []
        return effect

    def _checked(self, id_: int, *, is_changeable: bool) -> tuple[dict[str, object], int] | None:
        """Return the columns of a rerouted row, and its growth, before anything is changed."""
        action = self._intervention.action
        if not is_changeable and action not in _OF_ANY_ROW:
            raise Unreadable(MISTYPED)
        if action in (Action.RETRY, Action.REROUTE) and not 1 <= id_ <= ID_MAX:
            raise Unreadable("its number is not one that reliablepub assigns")
        return self._rerouted(id_) if action is Action.REROUTE else None

    def _apply(self, id_: int, state: str, *, is_changeable: bool) -> None:
        """Change one row, within an attempt."""
        action = self._intervention.action
        rerouted = self._checked(id_, is_changeable=is_changeable)
        record = {"id": id_, "at": self._now, "action": action.value}
        record |= {"person": self._intervention.person, "note": self._intervention.note}
        self._session.run("insert_intervention", record)
        if action is Action.PARK:
            self._park(id_)
        elif action is Action.DISCARD:
            self._discard(id_, state)
        elif action is Action.SKIP:
            self._session.run("skip", {"id": id_})
        else:
            self._make_due(id_, state)
        if rerouted is not None:
            row, grown_bytes = rerouted
            self._session.run("reroute", row)
            self._ledger["open_bytes"] += grown_bytes

    def _park(self, id_: int) -> None:
        words = f"parked by {self._intervention.person}"
        if self._intervention.note:
            words += f": {self._intervention.note}"
        words = words[:REPLY_TEXT_MAX]  # the note is kept whole with the intervention
        row = {"id": id_, "at": self._now, "outcome": "withdrawn", "reply_text": words}
        self._session.run("park_as_it_is", row)
        self._ledger["parked"] += 1
        self._delete_open(id_)

    def _discard(self, id_: int, state: str) -> None:
        self._ledger["discarded"] += 1
        if self._is_possible(id_):
            self._effect.possible.append(id_)
            record = {"id": id_, "at": self._now, "reply_text": EARLIER}
            self._session.run("remember_counts", record)
        if state in OPEN_STATES:
            self._session.run("next_falls_due", {"id": id_})
            self._delete_open(id_)
        else:
            self._session.run("delete_parked", {"id": id_}).fetchone()
            self._ledger[state] -= 1

    def _delete_open(self, id_: int) -> None:
        (size,) = self._session.run("delete_open", {"id": id_}).fetchone()
        # A damaged row may hold anything; `audit` then reports the difference.
        self._ledger["open_bytes"] -= size if isinstance(size, int) else 0

    def _is_possible(self, id_: int) -> bool:
        (is_possible,) = self._session.run("is_possible", {"id": id_}).fetchone()
        return bool(is_possible)

    def _make_due(self, id_: int, state: str) -> None:
        if self._intervention.due_at is not None:
            self._session.run("due_at", {"id": id_, "due_at": self._intervention.due_at})
            return
        if state in OPEN_STATES:
            self._session.run("due_now", {"id": id_})
            return
        self._session.run("unpark", {"id": id_})
        (size,) = self._session.run("delete_parked", {"id": id_}).fetchone()
        self._ledger[state] -= 1
        self._ledger["open_bytes"] += size

    def _rerouted(self, id_: int) -> tuple[dict[str, object], int]:
        """Return the columns that the new address changes, and the message's growth in bytes."""
        row = MessageRow._make(self._session.run("any_message", {"id": id_}).fetchone())
        before = Message(b"", row.exchange.decode(), row.routing_key.decode())
        asked = self._intervention
        after = replace(
            before,
            exchange=before.exchange if asked.exchange is None else asked.exchange,
            routing_key=before.routing_key if asked.routing_key is None else asked.routing_key,
        )
        grown_bytes = after.size - before.size
        changed = rewritten(row, self._keys, exchange=after.exchange, routing_key=after.routing_key)
        return {"size": row.size + grown_bytes, **changed}, grown_bytes


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return str(os.geteuid())
