"""A client of bare sockets: it says any frame, also a wrong one, and writes down what it hears.

It knows the handshake and how a frame is told in one line, so that a fact is a comparison of lines.
It must never know which broker is at the other end.
"""

import socket
import struct
import urllib.parse
from collections.abc import Sequence
from typing import Any, Self, TypeVar

from pamqp import commands, frame, header, heartbeat
from pamqp.base import Frame
from pamqp.body import ContentBody

F = TypeVar("F", bound=Frame)
Properties = commands.Basic.Properties

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
PERSISTENT = Properties(delivery_mode=2)
TRANSIENT = Properties(delivery_mode=1)
ALL_CAPABILITIES = ("authentication_failure_close", "connection.blocked", "consumer_cancel_notify")

_PATIENCE_S = 60.0
_FRAME = struct.Struct(">BHI")
_FRAME_OVERHEAD = 8


class RawClient:
    """One connection. With `opened` it has channel 1 in confirm mode; without, nothing was said."""

    def __init__(self, url: str) -> None:
        address = urllib.parse.urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self.user = address.username or ""
        self.password = address.password or ""
        self.virtual_host = urllib.parse.unquote(address.path[1:])
        self.frame_max = 131_072
        self._socket = socket.create_connection((address.hostname, address.port), _PATIENCE_S)
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    # ------------------------------------------------------------------ opening

    def start(self) -> commands.Connection.Start:
        """Say the protocol header."""
        self.write(PROTOCOL_HEADER)
        return self.hear_only(commands.Connection.Start)

    def log_in(
        self,
        *,
        mechanism: str = "PLAIN",
        response: str | None = None,
        capabilities: Sequence[str] = ALL_CAPABILITIES,
    ) -> None:
        """Say start-ok; what it is answered is still to be heard."""
        properties: Any = {"capabilities": dict.fromkeys(capabilities, True)}
        response = f"\0{self.user}\0{self.password}" if response is None else response
        self.send(commands.Connection.StartOk(properties, mechanism, response), 0)

    def enter(self, *, channel_max: int = 2047, heartbeat_s: int = 0) -> None:
        """Say tune-ok and open; what it is answered is still to be heard."""
        self.send(commands.Connection.TuneOk(channel_max, self.frame_max, heartbeat_s), 0)
        self.send(commands.Connection.Open(self.virtual_host), 0)

    def opened(
        self,
        *,
        channels: int = 1,
        confirm: bool = True,
        frame_max: int = 131_072,
        channel_max: int = 2047,
        heartbeat_s: int = 0,
        capabilities: Sequence[str] = ALL_CAPABILITIES,
    ) -> Self:
        """The whole handshake, and channels."""
        self.frame_max = frame_max
        self.start()
        self.log_in(capabilities=capabilities)
        self.hear_only(commands.Connection.Tune)
        self.enter(channel_max=channel_max, heartbeat_s=heartbeat_s)
        self.hear_only(commands.Connection.OpenOk)
        for number in range(1, channels + 1):
            self.open_channel(number, confirm=confirm)
        return self

    def open_channel(self, number: int = 1, *, confirm: bool = True) -> None:
        """Open a channel."""
        self.call(commands.Channel.Open(), commands.Channel.OpenOk, number)
        if confirm:
            self.call(commands.Confirm.Select(), commands.Confirm.SelectOk, number)

    # ------------------------------------------------------------------ speaking

    def write(self, data: bytes) -> Self:
        """Any bytes."""
        self._socket.sendall(data)
        return self

    def write_frame(self, kind: int, channel: int, payload: bytes, end: bytes = b"\xce") -> Self:
        """Any frame."""
        self.write(_FRAME.pack(kind, channel, len(payload)) + payload + end)
        return self

    def send(self, method: Frame, channel: int = 1) -> Self:
        """A method."""
        self.write(frame.marshal(method, channel))
        return self

    def call(self, method: Frame, answer: type[F], channel: int = 1) -> F:
        """A method and its answer, which must be the next thing heard."""
        self.send(method, channel)
        return self.hear_only(answer)

    def publish(
        self,
        routing_key: str,
        content: bytes = b"x",
        *,
        exchange: str = "",
        properties: Properties = PERSISTENT,
        mandatory: bool = True,
        immediate: bool = False,
        channel: int = 1,
    ) -> Self:
        """A whole publish."""
        method = commands.Basic.Publish(
            exchange=exchange, routing_key=routing_key, mandatory=mandatory, immediate=immediate
        )
        self.write(
            frame.marshal(method, channel)
            + frame.marshal(header.ContentHeader(0, len(content), properties), channel)
            + self.encode_body(content, channel)
        )
        return self

    def encode_body(self, content: bytes, channel: int = 1) -> bytes:
        """A body as frames."""
        step = self.frame_max - _FRAME_OVERHEAD
        pieces = (content[at : at + step] for at in range(0, len(content), step))
        return b"".join(frame.marshal(ContentBody(piece), channel) for piece in pieces)

    def declare(
        self,
        queue: str,
        *,
        durable: bool = True,
        exclusive: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> str:
        """A queue; its name."""
        method = commands.Queue.Declare(
            queue=queue, durable=durable, exclusive=exclusive, arguments=arguments or {}
        )
        return str(self.call(method, commands.Queue.DeclareOk).queue)

    def declare_exchange(self, exchange: str, kind: str = "direct", **arguments: Any) -> str:
        """An exchange; its name."""
        method = commands.Exchange.Declare(
            exchange=exchange, exchange_type=kind, durable=True, **arguments
        )
        self.call(method, commands.Exchange.DeclareOk)
        return exchange

    def bind(self, queue: str, exchange: str, routing_key: str = "") -> None:
        """A queue to an exchange."""
        method = commands.Queue.Bind(queue=queue, exchange=exchange, routing_key=routing_key)
        self.call(method, commands.Queue.BindOk)

    # ------------------------------------------------------------------ hearing

    def patience(self, seconds: float) -> None:
        """How long to wait for a frame from now on, before it is a TimeoutError."""
        self._socket.settimeout(seconds)

    def hear_bytes(self) -> bytes:
        """The next frame, as it came; empty at the end of the connection."""
        while len(self._data) < _FRAME.size or len(self._data) < self._size():
            try:
                data = self._socket.recv(1 << 20)
            except ConnectionResetError:
                return b""
            if not data:
                return b""
            self._data += data
        size = self._size()
        heard, self._data = self._data[:size], self._data[size:]
        return heard

    def _size(self) -> int:
        size: int = _FRAME.unpack_from(self._data)[2]
        return size + _FRAME_OVERHEAD

    def hear_rest(self) -> bytes:
        """Everything up to the end, for what is no frame."""
        heard = b""
        try:
            while data := self._socket.recv(1 << 16):
                heard += data
        except ConnectionResetError:
            pass  # by RabbitMQ, which has not read all we said
        return heard

    def hear(self) -> tuple[int, Any]:
        """The channel and the content of the next frame; channel -1 at the end."""
        data = self.hear_bytes()
        if not data:
            return -1, None
        _, channel, heard = frame.unmarshal(data)
        return channel, heard

    def hear_only(self, kind: type[F]) -> F:
        """The next frame, which must be of this kind."""
        channel, heard = self.hear()
        assert isinstance(heard, kind), told(channel, heard)
        return heard

    def told(self, count: int = 1) -> list[str]:
        """The next frames, a line each."""
        return [told(*self.hear()) for _ in range(count)]

    def told_until(self, beginning: str) -> list[str]:
        """The next frames, up to the first whose line begins so, or to the end."""
        lines = []
        while True:
            line = told(*self.hear())
            lines.append(line)
            if line == END or line.startswith(beginning):
                return lines

    def told_to_the_end(self) -> list[str]:
        """Everything until the connection ends, answering connection.close as one must."""
        lines = []
        while True:
            channel, heard = self.hear()
            lines.append(told(channel, heard))
            if heard is None:
                return lines
            if isinstance(heard, commands.Connection.Close):
                self.send(commands.Connection.CloseOk(), 0)

    def last_words(self) -> str:
        """The only thing that is said before the connection ends."""
        said, end = self.told_to_the_end()
        assert end == END
        return said

    def told_now(self, channel: int = 1) -> list[str]:
        """What was said up to now on an open channel: an answer shows that nothing is missing."""
        self.send(commands.Basic.Qos(), channel)
        return self.told_until("basic.qosok")[:-1]

    def verdicts(self, last: int, channel: int = 1) -> dict[int, str]:
        """Listen until the tags up to `last` are settled: `ack` or `nack` of each.

        A tag that is settled twice, or a confirm of nothing, fails.
        """
        outstanding = set(range(1, last + 1))
        verdicts: dict[int, str] = {}
        while outstanding:
            number, heard = self.hear()
            assert number == channel, told(number, heard)
            if isinstance(heard, commands.Basic.Return | header.ContentHeader | ContentBody):
                continue
            assert isinstance(heard, commands.Basic.Ack | commands.Basic.Nack), told(number, heard)
            covered = covered_by(heard, outstanding)
            assert covered, told(number, heard)
            outstanding -= covered
            verdicts |= dict.fromkeys(covered, heard.name.removeprefix("Basic.").lower())
        return verdicts

    def drained(self, queue: str, channel: int = 1) -> list[bytes]:
        """The bodies in a queue, taken out of it."""
        bodies: list[bytes] = []
        while True:
            self.send(commands.Basic.Get(queue=queue, no_ack=True), channel)
            _, heard = self.hear()
            if isinstance(heard, commands.Basic.GetEmpty):
                return bodies
            assert isinstance(heard, commands.Basic.GetOk), told(channel, heard)
            size = self.hear()[1].body_size
            body = b""
            while len(body) < size:
                body += self.hear()[1].value
            bodies.append(body)


END = "the end"


def covered_by(heard: commands.Basic.Ack | commands.Basic.Nack, outstanding: set[int]) -> set[int]:
    """Which of the tags a confirm settles."""
    if heard.multiple:
        return {tag for tag in outstanding if tag <= heard.delivery_tag}
    return {heard.delivery_tag} & outstanding


def told(channel: int, heard: object) -> str:
    """A frame in one line; of another channel than 1 and 0 with its number."""
    line = _line(heard)
    return line if channel in (-1, 0, 1) else f"{channel}: {line}"


def _line(heard: object) -> str:
    match heard:
        case None:
            return END
        case heartbeat.Heartbeat():
            line = "heartbeat"
        case commands.Basic.Ack() | commands.Basic.Nack():
            line = f"{heard.name.lower()} {heard.delivery_tag}{' multiple' * heard.multiple}"
        case commands.Channel.Close() | commands.Connection.Close():
            ids = f"({heard.class_id}, {heard.method_id})"
            line = f"{heard.name.lower()} {heard.reply_code} {heard.reply_text} {ids}"
        case header.ContentHeader():
            line = f"header {heard.body_size}"
        case ContentBody():
            line = f"body {heard.value!r}"
        case Frame():
            values = " ".join(str(value) for _, value in heard)
            line = f"{heard.name.lower()} {values}".rstrip()
        case _:
            line = repr(heard)
    return line
