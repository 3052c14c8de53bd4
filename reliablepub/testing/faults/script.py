"""Fault scripts: the rules in force, which of them act on an event, and their TOML files.

Knows: when a rule acts, the file format, how a value becomes a field. Must never know: what a fault
does, how the broker carries it out. The kinds and their fields come from the classes.

Rules compose: every rule that matches an event acts on it, in the order of injection.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from reliablepub.testing.faults import answers, deliveries, events, network
from reliablepub.testing.faults.events import AnyOf
from reliablepub.testing.faults.rule import ConnectionFault, DeliveryFault, Fault, PublishFault

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", PublishFault, DeliveryFault, ConnectionFault)

KINDS: dict[str, type[Fault]] = {
    kind.kind: kind
    for module in (answers, deliveries, events, network)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Fault) and hasattr(kind, "kind")
}
"""Every kind of fault, by its name."""


class FaultFileError(ValueError):
    """A fault file is invalid; the message names the file, the entry and the key."""


def load_faults(path: str | Path) -> tuple[Fault, ...]:
    """Read the faults of a TOML file: `[[fault]]` tables with a `kind` and its fields.

    Raises:
        FaultFileError: The file is not TOML, or an entry has a wrong kind, key or value.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FaultFileError(f"{path}: {error}") from error
    unknown = sorted(document.keys() - {"fault"})
    entries = document.get("fault", [])
    if unknown or not isinstance(entries, list):
        raise FaultFileError(f"{path}: expected only [[fault]] tables, found {unknown or 'fault'}")
    return tuple(fault_of(f"{path}: fault {i}", entry) for i, entry in enumerate(entries, 1))


def fault_of(where: str, entry: object) -> Fault:
    """Make the fault of a table with a `kind` and its fields.

    Args:
        where: Names the file and the entry in errors.
        entry: The table.

    Raises:
        FaultFileError: It is not a table, or has a wrong kind, key or value.
    """
    if not isinstance(entry, dict):
        raise FaultFileError(f"{where}: expected a table, not {entry!r}")
    name = entry.get("kind")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise FaultFileError(f"{where}: kind {name!r} is not one of {', '.join(sorted(KINDS))}")
    where = f"{where} ({name})"
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key in entry.keys() - {"kind"}:
        if key not in fields:
            known = ", ".join(sorted(fields))
            raise FaultFileError(f"{where}: unknown key {key!r}; known: {known}")
        values[key] = _value(where, key, entry[key], fields[key])
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:  # TypeError: a field without a default is missing
        reason = str(error).removeprefix(f"{kind.__name__}.__init__() ")
        raise FaultFileError(f"{where}: {reason}") from error


def _value(where: str, key: str, value: object, annotation: str) -> object:
    """Check and convert a TOML value of a field (`int | None`, `float`, `bool`, `str`, faults)."""
    if annotation.startswith("tuple[") and isinstance(value, list):
        return tuple(fault_of(f"{where}: {key} {i}", one) for i, one in enumerate(value, 1))
    wanted = set(re.findall(r"\w+", annotation))
    if type(value).__name__ in wanted or (type(value) is int and "float" in wanted):
        return value
    raise FaultFileError(f"{where}: {key} must be {annotation}, not {value!r}")


class _Rule:
    """An injected fault, with the number of events seen and of actions left."""

    def __init__(self, fault: Fault, random: Random) -> None:
        self.fault = fault
        self._random = random
        self._seen = 0
        self._left = fault.times_max

    def fires(self) -> bool:
        self._seen += 1
        if self._seen < (self.fault.nth or 1) or self._left == 0:
            return False
        share = self.fault.share
        if share is not None and self._random.random() >= share:
            return False
        if self._left is not None:
            self._left -= 1
        return True

    def draw(self) -> Fault:
        """Return the fault that acts; of an `AnyOf`, a random one."""
        fault = self.fault
        return self._random.choice(fault.faults) if isinstance(fault, AnyOf) else fault

    @property
    def is_spent(self) -> bool:
        return self._left == 0


class FaultScript:
    """The rules in force. Each random rule draws from its own stream, seeded by its position."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._injected = 0
        self._rules: list[_Rule] = []

    def inject(self, *faults: Fault) -> None:
        """Add rules, which see only events from now on.

        Raises:
            TypeError: One is not a fault, such as a class without its parentheses.
        """
        for fault in faults:
            if not isinstance(fault, Fault):
                raise TypeError(f"{fault!r} is not a fault; write faults.Nack(), for example")
        for fault in faults:
            self._injected += 1
            random = Random(f"{self._seed}/{self._injected}")  # noqa: S311 - repeatable, no secret
            self._rules.append(_Rule(fault, random))

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults in force, in the order of injection."""
        return tuple(rule.fault for rule in self._rules)

    def remove(self, kind: type[Fault]) -> None:
        """Remove every rule of a kind."""
        self._rules = [rule for rule in self._rules if not isinstance(rule.fault, kind)]

    def on_publish(self, routing_key: str) -> tuple[PublishFault, ...]:
        """Return the faults that act on this publish."""
        keys = (None, routing_key)
        return self._fire(PublishFault, lambda fault: fault.routing_key in keys)

    def on_delivery(self, queue: str) -> tuple[DeliveryFault, ...]:
        """Return the faults that act on this delivery."""
        return self._fire(DeliveryFault, lambda fault: fault.queue in (None, queue))

    def on_connection(self) -> tuple[ConnectionFault, ...]:
        """Return the faults that act on this new connection."""
        return self._fire(ConnectionFault, lambda _: True)

    def _fire(self, kind: type[F], matches: Callable[[F], bool]) -> tuple[F, ...]:
        if not self._rules:
            return ()
        fired: list[F] = []
        for rule in self._rules:
            if isinstance(rule.fault, kind) and matches(rule.fault) and rule.fires():
                drawn = rule.draw()
                assert isinstance(drawn, kind)
                fired.append(drawn)
        if fired:
            self._rules = [rule for rule in self._rules if not rule.is_spent]
        return tuple(fired)
