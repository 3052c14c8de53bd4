"""Ids for messages whose sender gave them none.

Knows: the kernel's random bytes, and forks. Must never know: messages.

To ask the kernel for each of them, as `uuid.uuid4` does, gives the interpreter away meanwhile, and
a thread that competes for it is then five milliseconds ahead. So it is asked once in a process, and
counted from there.
"""

from __future__ import annotations

import os
from itertools import count
from typing import Final


class Mint:
    """Makes ids that nobody else has: UUIDs of version 4, as far as anybody can see.

    They begin with 72 bits by chance, and end with a number that began with 47.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Make others from now on: a forked process must not repeat its parent's."""
        digits = os.urandom(9).hex()
        self._head = f"{digits[:8]}-{digits[8:12]}-4{digits[12:15]}-a{digits[15:]}-"
        self._numbers = count(int.from_bytes(os.urandom(6)) >> 1)

    def new_id(self) -> str:
        """A ``message_id``; from any thread."""
        return f"{self._head}{next(self._numbers):012x}"


_mint: Final = Mint()
new_id: Final = _mint.new_id
os.register_at_fork(after_in_child=_mint.begin)
