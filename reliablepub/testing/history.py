"""What the broker saw: every publish, and what became of it.

This module knows the fates of a publish and the read-only records that tests look at.
It must never know how a fate comes about.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pamqp.commands import Basic

    from reliablepub.testing.faults import Fault

_PERSISTENT = 2


class Fate(enum.StrEnum):
    """What became of a publish that reached the broker whole."""

    WITHHELD = "withheld"
    """Not processed yet: an alarm or a freeze holds it back, or a transaction that is open."""
    ACCEPTED = "accepted"
    """At least one queue took it."""
    RETURNED = "returned"
    """Mandatory and unroutable: basic.return was sent, then its confirm."""
    UNROUTABLE = "unroutable"
    """Not mandatory and unroutable: dropped, and confirmed all the same."""
    NACKED = "nacked"
    """Refused by basic.nack (`x-overflow=reject-publish`, or a fault)."""
    REFUSED = "refused"
    """The channel or the connection was closed because of it."""
    LOST = "lost"
    """It arrived, and the broker no longer has it: dropped before acceptance, or by a crash."""


@dataclass(slots=True, eq=False)
class Publish:
    """One publish inside the broker; `header` is its content header as it came, properties too."""

    exchange: str
    routing_key: str
    mandatory: bool
    header: bytes
    properties: Basic.Properties
    body: bytes
    connection: int
    channel: int
    delivery_tag: int = 0
    fate: Fate = Fate.WITHHELD
    waiting: int = 0
    """Queues that still have to write it before it may be confirmed."""
    rejected: bool = False
    faults: tuple[Fault, ...] = ()

    @property
    def is_persistent(self) -> bool:
        """Whether delivery_mode asks for the disk (rabbit_basic:is_message_persistent)."""
        return self.properties.delivery_mode == _PERSISTENT

    def drop_faults(self, kind: type[Fault]) -> None:
        """It has no fault of this kind any more."""
        self.faults = tuple(fault for fault in self.faults if not isinstance(fault, kind))

    def mark_lost(self) -> None:
        """No queue has it any more, and nobody consumed it."""
        self.fate = Fate.LOST


@dataclass(frozen=True, slots=True)
class Published:
    """A publish as the broker saw it.

    `delivery_tag` is 0 outside confirm mode; `connection` counts connections from 1.
    """

    fate: Fate
    exchange: str
    routing_key: str
    body: bytes = field(repr=False)
    properties: Basic.Properties = field(repr=False)
    mandatory: bool
    connection: int
    channel: int
    delivery_tag: int


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message that is ready in a queue."""

    exchange: str
    routing_key: str
    body: bytes = field(repr=False)
    properties: Basic.Properties = field(repr=False)
    redelivered: bool


class History:
    """The last publishes in the order they came, and how many there were.

    Args:
        size_max: How many are remembered.
        bytes_max: How many bytes their bodies may have together.
    """

    def __init__(self, size_max: int, bytes_max: int) -> None:
        self.total = 0
        self._size_max = size_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._publishes: deque[Publish] = deque()

    def add(self, publish: Publish) -> None:
        """Remember a publish; the oldest are forgotten when there is no room."""
        self.total += 1
        self._publishes.append(publish)
        self._bytes += len(publish.body)
        while len(self._publishes) > self._size_max or (
            self._bytes > self._bytes_max and len(self._publishes) > 1
        ):
            self._bytes -= len(self._publishes.popleft().body)

    def drop_faults(self, kind: type[Fault]) -> None:
        """No publish has a fault of this kind any more."""
        for publish in self._publishes:
            if publish.faults:
                publish.drop_faults(kind)

    def snapshot(self) -> tuple[Published, ...]:
        """The publishes as they stand now."""
        return tuple(
            Published(
                fate=publish.fate,
                exchange=publish.exchange,
                routing_key=publish.routing_key,
                body=publish.body,
                properties=publish.properties,
                mandatory=publish.mandatory,
                connection=publish.connection,
                channel=publish.channel,
                delivery_tag=publish.delivery_tag,
            )
            for publish in self._publishes
        )
