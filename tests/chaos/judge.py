"""What a set's histories say: what was lost, told wrongly, sent or delivered as it must not be.

It knows numbers of messages, events and arrivals; it must never know nodes, links or clients.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, Final

from reliablepub import Message
from tests.chaos.account import Told, close_account

KINDS: Final = ("classic", "quorum", "stream")
BROKER_MAY_LOSE: Final = ("classic", "stream")
"""Kinds of queue in which RabbitMQ 3.10 loses what it has confirmed when a cluster falls apart."""
KEYED_OF_EACH: Final = 10


def kind_of(kinds: Sequence[str], number: int) -> str:
    """The kind of queue that a number goes to, of those that one load publishes to."""
    return kinds[number % len(kinds)]


def is_keyed(kinds: Sequence[str], number: int) -> bool:
    """Whether it has an ordering key, as a tenth of each kind has."""
    return number % (KEYED_OF_EACH * len(kinds)) < len(kinds)


def message(exchange: str, kinds: Sequence[str], number: int) -> Message:
    """The n-th message; an ordering key is that of the queue."""
    kind = kind_of(kinds, number)
    body = b"%d " % number * (1 + number % 40) * (40 if number % 50 == 0 else 1)
    key = kind if is_keyed(kinds, number) else None
    return Message(body, exchange, kind, message_id=f"n{number}", ordering_key=key)


class History:
    """Hooks that write down what the relay does: seconds, what, message, epoch, tag."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, int, str, int]] = []

    def _note(self, what: str, events: Iterable[Any]) -> None:
        now = time.monotonic()
        for each in events:
            number = int(each.message_id.removeprefix("n"))
            epoch, tag = getattr(each, "epoch", ""), getattr(each, "tag", 0)
            self.events.append((now, what, number, epoch, tag))

    on_stored = partialmethod(_note, "stored")
    on_sent = partialmethod(_note, "sent")
    on_confirmed = partialmethod(_note, "confirmed")
    on_returned = partialmethod(_note, "returned")
    on_nacked = partialmethod(_note, "nacked")
    on_refused = partialmethod(_note, "refused")
    on_uncertain = partialmethod(_note, "uncertain")
    on_parked = partialmethod(_note, "parked")

    def acked(self) -> set[int]:
        """Messages for which a confirm came."""
        return {number for _, what, number, _, tag in self.events if what == "confirmed" and tag}

    def wrong(self, confirmed: set[int]) -> list[str]:
        """What contradicts itself: each outcome is of one attempt, and each confirm was told."""
        sent: Counter[tuple[int, str, int]] = Counter()
        ended: Counter[tuple[int, str, int]] = Counter()
        for _, what, number, epoch, tag in self.events:
            if what == "sent":
                sent[number, epoch, tag] += 1
            elif tag and what not in ("stored", "parked"):
                ended[number, epoch, tag] += 1
        found: dict[str, list[Any]] = {
            "an attempt was sent twice": [key for key, count in sent.items() if count > 1],
            "an attempt ended twice": [key for key, count in ended.items() if count > 1],
            "ended, and never sent": sorted(ended.keys() - sent.keys()),
            "told as confirmed, and no confirm came": sorted(confirmed - self.acked()),
        }
        return [f"{what}: {keys[:20]}" for what, keys in found.items() if keys]


def out_of_order(numbers: Iterable[int]) -> list[int]:
    """Messages of one key whose first arrival came after that of a later one."""
    highest = 0
    seen: set[int] = set()
    late = []
    for number in numbers:
        if number not in seen:
            seen.add(number)
            if number < highest:
                late.append(number)
            highest = max(highest, number)
    return late


@dataclass(frozen=True)
class Figures:
    """Of one kind of queue. What the broker lost was confirmed by it, and is not there.

    Attributes:
        offered: messages whose `publish` returned.
        confirmed: those that were told as confirmed.
        lost_by_broker: those for which a confirm came, and that are not there.
        duplicates: arrivals beyond the first.
        second_ids: messages that arrived under two ids.
        late: messages that arrived after a later one of the same key.
    """

    offered: int
    confirmed: int
    lost_by_broker: int
    duplicates: int
    second_ids: int
    late: int


@dataclass(frozen=True)
class Load:
    """What one publisher was told and did.

    Attributes:
        kinds: of queues that it published to.
        told: what it was told.
        history: what it did; None where the client has no hooks.
        outbox: its file; None where it has none.
        duplicates_max: attempts that failed.
    """

    kinds: Sequence[str]
    told: Told
    history: History | None
    outbox: Path | None
    duplicates_max: int


def judge(
    load: Load, exchange: str, arrivals: Sequence[tuple[str, bytes, str]]
) -> tuple[dict[str, Figures], list[str]]:
    """Figures by kind of queue, and everything that must not be, in words.

    A message of a classic queue or a stream for which the broker's confirm came, and that is not
    there, is counted as the broker's loss. Any other loss is wrong.

    Args:
        load: a publisher's.
        exchange: to which it published.
        arrivals: kind of queue, body and id of everything in all queues, in order.
    """
    mine = [each for each in arrivals if each[0] in load.kinds]
    told, missing = load.told, load.told.confirmed - {int(body.split()[0]) for _, body, _ in mine}
    acked = told.confirmed if load.history is None else load.history.acked()
    excused = {n for n in missing & acked if kind_of(load.kinds, n) in BROKER_MAY_LOSE}
    account = close_account(
        Told(told.stored - excused, told.confirmed - excused, told.failed, told.refused),
        [(body, message_id) for _, body, message_id in mine],
        load.outbox,
        lambda number: message(exchange, load.kinds, number),
        duplicates_max=load.duplicates_max,
    )
    wrong = list(account.wrong)
    figures = {}
    for kind in load.kinds:
        here = [(int(body.split()[0]), its_id) for of, body, its_id in mine if of == kind]
        late = out_of_order(n for n, _ in here if is_keyed(load.kinds, n))
        if strangers := sorted({n for n, _ in here if kind_of(load.kinds, n) != kind}):
            wrong.append(f"in the queue of another kind: {strangers}")
        if late and load.history is not None:
            wrong.append(f"out of order: {late}")
        different = len({number for number, _ in here})
        figures[kind] = Figures(
            offered=_of(kind, load, told.stored),
            confirmed=_of(kind, load, told.confirmed),
            lost_by_broker=_of(kind, load, excused),
            duplicates=len(here) - different,
            second_ids=len({*here}) - different,
            late=len(late),
        )
    if load.history is not None:
        wrong += load.history.wrong(told.confirmed)
    return figures, wrong


def _of(kind: str, load: Load, numbers: Iterable[int]) -> int:
    return sum(kind_of(load.kinds, number) == kind for number in numbers)


def as_json(figures: dict[str, Figures]) -> dict[str, dict[str, int]]:
    return {kind: asdict(each) for kind, each in figures.items()}
