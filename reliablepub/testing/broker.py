"""`FakeBroker`: a RabbitMQ stand-in on a real TCP port, for tests and demos.

Knows: how a test's thread starts, stops, crashes and inspects a node, and injects faults. Must
never know: frames, sockets; `server` moves the bytes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import threading
import time
from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote

from reliablepub.testing import views
from reliablepub.testing.content_header import encode_properties
from reliablepub.testing.faults import Crash, Fault, Freeze
from reliablepub.testing.history import Fate, Publish
from reliablepub.testing.node import Node
from reliablepub.testing.options import NodeOptions, Permissions
from reliablepub.testing.queues import new_queue
from reliablepub.testing.routing import EXCHANGE_TYPES, Exchange, VirtualHost, new_binding
from reliablepub.testing.server import Server

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from reliablepub.testing.history import Published, StoredMessage
    from reliablepub.testing.views import ClientState, ConsumerState, QueueState, UnackedMessage

T = TypeVar("T")


class FakeBroker:
    """A RabbitMQ stand-in: AMQP 0-9-1 over real TCP, served by a thread, with scripted faults.

    Every method may be called from any thread. Exchanges, queues, bindings and persistent messages
    survive `crash` and `restart` as in RabbitMQ.

    Args:
        host: Address to listen on; must be loopback unless `allow_remote` is set.
        port: Port to listen on; 0 picks a free one, which a restart reuses.
        allow_remote: Permit a host that other machines can reach. A fake broker is not secure.
        options: Settings of the node, as in rabbitmq.conf.
        tls: Server-side context with a certificate; the broker then accepts AMQPS only.

    Raises:
        ValueError: The host is not loopback.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
        options: NodeOptions | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not allow_remote and not _is_loopback(host):
            raise ValueError(f"{host!r} is not a loopback address; pass allow_remote=True")
        self._host = host
        self._port = port
        self._tls = tls
        self._options = options or NodeOptions()
        self._node = Node(self._options)
        self._changed = threading.Condition()
        self._server: Server | None = None

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)  # stop() may wait for a client on this event loop

    @property
    def port(self) -> int:
        """The port; 0 before the first start."""
        return self._port

    @property
    def url(self) -> str:
        """The URL: `amqp://guest:guest@127.0.0.1:PORT/%2F`, or `amqps://` with TLS."""
        return self.url_of(next(iter(self._node.options.users)))

    def url_of(self, user: str, virtual_host: str | None = None) -> str:
        """Return the URL for a user and a virtual host, by default the first virtual host.

        Raises:
            KeyError: There is no such user.
        """
        password = self._node.options.users[user]
        credentials = f"{quote(user, safe='')}:{quote(password, safe='')}"
        host = f"[{self._host}]" if ":" in self._host else self._host
        scheme = "amqp" if self._tls is None else "amqps"
        vhost = quote(virtual_host or self._options.virtual_hosts[0], safe="")
        return f"{scheme}://{credentials}@{host}:{self._port}/{vhost}"

    @property
    def is_up(self) -> bool:
        """Whether the port accepts connections: started, and not crashed."""
        with self._changed:
            return self._server is not None and self._server.is_up

    def start(self) -> None:
        """Start serving; after a crash or a stop, on the same port. Do nothing if already up."""
        with self._changed:
            if self._server is None:
                self._server = Server(self._node, self._changed, self._host, self._port, self._tls)
                self._port = self._server.port
            elif not self._server.is_up:
                self._server.listen()
                self._server.wake()

    def stop(self) -> None:
        """Shut down cleanly: send connection.close 320, and write persistent messages first."""
        with self._changed:
            server, self._server = self._server, None
            if server is not None:
                server.ask_to_stop()
        if server is not None:
            server.join()

    def restart(self) -> None:
        """`stop`, then `start`."""
        self.stop()
        self.start()

    def reset(self) -> None:
        """`stop`, forget everything but the options, and `start` again if it was running.

        Connections are closed; queues, exchanges, messages, faults, the history, and passwords and
        permissions that were set later are gone.
        """
        was_running = self._server is not None
        self.stop()
        with self._changed:
            self._node = Node(self._options)
        if was_running:
            self.start()

    def crash(self, *, lose_unsynced: bool = True) -> None:
        """Crash, as on kill -9: reset connections, and refuse new ones until `start`.

        Transient messages are lost. With `lose_unsynced`, so are persistent messages whose batch
        had not been written yet.
        """
        with self._changed:
            server = self._running()
            if server.is_up:
                self._node.trigger(Crash(lose_unsynced=lose_unsynced))
                server.wake()
                self._changed.wait_for(lambda: not server.is_up)

    # ------------------------------------------------------------------ misbehaving

    def inject(self, *faults: Fault) -> None:
        """Add faults; each applies to later events only.

        Raises:
            TypeError: An argument is not a fault, such as a class without its parentheses.
        """
        with self._changed:
            self._node.script.inject(*faults)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults in force: injected and not yet used up."""
        with self._changed:
            return self._node.script.faults

    def clear_faults(self) -> None:
        """Remove every fault, and send the confirms that `HoldConfirms` held back."""

        def clear() -> None:
            self._node.script.remove(Fault)
            self._node.release_confirms()

        self._act(clear)

    def release_confirms(self) -> None:
        """Send every confirm that `HoldConfirms` faults hold back, and remove these faults."""
        self._act(self._node.release_confirms)

    def block(self, reason: str = "low on memory") -> None:
        """Raise a resource alarm: a client that publishes gets connection.blocked and waits."""
        self._act(lambda: self._node.block(reason))

    def unblock(self) -> None:
        """End the alarm: send connection.unblocked, and process withheld publishes in order."""
        self._act(self._node.unblock)

    def drop_connections(self) -> None:
        """Reset every connection (RST); the broker stays up."""
        self._act(lambda: self._running().reset_connections())

    def freeze(self) -> None:
        """Stop reading and answering, including heartbeats, as on SIGSTOP."""
        with self._changed:
            server = self._running()
            if not server.is_frozen:
                self._node.trigger(Freeze())
                server.wake()
                self._changed.wait_for(lambda: server.is_frozen)

    def thaw(self) -> None:
        """Resume after `freeze`."""
        self._act(lambda: self._running().thaw())

    def advance(self, seconds: float, *, clients_are_silent: bool = False) -> None:
        """Move the broker's clock forward, so that a test need not wait.

        Events that become due happen in order, as if the time had passed: messages, queues and
        tokens expire, deliveries that were not acknowledged in time close their channels, delayed
        confirms and deliveries are sent, and an alarm, a crash or a freeze with a duration ends.
        The clients' clocks do not change, so heartbeats are not late unless `clients_are_silent`.

        Args:
            seconds: Seconds to add.
            clients_are_silent: Count the time against heartbeat timeouts: close the connection of a
                client that missed its heartbeats.

        Raises:
            ValueError: `seconds` is negative, not a number, or goes beyond the year 9998.
        """

        def advance() -> None:
            if self._server is not None and self._server.is_frozen:
                self._node.clock.advance(seconds)  # due events happen when the freeze ends
            else:
                self._node.advance(seconds, clients_are_silent=clients_are_silent)

        self._act(advance)

    # ------------------------------------------------------------------ declaring

    def declare_exchange(
        self,
        name: str,
        type: str = "direct",  # noqa: A002 - the name in exchange.declare
        *,
        durable: bool = True,
        internal: bool = False,
        arguments: Mapping[str, Any] | None = None,
        virtual_host: str | None = None,
    ) -> None:
        """Declare an exchange; an existing one is not changed."""
        if type not in EXCHANGE_TYPES:
            raise ValueError(f"unknown exchange type {type!r}")
        exchange = Exchange(
            name, type, durable=durable, internal=internal, arguments=dict(arguments or {})
        )
        with self._changed:
            vhost = self._vhost(virtual_host)
            if name not in vhost.exchanges:
                vhost.add_exchange(exchange)

    def declare_queue(
        self,
        name: str,
        *,
        durable: bool = True,
        arguments: Mapping[str, Any] | None = None,
        virtual_host: str | None = None,
    ) -> None:
        """Declare a queue; an existing one is not changed."""
        with self._changed:
            vhost = self._vhost(virtual_host)
            if name not in vhost.queues:
                vhost.add_queue(new_queue(name, durable=durable, arguments=dict(arguments or {})))

    def bind(
        self,
        queue: str,
        exchange: str,
        routing_key: str = "",
        *,
        arguments: Mapping[str, Any] | None = None,
        virtual_host: str | None = None,
    ) -> None:
        """Bind a queue to an exchange.

        Raises:
            KeyError: The queue or the exchange does not exist.
        """
        binding = new_binding(queue, routing_key, arguments)
        with self._changed:
            vhost = self._vhost(virtual_host)
            vhost.queues[queue]
            vhost.bind(exchange, binding)

    def delete_queue(self, name: str, *, virtual_host: str | None = None) -> None:
        """Delete a queue; publishes to it that are not confirmed yet are acked, as in RabbitMQ."""
        self._act(lambda: self._node.remove_queue(self._vhost(virtual_host), name))

    def delete_exchange(self, name: str, *, virtual_host: str | None = None) -> None:
        """Delete an exchange."""
        with self._changed:
            self._vhost(virtual_host).remove_exchange(name)

    def publish(
        self,
        body: bytes,
        routing_key: str = "",
        *,
        exchange: str = "",
        properties: Mapping[str, Any] | None = None,
        virtual_host: str | None = None,
    ) -> bool:
        """Route a message to queues, as if a client had published it earlier.

        The message is on disk at once. No fault applies to it, and `published` does not list it.

        Args:
            body: The body.
            routing_key: Routing key; the name of a queue, unless an exchange is given.
            exchange: The exchange; by default the default exchange.
            properties: Basic properties by name (`message_id`, `headers`, ...); `delivery_mode` is
                2 by default.
            virtual_host: Virtual host; by default the first one.

        Returns:
            Whether a queue accepted it.

        Raises:
            KeyError: There is no such exchange.
            ValueError: There is no such property, or its value cannot be encoded.
        """
        header = encode_properties(dict(properties or {}), len(body))
        publish = Publish(
            exchange,
            routing_key,
            mandatory=False,
            header=header,
            body=body,
            connection=0,
            channel=0,
            fate=Fate.ACCEPTED,
        )
        with self._changed:
            vhost = self._vhost(virtual_host)
            vhost.exchanges[exchange]
            return self._act(lambda: self._node.seed(vhost, publish))

    # ------------------------------------------------------------------ users

    def set_permissions(
        self, user: str, permissions: Permissions, *, virtual_host: str | None = None
    ) -> None:
        """Set a user's permissions, including on open connections."""
        name = virtual_host or self._options.virtual_hosts[0]
        self._act(lambda: self._node.set_permissions(user, name, permissions))

    def set_password(self, user: str, password: str) -> None:
        """Change the password of a user, or add a user with all rights.

        Open connections stay open, as in RabbitMQ; `drop_connections` makes clients log in again.
        `url` and `url_of` then contain the new password.
        """
        self._act(lambda: self._node.set_password(user, password))

    def issue_token(self, lifetime_s: float, *, user: str | None = None) -> str:
        """Issue a token that replaces the password in a login, as RabbitMQ's OAuth 2 plugin does.

        It is a JSON Web Token with an expiry (``exp``) and an empty signature. After its expiry, a
        login with it is refused. An open connection stays open, as in RabbitMQ before 4.3, but each
        method that needs a permission closes its channel with 403, until
        ``connection.update-secret`` provides another token. RabbitMQ caches a permission for up to
        a minute while a channel is busy; this broker does not. Since 4.3, RabbitMQ closes the
        connection: 320 "credential expired".

        Args:
            lifetime_s: Seconds until it expires; 0 or less for an expired token.
            user: User whose rights it grants; by default the first user.
        """
        claims = {"exp": time.time() + lifetime_s, "jti": secrets.token_hex(16)}
        secret = ".".join(_base64url(json.dumps(part)) for part in ({"alg": "none"}, claims)) + "."
        name = next(iter(self._options.users)) if user is None else user
        self._act(lambda: self._node.add_token(secret, name, lifetime_s))
        return secret

    def expire_tokens(self) -> None:
        """Expire every token that has been issued so far."""
        self._act(self._node.expire_tokens)

    # ------------------------------------------------------------------ looking

    def messages(self, queue: str, *, virtual_host: str | None = None) -> tuple[StoredMessage, ...]:
        """Return the messages that are ready in a queue, the head first."""
        with self._changed:
            found = self._vhost(virtual_host).queues[queue]
            self._node.tick()
            found.expire(self._node.now)
            return tuple(map(views.stored, found.ready))

    def queues(self, *, virtual_host: str | None = None) -> tuple[QueueState, ...]:
        """Return the queues, with their numbers of messages and consumers."""
        with self._changed:
            self._node.tick()
            for queue in self._vhost(virtual_host).queues.values():
                queue.expire(self._node.now)
            return views.queues(self._node, self._vhost(virtual_host))

    def consumers(self, *, virtual_host: str | None = None) -> tuple[ConsumerState, ...]:
        """Return the consumers of all queues."""
        with self._changed:
            return views.consumers(self._node, self._vhost(virtual_host))

    def clients(self, *, virtual_host: str | None = None) -> tuple[ClientState, ...]:
        """Return the clients that have logged in, with the properties that they sent."""
        with self._changed:
            return views.clients(self._node, self._vhost(virtual_host))

    def unacked(self, *, virtual_host: str | None = None) -> tuple[UnackedMessage, ...]:
        """Return the messages that were delivered and are not yet acknowledged."""
        with self._changed:
            return views.unacknowledged(self._node, self._vhost(virtual_host))

    @property
    def published(self) -> tuple[Published, ...]:
        """Every publish that arrived completely, in order, with its fate."""
        with self._changed:
            return self._node.history.snapshot()

    @property
    def published_count(self) -> int:
        """Number of publishes that arrived completely, including those dropped from `published`."""
        with self._changed:
            return self._node.history.total

    @property
    def connections(self) -> int:
        """Number of open connections that have finished the handshake."""
        with self._changed:
            return sum(one.is_open for one in self._node.connections.values())

    def wait_for(self, condition: int | Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until a number of publishes have arrived, or until a condition on the broker holds.

        Args:
            condition: A count of publishes, or a function that inspects this broker; it is called
                after every event.
            timeout_s: Longest wait, in seconds.

        Raises:
            TimeoutError: The condition did not hold in time; the message lists the fates of the
                publishes, and the number of connections.
            TypeError: The condition is True or False; give it as a function.
            ValueError: `timeout_s` is not a number, or above `threading.TIMEOUT_MAX` (292 years).
        """
        if isinstance(condition, bool):  # an int as well, which would wait for nothing
            raise TypeError("give the condition as a function: lambda: ...")
        if not timeout_s <= threading.TIMEOUT_MAX:  # NaN is not
            raise ValueError(f"timeout_s must be at most {threading.TIMEOUT_MAX:.0f}")
        holds = condition if callable(condition) else lambda: self.published_count >= condition
        with self._changed:
            if not self._changed.wait_for(holds, timeout_s):
                fates = [publish.fate for publish in self.published]
                tally = {fate.value: fates.count(fate) for fate in sorted(set(fates))}
                raise TimeoutError(
                    f"not within {timeout_s} s; publishes: {tally}, connections: {self.connections}"
                )

    # ------------------------------------------------------------------ inside

    def _vhost(self, name: str | None) -> VirtualHost:
        return self._node.vhost if name is None else self._node.vhosts[name]

    def _act(self, action: Callable[[], T]) -> T:
        with self._changed:
            self._node.tick()
            result = action()
            self._node.flush()
            if self._server is not None:
                self._server.wake()
            self._changed.notify_all()
            return result

    def _running(self) -> Server:
        if self._server is None:
            raise RuntimeError("the broker is not running; call start()")
        return self._server


def _base64url(text: str) -> str:
    return urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
