"""Recognizes input that is compressed or in UTF-16, which would otherwise be read as lines of text.

Knows: how such files begin. Must never know: how they are converted.
"""

from __future__ import annotations

from typing import Final

_BEGINNINGS: Final = {
    b"\x1f\x8b": ("compressed", "zcat"),
    b"\x28\xb5\x2f\xfd": ("compressed", "zstdcat"),
    b"\xfd7zXZ\0": ("compressed", "xzcat"),
    b"\xff\xfe\0\0": ("in UTF-32", "`iconv -f UTF-32 -t UTF-8`"),
    b"\0\0\xfe\xff": ("in UTF-32", "`iconv -f UTF-32 -t UTF-8`"),
    b"\xff\xfe": ("in UTF-16", "`iconv -f UTF-16 -t UTF-8`"),
    b"\xfe\xff": ("in UTF-16", "`iconv -f UTF-16 -t UTF-8`"),
}
"""How files of gzip, zstd and xz begin, and byte order marks; what each is, and a command."""


def hint(first: bytes) -> str:
    """What to do about input that begins like this; empty if it can be text in UTF-8."""
    for beginning, (what, command) in _BEGINNINGS.items():
        if first.startswith(beginning):
            return f"the input is {what}: pipe it through {command}, and read `-`"
    return ""
