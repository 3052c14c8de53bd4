"""A client that speaks to a `Connection` without sockets or threads, in virtual time."""

from typing import Self, TypeVar

from pamqp import body, commands, frame, header
from pamqp.base import Frame
from pamqp.common import FieldTable
from pamqp.frame import FrameTypes

from reliablepub.testing.connection import Connection
from reliablepub.testing.faults import ConnectionFault
from reliablepub.testing.history import Fate
from reliablepub.testing.node import Node
from reliablepub.testing.options import NodeOptions

F = TypeVar("F", bound="Frame")
Properties = commands.Basic.Properties

PERSISTENT = Properties(delivery_mode=2)
TRANSIENT = Properties(delivery_mode=1)

CAPABILITIES = {
    "authentication_failure_close": True,
    "connection.blocked": True,
    "consumer_cancel_notify": True,
}


class Client:
    """The other end of one connection; everything the server says is kept in `frames`."""

    def __init__(self, node: Node, *faults: ConnectionFault) -> None:
        self.node = node
        self.connection = Connection(node, node.next_connection_number(), faults)
        self.frames: list[tuple[int, FrameTypes]] = []

    # -------------------------------------------------------------------------- speaking

    def write(self, data: bytes) -> Self:
        self.connection.handle_data(data)
        self.listen()
        return self

    def send(self, method: Frame, channel: int = 1) -> Self:
        self.write(frame.marshal(method, channel))
        return self

    def call(self, method: Frame, answer: type[F], channel: int = 1) -> F:
        self.send(method, channel)
        return self.only(answer)

    def open(self, *, channels: int = 1, confirm: bool = True, heartbeat: int = 0) -> Self:
        self.write(b"AMQP\x00\x00\x09\x01")
        properties: FieldTable = {"capabilities": {**CAPABILITIES}}
        self.send(commands.Connection.StartOk(properties, "PLAIN", "\0guest\0guest"), 0)
        self.send(commands.Connection.TuneOk(self.node.options.channel_max, 131072, heartbeat), 0)
        self.send(commands.Connection.Open("/"), 0)
        for channel in range(1, channels + 1):
            self.send(commands.Channel.Open(), channel)
            if confirm:
                self.send(commands.Confirm.Select(), channel)
        self.frames.clear()
        return self

    def publish(
        self,
        routing_key: str = "q",
        content: bytes = b"x",
        *,
        exchange: str = "",
        properties: Properties = PERSISTENT,
        mandatory: bool = True,
        immediate: bool = False,
        channel: int = 1,
    ) -> Self:
        self.write(
            encode_publish(
                routing_key,
                content,
                exchange=exchange,
                properties=properties,
                mandatory=mandatory,
                immediate=immediate,
                channel=channel,
            )
        )
        return self

    # -------------------------------------------------------------------------- hearing

    def listen(self) -> None:
        data = self.connection.poll_transmit()
        while data:
            size, channel, heard = frame.unmarshal(data)
            self.frames.append((channel, heard))
            data = data[size:]

    def wait(self, seconds: float) -> Self:
        """Let virtual time pass."""
        self.node.now += seconds
        self.node.handle_timeout()
        self.connection.handle_timeout()
        self.listen()
        return self

    def of(self, kind: type[F]) -> list[F]:
        """Everything of a kind that was heard, which is then forgotten."""
        found = [heard for _, heard in self.frames if isinstance(heard, kind)]
        self.frames = [one for one in self.frames if not isinstance(one[1], kind)]
        return found

    def only(self, kind: type[F]) -> F:
        found = self.of(kind)
        assert len(found) == 1, self.names()
        return found[0]

    def names(self) -> list[str]:
        return [heard.name for _, heard in self.frames]

    def confirms(self) -> list[str]:
        """The confirms heard, in order, as `ack 3 multiple`."""
        words = []
        for _, heard in self.frames:
            if isinstance(heard, commands.Basic.Ack | commands.Basic.Nack):
                verdict = "ack" if isinstance(heard, commands.Basic.Ack) else "nack"
                multiple = " multiple" if heard.multiple else ""
                words.append(f"{verdict} {heard.delivery_tag}{multiple}")
        self.frames = [
            one
            for one in self.frames
            if not isinstance(one[1], commands.Basic.Ack | commands.Basic.Nack)
        ]
        return words


def encode_publish(
    routing_key: str = "q",
    content: bytes = b"x",
    *,
    exchange: str = "",
    properties: Properties = PERSISTENT,
    mandatory: bool = True,
    immediate: bool = False,
    channel: int = 1,
) -> bytes:
    method = commands.Basic.Publish(
        exchange=exchange, routing_key=routing_key, mandatory=mandatory, immediate=immediate
    )
    parts = [
        frame.marshal(method, channel),
        frame.marshal(header.ContentHeader(0, len(content), properties), channel),
    ]
    step = 131072 - 8
    parts += [
        frame.marshal(body.ContentBody(content[at : at + step]), channel)
        for at in range(0, len(content), step)
    ]
    return b"".join(parts)


def node_with_queue(options: NodeOptions | None = None) -> Node:
    """A node with the durable queue `q`."""
    node = Node(options or NodeOptions())
    setup = Client(node).open()
    setup.send(commands.Queue.Declare(queue="q", durable=True))
    setup.send(commands.Connection.Close(200, "", 0, 0), 0)
    return node


def fates(node: Node) -> list[Fate]:
    """What became of each publish."""
    return [publish.fate for publish in node.history.snapshot()]
