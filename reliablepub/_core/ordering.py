"""Ordering keys: at most one message of each key is on its way, in the order of storing.

Knows: keys, and message numbers that grow in the order of storing. Must never know: what a message
is, or where the later messages of a key are stored.

The rule: a message is not sent before every earlier message of its key is confirmed, or was given
up in a way that releases the key. So at most one message of a key is *admitted* at a time, and
retries do not release the key. When the message has left the store, the key becomes *wanted*: the
caller asks the store for the key's next message. A key that is neither admitted nor wanted takes no
memory; there may be millions of keys.

An operator can put an earlier message back while a later one of its key is admitted. The earlier
message is then *passed*. It is sent when the later one leaves memory, even if only until a retry.
"""

from __future__ import annotations

from itertools import islice


class KeyOrder:
    """Admits one message of each key at a time."""

    def __init__(self) -> None:
        self._admitted: dict[str, int] = {}
        self._passed_of: dict[str, set[int]] = {}
        # By number. To look these up again is useless before the admitted one of their key leaves.
        self.passed: dict[int, None] = {}
        self.wanted: dict[str, None] = {}  # in the order in which they became wanted

    def want(self, key: str) -> None:
        """Have the key's next message looked up, unless one of its messages is admitted."""
        if key not in self._admitted:
            self.wanted[key] = None

    def next_wanted(self, limit: int) -> list[str]:
        """Take up to ``limit`` wanted keys, in the order in which they became wanted."""
        keys = list(islice(self.wanted, limit))
        for key in keys:
            del self.wanted[key]
        return keys

    def admit(self, key: str, number: int) -> bool:
        """Admit a message, unless another message of its key is admitted; return whether it was."""
        if key in self._admitted:
            self._passed_of.setdefault(key, set()).add(number)
            self.passed[number] = None
            return False
        self._admitted[key] = number
        self.wanted.pop(key, None)
        return True

    def leave(self, key: str, number: int, *, is_settled: bool) -> bool:
        """Note that a message has left memory; return whether others were passed because of it."""
        others: set[int] = set()
        # One that was never admitted leaves too: given up while earlier ones of its key were open.
        if self._admitted.get(key) == number:
            del self._admitted[key]
            passed = self._passed_of.pop(key, set())
            for one in passed:
                del self.passed[one]
            others = passed - {number}
        # An earlier message that was put back goes first, also if this one is only postponed.
        if is_settled or others:  # settled: it has left the store too
            self.want(key)
        return bool(others)  # the time at which they are due may have changed since
