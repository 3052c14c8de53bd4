"""Wakes an idle relay when a process writes to the outbox, by inotify on the write-ahead log.

Knows: inotify(7); every commit writes to the log before it is visible. Must never know: what was
written, by which process.

Every writer rings the bell: `Outbox.enqueue`, the application's own transactions, an operator, the
``sqlite3`` shell. This costs the writers nothing: the kernel notifies the processes that watch the
inode of the log. All of them run on one kernel, because the index of the log is shared memory.

A ring is a hint: the relay then asks the store. It comes when a transaction *begins* to write its
pages, one sync before the commit is visible, and also for transactions that are rolled back or
concern other tables. A ring can be missed, so the relay also polls.

The bell rings once, and must be armed again (``IN_ONESHOT``). So writes neither disturb a busy
relay nor cost it anything.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from reliablepub.outbox.sqlite.location import libc

if TYPE_CHECKING:
    from pathlib import Path

_IN_MODIFY: Final = 0x2
_IN_DONT_FOLLOW: Final = 0x0200_0000
_IN_ONESHOT: Final = 0x8000_0000
_EVENTS_BYTES: Final = 4_096
"""Room for all events of one arming: the write, and the end of the watch."""


class Bell:
    """Rings when a process writes to the log of an outbox; `outbox.entry.Bell` is the contract."""

    rings_early: Final = True  # a commit writes to the log before it syncs

    def __init__(self, outbox: Path) -> None:
        self.is_armed: bool = False
        self._log = os.fsencode(outbox) + b"-wal"  # need not exist yet
        self._libc = libc()
        # This fails if the user has 128 instances open (fs.inotify.max_user_instances).
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = -1 if self._libc is None else int(self._libc.inotify_init1(flags))

    def fileno(self) -> int:
        """Return the descriptor that is readable when the bell has rung; -1 if there is no bell."""
        return self._fd

    def arm(self) -> None:
        """Ring at the next write, if the kernel reports it."""
        if self._fd >= 0 and self._libc is not None:
            mask = _IN_MODIFY | _IN_DONT_FOLLOW | _IN_ONESHOT
            self.is_armed = self._libc.inotify_add_watch(self._fd, self._log, mask) >= 0

    def has_rung(self) -> bool:
        """Whether it has rung since the last call. If so, it is silent until it is armed again."""
        if not self.is_armed:
            return False
        try:
            os.read(self._fd, _EVENTS_BYTES)
        except OSError:  # there is nothing to read
            return False
        self.is_armed = False
        return True

    def close(self) -> None:
        """Stop ringing, and close the descriptor."""
        self.is_armed = False
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """Close the descriptor: a user may have 128."""
        self.close()
