"""Recognizes compressed input, which would otherwise be read as lines of text.

Knows: how compressed files begin. Must never know: how they are decompressed.
"""

from __future__ import annotations

from typing import Final

_BEGINNINGS: Final = {b"\x1f\x8b": "zcat", b"\x28\xb5\x2f\xfd": "zstdcat", b"\xfd7zXZ\0": "xzcat"}
"""How files of gzip, zstd and xz begin, and the command that decompresses each."""


def hint(first: bytes) -> str:
    """What to do about input that begins like this; empty if it is not compressed."""
    for beginning, command in _BEGINNINGS.items():
        if first.startswith(beginning):
            return f"the input is compressed: pipe it through {command}, and read `-`"
    return ""
