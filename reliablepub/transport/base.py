"""What the relay asks of a client library, and the broker's words as text.

Knows: the core's events, messages, and that RabbitMQ cuts a reply text at 252 bytes and puts
``...`` behind it, also inside a character. Must never know: SQL, outcomes, which message is which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from reliablepub._core.events import Event
from reliablepub.message import Message


def text(words: str | bytes | None) -> str:
    """The words as text, which can be stored and shown; empty for None."""
    if words is None:
        return ""
    return words.decode(errors="replace") if isinstance(words, bytes) else words


class CannotEncode(Exception):
    """A message does not fit what this broker allows; nothing of its batch was written.

    Attributes:
        index: position of the message in the batch.
        problem: what does not fit.
    """

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index
        self.problem = problem


class Transport(Protocol):
    """One connection at a time, and channels on it by epoch. All but `wake` from one thread.

    Requests are answered by events from `listen`, never by exceptions: a request on a connection
    that is gone is answered by the `ConnectionLost` that is already on its way.
    """

    @property
    def hooks_off(self) -> str:
        """Why the client library is used by its public interface alone; empty where it is not."""

    def connect(self) -> None:
        """Begin to connect; `Connected` or `ConnectionLost` follows."""

    def disconnect(self, reason: str) -> None:
        """Drop the connection without waiting for the broker; `ConnectionLost` follows."""

    def open_channel(self, epoch: int) -> None:
        """Open a channel in confirm mode; `ChannelOpened` follows."""

    def close_channel(self, epoch: int) -> None:
        """Close a channel; nothing follows."""

    def send(self, epoch: int, first_tag: int, messages: Sequence[Message]) -> None:
        """Write publishes, ``mandatory`` set, in order: ``messages[i]`` has tag ``first_tag + i``.

        Raises:
            CannotEncode: nothing was written.
        """

    def listen(self, timeout_s: float | None) -> list[Event]:
        """Wait until something happens, `wake` is called, or time is up; all that happened."""

    def wake(self) -> None:
        """End the current or the next `listen` at once. From any thread."""

    def close(self) -> None:
        """Close the connection and give everything back; waits a moment for the broker's answer."""


class LentConnection(Protocol):
    """An aio-pika connection, plain or robust, as far as can be told without importing aio-pika."""

    connected: asyncio.Event

    @property
    def is_closed(self) -> bool:
        """Whether the application has closed it."""
