"""Limits what pika reads from a broker, through pika's public interface to an I/O loop.

Knows: pika's documented I/O interface (`nbio_interface`). Must never know: what is written, or to
which broker.

Used wherever the hooks do not read for pika: in `PikaTransport` without hooks, and in `probe`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pika import spec

from reliablepub.transport.incoming import (
    BadFrame,
    Contents,
    Incoming,
    Part,
    body_bytes,
    without_body,
)
from reliablepub.transport.pika_names import ResolvingServices

_FRAME_MAX: Final = int(spec.FRAME_MAX_SIZE)
"""The frame size that pika offers: the negotiated size is at most this."""


class BoundedServices(ResolvingServices):
    """pika's adapter to its own I/O loop, with a check of all received frames.

    One connection at a time. Bodies of returned messages are dropped on arrival: pika sees each
    return as soon as its header has arrived, with an empty body.
    """

    ended_because = ""  # why a received frame was rejected; empty if none was
    returned_bytes = 0  # body size of the last returned message

    def create_streaming_connection(
        self,
        protocol_factory: Callable[[], Any],
        *args: Any,  # noqa: ANN401 - pika's own
        **kwargs: Any,  # noqa: ANN401 - pika's own
    ) -> Any:  # noqa: ANN401 - pika's own
        """Connect as pika does, with a protocol that receives checked bytes only."""
        return super().create_streaming_connection(
            lambda: self._bound(protocol_factory()), *args, **kwargs
        )

    def _bound(self, protocol: Any) -> Any:  # noqa: ANN401 - pika's own
        """Replace the protocol's `data_received` by one that checks frames first."""
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
        """The bytes of a frame that are passed on to pika."""
        if part is Part.BODY:
            return b""
        if part is Part.HEADER:
            self.returned_bytes = body_bytes(one)
            return without_body(one)
        return one
