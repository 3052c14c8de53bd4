"""Search for messages by state, address, age or reason, in an outbox of any size.

Knows: the columns that operators filter by, and how conditions become a statement that every
database runs; values are bound. Must never know: bodies, what the caller does with the messages.

Open messages, those given up and those kept after their confirm are in three tables. A table is
read only if it can have a match, in the requested order, and only up to the limit: the first 50 of
a million messages, by id, are found by reading 50 rows.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, Final

from reliablepub.errors import OutboxError
from reliablepub.outbox.database import Database, Session

OPEN_STATES: Final = ("ready", "waiting")
GIVEN_UP_STATES: Final = ("parked", "expired")
CONFIRMED: Final = "confirmed"
"""State of a confirmed message that the relay keeps for a while; never selected unless named."""
STATES: Final = (*OPEN_STATES, *GIVEN_UP_STATES)
SORTS: Final = {
    "id": "id",
    "age": "stored_at, id",
    "attempts": "attempts DESC, id",
    "size": "size DESC, id",
}
"""Sort orders: oldest, most attempts or largest first."""

NAMES: Final = (
    *("id", "message_id", "exchange", "routing_key", "ordering_key", "state", "attempts"),
    *("stored_at", "expires_at", "size", "due_at", "parked_at"),
    *("outcome", "reply_code", "reply_text", "may_have_arrived", "confirmed_at"),
)
"""Keys of each dictionary that `find` returns, in their order."""

_ZERO: Final = "CAST(0 AS double precision)"
_FINITE: Final = "CAST(1e300 AS double precision)"
"""Of the column's type: see the top of ``postgres/queries.sql``."""
_NAMES: Final = "id, message_id, exchange, routing_key, ordering_key, {state} AS state, "
_COUNTS: Final = "nacked + returned + refused + uncertain AS attempts, stored_at, expires_at, size"
_DOUBT: Final = ", nacked + uncertain > 0 AS may_have_arrived, NULL AS confirmed_at"
_TABLES: Final = {
    "reliablepub_messages": (
        OPEN_STATES,
        _NAMES.format(state=f"CASE WHEN due_at > {_ZERO} THEN 'waiting' ELSE 'ready' END")
        + _COUNTS
        + f", CASE WHEN due_at <> {_ZERO} AND due_at < {_FINITE} THEN due_at END AS due_at"
        ", NULL AS parked_at, NULL AS outcome, NULL AS reply_code, NULL AS reply_text" + _DOUBT,
    ),
    "reliablepub_parked": (
        GIVEN_UP_STATES,
        _NAMES.format(state="state")
        + _COUNTS
        + ", NULL AS due_at, parked_at, outcome, reply_code, reply_text"
        + _DOUBT,
    ),
    "reliablepub_confirmed": (
        (CONFIRMED,),
        _NAMES.format(state=f"'{CONFIRMED}'")
        + "0 AS attempts, stored_at, NULL AS expires_at, size, NULL AS due_at, NULL AS parked_at"
        ", NULL AS outcome, NULL AS reply_code, NULL AS reply_text"
        ", 1 > 0 AS may_have_arrived, confirmed_at",
    ),
}
_OF_STATE: Final = {
    "ready": f"due_at IS NULL OR due_at = {_ZERO}",
    "waiting": f"due_at > {_ZERO}",
    "parked": "state = 'parked'",
    "expired": "state = 'expired'",
}
_SAID: Final = "{of}outcome || ' ' || CAST({of}reply_code AS TEXT) || ' ' || {of}reply_text"
_CONTAINS: Final = "replace(lower({text}), lower(:reason), '') <> lower({text})"
_CONDITIONS: Final = {
    "reliablepub_parked": {
        "reason": _CONTAINS.format(text=_SAID.format(of="")),
        "given_up_before": "parked_at <= :given_up_before",
        "due_before": "1 = 0",
    },
    "reliablepub_messages": {
        # The first condition avoids the lookup in the history for messages that never failed.
        "reason": "nacked + returned + refused + uncertain > 0 AND EXISTS (SELECT 1 "  # noqa: S608
        "FROM reliablepub_attempts AS a WHERE a.id = reliablepub_messages.id AND "
        f"{_CONTAINS.format(text=_SAID.format(of='a.'))})",
        "given_up_before": "1 = 0",
        "due_before": "due_at <= :due_before",
    },
    "reliablepub_confirmed": dict.fromkeys(("reason", "given_up_before", "due_before"), "1 = 0"),
}
_OF_BOTH: Final = {
    "stored_before": "stored_at <= :stored_before",
    "stored_after": "stored_at >= :stored_after",
    "after": "id > :after",
}
"""Conditions by field of `Selection`; the others are patterns for the column of their name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Filter for messages. A message matches if all conditions hold; None is no condition."""

    states: tuple[str, ...] = STATES
    exchange: str | None = None  # a pattern (``*``, ``?``, ``[...]``), as the two keys
    routing_key: str | None = None
    ordering_key: str | None = None
    # Substring, in any ASCII case, of outcome, reply code and reply text: of any attempt of an open
    # message, of the last one of a message that was given up
    reason: str | None = None
    stored_before: float | None = None  # all times are inclusive
    stored_after: float | None = None
    given_up_before: float | None = None  # no open message matches
    due_before: float | None = None  # retries included; only waiting messages match
    after: int | None = None  # the id is higher: the next page of a list by id

    def within(self, states: tuple[str, ...]) -> Selection:
        """Return this selection limited to these states, unless it already names states."""
        return replace(self, states=states) if self.states == STATES else self

    def query(
        self,
        table: str,
        session: Session,
        *,
        columns: str,
        order: str,  # and limit
        among: Sequence[int] | None = None,  # ids of the only rows that can match
    ) -> tuple[str, dict[str, object]]:
        """Return the query for the rows of a table that match, and its values."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "states"}
        values = {name: value for name, value in values.items() if value is not None}
        texts = _OF_BOTH | _CONDITIONS[table]
        conditions = []
        for name, value in values.items():
            conditions.append(texts.get(name) or session.glob.format(column=name))
            if name not in texts:
                values[name] = session.pattern(value)
        asked = [state for state in _TABLES[table][0] if state in self.states]
        if len(asked) < len(_TABLES[table][0]):
            conditions += [_OF_STATE[state] for state in asked]
        if among is not None:
            conditions.append(f"id IN ({', '.join(map(str, map(int, among)))})")
        where = " AND ".join(f"({condition})" for condition in conditions) or "1 = 1"
        return f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {order}", values  # noqa: S608


def find(
    database: Database, selection: Selection, *, sort: str = "id", limit: int
) -> list[dict[str, Any]]:
    """List messages in an order of `SORTS`, with outcome and broker's reply of the last attempt."""
    with database.reading() as session:
        found = list(islice(_merged(session, selection, sort, limit), limit))
        return _with_last_attempt(session, found)


def with_tasks(database: Database, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the name of its Celery task to each row; None of other messages.

    None also if the properties are encrypted, or if this user may not read them.
    """
    names: dict[int, str] = {}
    with suppress(OutboxError), database.reading() as session:
        found = session.run("tasks", {"chosen": [row["id"] for row in rows]})
        names = {id_: task for id_, task in found if isinstance(task, str)}
    return [row | {"task": names.get(row["id"])} for row in rows]


def found_by_due_time(
    database: Database, selection: Selection, *, limit: int
) -> list[dict[str, Any]]:
    """List open messages with the columns of `find`, the next one due first."""
    table = "reliablepub_messages"
    # The column of the table, not of the result: an index has its order.
    order = f"{table}.due_at, {table}.id LIMIT :limit"
    with database.reading() as session:
        query, values = selection.query(table, session, columns=_TABLES[table][1], order=order)
        return _with_last_attempt(session, list(session.select(query, values | {"limit": limit})))


SUMMED: Final = (
    *("messages", "state", "exchange", "routing_key", "is_several", "outcome", "reply_code"),
    *("reply_text", "oldest_at", "newest_at", "bytes"),
)
"""Keys of each dictionary that `summed` returns, in their order."""
_NO_REPLY: Final = "CAST(NULL AS integer) AS reply_code, NULL AS reply_text"
_LAST: Final = (
    "CASE WHEN nacked + returned + refused + uncertain > 0 THEN (SELECT max(a.attempt) "
    "FROM reliablepub_attempts AS a WHERE a.id = reliablepub_messages.id) END AS attempt, "
)
_NONE: Final = "CAST(NULL AS bigint) AS attempt, "
_PARTS: Final = {
    "reliablepub_messages": _LAST
    + f"CASE WHEN due_at > {_ZERO} THEN 'waiting' ELSE 'ready' END AS state, "
    f"CASE WHEN due_at > {_FINITE} THEN 'paused' END AS outcome, {_NO_REPLY}",
    "reliablepub_parked": _NONE + "state, outcome, reply_code, reply_text",
    "reliablepub_confirmed": _NONE + f"'{CONFIRMED}' AS state, NULL AS outcome, {_NO_REPLY}",
}
_GROUPS: Final = """
SELECT
    sum(one) AS messages, state, exchange, min(routing_key) AS routing_key,
    min(routing_key) <> max(routing_key) AS is_several, outcome, reply_code, reply_text,
    min(stored_at) AS oldest_at, max(stored_at) AS newest_at,
    sum(CAST(size AS double precision)) AS bytes
FROM (
    SELECT
        f.one, f.state, f.exchange, f.routing_key, f.stored_at, f.size,
        CASE WHEN f.exchange = '' THEN f.routing_key END AS queue,
        coalesce(a.outcome, f.outcome) AS outcome,
        coalesce(a.reply_code, f.reply_code) AS reply_code,
        coalesce(a.reply_text, f.reply_text) AS reply_text
    FROM ({found}) AS f LEFT JOIN reliablepub_attempts AS a ON a.attempt = f.attempt
) AS each GROUP BY state, exchange, queue, outcome, reply_code, reply_text
"""


def summed(database: Database, selection: Selection) -> list[dict[str, Any]]:
    """Count messages by state, destination and last answer, the largest group first.

    A destination is an exchange, and a queue in the default exchange. Of a group with several
    routing keys, ``routing_key`` is one of them. A message that waits for a paused destination and
    was never refused itself has the outcome ``paused``.
    """
    columns = "1 AS one, exchange, routing_key, stored_at, size, "
    rows: list[dict[str, Any]] = []
    with database.reading() as session:
        for table in _asked(selection):
            parts = columns + _PARTS[table]
            found, values = selection.query(table, session, columns=parts, order="id")
            rows += session.select(_GROUPS.format(found=found), values)
    for row in rows:
        row["is_several"] = bool(row["is_several"])
        row["messages"], row["bytes"] = int(row["messages"]), int(row["bytes"])
    return sorted(rows, key=lambda row: (-row["messages"], _rank(row["oldest_at"])))


def with_doubt(row: dict[str, Any]) -> dict[str, Any]:
    """Make ``may_have_arrived`` of a row a bool, which SQLite lacks."""
    row["may_have_arrived"] = bool(row["may_have_arrived"])
    return row


def _with_last_attempt(session: Session, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in map(with_doubt, found):
        if row["parked_at"] is None and row["attempts"]:
            row.update(next(session.rows("last_attempt", {"id": row["id"]}), {}))
    return found


def find_ids(database: Database, selection: Selection) -> list[int]:
    """Return the ids of all messages that match a selection."""
    with database.reading() as session:
        return [
            row["id"]
            for table in _asked(selection)
            for row in session.select(*selection.query(table, session, columns="id", order="id"))
        ]


def those_that_match(session: Session, selection: Selection, ids: Sequence[int]) -> set[int]:
    """Return which of these messages match a selection, in the transaction of the session."""
    found: set[int] = set()
    for table in _asked(selection) if ids else ():
        query, values = selection.query(table, session, columns="id", order="id", among=ids)
        found.update(row["id"] for row in session.select(query, values))
    return found


def _asked(selection: Selection) -> Iterator[str]:
    for table, (states, _) in _TABLES.items():
        if set(states) & set(selection.states):
            yield table


def _merged(
    session: Session, selection: Selection, sort: str, limit: int
) -> Iterator[dict[str, Any]]:
    order = SORTS[sort]
    name, _, direction = order.partition(",")[0].partition(" ")
    parts = []
    for table in _asked(selection):
        query, values = selection.query(
            table, session, columns=_TABLES[table][1], order=f"{order} LIMIT :limit"
        )
        parts.append(session.select(query, values | {"limit": limit}))
    sign = -1 if direction == "DESC" else 1
    return heapq.merge(*parts, key=lambda row: (sign * _rank(row[name]), row["id"]))


def _rank(value: object) -> float:
    """The place of a value in SQLite's order; a damaged row may hold one that is no number."""
    if isinstance(value, int | float):
        return value
    return -math.inf if value is None else math.inf
