"""The broker without sockets: the state that all connections share.

Knows: virtual hosts, the disk (which persistent messages are not written yet), the resource alarm,
the fault script, the history. `now` is set before every input. Must never know: bytes, sockets. It
queues a crash or a freeze, which the server carries out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, Final, Protocol

from reliablepub.testing.clock import Clock, Timers
from reliablepub.testing.consumers import check_reply_name, deliver
from reliablepub.testing.dead_letters import destinations, died
from reliablepub.testing.faults import Block, Crash, FaultScript, Freeze, HoldConfirms
from reliablepub.testing.history import History
from reliablepub.testing.options import EVERYTHING
from reliablepub.testing.replies import AmqpError
from reliablepub.testing.routing import VirtualHost, routing_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliablepub.testing.consumers import Receiver
    from reliablepub.testing.history import Publish
    from reliablepub.testing.options import NodeOptions, Permissions
    from reliablepub.testing.queues import Buried, Entry, Queue


Settle = Callable[["Publish"], None]
"""Confirms a publish: ack or nack."""


class Client(Protocol):
    """A connection, as the broker sees it."""

    vhost: VirtualHost
    permissions: Permissions

    @property
    def user(self) -> str:
        """The user that logged in."""

    @property
    def client_properties(self) -> Mapping[str, Any]:
        """What the client told of itself."""

    @property
    def channels(self) -> int:
        """Number of open channels."""

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done and the connection is not closed."""

    def consuming(self) -> Iterable[tuple[int, Receiver]]:
        """The number and the consuming side of every open channel."""

    def handle_unblocked(self) -> None:
        """Handle the end of the alarm."""

    def handle_thawed(self) -> None:
        """Handle the end of a freeze."""

    def handle_advanced(self, seconds: float) -> None:
        """Handle a clock that was set ahead."""

    def handle_lost(self) -> None:
        """Handle the loss of the socket."""

    def close(self, code: int, text: str, ids: tuple[int, int] = (0, 0)) -> None:
        """Send connection.close."""

    def drop(self, *, reset: bool) -> None:
        """End the TCP connection without connection.close."""


@dataclass(slots=True)
class Token:
    """The claims of an OAuth 2 token.

    Attributes:
        user: The user whose rights it grants; the user name of the login is ignored.
        expires_at: When it expires, in seconds of `Node.now`.
    """

    user: str
    expires_at: float


class Node:
    """One RabbitMQ node."""

    def __init__(self, options: NodeOptions) -> None:
        self.options: NodeOptions = options
        self.clock: Final = Clock()
        self.now: float = 0.0
        self.vhosts: Final = {name: VirtualHost(name) for name in options.virtual_hosts}
        self.script: Final = FaultScript(options.seed)
        self.history: Final = History(options.history_max, options.history_bytes_max)
        self.random: Final = Random(options.seed)  # noqa: S311 - repeatable, no secret
        self.connections: dict[int, Client] = {}
        self.tokens: dict[str, Token] = {}
        """Tokens that clients may give instead of a password."""
        self.reply_consumers: dict[str, Receiver] = {}
        """Consuming sides of channels with a consumer of direct replies, by its generated name."""
        self.alarm: str | None = None
        self.is_going_down: bool = False
        """Whether all connections end at once: no classic queue delivers, no queue is unused."""
        self.timers: Final = Timers()
        self.triggered: deque[Crash | Freeze] = deque()
        self._alarms = 0
        self._unwritten: list[tuple[Entry, Publish, Settle | None]] = []
        self._held: list[tuple[Publish, Settle]] = []
        self._settled: dict[Callable[[], None], None] = {}
        self._names = 0
        self._connections_seen = 0

    @property
    def vhost(self) -> VirtualHost:
        """The first virtual host."""
        return self.vhosts[self.options.virtual_hosts[0]]

    def channels_of(self, user: str) -> int:
        """Return the number of channels that a user has open on all connections."""
        return sum(one.channels for one in self.connections.values() if one.user == user)

    def set_permissions(self, user: str, virtual_host: str, permissions: Permissions) -> None:
        """`rabbitmqctl set_permissions`; on open connections it applies from the next method on."""
        of_user = {**self.options.permissions.get(user, {}), virtual_host: permissions}
        if user not in self.options.permissions:
            of_user = dict.fromkeys(self.options.virtual_hosts, EVERYTHING) | of_user
        granted = {**self.options.permissions, user: of_user}
        self.options = replace(self.options, permissions=granted)
        for connection in self.connections.values():
            if connection.user == user and connection.vhost is self.vhosts[virtual_host]:
                connection.permissions = permissions

    def set_password(self, user: str, password: str) -> None:
        """`rabbitmqctl add_user` or `change_password`; open connections stay, as in RabbitMQ."""
        self.options = replace(self.options, users={**self.options.users, user: password})

    def add_token(self, secret: str, user: str, lifetime_s: float) -> None:
        """Accept a token for a number of seconds."""
        self.tokens[secret] = Token(user, self.now + lifetime_s)

    def expire_tokens(self) -> None:
        """Expire all tokens now, on open connections too."""
        for token in self.tokens.values():
            token.expires_at = min(token.expires_at, self.now)

    def tick(self) -> None:
        """Set `now` by the clock."""
        self.now = self.clock.monotonic()

    def advance(self, seconds: float, *, clients_are_silent: bool) -> None:
        """Set the clock ahead; run the timers that become due, each at its time."""
        until = self.now + seconds
        self.clock.advance(seconds)
        while (due_at := self.timers.deadline) is not None and due_at <= until:
            self.now = max(self.now, due_at)
            self.handle_timeout()
        self.now = until
        if not clients_are_silent:
            for connection in list(self.connections.values()):
                connection.handle_advanced(seconds)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action later."""
        self.timers.at(self.now + seconds, action)

    def handle_timeout(self) -> None:
        """Run the timers that are due."""
        self.timers.fire(self.now)
        self.flush()

    # ------------------------------------------------------------------ messages

    def enqueue(self, queue: Queue, publish: Publish, settle: Settle | None) -> bool:
        """Put a publish into a queue and deliver it to waiting consumers; False if refused.

        A persistent publish to a durable queue is settled only once it is written.
        """
        entry = queue.offer(publish, self.now)
        if entry is None:
            return False
        self._expire_later(queue, entry)
        if queue.writes(publish):
            publish.waiting += 1
            if not self._unwritten:
                self.after(self.options.flush_delay_s, self._write)
            self._unwritten.append((entry, publish, settle))
        deliver(queue, self.now)
        queue.trim()
        return True

    def seed(self, vhost: VirtualHost, publish: Publish) -> bool:
        """Put a test's message into the queues that it is routed to; False if no queue takes it."""
        taken = [self.enqueue(queue, publish, None) for queue in vhost.route(publish)]
        self.write_now(publish)
        return any(taken)

    def _expire_later(self, queue: Queue, entry: Entry) -> None:
        if entry.expires_at is not None:
            self.timers.at(entry.expires_at, lambda: queue.expire(self.now))

    def _write(self) -> None:
        batch, self._unwritten = self._unwritten, []
        for entry, publish, settle in batch:
            entry.written = True
            publish.waiting -= 1
            if settle is not None and not publish.waiting and not publish.rejected:
                settle(publish)

    def write_now(self, publish: Publish) -> None:
        """Write one publish at once, for a fault with `accepted`."""
        for entry, owner, _ in self._unwritten:
            if owner is publish:
                entry.written = True

    def flush(self) -> None:
        """Route dead letters, and send the confirms that are due, after all input was processed.

        RabbitMQ sends confirms when a channel's mailbox is empty (noreply_coalesce).
        """
        for vhost in self.vhosts.values():
            while vhost.dead:
                self._bury(vhost, vhost.dead.popleft())
        while self._settled:
            send_confirms, _ = self._settled.popitem()
            send_confirms()

    def reply(self, publish: Publish, keys: list[str]) -> bool:
        """Deliver to the consumers of direct replies that the keys name; False if there are none.

        The names are known in every virtual host (rabbit_exchange:route).

        Raises:
            AmqpError: 541 for a key that has the form of a generated name, but is not one.
        """
        if publish.exchange:
            return False
        for key in keys:
            check_reply_name(key)
        names = sorted({key for key in keys if key in self.reply_consumers})
        for name in names:
            self.reply_consumers[name].send_reply(publish)
        return bool(names)

    def _bury(self, vhost: VirtualHost, buried: Buried) -> None:
        publish = died(buried, int(self.clock.wall()))
        with suppress(AmqpError):  # in RabbitMQ the queue's process crashes, and starts again
            self.reply(publish, routing_keys(publish))
        for queue in destinations(vhost, publish, buried.reason):
            self.enqueue(queue, publish, None)

    # ------------------------------------------------------------------ confirms

    def settled(self, send_confirms: Callable[[], None]) -> None:
        """Have a channel send its confirms with the next `flush`."""
        self._settled[send_confirms] = None

    def hold(self, publish: Publish, settle: Settle) -> None:
        """Hold back a confirm until `release_confirms`."""
        self._held.append((publish, settle))

    def release_confirms(self) -> None:
        """Send every confirm held back, and remove the faults that hold them."""
        self.script.remove(HoldConfirms)
        self.history.drop_faults(HoldConfirms)  # of publishes that are not settled yet
        held, self._held = self._held, []
        for publish, settle in held:
            settle(publish)
        self.flush()

    # ------------------------------------------------------------------ the whole broker

    def block(self, reason: str, for_s: float | None = None) -> None:
        """Raise a resource alarm; a connection gets connection.blocked when it publishes."""
        self.alarm = reason
        self._alarms += 1
        number = self._alarms
        if for_s is not None:
            self.after(for_s, lambda: self._unblock_if(number))

    def _unblock_if(self, number: int) -> None:
        if number == self._alarms:
            self.unblock()

    def unblock(self) -> None:
        """End the alarm: send connection.unblocked, and process withheld publishes in order."""
        self.alarm = None
        self._alarms += 1
        for connection in list(self.connections.values()):
            connection.handle_unblocked()

    def trigger(self, fault: Block | Crash | Freeze) -> None:
        """Begin a fault of the whole broker."""
        if isinstance(fault, Block):
            self.block(fault.reason, fault.for_s)
        else:
            self.triggered.append(fault)

    def thaw(self) -> None:
        """End a freeze: process the publishes that it withheld."""
        for connection in list(self.connections.values()):
            connection.handle_thawed()

    def restart(self, *, keep_unwritten: bool) -> None:
        """Drop connections, and all messages that are not on disk, as the node went down.

        A clean shutdown writes persistent messages first (`keep_unwritten`); a crash does not.
        """
        self.is_going_down = True
        for connection in list(self.connections.values()):
            connection.handle_lost()
        self.is_going_down = False
        self._unwritten, self._held = [], []
        self._settled.clear()
        self.timers.clear()
        self.alarm = None
        self.triggered.clear()
        for vhost in self.vhosts.values():
            vhost.restart(keep_unwritten=keep_unwritten)
            for queue in vhost.queues.values():
                queue.used_at = None
                self.keep_while_used(vhost, queue)
                for entry in queue.ready:
                    self._expire_later(queue, entry)

    # ------------------------------------------------------------------ queues

    def remove_queue(self, vhost: VirtualHost, name: str) -> None:
        """Delete a queue and tell its consumers."""
        for consumer in vhost.remove_queue(name).consumers:
            consumer.receiver.handle_queue_deleted(consumer)

    def delete_exclusive_queues(self, vhost: VirtualHost, owner: int) -> None:
        """Delete the exclusive queues of a connection that has ended."""
        for queue in list(vhost.queues.values()):
            if queue.owner == owner:
                self.remove_queue(vhost, queue.name)

    def keep_while_used(self, vhost: VirtualHost, queue: Queue) -> None:
        """Restart the time after which `x-expires` deletes a queue, because the queue was used."""
        if "x-expires" in queue.arguments:
            is_watched = queue.used_at is not None
            queue.used_at = self.now
            if not is_watched:
                self._delete_unused(vhost, queue)

    def _delete_unused(self, vhost: VirtualHost, queue: Queue) -> None:
        """Delete a queue whose `x-expires` has passed; otherwise check again when it may have."""
        assert queue.used_at is not None
        if queue.is_deleted:
            return
        if queue.consumers:
            queue.used_at = self.now
        expires_at = queue.used_at + queue.arguments["x-expires"] / 1000
        if self.now >= expires_at:
            self.remove_queue(vhost, queue.name)
        else:
            self.timers.at(expires_at, lambda: self._delete_unused(vhost, queue))

    # ------------------------------------------------------------------ names

    def next_connection_number(self) -> int:
        """Return the number of a new connection, counted from 1 across restarts."""
        self._connections_seen += 1
        return self._connections_seen

    def generated_name(self, prefix: str) -> str:
        """Return a server-generated name (`amq.gen-`, `amq.ctag-`)."""
        self._names += 1
        return f"{prefix}{self._names}-{self.random.getrandbits(64):016x}"
