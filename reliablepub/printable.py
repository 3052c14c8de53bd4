"""Texts of others made safe for a terminal or a log: message ids, addresses, a broker's words.

Knows: which characters are seen as themselves. Must never know: where a text came from or goes to.

Whoever publishes chooses ids and routing keys, and a broker its reply texts. An escape sequence in
one would act on the operator's terminal, a line end would forge a line of the log, and a
bidirectional control would show another address than the one there is.
"""

from __future__ import annotations

from unicodedata import category


def printable(text: str) -> str:
    r"""The text with every character escaped that is not seen as itself, as in ``\x1b``.

    Escaped are control characters, line ends, format characters (bidirectional ones among them),
    halves of surrogate pairs, and characters for private use or without a meaning. Spaces of any
    width stay.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_seen(char) else _escaped(char) for char in text)


def one_line(text: str) -> str:
    """The text in one line, with single spaces, and otherwise as `printable` has it."""
    return printable(" ".join(text.split()))


def _is_seen(char: str) -> bool:
    return char.isprintable() or category(char) == "Zs"


def _escaped(char: str) -> str:
    code = ord(char)
    if code <= 0xFF:  # noqa: PLR2004 - as Python writes it
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004 - likewise
