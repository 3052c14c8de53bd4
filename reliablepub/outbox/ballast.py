"""A little space that is kept for the day the disk is full.

Knows: one file beside the outbox. Must never know: what the space will be used for.

On a full disk SQLite cannot even delete: that, too, writes to its log first. The outbox could not
drain, so the disk would stay full. Removing this file makes room for the verdicts of messages that
are on their way; room is made again once there is some. It must hold one whole checkpoint: the log
shrinks only after the pages in it have found room in the database.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

BALLAST_BYTES: Final = 5 * 1024 * 1024
RETRY_INTERVAL_S: Final = 10.0


class Ballast:
    """``<outbox>.ballast``, filled when there is space for it; its absence is no error."""

    def __init__(self, outbox: Path, *, size: int = BALLAST_BYTES) -> None:
        self._path = outbox.with_name(outbox.name + ".ballast")
        self._size = size
        self._is_kept = _is_ours(self._path)
        self._next_try_at = 0.0
        self.restore()

    def release(self) -> bool:
        """Give the space back; False when there is none left to give."""
        if not self._is_kept:
            return False
        self._is_kept = False
        self._next_try_at = time.monotonic() + RETRY_INTERVAL_S
        try:
            self._path.unlink()
        except OSError:
            return False
        return True

    def restore(self) -> None:
        """Keep the space again, if there is any; looks only now and then."""
        if self._is_kept or time.monotonic() < self._next_try_at:
            return
        self._next_try_at = time.monotonic() + RETRY_INTERVAL_S
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # which follows no link
        try:
            fd = os.open(self._path, flags, 0o600)
        except OSError:
            return
        try:
            os.posix_fallocate(fd, 0, self._size)
            self._is_kept = True
        except OSError:
            with suppress(OSError):
                self._path.unlink()
        finally:
            os.close(fd)


def _is_ours(path: Path) -> bool:
    """Whether it is a file of this user: another user's gives no space back."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
