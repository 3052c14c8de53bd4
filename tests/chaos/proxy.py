"""A network that can be made slow, silent or short: a TCP proxy in a thread.

It knows bytes and sockets; it must never know AMQP.
"""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self, TypeAlias

from tests.chaos.networks import Network

CHUNK_BYTES = 16 * 1024
LINE_PIECES = 1_000
RESET = struct.pack("ii", 1, 0)

_Line: TypeAlias = asyncio.Queue[tuple[float, bytes]]
"""Pieces under way, and when each of them arrives; an empty one is the end."""


class Proxy:
    """Listens on loopback and passes everything on to one port, as well as it is allowed to.

    Args:
        target_port: of the broker.
        held_bytes: what the kernel may hold here of what clients send; None for its own idea.
        network: where it listens; None for the network of this process.

    Attributes:
        delay_s: how far away the broker is, each way; what is under way does not wait for another.
        latency_s: added to each piece, each way; the next one waits meanwhile.
        bytes_per_s: the most that passes each way; None for no limit.
        piece_bytes: the most that passes at once.
        resets: share of pieces at which the connection is reset instead.
        is_silent_up: what the client sends is kept back.
        is_silent_down: what the broker sends is kept back.
    """

    def __init__(
        self, target_port: int, *, held_bytes: int | None = None, network: Network | None = None
    ) -> None:
        self._target_port = target_port
        self._network = network
        self._held_bytes = held_bytes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._writers: set[asyncio.StreamWriter] = set()
        self._downs: set[_Line] = set()
        self.heal()

    def heal(self) -> None:
        """Let everything pass at once."""
        self.delay_s = 0.0
        self.latency_s = 0.0
        self.bytes_per_s: float | None = None
        self.piece_bytes = CHUNK_BYTES
        self.resets = 0.0
        self.is_silent_up = self.is_silent_down = False

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"

    def __enter__(self) -> Self:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, sock=self._bound(), limit=CHUNK_BYTES), self._loop
        ).result()
        self._server = server
        self.port: int = server.sockets[0].getsockname()[1]
        return self

    def _bound(self) -> socket.socket:
        with self._network.within() if self._network is not None else nullcontext():
            sock = socket.create_server(("127.0.0.1", 0))
        if self._held_bytes is not None:  # what it accepts inherits this
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._held_bytes)
        return sock

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection, at both ends."""
        self._call(self._cut)

    def lead_to(self, target_port: int) -> None:
        """Pass everything on to another port from now on; every connection is reset."""
        self._target_port = target_port
        self.cut()

    def inject(self, data: bytes) -> None:
        """Have every client hear this from its broker, between two things that it says."""
        self._call(lambda: self._inject(data))

    def _inject(self, data: bytes) -> None:
        for line in self._downs:
            line.put_nowait((0.0, data))

    def _call(self, function: Callable[[], None]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(function)
        self._loop.call_soon_threadsafe(done.set)
        done.wait()

    def _cut(self) -> None:
        for writer in list(self._writers):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            broker_reader, broker_writer = await asyncio.open_connection(
                "127.0.0.1", self._target_port
            )
        except OSError:
            _reset(writer)
            return
        pair = {writer, broker_writer}
        up: _Line = asyncio.Queue(LINE_PIECES)
        down: _Line = asyncio.Queue(LINE_PIECES)
        self._writers |= pair
        self._downs.add(down)
        try:
            await asyncio.gather(
                self._pass(reader, up, lambda: self.is_silent_up),
                self._pass(broker_reader, down, lambda: self.is_silent_down),
                self._arrive(up, broker_writer),
                self._arrive(down, writer),
            )
        except OSError:
            pass
        finally:
            self._writers -= pair
            self._downs.discard(down)
            for end in pair:
                _reset(end)

    async def _pass(
        self, reader: asyncio.StreamReader, line: _Line, is_silent: Callable[[], bool]
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            for start in range(0, len(data), self.piece_bytes):
                piece = data[start : start + self.piece_bytes]
                while is_silent():  # noqa: ASYNC110 - it is switched by another thread
                    await asyncio.sleep(0.01)
                if random.random() < self.resets:
                    raise ConnectionResetError
                delay_s = self.latency_s * random.uniform(0.5, 1.5)
                if self.bytes_per_s is not None:
                    delay_s += len(piece) / self.bytes_per_s
                if delay_s:
                    await asyncio.sleep(delay_s)
                await line.put((self._loop.time() + self.delay_s, piece))
        await line.put((self._loop.time() + self.delay_s, b""))

    async def _arrive(self, line: _Line, writer: asyncio.StreamWriter) -> None:
        while True:
            at, piece = await line.get()
            if (delay_s := at - self._loop.time()) > 0:
                await asyncio.sleep(delay_s)
            if not piece:
                raise ConnectionResetError  # one end has closed: so does the other
            writer.write(piece)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock: Any = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
