"""Search for messages by state, address, age or reason, in an outbox of any size.

Knows: the columns that operators filter by, and how conditions are joined into a statement, with
sqlite-utils; values are bound. Must never know: bodies, or what the caller does with the messages.

Open messages and those given up are in two tables with the same columns. A table is read only if a
message in it can match, in the requested order, and only up to the limit: the first 50 of a million
messages, by id, are found by reading 50 rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reliablepub.outbox.sqlite.database import reading
from reliablepub.outbox.sqlite.sql import QUERIES

if TYPE_CHECKING:
    from sqlite_utils import Database

OPEN_STATES: Final = ("ready", "waiting")
GIVEN_UP_STATES: Final = ("parked", "expired")
STATES: Final = (*OPEN_STATES, *GIVEN_UP_STATES)
SORTS: Final = {
    "id": "id",
    "age": "stored_at, id",
    "attempts": "attempts DESC, id",
    "size": "size DESC, id",
}
"""Sort orders: oldest, most attempts or largest first."""

_COMMON: Final = (
    "id, message_id, exchange, routing_key, ordering_key, {state} AS state, "
    "nacked + returned + refused + uncertain AS attempts, stored_at, expires_at, size"
)
_TABLES: Final = {
    "reliablepub_messages": (
        OPEN_STATES,
        _COMMON.format(state="CASE WHEN due_at > 0 THEN 'waiting' ELSE 'ready' END")
        + ", nullif(nullif(due_at, 9e999), 0) AS due_at, NULL AS parked_at"
        ", NULL AS outcome, NULL AS reply_code, NULL AS reply_text",
    ),
    "reliablepub_parked": (
        GIVEN_UP_STATES,
        _COMMON.format(state="state")
        + ", NULL AS due_at, parked_at, outcome, reply_code, reply_text",
    ),
}
_GIVEN_UP_BEFORE: Final = {
    "reliablepub_parked": "parked_at <= :given_up_before",
    "reliablepub_messages": "0",
}
_OF_STATE: Final = {
    "ready": "due_at IS NULL OR due_at = 0",
    "waiting": "due_at > 0",
    "parked": "state = 'parked'",
    "expired": "state = 'expired'",
}
_REASON: Final = {
    "reliablepub_parked": (
        "instr(lower(outcome || ' ' || reply_code || ' ' || reply_text), lower(:reason))"
    ),
    # The first condition spares the lookup in the history for messages without a failed attempt.
    "reliablepub_messages": (
        "nacked + returned + refused + uncertain > 0 AND EXISTS ("
        "SELECT 1 FROM reliablepub_attempts AS a WHERE a.id = reliablepub_messages.id AND "
        "instr(lower(a.outcome || ' ' || a.reply_code || ' ' || a.reply_text), lower(:reason)))"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Filter for messages. A message matches if all conditions hold; None is no condition.

    Attributes:
        states: any of `STATES`.
        exchange: SQLite GLOB pattern (``*``, ``?``, ``[...]``) for the exchange.
        routing_key: SQLite GLOB pattern (``*``, ``?``, ``[...]``) for the routing key.
        ordering_key: SQLite GLOB pattern (``*``, ``?``, ``[...]``) for the ordering key.
        reason: substring of the outcome, reply code and reply text of an attempt (any attempt of an
            open message, the last one of a message that was given up); ASCII case is ignored.
        stored_before: latest time of storage (seconds since 1970).
        stored_after: earliest time of storage (seconds since 1970).
        given_up_before: latest time at which the message was given up (seconds since 1970); no open
            message matches.
    """

    states: tuple[str, ...] = STATES
    exchange: str | None = None
    routing_key: str | None = None
    ordering_key: str | None = None
    reason: str | None = None
    stored_before: float | None = None
    stored_after: float | None = None
    given_up_before: float | None = None

    def within(self, states: tuple[str, ...]) -> Selection:
        """Return this selection limited to these states, unless it already names states."""
        return replace(self, states=states) if self.states == STATES else self

    def conditions(self, table: str) -> tuple[str | None, dict[str, object]]:
        """Return the SQL condition on rows of a table, None if there is none, and its values."""
        states = _TABLES[table][0]
        parts: dict[str, tuple[str, object]] = {
            "exchange": ("exchange GLOB :exchange", self.exchange),
            "routing_key": ("routing_key GLOB :routing_key", self.routing_key),
            "ordering_key": ("ordering_key GLOB :ordering_key", self.ordering_key),
            "reason": (_REASON[table], self.reason),
            "stored_before": ("stored_at <= :stored_before", self.stored_before),
            "stored_after": ("stored_at >= :stored_after", self.stored_after),
            "given_up_before": (_GIVEN_UP_BEFORE[table], self.given_up_before),
        }
        asked = {name: part for name, part in parts.items() if part[1] is not None}
        conditions = [text for text, _ in asked.values()]
        if not set(states) <= set(self.states):
            conditions += [_OF_STATE[state] for state in states if state in self.states]
        values = {name: value for name, (_, value) in asked.items()}
        return " AND ".join(conditions) or None, values


def find(path: Path, selection: Selection, *, sort: str = "id", limit: int) -> list[dict[str, Any]]:
    """List messages, each with the outcome and the broker's reply of its last attempt.

    Args:
        path: path of the outbox.
        selection: filter for the messages.
        sort: one of `SORTS`.
        limit: maximum number of messages to list.

    Returns:
        a dictionary for each message, all with the same keys.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    with reading(path) as connection:
        from sqlite_utils import Database  # noqa: PLC0415 - takes 50 ms; producers do not need it

        database = Database(connection)
        found = list(islice(_merged(database, selection, sort, limit), limit))
        for row in found:
            if row["parked_at"] is None and row["attempts"]:
                row.update(next(database.query(QUERIES["last_attempt"], (row["id"],)), {}))
    return found


def find_ids(path: Path, selection: Selection) -> list[int]:
    """Return the ids of all messages that match a selection.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    with reading(path) as connection:
        from sqlite_utils import Database  # noqa: PLC0415

        return [
            row["id"]
            for table in _asked(selection)
            for row in Database(connection)[table].rows_where(
                *selection.conditions(table), select="id", order_by="id"
            )
        ]


def _asked(selection: Selection) -> Iterator[str]:
    for table, (states, _) in _TABLES.items():
        if set(states) & set(selection.states):
            yield table


def _merged(
    database: Database, selection: Selection, sort: str, limit: int
) -> Iterator[dict[str, Any]]:
    order = SORTS[sort]
    name, _, direction = order.partition(",")[0].partition(" ")
    parts = [
        database[table].rows_where(
            *selection.conditions(table), select=_TABLES[table][1], order_by=order, limit=limit
        )
        for table in _asked(selection)
    ]
    sign = -1 if direction == "DESC" else 1
    return heapq.merge(*parts, key=lambda row: (sign * row[name], row["id"]))
