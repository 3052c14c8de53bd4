"""The account: what callers were told, against what the broker has and the outbox keeps.

It asks the broker, the outbox and the callers; it must never know what was done to them.
"""

import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from reliablepub import Message, Outbox


@dataclass
class Told:
    """What callers were told, by number of the message.

    Attributes:
        stored: the call returned.
        confirmed: the broker has it.
        failed: it was given up.
        refused: it was not stored, says the error. `OutboxUnsure` does not say so.
    """

    stored: set[int] = field(default_factory=set)
    confirmed: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> Self:
        """From the file that a publisher wrote to; the last line may be torn."""
        told = cls()
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                what, number = line.split()
                getattr(told, what).add(int(number))
        return told


@dataclass(frozen=True)
class Account:
    """The end of a story.

    Attributes:
        promised: messages whose ``publish()`` returned.
        arrived: different messages that arrived.
        parked: messages in the outbox, with a reason.
        duplicates: arrivals beyond the first of a message.
        wrong: everything that must not be, in words.
    """

    promised: int
    arrived: int
    parked: int
    duplicates: int
    wrong: list[str]


def close_account(
    told: Told,
    arrivals: Iterable[tuple[bytes, str]],
    outbox: Path | str | None,
    expected: Callable[[int], Message],
    *,
    duplicates_max: int,
) -> Account:
    """Compare; nothing may be open any more.

    Args:
        told: by the publisher.
        arrivals: body and ``message_id`` of every message the broker delivered.
        outbox: the file, or the URL of the database; None for a publisher that has none.
        expected: what the message of a number was.
        duplicates_max: how many may have arrived again.
    """
    ids: dict[int, str] = {}
    wrong: list[str] = []
    count = 0
    for body, message_id in arrivals:
        count += 1
        number = int(body.split()[0])
        first = ids.setdefault(number, message_id)
        if message_id != first:
            wrong.append(f"{number} arrived as {first} and as {message_id}")
        if body != expected(number).body:
            wrong.append(f"{number} arrived changed")
    parked, without_reason, still_open, differences = _look(outbox)
    arrived = set(ids)
    duplicates = count - len(arrived)
    found = {
        "lost": told.stored - arrived - parked,
        "confirmed falsely": told.confirmed - arrived,
        "told as failed, and not parked": told.failed - parked,
        "refused, and there": told.refused & (arrived | parked),
        "parked without a reason": without_reason,
        "still open": still_open,
    }
    wrong += [f"{what}: {sorted(numbers)}" for what, numbers in found.items() if numbers]
    if duplicates > duplicates_max:
        wrong.append(f"{duplicates} duplicates; at most {duplicates_max} can be explained")
    if differences:
        wrong.append(f"the ledger does not add up: {differences}")
    return Account(len(told.stored), len(arrived), len(parked), duplicates, wrong)


def _look(where: Path | str | None) -> tuple[set[int], set[int], set[int], list[object]]:
    """Parked, parked without a reason, open, and differences of the ledger."""
    if where is None:
        return set(), set(), set(), []
    outbox = Outbox(where)
    parked = list(outbox.rows("parked"))
    [audit] = outbox.rows("audit")
    return (
        {_number(row) for row in parked},
        {_number(row) for row in parked if not row["reply_text"]},
        {_number(row) for row in outbox.rows("open")},
        [count for name, count in audit.items() if name.endswith("_difference") and count],
    )


def _number(row: dict[str, object]) -> int:
    return int(str(row["message_id"]).removeprefix("n"))


@dataclass(frozen=True)
class Attempts:
    """Those that were not confirmed.

    Attributes:
        uncertain: they got no answer.
        nacked: the queue may have the message nevertheless.
        refused: returned, nacked or refused; nacked ones included.
        uncertain_at_once: most that were uncertain on one channel.
    """

    uncertain: int
    nacked: int
    refused: int
    uncertain_at_once: int


def attempts(outbox: Path) -> Attempts:
    with closing(sqlite3.connect(f"{outbox.as_uri()}?mode=ro", uri=True)) as db:
        rows = db.execute(
            "SELECT outcome, epoch, count(*) FROM reliablepub_history GROUP BY 1, 2"
        ).fetchall()
    uncertain = [count for outcome, _, count in rows if outcome == "uncertain"]
    return Attempts(
        uncertain=sum(uncertain),
        nacked=sum(c for outcome, _, c in rows if outcome == "nacked"),
        refused=sum(c for outcome, _, c in rows if outcome not in ("uncertain", "confirmed")),
        uncertain_at_once=max(uncertain, default=0),
    )
