"""What pika reads, bounded, by the interface through which it asks for connections.

Knows: pika's documented interfaces to an I/O loop (`nbio_interface`). Must never know: what is
written, who is connected.

Wherever pika reads for itself, its bytes pass here first: on the public way of `PikaTransport`, and
in `probe`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pika import spec
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter

from reliablepub.transport.incoming import (
    BadFrame,
    Contents,
    Incoming,
    Part,
    body_bytes,
    without_body,
)

_FRAME_MAX: Final = int(spec.FRAME_MAX_SIZE)
"""What pika offers, so what is agreed on at most."""


class BoundedServices(SelectorIOServicesAdapter):
    """pika's adapter to its own loop, which lets through what a broker may send.

    One connection at a time. Bodies of returned messages are dropped as they come, so pika
    hears of each as soon as its header is there, and never of a body.

    Attributes:
        ended_because: what was wrong with what the broker sent; empty so far.
        returned_bytes: how long the body is of the message that came back last.
    """

    ended_because = ""
    returned_bytes = 0

    def create_streaming_connection(
        self,
        protocol_factory: Callable[[], Any],
        *args: Any,  # noqa: ANN401 - pika's own
        **kwargs: Any,  # noqa: ANN401 - pika's own
    ) -> Any:  # noqa: ANN401 - pika's own
        """Do what pika does; but its protocol is given what is left of the received bytes."""
        return super().create_streaming_connection(
            lambda: self._bound(protocol_factory()), *args, **kwargs
        )

    def _bound(self, protocol: Any) -> Any:  # noqa: ANN401 - pika's own
        """The protocol, which hears of received bytes only through here from now on."""
        incoming, contents = Incoming(lambda: _FRAME_MAX), Contents()
        to_pika = protocol.data_received

        def data_received(data: bytes) -> None:
            try:
                for one in incoming.frames(data):
                    if left := self._left(contents.part(one), one):
                        to_pika(left)
            except BadFrame as error:
                self.ended_because = str(error)
                raise

        protocol.data_received = data_received
        return protocol

    def _left(self, part: Part, one: bytes) -> bytes:
        """The frame as pika shall see it."""
        if part is Part.BODY:
            return b""
        if part is Part.HEADER:
            self.returned_bytes = body_bytes(one)
            return without_body(one)
        return one
