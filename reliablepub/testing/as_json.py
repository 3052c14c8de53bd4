"""The records of the broker as values of JSON, for the control port.

PURE: this module knows how bytes, dates and properties are written in JSON.
It must never know HTTP, or where a record comes from.
"""

from __future__ import annotations

import dataclasses
from base64 import b64decode, b64encode
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING

from pamqp.commands import Basic

from reliablepub.testing.faults import Fault

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def of_record(record: DataclassInstance) -> dict[str, object]:
    """The fields of a record; a body is `body` if it is UTF-8, else `body_base64`.

    Instead of an encoded header it has the properties.
    """
    names = (field.name for field in dataclasses.fields(record))
    shown = ("properties" if name == "header" else name for name in names)
    named = {name: getattr(record, name) for name in shown}
    if "body" in named:
        body = named.pop("body")
        try:
            named["body"] = body.decode()
        except UnicodeDecodeError:
            named["body_base64"] = b64encode(body).decode()
    return named


def of_fault(fault: Fault) -> dict[str, object]:
    """A fault as in a fault file: its kind, and the fields that differ from their defaults."""
    named = {
        field.name: getattr(fault, field.name)
        for field in dataclasses.fields(fault)
        if getattr(fault, field.name) != field.default
    }
    return {"kind": fault.kind} | named


def plain(value: object) -> object:
    """A value that JSON has no form for, as one that it has.

    Raises:
        TypeError: It is of an unknown type.
    """
    if isinstance(value, Basic.Properties):
        named = {name: one for name, one in value if one is not None}
        return {name: one for name, one in named.items() if (name, one) != ("cluster_id", "")}
    if isinstance(value, Fault):
        return of_fault(value)
    if isinstance(value, bytes | bytearray):
        return {"base64": b64encode(value).decode()}
    if isinstance(value, datetime):
        return int(value.timestamp())
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def body_of(text: str | None, base64: str | None) -> bytes:
    """The body of a message, from its text or from base64.

    Raises:
        ValueError: Both are given, or it is not base64.
    """
    if base64 is None:
        return (text or "").encode()
    if text is not None:
        raise ValueError("give either body or body_base64")
    return b64decode(base64, validate=True)
