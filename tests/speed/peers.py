"""Ways to publish confirmed messages: other people's, each as good as it can be made by hand.

Each takes a broker's URL, queues and a number of messages, and returns when all are confirmed. It
knows their libraries and the wire. It must never know what is measured.
"""

import asyncio
import itertools
import socket
from collections.abc import Sequence
from struct import Struct
from typing import Any

import aio_pika
import pika
from pamqp import commands, frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader, ProtocolHeader
from pika.adapters.select_connection import SelectConnection

from reliablepub.headers import ATTEMPT_HEADER

BODY = b"x" * 1_024
WINDOW = 4_096
"""As many messages in flight as a `Publisher` finds at most by default."""
NARROW = TASKS = 1_000

_CONFIRM = Struct(">BHIHHQBB")
_ACK = 80


class Outstanding:
    """Delivery tags that are in flight; the least that counting confirms takes."""

    def __init__(self) -> None:
        self._tags: set[int] = set()
        self._lowest = 1
        self._next = 1

    def __len__(self) -> int:
        return len(self._tags)

    @property
    def tags(self) -> list[int]:
        return sorted(self._tags)

    def send(self, count: int) -> None:
        self._tags.update(range(self._next, self._next + count))
        self._next += count

    def ack(self, tag: int, *, multiple: bool) -> None:
        if not multiple:
            self._tags.discard(tag)
            return
        self._tags.difference_update(range(self._lowest, tag + 1))
        self._lowest = max(self._lowest, tag + 1)


def raw_socket(url: str, queues: Sequence[str], count: int) -> None:
    """The ceiling: frames that were encoded before, and a socket."""
    _raw_socket(url, [_publish_frames(queue) for queue in queues], count)


def raw_socket_with_ids(url: str, queues: Sequence[str], count: int) -> None:
    """The same, each message with the two properties that ours have: they cost the broker time."""
    properties = commands.Basic.Properties(
        delivery_mode=2,
        message_id="5f0c3a52-9d1e-4b7a-a1c2-3d4e5f607182",
        headers={ATTEMPT_HEADER: 1_203_000_000_000_000},
    )
    _raw_socket(url, [_publish_frames(queue, properties) for queue in queues], count)


def _raw_socket(url: str, frames: Sequence[bytes], count: int) -> None:
    outstanding, sent = Outstanding(), 0
    with _connected(url) as wire:
        buffer = b""
        while sent < count or outstanding:
            room = min(WINDOW - len(outstanding), count - sent)
            if room:
                wire.sendall(b"".join(frames[n % len(frames)] for n in range(sent, sent + room)))
                outstanding.send(room)
                sent += room
            buffer += wire.recv(256 * 1024)
            end = len(buffer) - len(buffer) % _CONFIRM.size
            for _, _, _, _, method, tag, multiple, _ in _CONFIRM.iter_unpack(buffer[:end]):
                assert method == _ACK
                outstanding.ack(tag, multiple=bool(multiple))
            buffer = buffer[end:]


def raw_unconfirmed(url: str, queues: Sequence[str], count: int) -> None:
    """The same without confirms; over when the broker has answered that it read everything."""
    frames = [_publish_frames(queue) for queue in queues]
    with _connected(url, is_confirming=False) as wire:
        for since in range(0, count, WINDOW):
            numbers = range(since, min(since + WINDOW, count))
            wire.sendall(b"".join(frames[n % len(frames)] for n in numbers))
        wire.sendall(frame.marshal(commands.Channel.Close(200, "", 0, 0), 1))
        _read(wire, b"")


def pika_select(url: str, queues: Sequence[str], count: int) -> None:
    """Pika's `SelectConnection`, with a window that its user counts by hand."""
    window = WindowByHand(queues, count)
    connection = SelectConnection(
        pika.URLParameters(url),
        on_open_callback=window.opened,
        on_close_callback=lambda *_: connection.ioloop.stop(),
    )
    connection.ioloop.start()
    connection.ioloop.close()
    assert not window.outstanding


class WindowByHand:
    """What a user of `SelectConnection` writes to have a window's worth of publishes in flight."""

    def __init__(self, queues: Sequence[str], count: int) -> None:
        self.outstanding = Outstanding()
        self._names = itertools.islice(itertools.cycle(queues), count)
        self._properties = pika.BasicProperties(delivery_mode=2)

    def opened(self, connection: Any) -> None:
        self._connection = connection
        connection.channel(on_open_callback=self._selected)

    def _selected(self, channel: Any) -> None:
        self._channel = channel
        channel.confirm_delivery(self._confirmed)
        self._fill()

    def _confirmed(self, method: Any) -> None:
        assert isinstance(method.method, pika.spec.Basic.Ack)
        self.outstanding.ack(method.method.delivery_tag, multiple=method.method.multiple)
        if not self._fill() and not self.outstanding:
            self._connection.close()

    def _fill(self) -> int:
        written = 0
        for name in itertools.islice(self._names, WINDOW - len(self.outstanding)):
            self._channel.basic_publish("", name, BODY, self._properties, mandatory=True)
            written += 1
            self.outstanding.send(1)
        return written


def pika_blocking(url: str, queues: Sequence[str], count: int) -> None:
    """Pika's `BlockingConnection`: it waits for each confirm before the next publish."""
    properties = pika.BasicProperties(delivery_mode=2)
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.confirm_delivery()
    for name in itertools.islice(itertools.cycle(queues), count):
        channel.basic_publish("", name, BODY, properties, mandatory=True)
    connection.close()


def pika_unconfirmed(url: str, queues: Sequence[str], count: int) -> None:
    """The same without confirms: what was lost is never known."""
    properties = pika.BasicProperties(delivery_mode=2)
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    for name in itertools.islice(itertools.cycle(queues), count):
        channel.basic_publish("", name, BODY, properties)
    connection.close()  # answered when the broker has read all of it


def aio_pika_tasks(url: str, queues: Sequence[str], count: int) -> None:
    """aio-pika, with so many tasks that each wait for a confirm."""

    async def main() -> None:
        async with await aio_pika.connect(url) as connection:
            exchange = (await connection.channel()).default_exchange
            names = itertools.islice(itertools.cycle(queues), count)

            async def task() -> None:
                for name in names:
                    message = aio_pika.Message(BODY, delivery_mode=2)
                    await exchange.publish(message, name)

            await asyncio.gather(*(task() for _ in range(TASKS)))

    asyncio.run(main())


def _publish_frames(queue: str, properties: commands.Basic.Properties | None = None) -> bytes:
    properties = properties or commands.Basic.Properties(delivery_mode=2)
    frames = (
        commands.Basic.Publish(routing_key=queue, mandatory=True),
        ContentHeader(body_size=len(BODY), properties=properties),
        ContentBody(BODY),
    )
    return b"".join(frame.marshal(one, 1) for one in frames)


def _connected(url: str, *, is_confirming: bool = True) -> socket.socket:
    """A socket with an open channel, in confirm mode if wanted."""
    parts = pika.URLParameters(url)
    wire = socket.create_connection((parts.host, parts.port))
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as all the others do
    assert isinstance(parts.credentials, pika.PlainCredentials)
    login = f"\0{parts.credentials.username}\0{parts.credentials.password}"
    tune = [
        commands.Connection.StartOk({}, "PLAIN", login, "en_US"),
        commands.Connection.TuneOk(2047, 131_072, 0),
        commands.Connection.Open(parts.virtual_host),
        commands.Channel.Open(),
    ]
    if is_confirming:
        tune.append(commands.Confirm.Select())
    wire.sendall(ProtocolHeader().marshal())
    buffer = _read(wire, b"")
    for method in tune:
        wire.sendall(frame.marshal(method, 0 if method.name.startswith("Connection") else 1))
        if not isinstance(method, commands.Connection.TuneOk):
            buffer = _read(wire, buffer)
    return wire


def _read(wire: socket.socket, buffer: bytes) -> bytes:
    """Wait for one frame, and drop it."""
    while True:
        size, _, one = frame.unmarshal(buffer) if len(buffer) >= 8 else (0, 0, None)
        if one is not None:
            return buffer[size:]
        buffer += wire.recv(65_536)
