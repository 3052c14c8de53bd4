"""How the relay says how it is doing to whoever looks at the outbox from outside.

Knows: a small JSON file beside the outbox. Must never know: what is in the picture.

It is for people and their tools, and nothing is decided by it: so it is not part of the database,
costs no transaction and no fsync, and a disk that is full only makes it old. It is replaced as a
whole, so nobody reads half of it; whoever finds one that is not of the process that has the lease
takes no notice of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from reliablepub.errors import OutboxError
from reliablepub.outbox.lease import holder_pid
from reliablepub.outbox.side_files import read_side_file

STATUS_BYTES_MAX: Final = 65_536
"""What is read of a picture; a relay's has about 500 bytes, and more with paused routes."""
_SUFFIX: Final = ".relay"
_IS_LAST: Final = "is_last"


def picture_path(outbox: Path) -> Path:
    """The file of an outbox's relay."""
    return outbox.with_name(outbox.name + _SUFFIX)


def write_picture(outbox: Path, values: Mapping[str, object]) -> None:
    """Replace the picture, if that is possible."""
    path = picture_path(outbox)
    draft = path.with_name(path.name + ".new")
    with suppress(OSError):
        draft.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # which follows no link
        with os.fdopen(os.open(draft, flags, 0o600), "w") as file:
            json.dump({"pid": os.getpid(), **values}, file)
        draft.replace(path)


def remove_picture(outbox: Path, last: Mapping[str, object] | None = None) -> None:
    """The relay ends; one that has failed leaves a last picture, until the next one begins.

    Another relay that has taken the outbox over meanwhile keeps its own.
    """
    values = _read(outbox)
    if values is not None and values.get("pid") != os.getpid():
        return
    if last is not None:
        write_picture(outbox, {**last, _IS_LAST: True})
        return
    with suppress(OSError):
        picture_path(outbox).unlink()


def read_picture(outbox: Path) -> dict[str, Any] | None:
    """The picture of the relay that is at work now, or the last one of a relay that has failed.

    None without either, and of a relay that was killed.
    """
    values = _read(outbox)
    if values is None:
        return None
    pid = holder_pid(outbox)
    return values if (values.get("pid") == pid if pid is not None else _IS_LAST in values) else None


def _read(outbox: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(read_side_file(outbox, _SUFFIX, STATUS_BYTES_MAX))
    except (OSError, ValueError, RecursionError, OutboxError):
        return None
    return values if isinstance(values, dict) else None
