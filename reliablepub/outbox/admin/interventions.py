"""Operator actions on messages, such as retry, park and edit; also while a relay runs.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import Any, Final, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from reliablepub.errors import InvalidMessage, OutboxDiskFull, OutboxError
from reliablepub.headers import FieldValue
from reliablepub.message import Message
from reliablepub.outbox.admin.selection import (
    CONFIRMED,
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
    REPLY_TEXT_MAX,
    MessageRow,
    Unreadable,
    revised,
)
from reliablepub.printable import printable

T = TypeVar("T")

CHUNK: Final = 1_000
"""Messages in one transaction: few, so that a relay waits only briefly for the write lock."""
PAUSE: Final = 0.25
"""Length of a pause, as a part of the step before it: a relay commits in each of them."""
PAUSE_S_MAX: Final = 0.2
_READ_BYTES: Final = 16 * 1024 * 1024
"""Most bytes of messages that are read at a time, unless one is larger."""
_SIZE: Final = 1024 * 1024
"""What counts for a message whose size is not known."""
FULL_S: Final = 5.0
"""Seconds for which a transaction that finds the disk full is tried again."""


def step_by_step(
    database: Database,
    steps: Iterable[Callable[[Session], T]],  # `Database.write` may call each again
    halve: Callable[[], bool] = lambda: False,  # makes the step smaller; False if it cannot be
) -> Iterator[T]:
    """Run each step in its own transaction, and let others write in a pause between two of them.

    The pause is a part of the time of the step (`PAUSE`), and at most `PAUSE_S_MAX`. A step that
    does not fit on a full disk is tried again for `FULL_S`, if it can be smaller, or a relay runs.
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
        pause_s = min(PAUSE_S_MAX, PAUSE * (time.monotonic() - begun))
        yield result


def _is_relayed(session: Session) -> bool:
    return Relaying.first(session.relays()).pid is not None


class Action(StrEnum):
    """Action of an operator on a message."""

    RETRY = "retry"
    PARK = "park"
    DISCARD = "discard"
    REROUTE = "reroute"
    EDIT = "edit"
    """Change properties, headers or body; the original is kept with the intervention."""
    REPLAY = "replay"
    """Send a confirmed message again, which the relay has kept."""
    SKIP = "skip"
    """Leave the message parked, and send the later messages of its ordering key."""


_OF_ANY_ROW: Final = (Action.PARK, Action.DISCARD)
"""Actions that need no column of the message to have the right type."""
_REVISING: Final = (Action.REROUTE, Action.EDIT)
_UNFIT: Final = (Unreadable, InvalidMessage, UnicodeDecodeError)
"""Errors of a damaged row, and of a message that cannot be changed so."""
EARLIER: Final = "an attempt before the message came to this outbox"

FIT: Final[dict[Action, tuple[str, ...]]] = {
    Action.RETRY: ("waiting", *GIVEN_UP_STATES),
    Action.PARK: OPEN_STATES,
    Action.DISCARD: STATES,
    Action.REROUTE: STATES,
    Action.EDIT: STATES,
    Action.REPLAY: (CONFIRMED,),
    Action.SKIP: ("parked",),
}
"""States of a message in which each action is possible."""


@dataclass(frozen=True, slots=True)
class Intervention:
    """One decision of an operator about any number of messages."""

    action: Action
    exchange: str | None = None  # new one, for `Action.REROUTE` and `EDIT`; None keeps the old one
    routing_key: str | None = None  # as the exchange
    # New properties, or body, by field of `Message`, for `Action.EDIT`; None removes a property
    changes: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, FieldValue] = field(default_factory=dict)  # new ones, for `Action.EDIT`
    dropped: frozenset[str] = frozenset()  # names of headers to remove
    note: str = ""
    person: str = field(default_factory=lambda: printable(f"{_user()}@{socket.gethostname()}"))
    due_at: float | None = None  # when to send an open message, for `Action.RETRY`; None: now
    # Changes only messages that no queue can hold; a discard forgets their deduplication keys
    is_unsent: bool = False

    def __post_init__(self) -> None:
        """Check what is new, and that every database can store the texts."""
        for name in ("exchange", "routing_key", "note", "person"):
            text = getattr(self, name) or ""
            if "\0" in text:
                raise InvalidMessage(name, "has the character U+0000")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidMessage(name, f"cannot be encoded as UTF-8: {error.reason}") from None
        self.revise(Message(b""))

    @property
    def states(self) -> tuple[str, ...]:
        """States of a message in which the intervention is possible."""
        return FIT[self.action] if self.due_at is None else OPEN_STATES

    def revise(self, message: Message) -> Message:
        """Return the message with all that is new."""
        changes = dict(self.changes)
        if self.exchange is not None:
            changes["exchange"] = self.exchange
        if self.routing_key is not None:
            changes["routing_key"] = self.routing_key
        if self.headers or self.dropped:
            kept = {**(message.headers or {}), **self.headers}
            changes["headers"] = {n: v for n, v in kept.items() if n not in self.dropped} or None
        return replace(message, **changes)


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
    """Apply an intervention, `CHUNK` messages in each transaction.

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
        gone = set(chosen).difference(effect.in_flight, effect.unfit, effect.damaged)
        session.run("forget_keys_of", {"chosen": list(gone)})
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
        # `change` first records these as uncertain, because a queue may hold them.
        left = set() if is_relayed else {id_ for (id_,) in session.run("in_flight_ids")}
        chosen, effect = list(dict.fromkeys(ids)), Effect()
        for first in range(0, len(chosen), CHUNK):
            effect = step.foresee(chosen[first : first + CHUNK], left)
        return effect


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


def delete(session: Session, name: str, ids: Sequence[int]) -> int:
    """Delete rows by the statement of this name; return their bytes."""
    # A damaged row may hold anything; `audit` then reports the difference.
    sizes = session.run(name, {"chosen": ids}).fetchall()
    if len(sizes) != len(ids):
        raise OutboxError(
            "nothing was changed, because a trigger that another program has put on a table of the "
            "outbox keeps rows there; drop that trigger"
        )
    return sum(size for (size,) in sizes if isinstance(size, int))


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
        rows = session.run("in_flight_ids") if is_relayed else ()
        self._in_flight = {id_ for (id_,) in rows}
        self._possible: set[int] = set()  # those that a queue may hold
        self._sizes: dict[int, int] = {}
        self._effect = Effect()

    def change(self, ids: Sequence[int]) -> Effect:
        """Change the messages that can be changed; return the result for all ids."""
        effect = self._effect
        self._possible = self._possible_among(ids)
        groups: dict[tuple[str, int], list[int]] = {}  # by state and shard
        for id_, state, shard in self._fit_among(ids, self._states(ids)):
            groups.setdefault((state, shard), []).append(id_)
        for (state, shard), chosen in groups.items():
            ledger = dict(NO_CHANGE)
            self._apply(chosen, state, ledger)
            self._session.run("change_ledger", ledger | {"shard": shard})
        places = {id_: place for place, id_ in enumerate(ids)}
        for found in (effect.damaged, effect.possible):
            found.sort(key=places.__getitem__)
        return effect

    def foresee(self, ids: Sequence[int], left: set[int]) -> Effect:
        """Return what `change` would do; see the function of this name."""
        effect, states = self._effect, self._states(ids)
        # In PostgreSQL only the turn that `change` takes gives a new message its state.
        missing = [id_ for id_ in ids if id_ not in states]
        for state in self._intervention.states:
            found = those_that_match(self._session, Selection(states=(state,)), missing)
            states |= dict.fromkeys(found, (state, 0, True))
        self._possible = self._possible_among(ids) | (left if self._asks_for_possible else set())
        fit = [id_ for id_, _, _ in self._fit_among(ids, states)]
        unfit = self._unrevisable(fit)
        effect.damaged += [id_ for id_ in fit if id_ in unfit]
        effect.possible += [id_ for id_ in fit if id_ in self._possible]
        effect.changed += len(fit) - len(unfit)
        return effect

    def _unrevisable(self, ids: Sequence[int]) -> set[int]:
        """Return the messages that cannot have what is new."""
        found: set[int] = set()
        is_revising = self._intervention.action in _REVISING
        for row in chain.from_iterable(self._read(ids if is_revising else ())):
            try:
                revised(row, self._keys, self._intervention.revise)
            except _UNFIT:
                found.add(row.id)
        return found

    def _fit_among(
        self, ids: Sequence[int], states: Mapping[int, tuple[str, int, bool]]
    ) -> Iterator[tuple[int, str, int]]:
        """Yield the messages that can be changed, with state and shard; note why others cannot."""
        effect, spoiled = self._effect, self._spoiled(states)
        for id_ in ids:
            state, shard, _ = states.get(id_, ("", 0, True))
            if state not in self._intervention.states:
                effect.unfit.append(id_)
            elif id_ in self._in_flight or (self._intervention.is_unsent and id_ in self._possible):
                effect.in_flight.append(id_)
            elif id_ in spoiled:
                effect.damaged.append(id_)
            else:
                yield id_, state, shard

    def _states(self, ids: Sequence[int]) -> dict[int, tuple[str, int, bool]]:
        """Return state and shard of messages, and whether each column has the right type."""
        rows = self._session.run("states", {"chosen": list(ids)}).fetchall()
        self._sizes = {id_: size for id_, *_, size in rows if isinstance(size, int)}
        return {id_: (state, shard, bool(is_fit)) for id_, state, shard, is_fit, _ in rows}

    @property
    def _asks_for_possible(self) -> bool:
        """Whether it matters that a queue may hold a message."""
        return self._intervention.is_unsent or self._intervention.action is Action.DISCARD

    def _possible_among(self, ids: Sequence[int]) -> set[int]:
        """Return the messages that a queue may hold, where that matters."""
        if not self._asks_for_possible:
            return set()
        return {id_ for (id_,) in self._session.run("possible_among", {"chosen": list(ids)})}

    def _spoiled(self, states: Mapping[int, tuple[str, int, bool]]) -> set[int]:
        """Return the messages whose rows no statement can change."""
        action = self._intervention.action
        if action in _OF_ANY_ROW:
            return set()
        is_numbered = action is not Action.SKIP
        return {
            id_
            for id_, (_, _, is_fit) in states.items()
            if not is_fit or (is_numbered and not 1 <= id_ <= ID_MAX)
        }

    def _read(self, ids: Sequence[int]) -> Iterator[list[MessageRow]]:
        """Yield rows with their bodies, so many at a time as memory should hold."""
        part: list[int] = []
        size = 0
        for id_ in (*ids, None):
            size += self._sizes.get(id_ or 0, _SIZE)
            if part and (id_ is None or size > _READ_BYTES):
                found = self._session.run("any_message", {"chosen": part}).fetchall()
                yield list(map(MessageRow._make, found))
                part, size = [], self._sizes.get(id_ or 0, _SIZE)
            part += [] if id_ is None else [id_]

    def _apply(self, ids: list[int], state: str, ledger: dict[str, int]) -> None:
        """Change rows together; if the database refuses one, halve them until it is alone."""
        try:
            with self._session.attempt():
                came_to = self._apply_all(ids, state)
        except _UNFIT:
            if len(ids) == 1:
                self._effect.damaged += ids
                return
            half = len(ids) // 2
            self._apply(ids[:half], state, ledger)
            self._apply(ids[half:], state, ledger)
            return
        self._effect.changed += len(ids)
        if self._intervention.action is Action.DISCARD:
            self._effect.possible += [id_ for id_ in ids if id_ in self._possible]
        for name, difference in came_to.items():
            ledger[name] += difference

    def _apply_all(self, ids: list[int], state: str) -> dict[str, int]:
        """Change rows of one state, within an attempt; return how the ledger changes."""
        asked, chosen = self._intervention, {"chosen": ids}
        record = {"at": self._now, "action": asked.action.value, "person": asked.person}
        self._session.run("insert_intervention", chosen | record | {"note": asked.note})
        if asked.action is Action.EDIT:
            self._session.run("keep_originals", chosen)
        match asked.action:
            case Action.PARK:
                return self._park(ids)
            case Action.DISCARD:
                return self._discard(ids, state)
            case Action.SKIP:
                self._session.run("skip", chosen)
                return {}
            case _:
                return self._make_due(ids, state)

    def _park(self, ids: list[int]) -> dict[str, int]:
        words = f"parked by {self._intervention.person}"
        if self._intervention.note:
            words += f": {self._intervention.note}"
        words = words[:REPLY_TEXT_MAX]  # the note is kept whole with the intervention
        row = {"at": self._now, "outcome": "withdrawn", "reply_text": words}
        self._session.run("park_as_it_is", {"chosen": ids} | row)
        return {"parked": len(ids), "open_bytes": -delete(self._session, "delete_open", ids)}

    def _discard(self, ids: list[int], state: str) -> dict[str, int]:
        if possible := [id_ for id_ in ids if id_ in self._possible]:
            record = {"chosen": possible, "at": self._now, "reply_text": EARLIER}
            self._session.run("remember_counts", record)
        if state not in OPEN_STATES:
            delete(self._session, "delete_parked", ids)
            return {"discarded": len(ids), state: -len(ids)}
        self._session.run("next_falls_due", {"chosen": ids})
        return {"discarded": len(ids), "open_bytes": -delete(self._session, "delete_open", ids)}

    def _make_due(self, ids: list[int], state: str) -> dict[str, int]:
        chosen: dict[str, object] = {"chosen": ids}
        came_to: dict[str, int] = {}
        if self._intervention.due_at is not None:
            self._session.run("due_at", chosen | {"due_at": self._intervention.due_at})
        elif state in OPEN_STATES:
            self._session.run("due_now", chosen)
        elif state == CONFIRMED:
            # Stored again, so that no counter goes back; and marked as one that a queue may hold.
            self._session.run("remember_confirm", chosen)
            self._session.run("open_again", chosen)
            size = delete(self._session, "delete_confirmed", ids)
            came_to = {"stored": len(ids), "open_bytes": size}
        else:
            self._session.run("unpark", chosen)
            size = delete(self._session, "delete_parked", ids)
            came_to = {state: -len(ids), "open_bytes": size}
        if self._intervention.action in _REVISING:
            came_to["open_bytes"] = came_to.get("open_bytes", 0) + self._revise(ids)
        return came_to

    def _revise(self, ids: Sequence[int]) -> int:
        """Change the messages themselves; return by how many bytes they have grown."""
        grown_bytes = 0
        for rows in self._read(ids):
            changed = [revised(row, self._keys, self._intervention.revise) for row in rows]
            self._session.run_each("revise", changed)
            grown_bytes += sum(
                new["size"] - row.size for new, row in zip(changed, rows, strict=True)
            )
        return grown_bytes


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return str(os.geteuid())
