"""Pika's I/O loop, and what can be learned from it about the connection's socket.

Knows: the public interface by which pika asks its loop to watch sockets. Must never know: AMQP,
what is written.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress

from pika.adapters.select_connection import IOLoop


class WatchedLoop(IOLoop):
    """Runs one connection at a time, and remembers its socket.

    Attributes:
        fd: of the socket that pika has begun to watch last; None when it has left that one.
        is_writing: whether pika waits for room in that socket, so has more to write.
    """

    def __init__(self) -> None:
        self.fd: int | None = None
        self.is_writing = False
        super().__init__()

    def add_handler(self, fd: int, handler: Callable[[int, int], None], events: int) -> None:
        """Begin to watch a socket."""
        self.fd = fd
        self.is_writing = bool(events & self.WRITE)
        super().add_handler(fd, handler, events)

    def update_handler(self, fd: int, events: int) -> None:
        """Watch it for something else."""
        if fd == self.fd:
            self.is_writing = bool(events & self.WRITE)
        super().update_handler(fd, events)

    def remove_handler(self, fd: int) -> None:
        """Watch it no longer."""
        if fd == self.fd:
            self.fd, self.is_writing = None, False
        super().remove_handler(fd)

    def cut(self) -> None:
        """End the socket's connection here and now; pika notices, and closes the socket."""
        if self.fd is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(self.fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
