"""Hints that a process writes to the outbox, so that the relay need not wait for its next look.

Knows: inotify(7), and that every commit writes to the write-ahead log before it is visible. Must
never know: what was written, or by which process.

All writers ring, whatever they are: `Outbox.enqueue`, the application's own transactions, an
operator, the ``sqlite3`` shell. They need not do anything for it, and it costs them nothing: the
kernel reports a write to the log to processes that watch its inode. A log is shared by processes
of one kernel only, since its index is shared memory.

A ring is a hint, and the store decides. It comes when a transaction *begins* to write its pages,
a sync before the commit is visible, and also for transactions that are rolled back or concern other
tables. One can be missed, so the relay goes on looking by itself.

The bell rings once, and has to be armed again (``IN_ONESHOT``): a relay that has enough to do is
not disturbed, and writers of other tables cost it nothing in between.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from reliablepub.outbox.sqlite.location import libc

if TYPE_CHECKING:
    from pathlib import Path

_IN_MODIFY: Final = 0x2
_IN_DONT_FOLLOW: Final = 0x0200_0000
_IN_ONESHOT: Final = 0x8000_0000
_EVENTS_BYTES: Final = 4_096
"""Room for every event that one arming can lead to: the write, and the end of the watch."""
SILENT_S: Final = 5.0
"""No sync takes longer: an armed bell that has been silent for so long has missed a commit."""
MISSED_MAX: Final = 3
"""Commits in a row that a bell may miss. More mean that this file system tells nothing."""


class Bell:
    """Rings when a process writes to the log of an outbox; `outbox.entry.Bell` is the contract.

    Args:
        outbox: path of the database, whose log need not exist yet.

    Attributes:
        is_armed: whether the next write will ring.
    """

    def __init__(self, outbox: Path) -> None:
        self.is_armed = False
        self._log = os.fsencode(outbox) + b"-wal"
        self._libc = libc()
        # It fails where the user has 128 others open (fs.inotify.max_user_instances).
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = -1 if self._libc is None else int(self._libc.inotify_init1(flags))
        self._has_rung = False
        self._armed_at = 0.0
        self._missed = 0

    def fileno(self) -> int:
        """The descriptor that is readable when the bell has rung; -1 if there is no bell."""
        return self._fd

    def arm(self) -> None:
        """Ring at the next write, if the kernel can tell of it."""
        if self._fd >= 0 and self._libc is not None and self._missed < MISSED_MAX:
            if not self.is_armed:
                self._armed_at = time.monotonic()
            mask = _IN_MODIFY | _IN_DONT_FOLLOW | _IN_ONESHOT
            self.is_armed = self._libc.inotify_add_watch(self._fd, self._log, mask) >= 0

    def has_rung(self) -> bool:
        """Whether it has rung since the last call. It is silent then until it is armed again."""
        self._listen()
        has_rung, self._has_rung = self._has_rung, False
        return has_rung

    def hush(self) -> None:
        """Forget a ring: it was that of a commit of the relay.

        That of another process is not lost with it. What was written before the relay's commit is
        visible with it, since one process at a time may write.
        """
        if not (self.is_armed or self._has_rung):
            return
        missed = self._missed  # the relay's commits do not prove that others are heard
        self._listen()
        self._missed, self._has_rung = missed, False

    def looked(self, *, has_changed: bool) -> None:
        """Compare with what the store has found: a bell that misses commit after commit is broken.

        Args:
            has_changed: whether another process has committed since the last call.
        """
        if not (has_changed and self.is_armed):
            return
        self._listen()
        if self.is_armed and time.monotonic() - self._armed_at > SILENT_S:
            self._missed += 1
            self.is_armed = self._missed < MISSED_MAX  # its descriptor stays: a loop watches it

    def close(self) -> None:
        """Ring no more."""
        self.is_armed = False
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """Close the descriptor: a user has 128 of them."""
        self.close()

    def _listen(self) -> None:
        if not self.is_armed:
            return
        try:
            os.read(self._fd, _EVENTS_BYTES)
        except OSError:  # there is nothing to read
            return
        self._has_rung, self.is_armed, self._missed = True, False, 0
