"""The status file: the relay writes its status for other processes, as JSON beside the outbox.

Knows: one small file. Must never know: what the status says.

No decision depends on the file. So it is not part of the database, and costs no transaction and no
fsync; on a full disk there may be none. It is replaced as a whole, so no process reads half of it.
A reader ignores a file that was not written by the process that holds the relay lock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from reliablepub.errors import OutboxError
from reliablepub.outbox.database import IS_LAST, Relaying
from reliablepub.outbox.sqlite.location import read_side_file
from reliablepub.outbox.sqlite.lock import holder_pid

STATUS_BYTES_MAX: Final = 65_536
"""Limit on reading. A relay writes about 500 bytes, and more with paused destinations."""
_SUFFIX: Final = ".relay"


def status_file_path(outbox: Path) -> Path:
    """Return the path of the status file of an outbox."""
    return outbox.with_name(outbox.name + _SUFFIX)


def write_status_file(outbox: Path, values: Mapping[str, object]) -> None:
    """Replace the file. If that fails, as on a full disk, remove it: an old one would mislead."""
    path = status_file_path(outbox)
    text = json.dumps({"pid": os.getpid(), **values})
    try:
        _replace(path, text)
    except OSError:
        with suppress(OSError):
            path.unlink()
            _replace(path, text)  # in the space that the old file has left


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)  # a process that was killed may have left one
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # O_EXCL follows no symbolic link
    try:
        with os.fdopen(os.open(draft, flags, 0o600), "w") as file:
            file.write(text)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(path)


def forget_killed(outbox: Path) -> None:
    """Remove the status of a relay that was killed, before another one starts.

    In containers, both may have the process id 1. The reason why a relay has failed stays until
    the next one shows its status. The caller must hold the relay lock.
    """
    values = _read(outbox)
    if values is None or IS_LAST not in values:
        with suppress(OSError):
            status_file_path(outbox).unlink()


def remove_status_file(outbox: Path, last: Mapping[str, object] | None = None) -> None:
    """Remove the file at the end of a relay, or leave the last status of one that failed.

    The file of another relay that has taken over the outbox stays.
    """
    values = _read(outbox)
    if values is not None and values.get("pid") != os.getpid():
        return
    if last is not None:
        write_status_file(outbox, {**last, IS_LAST: True})
        return
    with suppress(OSError):
        status_file_path(outbox).unlink()


def relaying(outbox: Path) -> Relaying:
    """Return the process that relays an outbox now, and its status.

    If none does, the status is the last one of a relay that failed. That of a relay that was killed
    is left out.
    """
    # The status first: then it is of the process that holds the lock, or of an earlier one.
    shown = _read(outbox)
    return Relaying.of(0, holder_pid(outbox), shown)


def _read(outbox: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(read_side_file(outbox, _SUFFIX, STATUS_BYTES_MAX))
    except (OSError, ValueError, RecursionError, OutboxError):
        return None
    return values if isinstance(values, dict) else None
