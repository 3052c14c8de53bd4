"""Templates: text with fields in braces, filled from a record: ``flight.{carrier}.{airport.dest}``.

Knows: braces, and which JSON values can be part of a text. Must never know: where a record comes
from, or what the text is for. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

_TOKEN: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class TemplateError(ValueError):
    """A template is malformed, or a record lacks a field of it that can be part of a text."""


class Template:
    """A text with fields.

    ``{name}`` is a field of the record, ``{a.b}`` field ``b`` of the object in field ``a``; ``{{``
    and ``}}`` are braces.
    """

    def __init__(self, text: str) -> None:
        self.text: Final = text
        self._parts: list[str | tuple[str, ...]] = []
        end = 0
        for token in _TOKEN.finditer(text):
            self._parts.append(text[end : token.start()])
            self._parts.append(_part(token))
            end = token.end()
        self._parts.append(text[end:])
        self.fields: Final = tuple(
            ".".join(part) for part in self._parts if not isinstance(part, str)
        )
        self._fixed = None if self.fields else "".join(map(str, self._parts))

    def fill(self, record: Mapping[str, object]) -> str:
        """The text for one record; `TemplateError` if a value is missing, or cannot be text."""
        if self._fixed is not None:
            return self._fixed
        return "".join(
            [part if isinstance(part, str) else _value(record, part) for part in self._parts]
        )


def _part(token: re.Match[str]) -> str | tuple[str, ...]:
    """The meaning of a token: a literal brace, or the path of a field."""
    if token.group() in ("{{", "}}"):
        return token.group()[0]
    if token.group(1) is None:
        raise TemplateError(
            f"{token.group()!r} at position {token.start() + 1} has no partner; "
            f"write {token.group() * 2!r} for a brace"
        )
    path = tuple(token.group(1).split("."))
    if not all(path):
        raise TemplateError(f"{token.group()!r} names no field; write for example {{carrier}}")
    return path


def _value(record: Mapping[str, object], path: tuple[str, ...]) -> str:
    if len(path) == 1 and type(text := record.get(path[0])) is str:  # the common case
        return text
    found: object = record
    for depth, name in enumerate(path, 1):
        if not isinstance(found, Mapping):
            raise TemplateError(f"field {'.'.join(path[: depth - 1])!r} is not an object")
        if name not in found:
            raise TemplateError(f"field {'.'.join(path[:depth])!r} is missing")
        found = found[name]
    match found:
        case str():
            return found
        case bool():  # before int: bool is a subclass of int
            return "true" if found else "false"
        case float() if math.isinf(found):  # such as 1e400
            raise TemplateError(f"field {'.'.join(path)!r} is too large a number")
        case int() | float():
            return str(found)
    kind = "null" if found is None else "a list" if isinstance(found, list) else "an object"
    raise TemplateError(f"field {'.'.join(path)!r} is {kind}; a text, number or boolean is needed")
