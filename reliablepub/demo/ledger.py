"""The ledger: what was to be published against what arrived, and everything that happened between.

Knows: numbers from both sides, and which of them must agree. Must never know: how they came about.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from reliablepub import OutboxStatus
from reliablepub.demo.consumer import Count


@dataclass(frozen=True, slots=True)
class Happenings:
    """What went wrong on the way, as the outbox's history tells it.

    Attributes:
        nacked: attempts that a queue refused.
        returned: attempts that the broker returned.
        uncertain: attempts whose fate was unknowable, so that they were made again.
        connections_lost: how often a connection was lost with messages in flight.
    """

    nacked: int = 0
    returned: int = 0
    uncertain: int = 0
    connections_lost: int = 0


def read_happenings(outbox: Path) -> Happenings:
    """Count the ``reliablepub_history`` of an outbox, without disturbing the relay."""
    connection = sqlite3.connect(f"{outbox.as_uri()}?mode=ro", uri=True)
    try:
        outcomes = dict(
            connection.execute("SELECT outcome, count(*) FROM reliablepub_history GROUP BY 1")
        )
        (lost,) = connection.execute(
            "SELECT count(DISTINCT epoch) FROM reliablepub_history"
            " WHERE reply_text LIKE 'connection lost%'"
        ).fetchone()
    finally:
        connection.close()
    return Happenings(
        nacked=outcomes.get("nacked", 0),
        returned=outcomes.get("returned", 0),
        uncertain=outcomes.get("uncertain", 0),
        connections_lost=lost,
    )


@dataclass(frozen=True, slots=True)
class Ledger:
    """The result of a demo.

    Attributes:
        records: how many there were to publish.
        stored: messages that the outbox ever accepted.
        confirmed: of those, confirmed by the broker.
        parked: of those, given up.
        open: of those, still on their way.
        consumed: different records that arrived.
        lost: records that did not.
        duplicates: deliveries beyond the first of a record.
        redelivered: of those, the ones that the broker delivered again by itself.
        unknown_ids: of those, the ones without the ``message_id`` of the first delivery.
        damaged: deliveries whose body is not what was published.
        killed: how often the publisher was killed.
        crashed: how often the broker crashed.
        happenings: what else went wrong.
    """

    records: int
    stored: int
    confirmed: int
    parked: int
    open: int
    consumed: int
    lost: int
    duplicates: int
    redelivered: int
    unknown_ids: int
    damaged: int
    killed: int
    crashed: int
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
        """Close the account.

        Args:
            records: numbers 1 to this were to be published.
            status: of the outbox at the end.
            count: what the consumer saw.
            happenings: from the outbox's history.
            killed: how often the publisher was killed.
        """
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
        """Everything that must not be, in words."""
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
        """The ledger as JSON wants it."""
        row: dict[str, object] = asdict(self)
        row |= asdict(self.happenings)
        del row["happenings"]
        return row | {"problems": list(self.problems())}

    def table(self) -> Table:
        """The ledger as people want it."""
        what = self.happenings
        table = Table(title="LEDGER", title_justify="left", show_header=False)
        table.add_column("what")
        table.add_column("how many", justify="right")
        table.add_column("remark", style="dim")
        rows = [
            ("records", self.records, "to be published"),
            ("stored", self.stored, "in the outbox, on disk"),
            ("confirmed", self.confirmed, "the broker took responsibility"),
            ("parked", self.parked, "given up, kept for a person"),
            ("consumed", self.consumed, "different records that arrived"),
            ("lost", self.lost, "records that did not arrive"),
            (
                "duplicates",
                self.duplicates,
                f"{self.redelivered} of them redelivered by the broker",
            ),
            ("unknown ids", self.unknown_ids, "duplicates under a message_id of their own"),
            ("damaged", self.damaged, "deliveries with another body than was published"),
        ]
        for name, number, remark in rows:
            table.add_row(name, f"{number:,}".replace(",", " "), remark)
        table.add_section()
        rows = [
            ("publisher killed", self.killed, "SIGKILL"),
            ("broker crashed", self.crashed, "its port refused connections"),
            ("connections lost", what.connections_lost, "with messages in flight"),
            ("uncertain", what.uncertain, "attempts without an answer, made again"),
            ("nacked", what.nacked, "attempts that a queue refused, made again later"),
            ("returned", what.returned, "attempts that found no queue, made again later"),
        ]
        for name, number, remark in rows:
            table.add_row(name, f"{number:,}".replace(",", " "), remark)
        return table
