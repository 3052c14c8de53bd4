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

**Set aside.** A message that was alone when its channel or its connection ended is not refused as
long as it may be innocent (`reliablepub._core.evidence`). It is set aside, and tried again after
growing waits; after a channel's end also as soon as another message has passed to its place.

When the *connection* is lost over and over, before the broker answers any message in flight, a
proxy may reject a message, the broker may crash over it, or merely fail to come up. The messages
that were in flight are halved all the same, so that innocent ones pass. These groups are tried with
nothing else in flight, and fresh messages wait. That is brief where the broker confirms the group,
or ends the connection at once. Where it does neither, as for a queue without a quorum, it lasts
until the confirms are overdue: ``confirm_timeout_s`` for the first such group, twice as long for
the next (`reliablepub._core.session`, "A slow link"). A shorter time would clear a message that
takes its connection down slowly, such as one over which a broker runs out of memory.

**A broker that refuses every message** is probed by one message at a time, each time another one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
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
    """Suspects that are tried together."""

    keys: deque[K]  # not written yet
    is_alone: bool = False  # nothing else may be in flight on the connection meanwhile
    losses: int = 0  # channels or connections that have ended while its one message was alone


class Quarantine(Lane[K]):
    """A lane whose buffer is the group under trial; the other groups wait behind it."""

    __slots__ = ("_groups", "_trial", "aside", "why")

    def __init__(self, violations: Counter[Violation], size_of: Callable[[K], int]) -> None:
        super().__init__(violations, size_of)
        self._trial: _Group[K] = _Group(self.buffer)
        self._groups: deque[_Group[K]] = deque()
        self.aside: list[tuple[float, _Group[K]]] = []  # when it is due, and a group of one
        self.why: str = ""  # of the last one set aside, in the broker's words if there are any

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
        """Channels or connections that have ended while the message under trial was alone."""
        return self._trial.losses

    @property
    def due(self) -> float | None:
        """When the next message that is set aside is due; None if there is none."""
        return min((at for at, _ in self.aside), default=None)

    def suspect(self, named: Sequence[K], others: Sequence[K], *, is_alone: bool) -> None:
        """Try these next: one of them made the broker close a channel or the connection."""
        if self.buffer:  # not written, so innocent of this close: they wait behind
            self._groups.appendleft(_Group(self.buffer, self.is_alone))
            self.buffer = deque()
        # Halves: all of them together would close the next channel too. The first of those named
        # goes alone: its outcome shows whether the broker's text is true of the named messages.
        groups = [named[:1], *_halves(named[1:]), others] if named else _halves(others)
        self._groups.extendleft(
            _Group(deque(group), is_alone) for group in reversed(groups) if group
        )

    def expect(self, key: K, *, is_next: bool = False) -> None:
        """Queue a message that is likely to make the broker close its channel; it is sent alone."""
        group = _Group(deque([key]))
        (self._groups.appendleft if is_next else self._groups.append)(group)

    def set_aside(
        self, key: K, now: float, why: str, *, losses: int, is_alone: bool = True
    ) -> None:
        """Set aside a message that was alone when its channel or connection ended."""
        self.why = why
        wait_s = min(ASIDE_MAX_S, ASIDE_S * 2 ** min(losses, 10))  # 2.0 ** 1024 overflows
        self.aside.append((now + wait_s, _Group(deque([key]), is_alone, losses + 1)))

    def recall(self, now: float, can_judge: Callable[[K], bool]) -> None:
        """Queue, behind the other groups, what was set aside and is due or can be judged now."""
        waiting, self.aside = self.aside, []
        for at, group in waiting:
            is_due = at <= now or (not group.is_alone and can_judge(group.keys[0]))
            if is_due:
                self._groups.append(group)
            else:
                self.aside.append((at, group))

    def advance(self, *, is_single: bool = False) -> bool:
        """Go to the next group once this one is settled; return whether there is one to try."""
        if self.buffer or self.in_flight:
            return True
        group = self._groups.popleft() if self._groups else _Group(deque())
        if is_single and len(group.keys) > 1:  # a probe; the others are tried later
            self._groups.appendleft(group)
            group = replace(group, keys=deque([group.keys.popleft()]))
        self._trial = group
        self.buffer = group.keys
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
