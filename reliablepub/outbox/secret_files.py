"""Files with keys or passwords: whether other users of the machine can read or change them.

Knows: modes of files. Must never know: what is in one.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS = stat.S_IRWXO | stat.S_IWGRP


def exposure(path: str | os.PathLike[str]) -> str:
    """What is wrong with the mode of a secret file, and what to do; empty if nothing is.

    A group may read it, which is how services are given secrets; nobody else may, and only its
    owner may write to it.
    """
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return ""
    if not mode & _OTHERS:
        return ""
    return (
        f"other users of this machine can read or replace {path} (mode {stat.S_IMODE(mode):04o}), "
        f"and it holds a secret; chmod 600 {path}"
    )
