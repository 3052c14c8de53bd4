"""Text for a terminal or a log: untrusted text, escaped, and the names of callbacks.

Knows: which characters are printable, what names a function. Must never know: where a text comes
from, or where it goes.

Applications choose message ids and routing keys, and the broker chooses reply texts. An escape
sequence in such a text would act on the operator's terminal, a line end would forge a log line, and
a bidirectional control character would disguise an address.
"""

from __future__ import annotations

from unicodedata import category


def printable(text: str) -> str:
    r"""Escape every character that is not printable, as in ``\x1b``.

    These are control characters, line ends, format characters (including bidirectional controls),
    unpaired surrogates, and private-use and unassigned characters. Spaces of any width stay.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_seen(char) else _escaped(char) for char in text)


def one_line(text: str) -> str:
    """Join the text into one line with single spaces, and escape what is not printable."""
    return printable(" ".join(text.split()))


def _is_seen(char: str) -> bool:
    return char.isprintable() or category(char) == "Zs"


def _escaped(char: str) -> str:
    code = ord(char)
    if code <= 0xFF:  # noqa: PLR2004 - the escapes of Python's string literals
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004


def named(callback: object) -> str:
    """The name of a callback of the application, by which it can be found: ``shop.Audit.on_sent``.

    Callbacks made by one function, such as lambdas, share a name.
    """
    try:
        function = getattr(callback, "func", callback)  # of a `functools.partial`
        name = getattr(function, "__qualname__", type(function).__qualname__)
        module = getattr(function, "__module__", None)  # a method of a built-in type has none
        return f"{module}.{name}" if module else str(name)
    except Exception:  # noqa: BLE001 - of a proxy, whose every attribute may raise
        return type(callback).__qualname__
