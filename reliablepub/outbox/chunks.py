"""Cuts a stream of messages into chunks: `Cutter`, `cut`.

Knows: messages and their sizes. Must never know: where a chunk goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from reliablepub.errors import InvalidMessage
from reliablepub.message import Message
from reliablepub.outbox.entry import new_id, stamped


class Cutter:
    """Cuts a stream of messages into chunks, each within the limits or of a single message."""

    def __init__(
        self,
        messages_max: int,
        bytes_max: int,
        stamps: Sequence[Callable[[Message], Message]] = (),
    ) -> None:
        self._stamps = stamps
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._chunk: list[Message] = []
        self._size = 0

    def add(self, message: Message) -> list[Message] | None:
        """Add the next message. If it begins another chunk, return the finished one, else None."""
        if not issubclass(type(message), Message):  # `isinstance` would let a lazy proxy pass
            problem = f"one is of type {type(message).__name__}, not Message"
            raise InvalidMessage("messages", f"{problem}; Message(body, routing_key=...) makes one")
        if self._stamps:
            message = stamped(message, self._stamps)
        if message.message_id is None:
            message = message.with_message_id(new_id())  # the id counts towards the size
        size = self._size + message.size
        if self._chunk and (len(self._chunk) >= self._messages_max or size > self._bytes_max):
            chunk, self._chunk, self._size = self._chunk, [message], message.size
            return chunk
        self._chunk.append(message)
        self._size = size
        return None

    def rest(self) -> list[Message]:
        """The last chunk, which may be empty."""
        return self._chunk


def cut(messages: Iterable[Message], cutter: Cutter) -> Iterator[list[Message]]:
    """Cut a stream of messages into chunks, with a fresh cutter."""
    for message in messages:
        chunk = cutter.add(message)
        if chunk is not None:
            yield chunk
    if cutter.rest():
        yield cutter.rest()
