"""What crosses the border of the core: frozen facts in, frozen orders out.

Knows: the names of things that happen on a connection. Must never know: which client library saw
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from reliablepub.outcome import CONFIRMED, Outcome

K = TypeVar("K")
"""What the caller names a message by; the core only hands it back."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection is open and may carry channels."""


@dataclass(frozen=True, slots=True)
class ConnectionClose:
    """What the broker said when it closed the connection (``connection.close``).

    Attributes:
        reply_code: such as 320 or 540.
        reply_text: the broker's words.
        method: class and method that failed: (60, 40) is ``basic.publish``, (0, 0) none.
    """

    reply_code: int
    reply_text: str
    method: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection is gone, or could not be made; with it every channel.

    Attributes:
        reason: for people.
        close: what the broker said, if it said anything.
        is_refusal: whether the broker or TLS refuses the connection as it is: to try again helps
            only when one of the two sides is changed.
    """

    reason: str
    close: ConnectionClose | None = None
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class ChannelOpened:
    """The channel is open and in confirm mode (``confirm.select-ok``); its tags start at 1."""

    epoch: int


@dataclass(frozen=True, slots=True)
class NoChannel:
    """The channel was not opened, because the connection has no number left for one more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ChannelClosed:
    """The broker closed one channel (``channel.close``).

    Attributes:
        epoch: which channel.
        reply_code: such as 404.
        reply_text: the broker's words.
        by_publish: the close names ``basic.publish`` (class 60, method 40) as what failed.
    """

    epoch: int
    reply_code: int
    reply_text: str
    by_publish: bool


@dataclass(frozen=True, slots=True)
class Acked:
    """``basic.ack``: this tag, or with ``multiple`` all outstanding up to it."""

    epoch: int
    tag: int
    multiple: bool


@dataclass(frozen=True, slots=True)
class AckedEach:
    """``basic.ack`` several times in a row, without ``multiple``: one `Acked` after the other."""

    epoch: int
    tags: Sequence[int]


@dataclass(frozen=True, slots=True)
class Nacked:
    """``basic.nack``, read like `Acked`."""

    epoch: int
    tag: int
    multiple: bool


@dataclass(frozen=True, slots=True)
class Returned:
    """``basic.return``: its tag is read from our own header; 0 where that could not be read.

    Attributes:
        epoch: which channel.
        tag: of the publish that came back.
        reply_code: such as 312.
        reply_text: the broker's words.
        body_bytes: how much of a body it is said to have.
    """

    epoch: int
    tag: int
    reply_code: int
    reply_text: str
    body_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """``connection.blocked``: the broker takes no publishes for now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unblocked:
    """``connection.unblocked``."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Bytes have left this host of late, and a publish has not left it entirely.

    A transport repeats it while both hold, several times a second. What is not reported has left.

    Attributes:
        epoch: which channel.
        tag: the first publish that has not left entirely; 0 is the opening of the channel. From one
            report to the next it never falls.
    """

    epoch: int
    tag: int


ChannelEvent: TypeAlias = (
    Acked | AckedEach | Nacked | Returned | ChannelOpened | NoChannel | ChannelClosed | Leaving
)
Event: TypeAlias = ChannelEvent | Connected | ConnectionLost | Blocked | Unblocked


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """Open a channel in confirm mode; answer with `ChannelOpened` of this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CloseChannel:
    """Close the channel of this epoch; whatever it still says will be ignored."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Drop the connection: it does not answer, or it closes channels for no fault of ours."""

    reason: str


Command: TypeAlias = OpenChannel | CloseChannel | Disconnect


@dataclass(frozen=True, slots=True)
class Batch(Generic[K]):
    """Messages to write next on one channel: ``keys[i]`` has delivery tag ``first_tag + i``."""

    epoch: int
    first_tag: int
    keys: Sequence[K]


class Settlement(NamedTuple, Generic[K]):
    """One attempt has ended; how most of them end is told by `ConfirmedEach`.

    An uncertain message is sent again by the session; with every other the caller decides.
    """

    key: K
    epoch: int
    tag: int
    outcome: Outcome


@dataclass(slots=True)
class ConfirmedEach(Generic[K]):
    """Attempts of one epoch that were confirmed one after the other, as most are, in large numbers.

    It grows until it is told.
    """

    epoch: int
    tags: list[int]
    keys: list[K]

    def each(self) -> Iterator[Settlement[K]]:
        """The same, one by one."""
        for tag, key in zip(self.tags, self.keys, strict=True):
            yield Settlement(key, self.epoch, tag, CONFIRMED)


Ended: TypeAlias = Settlement[K] | ConfirmedEach[K]
