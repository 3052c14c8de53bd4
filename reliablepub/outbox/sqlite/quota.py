"""Whether a user's disk quota is used up, which neither SQLite nor ``statvfs`` tells.

Knows: the errors of the file system. Must never know: SQLite, messages.

SQLite reports a write beyond a quota (``EDQUOT``) as it does one that the disk refuses, and the
free blocks of a file system are not those that its user may still have. So it is tried, with a file
that has no name.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write for which there is no space."""


def may_take(folder: Path, size: int) -> bool:
    """Whether this user may have so many bytes more there; True where that cannot be tried."""
    if not hasattr(os, "O_TMPFILE"):
        return True
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return error.errno not in FULL
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        return error.errno not in FULL
    finally:
        os.close(fd)
    return True
