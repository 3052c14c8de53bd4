"""Streams: queues whose messages stay, and are read from an offset.

This module knows offsets and what a stream refuses to consumers. It must never know channels, or
how messages are delivered.

Of a stream's own protocol, segments and retention there is nothing: no message is ever dropped. One
message is a chunk of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from reliablepub.testing.field_types import is_integer
from reliablepub.testing.queue_arguments import seconds_of
from reliablepub.testing.queues import Entry, Queue
from reliablepub.testing.replies import crashed

if TYPE_CHECKING:
    from reliablepub.testing.history import Publish


@dataclass(slots=True, eq=False)
class Stream(Queue):
    """A stream; `ready` is all of it, and a message's place in it is its offset."""

    _stored_at: list[float] = field(default_factory=list)

    def offer(self, publish: Publish, now: float) -> Entry:
        """Append a publish."""
        entry = Entry(publish, len(self.ready), None)
        self.ready.append(entry)
        self.ready_bytes += len(publish.body)
        self._stored_at.append(now)
        return entry

    def writes(self, publish: Publish) -> bool:
        """Every message goes to disk."""
        del publish
        return True

    def trim(self) -> None:
        """Drop nothing: a limit concerns whole segments of 500 MB."""

    def expire(self, now: float) -> None:
        """Drop nothing."""

    def put_back(self, entry: Entry) -> None:
        """Do nothing: a delivery takes nothing."""

    def requeue(self, entries: list[Entry], *, is_lost: bool = False) -> None:
        """Do nothing: a delivery takes nothing."""

    def lose(self, *, keep_unwritten: bool) -> list[Publish]:
        """Drop what a restart does not leave; returns the publishes."""
        lost = Queue.lose(self, keep_unwritten=keep_unwritten)
        del self._stored_at[len(self.ready) :]
        return lost

    def first_offset(self, start: object, now: float, wall: float) -> int | None:
        """The offset at which a consumer begins; None for an age in a unit that there is not.

        Args:
            start: The argument `x-stream-offset`, or "next".
            now: Time, in seconds.
            wall: The same time, in seconds since 1970.

        Raises:
            AmqpError: 541 for another value that RabbitMQ does not understand.
        """
        end = len(self.ready)
        if start == "first":
            return 0
        if start == "last":
            return max(0, end - 1)
        if start == "next":
            return end
        if isinstance(start, int) and is_integer(start):
            return min(max(0, start), end)
        if isinstance(start, datetime):
            return bisect_left(self._stored_at, now - (wall - start.timestamp()))
        if isinstance(start, str):
            age_s = seconds_of(start)
            return None if age_s is None else bisect_left(self._stored_at, now - age_s)
        raise crashed()


def new_queue(name: str, *, arguments: dict[str, Any], **flags: Any) -> Queue:  # noqa: ANN401 - of `Queue`
    """A queue of the type that its arguments name."""
    kind = Stream if arguments.get("x-queue-type") == "stream" else Queue
    return kind(name, arguments=arguments, **flags)
