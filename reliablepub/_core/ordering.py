"""Ordering keys: of the messages that share one, one at a time, in their order.

Knows: keys, and numbers that grow in the order in which messages were stored. Must never know: what
a message is, where the messages behind the first one are stored.

The rule: a message of a key is never sent before every earlier one of that key is confirmed, or was
given up in a way that lets the key go on. So at most one of a key is *admitted* at a time, and it
stays so through every retry; when it has left, the key's next one is to be looked for, and only the
store can say which that is. Nothing is remembered of a key of which no message is admitted and none
is looked for: keys may come in millions.
"""

from __future__ import annotations

from itertools import islice


class KeyOrder:
    """One message of each key at a time."""

    def __init__(self) -> None:
        self._admitted: dict[str, int] = {}
        self._wanted: dict[str, None] = {}

    @property
    def wanted(self) -> int:
        """How many keys' next messages are to be looked for."""
        return len(self._wanted)

    @property
    def admitted(self) -> int:
        """How many messages are on their way."""
        return len(self._admitted)

    def want(self, key: str) -> None:
        """The next message of this key may be found now, unless one is on its way."""
        if key not in self._admitted:
            self._wanted[key] = None

    def next_wanted(self, limit: int) -> list[str]:
        """Take up to so many of the keys to look for, those wanted longest first."""
        keys = list(islice(self._wanted, limit))
        for key in keys:
            del self._wanted[key]
        return keys

    def admit(self, key: str, number: int) -> bool:
        """Whether this message may go now: no other one of its key is on its way."""
        if key in self._admitted:
            return False
        self._admitted[key] = number
        self._wanted.pop(key, None)
        return True

    def leave(self, key: str, number: int, *, is_settled: bool) -> None:
        """A message has left; if it is settled, the next one of its key is wanted.

        One that was never admitted may leave too: it was given up before its turn came.
        """
        if self._admitted.get(key) == number:
            del self._admitted[key]
        if is_settled:
            self.want(key)
