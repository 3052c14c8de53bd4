"""Which entries are too late, in memory and on disk, without looking at all of them.

Knows: ids and times of the wall clock, which have to survive the process. Must never know: what
becomes of an entry that is too late.

Of what is in memory, and bounded, the earliest deadline is remembered; all are looked at when it
has come. What is on disk only may be millions, and is found by an index.
"""

from __future__ import annotations

from collections.abc import Collection, Container

from reliablepub.outbox.entry import Entry

_NEVER = float("inf")


class Deadlines:
    """When the next entry is too late.

    Args:
        wall: now; entries of earlier runs may be too late already.
    """

    def __init__(self, wall: float) -> None:
        self._watched: dict[int, Entry] = {}
        self._next_watched = _NEVER
        self._next_on_disk = wall
        self._looked_at = wall

    @property
    def watched(self) -> Container[int]:
        """Ids of the entries in memory that have a deadline."""
        return self._watched

    @property
    def next_at(self) -> float | None:
        """When something has to be done (wall clock), or None."""
        next_at = min(self._next_watched, self._next_on_disk)
        return None if next_at == _NEVER else next_at

    def is_due_on_disk(self, wall: float) -> bool:
        """Whether there are late entries to be read."""
        return self._next_on_disk <= wall

    @property
    def entries(self) -> Collection[Entry]:
        """Entries in memory that have a deadline."""
        return self._watched.values()

    def step(self, wall: float) -> None:
        """The wall clock was set, and all deadlines with it: look at each of them."""
        self._next_watched = wall

    def watch(self, entry: Entry) -> None:
        """An entry is in memory from now on."""
        if entry.expires_at is not None:
            self._watched[entry.id] = entry
            self._next_watched = min(self._next_watched, entry.expires_at)

    def forget(self, entry: Entry) -> None:
        """An entry has left memory for good."""
        self._watched.pop(entry.id, None)

    def on_disk(self, expires_at: float | None) -> None:
        """An entry is on disk only; or, as far as is known then, the earliest one of all."""
        if expires_at is not None:
            self._next_on_disk = min(self._next_on_disk, expires_at)

    def read(self, next_on_disk: float | None) -> None:
        """Late entries have been read; the next one on disk is late at that time."""
        self._next_on_disk = _NEVER if next_on_disk is None else next_on_disk

    def late(self, wall: float) -> list[Entry]:
        """Entries in memory that are too late; perhaps not for the first time."""
        if self._next_watched > wall >= self._looked_at:
            self._looked_at = wall
            return []
        self._looked_at = wall  # should the clock be set back, what was late then is not now
        late = []
        self._next_watched = _NEVER
        for entry in self._watched.values():
            assert entry.expires_at is not None
            if entry.expires_at <= wall:
                late.append(entry)
            else:
                self._next_watched = min(self._next_watched, entry.expires_at)
        return late
