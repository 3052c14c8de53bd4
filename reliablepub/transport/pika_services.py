"""pika's I/O services: they try each address of a host name, and limit what pika reads.

Knows: pika's documented I/O interface (`nbio_interface`). Must never know: what is written, to
which broker, or why pika connects.

pika tries the addresses of a name in order, but ends the attempt at the first one that accepts TCP,
even if it then says nothing or hangs up. A node that hangs does that, and so does a container proxy
on ``::1``. The system sorts the addresses of a name alike each time, so without a turn of the order
the others would never be tried.

pika resolves each name on a new thread. Python 3.12 starts none while the interpreter shuts down;
in 3.12.0 and 3.12.1 that begins with the end of the main thread, while others may still publish.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
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
"""The frame size that pika offers: the negotiated size is at most this."""


class ResolvingServices(SelectorIOServicesAdapter):
    """pika's adapter to its own I/O loop; resolves on the loop's thread if there is no other."""

    turn: int = 0  # which of the found addresses comes first; those before it come last
    untried: int = 0  # found addresses that no turn has tried yet; 0 until the name is resolved

    def getaddrinfo(  # noqa: PLR0917 - pika's own
        self,
        host: str,
        port: int,
        on_done: Callable[..., None],
        family: int = 0,
        socktype: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> Any:  # noqa: ANN401 - pika's own
        """Resolve as pika does; the callback gets what was found, or an exception."""
        told = partial(self._found, on_done)
        try:
            return super().getaddrinfo(host, port, told, family, socktype, proto, flags)
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise  # too many threads: the relay tries again, and does not wait for DNS itself
        try:
            found: object = socket.getaddrinfo(host, port, family, socktype, proto, flags)
        except (OSError, UnicodeError) as error:
            found = error
        return self.call_later(0, partial(told, found))

    def _found(self, on_done: Callable[..., None], found: object) -> None:
        """Tell what was found; addresses in the order of this turn."""
        if isinstance(found, list) and found:
            self.untried = max(0, len(found) - self.turn)
            first = self.turn % len(found)
            found = found[first:] + found[:first]
        on_done(found)

    def connect_socket(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - pika's own
        """Connect to one of the addresses, as pika does."""
        self.untried = max(0, self.untried - 1)
        return super().connect_socket(*args, **kwargs)


class BoundedServices(ResolvingServices):
    """The same with a check of all received frames, for connections that pika reads without hooks.

    One connection at a time. Bodies of returned messages are dropped on arrival: pika sees each
    return as soon as its header has arrived, with an empty body.
    """

    ended_because: str = ""  # why a received frame was rejected; empty if none was
    returned_bytes: int = 0  # body size of the last returned message

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
