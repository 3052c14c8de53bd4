"""The server's side of one AMQP 0-9-1 connection, without a socket: bytes in, bytes out.

Knows: the handshake, channels, heartbeats, connection.close, and that a publish during a resource
alarm is withheld together with all input after it. The time is `Node.now`, which is set before
every input. Must never know: sockets, threads, what a message means.
"""

from __future__ import annotations

import enum
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pamqp import commands

from reliablepub.testing import decoding, wire
from reliablepub.testing.channel import Channel
from reliablepub.testing.content_header import decode_header
from reliablepub.testing.faults import ConnectionFault, CutStream
from reliablepub.testing.flow import Output
from reliablepub.testing.handshake import Handshake, ScriptedRefusal, Stalled
from reliablepub.testing.options import EVERYTHING
from reliablepub.testing.replies import (
    AmqpError,
    SilentlyRefused,
    crashed,
    frame_error,
    unexpected_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pamqp.base import Frame

    from reliablepub.testing.consuming import Consuming
    from reliablepub.testing.history import Publish
    from reliablepub.testing.node import Node
    from reliablepub.testing.options import Permissions
    from reliablepub.testing.routing import VirtualHost

HANDSHAKE_TIMEOUT_S = 10.0
CLOSING_TIMEOUT_S = 5.0
_ACCESS_REFUSED = 403
OUTPUT_MAX_BYTES = 4 * 1024 * 1024
"""Limit of unsent output; above it a client gets no deliveries, and is not read."""


class Ending(enum.Enum):
    """How the server ends a TCP connection."""

    FLUSH = "flush"
    """Send the remaining output, then FIN."""
    FLUSH_RESET = "flush, reset"
    """Send the remaining output, then RST."""
    FIN = "fin"
    """FIN at once."""
    RESET = "reset"
    """RST at once."""

    @property
    def flushes(self) -> bool:
        """Whether the remaining output is sent first."""
        return self in (Ending.FLUSH, Ending.FLUSH_RESET)

    @property
    def resets(self) -> bool:
        """Whether the connection ends with RST."""
        return self in (Ending.RESET, Ending.FLUSH_RESET)


class Connection:
    """One client."""

    def __init__(self, node: Node, number: int, faults: tuple[ConnectionFault, ...] = ()) -> None:
        self.node = node
        self.number = number
        self.ending: Ending | None = None
        self.unsent_bytes = 0
        """Bytes that the socket has not taken yet; set by `link`."""
        self.vhost: VirtualHost = node.vhost
        self.permissions: Permissions = EVERYTHING
        self._handshake = Handshake(node, faults)
        self._frames = wire.FrameBuffer()
        self._has_protocol = False
        self._is_closing = False
        self._is_released = False
        self._is_mute = False
        self._channels: dict[int, Channel] = {}
        self._output = Output()
        self._left_to_receive: int | None = None
        self._is_cut_by_reset = False
        self._withheld: tuple[Publish, Callable[[Publish], None]] | None = None
        self._has_sent_blocked = False
        self._began_at = self._received_at = self._sent_at = node.now
        self._closing_at = 0.0
        node.connections[number] = self
        for fault in faults:
            if isinstance(fault, CutStream):
                self.cut(sent=fault.sent, received=fault.received, reset=fault.reset)

    # ------------------------------------------------------------------------------ getters

    @property
    def user(self) -> str:
        """The user that logged in."""
        return self._handshake.user

    @property
    def client_properties(self) -> Mapping[str, Any]:
        """What the client told of itself."""
        return self._handshake.client_properties

    def handle_certificate(self, common_name: str) -> None:
        """The client has shown a certificate."""
        self._handshake.certificate_user = common_name

    @property
    def has_expired(self) -> bool:
        """Whether the client logged in with a token, and it has expired."""
        token = self._handshake.token
        return token is not None and token.expires_at <= self.node.now

    @property
    def frame_max(self) -> int:
        """The negotiated frame size."""
        return self._handshake.frame_max

    @property
    def channels(self) -> int:
        """Number of open channels."""
        return len(self._channels)

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done and the connection is not closed."""
        return self._handshake.is_open and not self._is_released

    @property
    def is_reading(self) -> bool:
        """Whether the server should read from this client now."""
        return self._withheld is None and self.ending is None and not self.is_congested

    @property
    def is_congested(self) -> bool:
        """Whether the client must read before the server sends it more."""
        return self.unsent_bytes + self._output.size > OUTPUT_MAX_BYTES

    @property
    def has_output(self) -> bool:
        """Whether `poll_transmit` would return bytes."""
        return self._output.size > 0

    @property
    def deadline(self) -> float | None:
        """When `handle_timeout` must be called; None for never."""
        if self.ending is not None or self._is_mute:
            return None
        if self._is_closing:
            return self._closing_at + CLOSING_TIMEOUT_S
        if not self._handshake.is_open:
            return self._began_at + HANDSHAKE_TIMEOUT_S
        interval = self._handshake.heartbeat_s
        if not interval:
            return None
        send_at = self._sent_at + interval / 2
        # The server sees no heartbeats while it does not read. RabbitMQ does not read a blocked
        # client either, but reads on while its writer waits (rabbit_reader).
        return min(send_at, self._received_at + 2 * interval) if self.is_reading else send_at

    def has_capability(self, name: str) -> bool:
        """Whether the client announced a capability."""
        return name in self._handshake.capabilities

    def consuming(self) -> Iterable[tuple[int, Consuming]]:
        """The number and the consuming side of every open channel."""
        return [(one.number, one.consuming) for one in self._channels.values()]

    # ------------------------------------------------------------------------------ inputs

    def handle_data(self, data: bytes) -> None:
        """Process bytes from the client."""
        if self._is_mute:
            return
        self._received_at = self.node.now
        if self._left_to_receive is not None:
            data = data[: self._left_to_receive]
            self._left_to_receive -= len(data)
        self._frames.feed(data)
        self._run()
        if self._left_to_receive == 0:
            self._end_cut()

    def handle_timeout(self) -> None:
        """Send a heartbeat, or end the connection of a client that missed a deadline."""
        deadline = self.deadline
        if deadline is None or self.node.now < deadline:
            return
        interval = self._handshake.heartbeat_s
        if (
            self._is_closing
            or not self._handshake.is_open
            or (self.is_reading and self.node.now >= self._received_at + 2 * interval)
        ):
            self._end(Ending.FIN)
        else:
            self.send(wire.HEARTBEAT_FRAME)

    def handle_unblocked(self) -> None:
        """Handle the end of the alarm: process the withheld publish, then all input after it."""
        if self._has_sent_blocked:
            self._has_sent_blocked = False
            self.send(wire.encode_method(0, commands.Connection.Unblocked()))
        self._resume()

    def handle_thawed(self) -> None:
        """Handle the end of a freeze: restart the heartbeat timeout, and process input."""
        self._received_at = self.node.now
        if self.node.alarm is None:
            self._resume()
        elif self._withheld is not None:
            self._send_blocked()

    def handle_advanced(self, seconds: float) -> None:
        """Handle a clock that was set ahead: the deadlines of the client move with it."""
        self._began_at += seconds
        self._received_at += seconds
        self._sent_at += seconds
        self._closing_at += seconds

    def handle_drained(self) -> None:
        """Handle a client that has read its output: restart the heartbeat timeout, and go on."""
        self._received_at = self.node.now
        for channel in self._channels.values():
            channel.consuming.deliver_all()
        self._run()

    def handle_lost(self) -> None:
        """Handle the loss of the socket."""
        self._end(Ending.FIN)

    # ------------------------------------------------------------------------------ commands

    def send(self, data: bytes) -> None:
        """Queue bytes for the client; ignored once the connection has ended."""
        if self.ending is None and not self._is_mute:
            self._output.add(data)

    def poll_transmit(self) -> bytes:
        """Remove and return all bytes to be written."""
        data = self._output.take()
        if self._output.is_cut:
            self._end_cut()
        if data:
            self._sent_at = self.node.now
        return data

    def withhold(self, publish: Publish, resume: Callable[[Publish], None]) -> None:
        """Keep a publish, and process no input after it, until `handle_unblocked`."""
        self._withheld = (publish, resume)
        if self.node.alarm is not None:
            self._send_blocked()

    def close(self, code: int, text: str, ids: tuple[int, int] = (0, 0)) -> None:
        """Send connection.close; after it, all input but close-ok is ignored."""
        if self._is_closing or self.ending is not None:
            return
        self._release()
        self._is_closing = True
        self._closing_at = self.node.now
        payload = wire.encode_close(commands.Connection.Close, code, text, ids)
        self.send(wire.encode_frame(wire.METHOD, 0, payload))

    def drop(self, *, reset: bool) -> None:
        """End the TCP connection without connection.close; unsent output is dropped."""
        self._output.clear()
        self._end(Ending.RESET if reset else Ending.FIN)

    def cut(self, *, sent: int | None = None, received: int | None = None, reset: bool) -> None:
        """End the TCP connection without connection.close, after a number of further bytes.

        Args:
            sent: Bytes to the client; None for no limit.
            received: Bytes from the client; None for no limit.
            reset: End with RST; otherwise with FIN.
        """
        if sent is not None:
            self._output.cut_after(sent)
        self._left_to_receive = received
        self._is_cut_by_reset = reset

    def go_mute(self) -> None:
        """Stop reading and writing without closing: the client sees a half-open connection."""
        self._release()
        self._is_mute = True

    # ------------------------------------------------------------------------------ frames

    def _run(self) -> None:
        try:
            if not self._has_protocol:
                self._handle_protocol()
            while self._has_protocol and self.is_reading and not self._is_mute:
                frame = self._frames.next_frame()
                if frame is None:
                    break
                self._handle_frame(*frame)
        except AmqpError as error:
            self._fail(error)
        except SilentlyRefused:
            self._end(Ending.FLUSH)
        except Stalled:
            self.go_mute()
        self.node.flush()

    def _resume(self) -> None:
        if self._withheld is None:
            return
        publish, resume = self._withheld
        self._withheld = None
        self._received_at = self.node.now
        resume(publish)
        self._run()

    def _send_blocked(self) -> None:
        if self.has_capability("connection.blocked") and not self._has_sent_blocked:
            self._has_sent_blocked = True
            self.send(wire.encode_method(0, commands.Connection.Blocked(self.node.alarm or "")))

    def _fail(self, error: AmqpError) -> None:
        # Before tune-ok, RabbitMQ reports only a failed login.
        is_scripted = isinstance(error, ScriptedRefusal)
        is_reported = self._handshake.is_tuned or error.code == _ACCESS_REFUSED or is_scripted
        if self._is_closing or not is_reported:
            self._end(Ending.FLUSH)
        else:
            self.close(error.code, error.reply_text, error.ids or (0, 0))

    def _handle_protocol(self) -> None:
        header = self._frames.take(len(wire.PROTOCOL_HEADER))
        if header is None:
            return
        if header in wire.PROTOCOL_HEADERS:
            self._has_protocol = True
            self.send(self._handshake.start())
        else:
            self.send(wire.PROTOCOL_HEADER)
            self._end(Ending.FLUSH)

    def _handle_frame(self, kind: int, number: int, payload: bytes) -> None:
        if self._is_closing:
            if kind == wire.METHOD and not number:
                self._handle_close(payload)
            return
        if kind == wire.HEARTBEAT and not payload:
            if number:
                raise unexpected_frame(kind, payload)
            return
        if kind not in (wire.METHOD, wire.HEADER, wire.BODY):
            raise frame_error(kind, payload, "unknown_frame")
        if not number and kind == wire.METHOD:
            self._handle_control(payload)
        elif not number:
            if kind == wire.HEADER:
                decode_header(payload)  # raises if it is cut short
            raise unexpected_frame(kind, payload)
        else:
            self._handle_channel_frame(kind, number, payload)

    def _handle_close(self, payload: bytes) -> None:
        """Handle a method after connection.close was sent; only close and close-ok matter."""
        with suppress(AmqpError):
            method = decoding.decode_method(payload)
            if isinstance(method, commands.Connection.CloseOk):
                self._end(Ending.FLUSH)
            elif isinstance(method, commands.Connection.Close):
                self.send(wire.encode_method(0, commands.Connection.CloseOk()))

    def _handle_control(self, payload: bytes) -> None:
        """Handle a method of the connection itself."""
        try:
            method = decoding.decode_method(payload)
        except decoding.UndecodableError:
            raise crashed() if self._handshake.is_open else SilentlyRefused from None
        if not self._handshake.is_open:
            self._open(method)
        elif isinstance(method, commands.Connection.Close):
            self.send(wire.encode_method(0, commands.Connection.CloseOk()))
            self._end(Ending.FLUSH)
        elif isinstance(method, commands.Connection.UpdateSecret):
            self._handshake.update_secret(method.new_secret or "")
            self.send(wire.encode_method(0, commands.Connection.UpdateSecretOk()))
        else:
            ids = decoding.ids_of(payload)
            raise AmqpError(504, "unexpected method in connection state running", ids)

    def _open(self, method: Frame) -> None:
        answer = self._handshake.handle(method)
        if isinstance(method, commands.Connection.TuneOk):
            self._frames.frame_max = self._handshake.frame_max
        if isinstance(method, commands.Connection.Open):
            self.vhost = self.node.vhosts[method.virtual_host]
            self.permissions = self._handshake.permissions
        if answer is not None:
            self.send(wire.encode_method(0, answer))

    def _handle_channel_frame(self, kind: int, number: int, payload: bytes) -> None:
        if not self._handshake.is_open:
            raise unexpected_frame(kind, payload)
        channel = self._channels.get(number) or self._new_channel(number)
        channel.handle_frame(kind, payload)
        if channel.is_gone:
            self._channels.pop(number, None)

    def _new_channel(self, number: int) -> Channel:
        """Make a channel for the first frame that names it; channel.open should be in it."""
        count, count_max = len(self._channels), self._handshake.channel_max
        if count_max and count >= count_max:
            reached = f"number of channels opened ({count}) has reached the negotiated channel_max"
            raise AmqpError(530, f"{reached} ({count_max})")
        user, limits = self._handshake.user, self.node.options.user_channel_max
        if user in limits and self.node.channels_of(user) >= limits[user]:
            reached = f"number of channels opened for user '{user}' has reached the maximum allowed"
            raise AmqpError(530, f"{reached} user limit of ({limits[user]})")
        channel = self._channels[number] = Channel(self, number)
        return channel

    # ------------------------------------------------------------------------------ the end

    def _end_cut(self) -> None:
        self._end(Ending.FLUSH_RESET if self._is_cut_by_reset else Ending.FLUSH)

    def _end(self, ending: Ending) -> None:
        self._release()
        if self.ending is None:
            self.ending = ending
            self.node.connections.pop(self.number, None)

    def _release(self) -> None:
        """Release channels, the withheld publish, and exclusive queues."""
        if self._is_released:
            return
        self._is_released = True
        for channel in self._channels.values():
            channel.release()
        self._channels.clear()
        if self._withheld is not None:
            self._withheld[0].mark_lost()
            self._withheld = None
        self.node.delete_exclusive_queues(self.vhost, self.number)
