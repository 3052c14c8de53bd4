"""Faults of connections: how they are opened, and what the network between does to their bytes.

This module must never know how the broker carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass

from reliablepub.testing.faults.rule import ConnectionFault, check_code, check_positive

STEPS = ("protocol_header", "start_ok", "tune_ok", "open")
"""What a client sends in the handshake, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeFault(ConnectionFault):
    """The handshake of a new connection goes wrong.

    Attributes:
        at: What the client has sent last: one of `STEPS`.
    """

    at: str = "start_ok"

    def __post_init__(self) -> None:
        """The step must be one of the handshake."""
        ConnectionFault.__post_init__(self)
        if self.at not in STEPS:
            message = f"at must be one of {', '.join(STEPS)}"
            raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseHandshake(HandshakeFault):
    """A new connection is refused.

    Attributes:
        code: The reply code of connection.close; None closes the socket without a word.
        text: The reply text after the name of the code.
    """

    kind = "refuse_handshake"
    code: int | None = 403
    text: str = "refused by a fault"

    def __post_init__(self) -> None:
        """The reply code must be one of AMQP's."""
        HandshakeFault.__post_init__(self)
        if self.code is not None:
            check_code(self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class StallHandshake(HandshakeFault):
    """The step of the client is not answered, and the socket not closed.

    At the protocol header that is a peer that accepts and says nothing.
    """

    kind = "stall_handshake"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStream(ConnectionFault):
    """The TCP connection ends at a byte.

    Attributes:
        sent: After so many bytes from the broker, from the connection's first.
        received: After so many bytes from the client; what follows is not looked at.
        reset: RST; otherwise FIN.
    """

    kind = "cut_stream"
    sent: int | None = None
    received: int | None = None
    reset: bool = True

    def __post_init__(self) -> None:
        """Exactly one of the two places."""
        ConnectionFault.__post_init__(self)
        if (self.sent is None) == (self.received is None):
            raise ValueError("say either sent or received")
        if (self.sent or 0) < 0 or (self.received or 0) < 0:
            raise ValueError("sent and received count from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOutput(ConnectionFault):
    """What the broker sends arrives in pieces of `size` bytes."""

    kind = "slice_output"
    size: int = 1

    def __post_init__(self) -> None:
        """A piece has a size."""
        ConnectionFault.__post_init__(self)
        check_positive(size=self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency(ConnectionFault):
    """What the broker sends takes `delay_s` to arrive; nothing is reordered."""

    kind = "latency"
    delay_s: float

    def __post_init__(self) -> None:
        """A delay lasts."""
        ConnectionFault.__post_init__(self)
        check_positive(delay_s=self.delay_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth(ConnectionFault):
    """The connection is slow, in one direction or both.

    Attributes:
        sent_per_s: Bytes a second from the broker.
        received_per_s: Bytes a second that the broker reads.
    """

    kind = "bandwidth"
    sent_per_s: float | None = None
    received_per_s: float | None = None

    def __post_init__(self) -> None:
        """At least one direction."""
        ConnectionFault.__post_init__(self)
        check_positive(sent_per_s=self.sent_per_s, received_per_s=self.received_per_s)
        if self.sent_per_s is None and self.received_per_s is None:
            raise ValueError("say sent_per_s, received_per_s or both")
