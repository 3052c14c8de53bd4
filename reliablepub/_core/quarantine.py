"""The lane of the suspects: one group at a time, halved until the guilty one is alone.

Knows: which messages may have made the broker close a channel or the connection, and in which
groups they are tried. Must never know: what the broker said (the session's), what a key means.

When the broker closes a channel because of a publish, everything in flight there is uncertain and
one message is guilty, but the broker does not say which. Sending all again would close the next
channel too. So the suspects go to a second channel, halved at every close, until one alone is in
flight when it happens. A window of n with k guilty ones costs O(k log n) channels. Where the
broker's words name some of the suspects (by their exchange), these are tried first.

When the *connection* is lost, whatever else is in flight shares that fate. So these groups are
tried with nothing beside them, and fresh messages wait meanwhile: a moment each, since what closes
a connection does so at once.

**Set aside.** Sometimes connection after connection is lost before the broker has said anything
about what was in flight, and nobody is blamed: a proxy that does not like a message, a broker that
crashes over it, or one that simply does not come up. What it is cannot be known, so nobody is
refused. But the suspects are halved too, so that the innocent ones pass; one that is alone when the
connection is lost is set aside, and tried again, alone, after waits that grow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from reliablepub._core.lane import Lane, without

K = TypeVar("K")
Item: TypeAlias = tuple[K, int]
"""Key and size of a message."""

ASIDE_S: Final = 1.0
"""How long a message is set aside first; then twice as long, and so on."""
ASIDE_MAX_S: Final = 60.0


@dataclass(slots=True)
class _Group(Generic[K]):
    """Suspects that are tried together.

    Attributes:
        items: not yet written.
        is_alone: whether nothing else may be in flight on the connection beside them.
        losses: connections that were lost while the only one of them was in flight.
    """

    items: deque[tuple[K, int]]
    is_alone: bool = False
    losses: int = 0


class Quarantine(Lane[K]):
    """A lane whose buffer is the group under trial; the other groups wait behind it."""

    __slots__ = ("_aside", "_groups", "_trial")

    def __init__(self) -> None:
        super().__init__()
        self._trial: _Group[K] = _Group(self.buffer)
        self._groups: deque[_Group[K]] = deque()
        self._aside: list[tuple[float, _Group[K]]] = []  # when one is due, and who it is

    @property
    def waiting(self) -> int:
        """Suspects that are not in flight."""
        return len(self.buffer) + sum(len(group.items) for group in self._groups) + self.aside

    @property
    def is_alone(self) -> bool:
        """Whether the group under trial goes with nothing beside it on the connection."""
        return self._trial.is_alone

    @property
    def losses(self) -> int:
        """Connections lost so far while the one under trial was alone in flight."""
        return self._trial.losses

    @property
    def aside(self) -> int:
        """How many are set aside."""
        return len(self._aside)

    @property
    def due(self) -> float | None:
        """When the next of these is to be tried again."""
        return min((at for at, _ in self._aside), default=None)

    def suspect(
        self, named: Sequence[Item[K]], others: Sequence[Item[K]], *, is_alone: bool
    ) -> None:
        """One of these made the broker close their channel, or the connection: try them next.

        All together would surely close the next one too, so they go in halves; and of those that
        are named one goes before, alone: where the words are true of all of them, it is the proof.
        What is in the buffer was not written yet and is innocent of this close, so it
        waits behind them.

        Args:
            named: whom the broker's words name.
            others: everybody else who was in flight.
            is_alone: it was the connection.
        """
        if self.buffer:
            self._groups.appendleft(_Group(self.buffer, self.is_alone))
            self.buffer = deque()
        groups = [named[:1], *_halves(named[1:]), others] if named else _halves(others)
        self._groups.extendleft(
            _Group(deque(group), is_alone) for group in reversed(groups) if group
        )

    def expect(self, item: Item[K]) -> None:
        """This one is likely to make the broker close its channel: try it alone, after others."""
        self._groups.append(_Group(deque([item])))

    def set_aside(self, item: Item[K], now: float, *, losses: int) -> None:
        """The connection was lost while this one was alone in flight, and nobody is blamed."""
        wait_s = min(ASIDE_MAX_S, ASIDE_S * 2 ** (losses - 1))
        self._aside.append((now + wait_s, _Group(deque([item]), is_alone=True, losses=losses)))

    def recall(self, now: float) -> None:
        """Whoever was set aside until now is tried after the others."""
        self._groups.extend(group for at, group in self._aside if at <= now)
        self._aside = [(at, group) for at, group in self._aside if at > now]

    def advance(self) -> bool:
        """Go on to the next group once this one is through.

        Returns:
            whether there is any suspect to be tried now.
        """
        if self.buffer or self.in_flight:
            return True
        self._trial = self._groups.popleft() if self._groups else _Group(deque())
        self.buffer = self._trial.items
        return bool(self.buffer)

    def waiting_keys(self) -> Iterator[K]:
        """Suspects that are not in flight."""
        yield from super().waiting_keys()
        for group in (*self._groups, *(group for _, group in self._aside)):
            yield from (key for key, _ in group.items)

    def withdraw(self, keys: Collection[K]) -> list[K]:
        """Forget suspects that are not in flight, and tell which."""
        withdrawn = super().withdraw(keys)
        for group in (*self._groups, *(group for _, group in self._aside)):
            withdrawn += [key for key, _ in group.items if key in keys]
            group.items = without(keys, group.items)
        self._groups = deque(group for group in self._groups if group.items)
        self._aside = [(at, group) for at, group in self._aside if group.items]
        return withdrawn


def _halves(items: Sequence[Item[K]]) -> list[Sequence[Item[K]]]:
    middle = (len(items) + 1) // 2
    return [items[:middle], items[middle:]]
