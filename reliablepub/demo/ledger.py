"""The demo's ledger: compares the records to publish with the records that arrived.

Knows: the views of an outbox, the consumer's counts, and which numbers must agree. Must never know:
how records were published or consumed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from reliablepub import OutboxStatus
from reliablepub.demo.consumer import Count


@dataclass(frozen=True, slots=True)
class Happenings:
    """Failed attempts, from the outbox's history."""

    nacked: int = 0
    returned: int = 0
    uncertain: int = 0  # their outcome is unknown, and they were repeated
    connections_lost: int = 0  # with messages in flight


def read_happenings(outbox: Path) -> Happenings:
    """Count the rows of an outbox's ``reliablepub_history``, read-only."""
    with closing(sqlite3.connect(f"{outbox.as_uri()}?mode=ro", uri=True)) as connection:
        outcomes = dict(
            connection.execute("SELECT outcome, count(*) FROM reliablepub_history GROUP BY 1")
        )
        (lost,) = connection.execute(
            "SELECT count(DISTINCT epoch) FROM reliablepub_history"
            " WHERE reply_text LIKE 'connection lost%'"
        ).fetchone()
    return Happenings(
        nacked=outcomes.get("nacked", 0),
        returned=outcomes.get("returned", 0),
        uncertain=outcomes.get("uncertain", 0),
        connections_lost=lost,
    )


@dataclass(frozen=True, slots=True)
class Ledger:
    """The result of a demo; `table` explains the numbers."""

    records: int
    stored: int
    confirmed: int
    parked: int  # or expired
    open: int
    consumed: int
    lost: int
    duplicates: int
    redelivered: int
    unknown_ids: int
    damaged: int
    killed: int  # times that the publisher was killed
    crashed: int  # times that the broker crashed
    happenings: Happenings

    @classmethod
    def of(
        cls,
        records: int,
        status: OutboxStatus,
        count: Count,
        happenings: Happenings,
        *,
        killed: int,
    ) -> Ledger:
        """Make the ledger at the end of a demo, whose records are numbered from 1."""
        consumed = sum(1 for number in range(1, records + 1) if number in count.ids)
        return cls(
            records=records,
            stored=status.stored,
            confirmed=status.confirmed,
            parked=status.parked + status.expired,
            open=status.open,
            consumed=consumed,
            lost=records - consumed,
            duplicates=count.duplicates,
            redelivered=count.redelivered,
            unknown_ids=count.unknown_ids,
            damaged=count.damaged,
            killed=killed,
            crashed=count.crashes,
            happenings=happenings,
        )

    def problems(self) -> Iterator[str]:
        """One sentence for each number that breaks the promise."""
        if self.lost:
            yield f"{self.lost} records are lost"
        if self.stored != self.records:
            yield f"{self.stored} messages were stored for {self.records} records"
        if self.parked:
            yield f"{self.parked} messages were given up"
        if self.open:
            yield f"{self.open} messages are still open"
        if self.unknown_ids:
            yield f"{self.unknown_ids} duplicates have an id that their record did not have before"
        if self.damaged:
            yield f"{self.damaged} deliveries have another body than was published"

    def as_dict(self) -> dict[str, object]:
        """The ledger as a flat dict, for JSON."""
        row: dict[str, object] = asdict(self)
        row |= asdict(self.happenings)
        del row["happenings"]
        return row | {"problems": list(self.problems())}

    def table(self) -> Table:
        """The ledger as a table for the terminal."""
        what = self.happenings
        table = Table(title="LEDGER", title_justify="left", show_header=False)
        table.add_column("what")
        table.add_column("how many", justify="right")
        table.add_column("remark", style="dim")
        duplicates = f"{self.redelivered} of them redelivered by the broker"
        messages = (
            ("records", self.records, "to be published"),
            ("stored", self.stored, "in the outbox, on disk"),
            ("confirmed", self.confirmed, "the broker took responsibility"),
            ("parked", self.parked, "given up, kept for an operator"),
            ("consumed", self.consumed, "distinct records that arrived"),
            ("lost", self.lost, "records that did not arrive"),
            ("duplicates", self.duplicates, duplicates),
            ("unknown ids", self.unknown_ids, "duplicates with another message_id"),
            ("damaged", self.damaged, "deliveries with another body than was published"),
        )
        events = (
            ("publisher killed", self.killed, "SIGKILL"),
            ("broker crashed", self.crashed, "its port refused connections"),
            ("connections lost", what.connections_lost, "with messages in flight"),
            ("uncertain", what.uncertain, "attempts without an answer, repeated"),
            ("nacked", what.nacked, "attempts that a queue refused, repeated later"),
            ("returned", what.returned, "attempts that found no queue, repeated later"),
        )
        for rows in (messages, events):
            for name, number, remark in rows:
                table.add_row(name, spaced(number), remark)
            table.add_section()
        return table


def spaced(number: int) -> str:
    """A number with spaces between thousands."""
    return f"{number:,}".replace(",", " ")
