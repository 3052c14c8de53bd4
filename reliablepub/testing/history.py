"""The history of a broker: every publish, and its fate.

Knows: the fates of a publish, the read-only records that tests inspect. Must never know: what
decides a fate.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reliablepub.testing.content_header import PERSISTENT, decode_properties

if TYPE_CHECKING:
    from pamqp.commands import Basic

    from reliablepub.testing.faults import Fault

# The properties of a message are read several times while it arrives, and then hardly ever.
_decoded = functools.lru_cache(maxsize=64)(decode_properties)


class Fate(enum.StrEnum):
    """The fate of a publish that reached the broker completely."""

    WITHHELD = "withheld"
    """Not processed yet: held back by an alarm, a freeze or an open transaction."""
    ACCEPTED = "accepted"
    """At least one queue took it, or the consumer of a direct reply got it."""
    RETURNED = "returned"
    """Mandatory and unroutable: basic.return was sent, then its confirm."""
    UNROUTABLE = "unroutable"
    """Not mandatory and unroutable: dropped, but confirmed."""
    NACKED = "nacked"
    """Refused by basic.nack (`x-overflow=reject-publish`, or a fault)."""
    REFUSED = "refused"
    """The broker closed the channel or the connection because of the publish."""
    LOST = "lost"
    """Arrived but gone: dropped before a queue accepted it, or lost in a crash."""


@dataclass(slots=True, eq=False)
class Publish:
    """One publish inside the broker; `header` is the encoded content header as it arrived.

    Decoded properties take a KiB, so a message keeps its header and decodes it on demand.
    """

    exchange: str
    routing_key: str
    mandatory: bool
    header: bytes
    body: bytes
    connection: int
    channel: int
    delivery_tag: int = 0
    fate: Fate = Fate.WITHHELD
    waiting: int = 0
    """Number of queues that must write the message before it may be confirmed."""
    rejected: bool = False
    faults: tuple[Fault, ...] = ()
    blind_keys: tuple[str, ...] = ()
    """The keys of its BCC header, which is dropped; its dead letters go there too."""

    @property
    def properties(self) -> Basic.Properties:
        """The decoded properties; messages with equal headers share them, so do not change them.

        Raises:
            MalformedError: The header cannot be decoded; this is checked when a publish arrives.
        """
        return _decoded(self.header)

    @property
    def is_persistent(self) -> bool:
        """Whether delivery_mode asks for the disk (rabbit_basic:is_message_persistent)."""
        return self.properties.delivery_mode == PERSISTENT

    def drop_faults(self, kind: type[Fault]) -> None:
        """Remove faults of this kind from the publish."""
        self.faults = tuple(fault for fault in self.faults if not isinstance(fault, kind))

    def mark_lost(self) -> None:
        """Record that no queue has the message any more, and no consumer got it."""
        self.fate = Fate.LOST


@dataclass(frozen=True, slots=True)
class Published:
    """A publish as the broker saw it.

    `delivery_tag` is 0 outside confirm mode; `connection` counts connections from 1; `header` is
    the encoded content header, which holds the properties.
    """

    fate: Fate
    exchange: str
    routing_key: str
    header: bytes = field(repr=False)
    body: bytes = field(repr=False)
    mandatory: bool
    connection: int
    channel: int
    delivery_tag: int

    @property
    def properties(self) -> Basic.Properties:
        """The properties of the message, decoded on each access."""
        return decode_properties(self.header)


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message that is ready in a queue; `header` is the encoded content header."""

    exchange: str
    routing_key: str
    header: bytes = field(repr=False)
    body: bytes = field(repr=False)
    redelivered: bool

    @property
    def properties(self) -> Basic.Properties:
        """The properties of the message, decoded on each access."""
        return decode_properties(self.header)


class History:
    """The last publishes in the order of arrival, and the number of all.

    Args:
        size_max: Maximum number of publishes kept.
        bytes_max: Maximum total size of their bodies.
    """

    def __init__(self, size_max: int, bytes_max: int) -> None:
        self.total: int = 0
        self._size_max = size_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._publishes: deque[Publish] = deque()

    def add(self, publish: Publish) -> None:
        """Add a publish; the oldest ones are dropped beyond the limits."""
        self.total += 1
        self._publishes.append(publish)
        self._bytes += len(publish.body)
        while len(self._publishes) > self._size_max or (
            self._bytes > self._bytes_max and len(self._publishes) > 1
        ):
            self._bytes -= len(self._publishes.popleft().body)

    def drop_faults(self, kind: type[Fault]) -> None:
        """Remove faults of this kind from every publish."""
        for publish in self._publishes:
            if publish.faults:
                publish.drop_faults(kind)

    def snapshot(self) -> tuple[Published, ...]:
        """Return read-only copies of the publishes in their present state."""
        return tuple(
            Published(
                fate=publish.fate,
                exchange=publish.exchange,
                routing_key=publish.routing_key,
                body=publish.body,
                header=publish.header,
                mandatory=publish.mandatory,
                connection=publish.connection,
                channel=publish.channel,
                delivery_tag=publish.delivery_tag,
            )
            for publish in self._publishes
        )
