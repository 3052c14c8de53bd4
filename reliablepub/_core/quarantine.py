"""The quarantine: the lane on which suspects are halved until the guilty message is alone.

Knows: which messages may have made the broker close a channel or the connection, and the groups in
which they are tried. Must never know: what the broker sent (the session knows), or what a key
means.

When the broker closes a channel because of a publish, everything in flight there is uncertain, and
the broker does not say which message is guilty. Sending all of them again would close the next
channel too. So the suspects go to a second channel and are halved at every close, until a message
is alone in flight at a close. For n suspects with k guilty messages among them this costs
O(k log n) channels. Suspects that the broker's reply text names (by their exchange) are tried
first.

When the *connection* is closed, everything in flight on it is lost too. So these groups are tried
with nothing else in flight, and fresh messages wait. That is brief where the broker confirms the
group, or closes the connection at once. Where it does neither, as for a queue without a quorum, it
lasts until the confirms are overdue: ``confirm_timeout_s`` for the first such group, twice as long
for the next (`reliablepub._core.session`, "A slow link"). A shorter time would clear a message that
takes its connection down slowly, such as one over which a broker runs out of memory.

**Set aside.** Several connections in a row may be lost before the broker answers any message in
flight, with no publish blamed: a proxy rejects a message, the broker crashes over it, or the broker
merely fails to come up. The cause cannot be known, so no message is refused. The suspects are
halved all the same, so that innocent messages pass. A message that is alone when the connection is
lost is set aside, and tried again, alone, after growing waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from reliablepub._core.confirms import Violation
from reliablepub._core.lane import Lane, without

K = TypeVar("K")

ASIDE_S: Final = 1.0
"""Seconds for which a message is set aside the first time; doubled each time."""
ASIDE_MAX_S: Final = 60.0
"""Longest time for which a message is set aside, in seconds."""


@dataclass(slots=True)
class _Group(Generic[K]):
    """Suspects that are tried together.

    Attributes:
        keys: suspects that are not written yet.
        is_alone: whether nothing else may be in flight on the connection meanwhile.
        losses: connections lost while this group's only message was in flight.
    """

    keys: deque[K]
    is_alone: bool = False
    losses: int = 0


class Quarantine(Lane[K]):
    """A lane whose buffer is the group under trial; the other groups wait behind it.

    Attributes:
        aside: messages that are set aside: the time when each is due, and a group of it alone.
    """

    __slots__ = ("_groups", "_trial", "aside")

    def __init__(self, violations: Counter[Violation], size_of: Callable[[K], int]) -> None:
        super().__init__(violations, size_of)
        self._trial: _Group[K] = _Group(self.buffer)
        self._groups: deque[_Group[K]] = deque()
        self.aside: list[tuple[float, _Group[K]]] = []

    @property
    def is_unused(self) -> bool:
        """Whether there are no suspects, and no channel for any."""
        is_empty = not (self.buffer or self._groups or self.aside)
        return is_empty and self.ledger is None and not self._trial.is_alone

    @property
    def waiting(self) -> int:
        """Number of suspects that are not in flight."""
        return len(self.buffer) + sum(len(group.keys) for group in self._groups) + len(self.aside)

    @property
    def is_alone(self) -> bool:
        """Whether nothing else may be in flight on the connection while this group is tried."""
        return self._trial.is_alone

    @property
    def losses(self) -> int:
        """Connections lost so far while the message under trial was alone in flight."""
        return self._trial.losses

    @property
    def due(self) -> float | None:
        """When the next message that is set aside is due; None if there is none."""
        return min((at for at, _ in self.aside), default=None)

    def suspect(self, named: Sequence[K], others: Sequence[K], *, is_alone: bool) -> None:
        """Try these messages next: one of them made the broker close a channel or the connection.

        They are tried in halves, because all of them together would close the next channel too. If
        the reply text names some, the first of these is tried before the others, alone: its outcome
        shows whether the text is true of the named messages. Buffered messages were not written, so
        they are innocent of this close and wait behind.

        Args:
            named: messages that the broker's reply text names.
            others: the other messages that were in flight.
            is_alone: whether the connection was closed, not only a channel.
        """
        if self.buffer:
            self._groups.appendleft(_Group(self.buffer, self.is_alone))
            self.buffer = deque()
        groups = [named[:1], *_halves(named[1:]), others] if named else _halves(others)
        self._groups.extendleft(
            _Group(deque(group), is_alone) for group in reversed(groups) if group
        )

    def expect(self, key: K) -> None:
        """Queue a message that is likely to make the broker close its channel; it is sent alone."""
        self._groups.append(_Group(deque([key])))

    def set_aside(self, key: K, now: float, *, losses: int) -> None:
        """Set a message aside: it was alone in flight when the connection was lost, and not blamed.

        Args:
            key: key of the message.
            now: on the session's active clock.
            losses: connections lost in this way so far, this one included.
        """
        doublings = min(losses - 1, 10)  # enough for the longest time; 2.0 ** 1024 overflows
        wait_s = min(ASIDE_MAX_S, ASIDE_S * 2**doublings)
        self.aside.append((now + wait_s, _Group(deque([key]), is_alone=True, losses=losses)))

    def recall(self, now: float) -> None:
        """Queue the messages whose time aside is over, behind the other groups."""
        self._groups.extend(group for at, group in self.aside if at <= now)
        self.aside = [(at, group) for at, group in self.aside if at > now]

    def advance(self) -> bool:
        """Go on to the next group once the current group is settled.

        Returns:
            Whether there is a suspect to try now.
        """
        if self.buffer or self.in_flight:
            return True
        self._trial = self._groups.popleft() if self._groups else _Group(deque())
        self.buffer = self._trial.keys
        return bool(self.buffer)

    def buffered_keys(self) -> Iterator[K]:
        """Keys of the suspects that are not in flight."""
        yield from super().buffered_keys()
        for group in (*self._groups, *(group for _, group in self.aside)):
            yield from group.keys

    def withdraw(self, keys: Collection[K]) -> list[K]:
        """Remove suspects of these keys that are not in flight; return those that were removed."""
        withdrawn = super().withdraw(keys)
        for group in (*self._groups, *(group for _, group in self.aside)):
            withdrawn += [key for key in group.keys if key in keys]
            group.keys = without(keys, group.keys)
        self._groups = deque(group for group in self._groups if group.keys)
        self.aside = [(at, group) for at, group in self.aside if group.keys]
        return withdrawn


def _halves(keys: Sequence[K]) -> list[Sequence[K]]:
    middle = (len(keys) + 1) // 2
    return [keys[:middle], keys[middle:]]
