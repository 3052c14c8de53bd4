"""Paths of this host, as Spark writes them: with the scheme ``file`` or without one.

Knows: URIs. Must never know: what lies at a path.
"""

from __future__ import annotations

from urllib.parse import unquote


def local_path(location: str) -> str | None:
    """The path of a location: ``file:///a%20b`` is ``/a b``; None for another scheme."""
    scheme, colon, path = location.partition(":")
    if not colon or "/" in scheme:
        return location
    if scheme != "file":
        return None
    return unquote("/" + path.lstrip("/") if path.startswith("/") else path)
