"""Finds out whether a user's disk quota is used up.

Knows: the errors of the file system. Must never know: SQLite, messages.

SQLite reports a write beyond a quota (``EDQUOT``) as a failing disk, and the free blocks that
``statvfs`` reports do not consider quotas. So the space is allocated in an unnamed file
(``O_TMPFILE``) to see whether that succeeds.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a write for which there is no space. A limit on file sizes (``EFBIG``) is not one of
them: other, shorter files may still have space."""


def may_take(folder: Path, size: int) -> bool:
    """Whether this user may write ``size`` more bytes in a folder; True if that is unknown."""
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
