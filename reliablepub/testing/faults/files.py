"""Reads fault scripts from TOML files.

This module knows the file format and how a value becomes a field. It must never know what a fault
does: it takes the kinds and their fields from the classes.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from typing import TYPE_CHECKING, Any

from reliablepub.testing.faults import answers, deliveries, events, mix, network
from reliablepub.testing.faults.rule import Fault

if TYPE_CHECKING:
    from pathlib import Path

KINDS: dict[str, type[Fault]] = {
    kind.kind: kind
    for module in (answers, deliveries, events, network, mix)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Fault) and hasattr(kind, "kind")
}
"""Every fault class, by the name of its kind."""


class FaultFileError(ValueError):
    """A fault file cannot be read; the message names the file, the entry and the key."""


def load_faults(path: Path) -> tuple[Fault, ...]:
    """The faults of a TOML file: `[[fault]]` tables with a `kind` and the fields of that kind.

    Raises:
        FaultFileError: The file is not TOML, or an entry has a wrong kind, key or value.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{path}: {error}"
        raise FaultFileError(message) from error
    unknown = sorted(document.keys() - {"fault"})
    entries = document.get("fault", [])
    if unknown or not isinstance(entries, list):
        message = f"{path}: expected only [[fault]] tables, found {unknown or 'fault'}"
        raise FaultFileError(message)
    return tuple(fault_of(f"{path}: fault {i}", entry) for i, entry in enumerate(entries, 1))


def fault_of(where: str, entry: object) -> Fault:
    """The fault of a table with a `kind` and the fields of that kind.

    Args:
        where: What an error names: the file and the entry.
        entry: The table.

    Raises:
        FaultFileError: It is no table, or has a wrong kind, key or value.
    """
    if not isinstance(entry, dict):
        message = f"{where}: expected a table, not {entry!r}"
        raise FaultFileError(message)
    name = entry.get("kind")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        message = f"{where}: kind {name!r} is not one of {', '.join(sorted(KINDS))}"
        raise FaultFileError(message)
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key in entry.keys() - {"kind"}:
        if key not in fields:
            message = f"{where} ({name}): unknown key {key!r}; known: {', '.join(sorted(fields))}"
            raise FaultFileError(message)
        values[key] = _value(f"{where} ({name})", key, entry[key], fields[key])
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:  # TypeError: a field without a default is missing
        message = f"{where} ({name}): {str(error).removeprefix(f'{kind.__name__}.__init__() ')}"
        raise FaultFileError(message) from error


def _value(where: str, key: str, value: object, annotation: str) -> object:
    """A TOML value as the value of a field (`int | None`, `float`, `bool`, `str`, or faults)."""
    if annotation.startswith("tuple[") and isinstance(value, list):
        return tuple(fault_of(f"{where}: {key} {i}", one) for i, one in enumerate(value, 1))
    wanted = set(re.findall(r"\w+", annotation))
    if type(value).__name__ in wanted or (type(value) is int and "float" in wanted):
        return value
    message = f"{where}: {key} must be {annotation}, not {value!r}"
    raise FaultFileError(message)
