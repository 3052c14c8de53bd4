"""One connection on its socket: reads, writes, TLS, and the end of the TCP connection.

Knows: a non-blocking socket, TLS, the faults of the network (`flow`). Must never know: AMQP, other
connections.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import struct
from typing import TYPE_CHECKING, Any

from reliablepub.testing.connection import Ending
from reliablepub.testing.flow import READ_MAX_BYTES, Flow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reliablepub.testing.connection import Connection
    from reliablepub.testing.faults import ConnectionFault

_LINGER_S = 1.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Link:
    """A connection and its socket.

    Args:
        sock: A non-blocking socket.
        connection: Processes the bytes.
        faults: Faults of the network.
        tls: The server-side TLS context; None for plain TCP.
    """

    def __init__(
        self,
        sock: socket.socket,
        connection: Connection,
        faults: tuple[ConnectionFault, ...],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.sock = sock
        self.connection = connection
        self.lingers_until: float | None = None
        """When to close, set once FIN is sent; None before. Until then input is read and dropped,
        because closing a socket with unread input sends RST."""
        self._out = Flow.outward(faults)
        self._in = Flow.inward(faults)
        self._tls = None if tls is None else _Tls(tls)
        self._unsent = b""

    def interest(self, now: float) -> int:
        """Return the selector events that the link waits for."""
        wanted = selectors.EVENT_WRITE if self._unsent else 0
        is_free = self._in is None or now >= self._in.free_at
        if self.lingers_until is not None or (self.connection.is_reading and is_free):
            wanted |= selectors.EVENT_READ
        return wanted

    def deadline(self, now: float) -> float | None:
        """Return when the link must act without an event on the socket; None for never."""
        if self.connection.has_output:  # queued after the last write
            return now
        times = [self.connection.deadline, self.lingers_until]
        if self._out is not None and not self._unsent:
            times.append(self._out.deadline)
        if self._in is not None and self._in.free_at > now:
            times.append(self._in.free_at)
        return min((time for time in times if time is not None), default=None)

    def read(self, now: float) -> bool:
        """Read, and pass the bytes to the connection; False if the client has disconnected."""
        room = None if self._in is None else self._in.room(now)
        if room == 0:
            return True
        try:
            data = self.sock.recv(READ_MAX_BYTES if room is None else room)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if self._in is not None:
            self._in.passed(len(data), now)
        if not data or self.lingers_until is not None:
            return bool(data)
        if self._tls is not None:
            try:
                data = self._tls.decrypt(data)
                if self._tls.peer:
                    self.connection.handle_certificate(self._tls.peer)
            except ssl.SSLError:  # the next write sends the alert that tells the client why
                self.connection.drop(reset=False)
                self._out = None  # its backlog can no longer be encrypted; the alert is not in it
                return True
        if data:
            self.connection.handle_data(data)
        return True

    def write(self, now: float) -> bool:
        """Write as much output as the socket takes; False if the client has disconnected."""
        was_congested = self.connection.is_congested
        data = self._unsent + self._encrypted(self._outgoing(now))
        if not data and self._out is None and not was_congested:
            return True
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return False
        self._unsent = data[sent:]
        self.connection.unsent_bytes = len(self._unsent)
        if self._out is not None:
            self.connection.unsent_bytes += self._out.backlog_bytes
        if was_congested and not self.connection.is_congested:
            self.connection.handle_drained()
        return True

    def finish(self, now: float) -> bool:
        """Carry out the ending that the connection chose; True when the socket may be closed."""
        ending = self.connection.ending
        is_sent = not self._unsent and (self._out is None or not self._out.backlog_bytes)
        if ending is None or (ending.flushes and not is_sent):
            return False
        if ending.resets:
            self.prepare_reset()
            return True
        if self.lingers_until is None:
            self.lingers_until = now + _LINGER_S
            self._unsent = b""
            with contextlib.suppress(OSError):
                if self._tls is not None and ending is Ending.FLUSH:
                    self.sock.send(self._tls.farewell())
                self.sock.shutdown(socket.SHUT_WR)
        return now >= self.lingers_until

    def prepare_reset(self) -> None:
        """Make close() send RST."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)

    def _outgoing(self, now: float) -> bytes:
        data = self.connection.poll_transmit()
        if self._out is None:
            return data
        self._out.push(data, now)
        return b"" if self._unsent else self._out.poll(now)

    def _encrypted(self, data: bytes) -> bytes:
        return data if self._tls is None else self._tls.encrypt(data)


class _Tls:
    """The server's side of TLS, without a socket."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._is_open = False
        self.peer = ""
        """Common name of the client's certificate, once it has shown one."""

    def decrypt(self, data: bytes) -> bytes:
        """Return the decrypted input; empty during the handshake.

        Raises:
            ssl.SSLError: The input is not TLS, or the handshake failed.
        """
        self._incoming.write(data)
        parts: list[bytes] = []
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            if not self._is_open:
                self._tls.do_handshake()
                self._is_open = True
                self.peer = _common_name(self._tls.getpeercert() or {})
            while True:
                part = self._tls.read(READ_MAX_BYTES)
                if not part:
                    break
                parts.append(part)
        return b"".join(parts)

    def encrypt(self, data: bytes) -> bytes:
        """Return the encrypted output: the data, and pending TLS handshake records."""
        if data and self._is_open:
            self._tls.write(data)
        return self._outgoing.read()

    def farewell(self) -> bytes:
        """Return the encrypted close_notify."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        return self._outgoing.read()


def _common_name(certificate: Mapping[str, Any]) -> str:
    """Return the common name of a certificate, as `ssl` decodes it; empty if it has none."""
    names = (one for part in certificate.get("subject", ()) for one in part)
    return next((value for name, value in names if name == "commonName"), "")
