"""A copy of an outbox whose files have moved, made from the files that the relay still has open.

Knows: SQLite's ``VACUUM INTO``. Must never know: which messages matter.

A deleted file lives on as long as a process has it open. When the relay learns that its path leads
elsewhere, it holds the only copy of what was stored there: this one outlives it.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

from reliablepub.errors import OutboxMoved

RESCUED: Final = ".rescued-"
"""Goes behind the name of the outbox, and before the number of the relay's run."""


def rescued(
    connection: sqlite3.Connection, path: Path, run: int, error: OutboxMoved
) -> OutboxMoved:
    """Copy the whole database beside the path, and say in the error where it is, or why not.

    Args:
        connection: not in a transaction.
        path: of the outbox; its folder may be gone.
        run: of the relay, for the name of the copy.
        error: what the relay raises.
    """
    copy = path.with_name(f"{path.name}{RESCUED}{run}")
    try:
        # Made before SQLite would, with a wider mode; SQLite takes an empty file.
        os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        connection.execute("VACUUM INTO ?", (str(copy),))
    except (OSError, sqlite3.Error) as failure:
        return OutboxMoved(f"{error}. What it held could not be copied to {copy} ({failure})")
    return OutboxMoved(
        f"{error}. What it held is in {copy}: `reliablepub outbox export` from there and `import`, "
        "which leaves out what the outbox has; or, if it is encrypted, `reliablepub relay --drain`"
    )
