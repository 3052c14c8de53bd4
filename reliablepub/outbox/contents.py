"""What is in one message: its columns, properties, headers and body, as far as they can be read.

Knows: rows, and that damaged ones must be shown too. Must never know: how they are shown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reliablepub.errors import OutboxSealed
from reliablepub.outbox.database import reading
from reliablepub.outbox.encryption import OutboxKeys, is_sealed
from reliablepub.outbox.rows import Unreadable, content_of, entry_of
from reliablepub.outbox.sql import QUERIES

_TEXTUAL = ("json", "xml", "javascript", "yaml", "csv", "x-www-form-urlencoded")


@dataclass(frozen=True, slots=True)
class Contents:
    """One message.

    Attributes:
        columns: of its row, without properties and body.
        properties: AMQP properties that are set, as they are stored.
        headers: likewise; what JSON lacks is tagged, as in ``{"$bytes": "..."}``.
        body: the payload; while it is encrypted, as it is stored.
        problem: why the row is not what was stored, or cannot be read here; None if it can.
        is_sealed: whether properties, headers and body are encrypted, and could not be decrypted.
    """

    columns: dict[str, Any]
    properties: dict[str, Any]
    headers: dict[str, Any]
    body: bytes
    problem: str | None
    is_sealed: bool = False

    @property
    def text(self) -> str | None:
        """The body as text, if its content type or its bytes say that it is text; else None."""
        if self.properties.get("content_encoding") not in (None, "", "utf-8", "identity"):
            return None
        kind = str(self.properties.get("content_type", ""))
        is_named = kind.startswith("text/") or any(word in kind for word in _TEXTUAL)
        try:
            text = self.body.decode()
        except UnicodeDecodeError:
            return None
        is_clean = all(char.isprintable() or char in "\n\r\t" for char in text)
        return text if is_clean and (is_named or not kind) else None


def read_contents(path: Path, id_: int, keys: OutboxKeys | None = None) -> Contents | None:
    """Everything in a row, or None if it is not there.

    Args:
        path: of the outbox.
        id_: of the message.
        keys: to decrypt it with, where it is encrypted.

    Raises:
        NotAnOutbox: there is no outbox.
    """
    with reading(path) as connection:
        cursor = connection.execute(QUERIES["one_message"], {"id": id_})
        row = cursor.fetchone()
        if row is None:
            return None
        columns = dict(zip((column[0] for column in cursor.description), row, strict=True))
        kept = "confirmed_message" if columns["state"] == "confirmed" else "any_message"
        raw = connection.execute(QUERIES[kept], {"id": id_}).fetchone()
    problem = None
    try:
        entry_of(raw, keys)
    except (Unreadable, OutboxSealed) as error:
        problem = str(error)
    text, body = columns.pop("properties"), raw[12]
    if is_sealed(text):
        try:
            text, body = content_of(raw, keys)
        except (Unreadable, OutboxSealed):
            return Contents(columns, {}, {}, body, problem, is_sealed=True)
    properties = _object(text)
    headers = properties.pop("headers", {})
    return Contents(columns, properties, headers, body, problem)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {"unreadable": text}
    return found if isinstance(found, dict) else {"unreadable": text}
