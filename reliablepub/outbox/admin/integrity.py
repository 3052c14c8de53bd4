"""Audit of the contents of an outbox: its ledger, and the checksum of each row.

Knows: which rows are read, and what a valid row is. Must never know: how an outbox is changed or
repaired.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from reliablepub.outbox.database import Database, LostCommits, Session, lost_ledger
from reliablepub.outbox.rows import MISTYPED, Unreadable, check, misfit_words, misfits

_DIFFERENCES: Final = ("open", "parked", "expired", "open_bytes")
_CONTENTS: Final = 6
"""Number of columns with the message itself. The bookkeeping columns follow them."""
PIECE_ROWS: Final = 100
"""Rows that are read at once, with their bodies."""
_FIRST: Final = -(2**63) + 1
"""Below each id, even of a damaged row; a lower number is no bigint to PostgreSQL."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of `audit`. The outbox is intact if nothing is listed.

    Attributes:
        rows: number of open and parked messages whose checksums were compared.
        differences: ledger counters that differ from the sum over the rows, each with the
            difference (ledger minus rows).
        damaged: ids of rows with a wrong checksum, or with a size, time or count that this library
            never writes; each with its defect. A relay parks such a row, and never sends it.
        structure: errors that the database reports about its pages. If there are any, neither the
            ledger nor the rows are read.
        passed_over: ids of messages in PostgreSQL, at most 1,000 per shard, that have been due for
            a minute and that a working relay does not send.
        lost: PostgreSQL failovers that lost commits of a relay, the newest first. They are in the
            past, so they do not count against `is_right`.
    """

    rows: int
    differences: dict[str, int]
    damaged: dict[int, str]
    structure: tuple[str, ...]
    passed_over: tuple[int, ...] = ()
    lost: tuple[LostCommits, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the audit found nothing wrong."""
        return not (self.differences or self.damaged or self.structure or self.passed_over)


def audit(database: Database) -> Audit:
    """Recount the ledger and compare each row with its checksum, in one read transaction."""
    with database.reading() as session:
        lines = session.damage()
        if lines:
            return Audit(0, {}, {}, tuple(lines))
        counted = session.run("audit").fetchone()
        if counted is None:
            raise lost_ledger(database)
        differences = {
            name: value for name, value in zip(_DIFFERENCES, counted, strict=True) if value
        }
        rows, damaged = 0, {}
        for query in ("open_contents", "parked_contents"):
            for texts, body, beside in _contents(session, query):
                rows += 1
                try:
                    check(texts, body, beside["checksum"])
                except Unreadable as error:
                    damaged[beside["id"]] = str(error)
                except (TypeError, ValueError):
                    damaged[beside["id"]] = MISTYPED
                else:
                    if any(misfits(beside)):
                        damaged[beside["id"]] = misfit_words(beside)
    passed_over, lost = database.passed_over(), database.lost_commits()
    return Audit(rows, differences, damaged, (), tuple(passed_over), tuple(lost))


def _contents(
    session: Session, query: str
) -> Iterator[tuple[tuple[Any, ...], Any, dict[str, Any]]]:
    """Yield the texts, the body and the bookkeeping columns of each row."""
    after = _FIRST
    while True:  # a client of PostgreSQL has all rows of a result in memory
        cursor = session.run(query, {"after": after, "limit": PIECE_ROWS})
        names = [column[0] for column in cursor.description[_CONTENTS:]]
        count = 0
        for message_id, exchange, routing_key, properties, key, body, *others in cursor:
            count += 1
            beside = dict(zip(names, others, strict=True))
            after = beside["id"]
            yield (message_id, exchange, routing_key, properties, key), body, beside
        if count < PIECE_ROWS:
            return
