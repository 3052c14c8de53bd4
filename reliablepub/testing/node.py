"""The broker itself, without sockets: what all connections share.

This module knows the virtual host, the disk (which persistent messages are not written yet), the
resource alarm, the fault script and the history. Time comes in with every input as `now`.
It must never know bytes or sockets; a crash or a freeze is only announced here, for the server to
carry out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from reliablepub.testing.faults import Block, Crash, FaultScript, Freeze, HoldConfirms
from reliablepub.testing.history import History
from reliablepub.testing.routing import VirtualHost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reliablepub.testing.connection import Connection
    from reliablepub.testing.history import Publish
    from reliablepub.testing.publishing import Publishing
    from reliablepub.testing.queues import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What rabbitmq.conf would say.

    Attributes:
        users: Names and passwords that may log in.
        virtual_host: The one virtual host.
        heartbeat_s: Proposed in connection.tune; 0 is none.
        channel_max: Channels a connection may have open.
        frame_max: Proposed in connection.tune.
        max_message_size: Bytes a body may have; above it is 406.
        flush_delay_s: How long persistent messages gather before they are written together.
        history_max: How many publishes are remembered.
        seed: Of everything random.
    """

    users: Mapping[str, str] = field(default_factory=lambda: {"guest": "guest"}, repr=False)
    virtual_host: str = "/"
    heartbeat_s: int = 60
    channel_max: int = 2047
    frame_max: int = 131_072
    max_message_size: int = 16 * 1024 * 1024
    flush_delay_s: float = 0.002
    history_max: int = 100_000
    seed: int = 0


class Node:
    """One RabbitMQ node."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self.now = 0.0
        self.vhost = VirtualHost()
        self.script = FaultScript(options.seed)
        self.history = History(options.history_max)
        self.random = Random(options.seed)  # noqa: S311 - repeatable, no secret
        self.connections: dict[int, Connection] = {}
        self.alarm: str | None = None
        self.triggered: deque[Crash | Freeze] = deque()
        self._alarm_ends_at: float | None = None
        self._unwritten: list[tuple[Entry, Publish, Publishing]] = []
        self._write_at: float | None = None
        self._held: list[tuple[Publish, Publishing]] = []
        self._settled: dict[Publishing, None] = {}
        self._names = 0
        self._connections_seen = 0

    @property
    def deadline(self) -> float | None:
        """When `handle_timeout` has something to do."""
        times = [time for time in (self._write_at, self._alarm_ends_at) if time is not None]
        return min(times, default=None)

    def handle_timeout(self) -> None:
        """Write what has gathered; end an alarm whose time is over."""
        if self._write_at is not None and self.now >= self._write_at:
            self._write()
        if self._alarm_ends_at is not None and self.now >= self._alarm_ends_at:
            self.unblock()

    def write_later(self, entry: Entry, publish: Publish, publishing: Publishing) -> None:
        """Put a persistent message into the batch that is written next."""
        self._unwritten.append((entry, publish, publishing))
        if self._write_at is None:
            self._write_at = self.now + self.options.flush_delay_s

    def _write(self) -> None:
        batch, self._unwritten, self._write_at = self._unwritten, [], None
        for entry, publish, publishing in batch:
            entry.written = True
            publish.waiting -= 1
            if not publish.waiting and not publish.rejected:
                publishing.settle(publish)
        self.flush_confirms()

    def write_now(self, publish: Publish) -> None:
        """Write one publish at once: the fault says that the broker has taken it."""
        for entry, owner, _ in self._unwritten:
            if owner is publish:
                entry.written = True

    def settled(self, publishing: Publishing) -> None:
        """A channel has verdicts to send."""
        self._settled[publishing] = None

    def flush_confirms(self) -> None:
        """Send the verdicts that gathered: the channel's mailbox is empty (noreply_coalesce)."""
        while self._settled:
            publishing, _ = self._settled.popitem()
            publishing.send_confirms()

    def hold(self, publish: Publish, publishing: Publishing) -> None:
        """Keep a verdict back until `release_confirms`."""
        self._held.append((publish, publishing))

    def release_confirms(self) -> None:
        """Send every verdict held back, and hold no more."""
        self.script.remove(HoldConfirms)
        held, self._held = self._held, []
        for publish, publishing in held:
            publishing.release(publish)
        self.flush_confirms()

    def block(self, reason: str, for_s: float | None = None) -> None:
        """Raise a resource alarm; connections hear of it when they publish."""
        self.alarm = reason
        self._alarm_ends_at = None if for_s is None else self.now + for_s

    def unblock(self) -> None:
        """End the alarm: tell who was told, and process what was withheld, in order."""
        self.alarm = self._alarm_ends_at = None
        for connection in list(self.connections.values()):
            connection.handle_unblocked()

    def trigger(self, fault: Block | Crash | Freeze) -> None:
        """A fault that concerns the whole broker begins."""
        if isinstance(fault, Block):
            self.block(fault.reason, fault.for_s)
        else:
            self.triggered.append(fault)

    def restart(self, *, keep_unwritten: bool) -> None:
        """The node went down: connections are gone, and what is not on disk is forgotten.

        A clean shutdown writes what has gathered (`keep_unwritten`); a crash does not.
        """
        for connection in list(self.connections.values()):
            connection.handle_lost()
        self.vhost.restart(keep_unwritten=keep_unwritten)
        self._unwritten, self._held, self._write_at = [], [], None
        self._settled.clear()
        self.alarm = self._alarm_ends_at = None
        self.triggered.clear()

    def remove_queue(self, name: str) -> None:
        """Delete a queue and tell its consumers."""
        for consumer in self.vhost.remove_queue(name).consumers:
            consumer.consuming.handle_queue_deleted(consumer)

    def delete_exclusive_queues(self, owner: int) -> None:
        """A connection is gone, and its exclusive queues with it."""
        for queue in list(self.vhost.queues.values()):
            if queue.owner == owner:
                self.remove_queue(queue.name)

    def thaw(self) -> None:
        """The freeze is over: what was withheld by it is processed."""
        for connection in list(self.connections.values()):
            connection.handle_thawed()

    def next_connection_number(self) -> int:
        """Connections are counted from 1, over restarts."""
        self._connections_seen += 1
        return self._connections_seen

    def generated_name(self, prefix: str) -> str:
        """A name the server chooses (`amq.gen-`, `amq.ctag-`)."""
        self._names += 1
        return f"{prefix}{self._names}-{self.random.getrandbits(64):016x}"
