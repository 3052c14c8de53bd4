"""Withholds the passwords of URLs in notes on stderr, and in errors that end a command.

Knows: URLs of brokers and of libpq. Must never know: what is printed, or why.

A password may hold any character, even spaces and `@`, so an argument is looked for as a whole; in
other text a password ends at a space.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_IN_TEXT: Final = (
    (re.compile(r"(\b(?:ssl)?password\s*=\s*)[^\s&]*"), r"\1..."),
    (re.compile(r"(://?[^\s:@/]*:)[^\s,]*@"), r"\1...@"),
)
_IN_ARGUMENT: Final = (
    (re.compile(r"(\b(?:ssl)?password\s*=\s*)[^&]*", re.DOTALL), r"\1..."),
    (re.compile(r"(://?[^:]*:).*@", re.DOTALL), r"\1...@"),
)
_OF_OUTBOX: Final = (
    re.compile(r"^\s*\w+://(?:[^/@]*:[^/@]*@|[^/?#]*:[^/?#]*@)"),
    re.compile(r"[?&](?:ssl)?password=.", re.DOTALL),
)
"""Before the host, where libpq lets it hold `?` and `#` and others a `@`; and as a parameter."""


def without_passwords(text: str, arguments: Sequence[str] = ()) -> str:
    """Withhold the passwords of URLs, which click and the system's errors repeat as they are."""
    for given in _spellings(arguments):  # also values of variables: the text may repeat them
        text = text.replace(given, _replaced(given, _IN_ARGUMENT))
    return _replaced(text, _IN_TEXT)


def has_outbox_password(name: str) -> bool:
    """Whether the name of a database (libpq's URI) has a password, before the host or in the query.

    Unlike in the URL of a broker, a `@` after the host ends none: ``?user=app@server``.
    """
    return any(pattern.search(name) for pattern in _OF_OUTBOX)


def _replaced(text: str, patterns: Sequence[tuple[re.Pattern[str], str]]) -> str:
    for pattern, instead in patterns:
        text = pattern.sub(instead, text)
    return text


def _spellings(arguments: Sequence[str]) -> Iterator[str]:
    """Ways in which an error may repeat an argument: whole, quoted, as a path, or in part."""
    for argument in arguments:
        if "://" not in argument and "password" not in argument:
            continue
        value, address = argument.partition("=")[2], argument.partition("://")[2]
        path = str(Path(argument))
        found = (argument, repr(argument)[1:-1], path, value, address and f"://{address}")
        yield from filter(None, found)
