"""Faults of connections: of the handshake, and of the network.

Knows: the fields of each fault. Must never know: how the broker carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from reliablepub.testing.faults.rule import ConnectionFault

STEPS = ("protocol_header", "start_ok", "tune_ok", "open")
"""The client's steps in the handshake, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeFault(ConnectionFault):
    """The handshake of a new connection goes wrong.

    Attributes:
        at: The client's last step before the fault: one of `STEPS`.
    """

    at: str = "start_ok"

    def __post_init__(self) -> None:
        """Check the step."""
        ConnectionFault.__post_init__(self)
        if self.at not in STEPS:
            raise ValueError(f"at must be one of {', '.join(STEPS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseHandshake(HandshakeFault):
    """A new connection is refused.

    Attributes:
        code: The reply code of connection.close; None closes the socket without a reply.
        text: The reply text after the name of the code.
    """

    kind = "refuse_handshake"
    code: int | None = 403
    text: str = "refused by a fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class StallHandshake(HandshakeFault):
    """A step of the client gets no answer, and the socket stays open.

    At `protocol_header`, the broker accepts the connection and never sends.
    """

    kind = "stall_handshake"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStream(ConnectionFault):
    """The TCP connection ends after a number of bytes, counted from its start.

    Attributes:
        sent: Number of bytes from the broker.
        received: Number of bytes from the client; later bytes are ignored.
        reset: End with RST; otherwise with FIN.
    """

    kind = "cut_stream"
    sent: int | None = None
    received: int | None = None
    reset: bool = True

    def __post_init__(self) -> None:
        """Require exactly one of `sent` and `received`."""
        ConnectionFault.__post_init__(self)
        if (self.sent is None) == (self.received is None):
            raise ValueError("give either sent or received")
        if (self.sent or 0) < 0 or (self.received or 0) < 0:
            raise ValueError("sent and received count from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOutput(ConnectionFault):
    """The broker's output arrives in pieces of `size` bytes."""

    kind = "slice_output"
    _positive = ("size",)
    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency(ConnectionFault):
    """The broker's output takes `delay_s` seconds to arrive, in order."""

    kind = "latency"
    _positive = ("delay_s",)
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth(ConnectionFault):
    """The connection is slow, in one direction or both.

    Attributes:
        sent_per_s: Bytes per second from the broker.
        received_per_s: Bytes per second that the broker reads.
    """

    kind = "bandwidth"
    _positive = ("sent_per_s", "received_per_s")
    sent_per_s: float | None = None
    received_per_s: float | None = None

    def __post_init__(self) -> None:
        """Require at least one of the two rates."""
        ConnectionFault.__post_init__(self)
        if self.sent_per_s is None and self.received_per_s is None:
            raise ValueError("give sent_per_s, received_per_s or both")
