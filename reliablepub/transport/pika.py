"""The transport on pika: a `SelectConnection`, driven one poll at a time by the relay's thread.

Knows: pika, its callbacks and its exceptions. Must never know: what is in the outbox, or what an
outcome leads to.

pika's callbacks only append events. `listen` runs one iteration of pika's I/O loop and returns the
events. Delivery tags are counted by the core, never by pika (and never by `BlockingConnection`,
which can take the late ack of one message for the confirm of the next). A batch is written as
frames of `PublishFrames`, or by `Channel.basic_publish`, whose only state is pika's output buffer.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

import pika
from pika import exceptions, spec
from pika.adapters.select_connection import SelectConnection
from pika.adapters.utils import connection_workflow
from pika.channel import Channel
from pika.connection import Connection
from pika.credentials import ExternalCredentials

from reliablepub._core.events import (
    Acked,
    AckedEach,
    Blocked,
    ChannelClosed,
    ChannelOpened,
    Connected,
    ConnectionClose,
    ConnectionLost,
    Event,
    Nacked,
    NoChannel,
    Returned,
    Unblocked,
)
from reliablepub._core.session import COUNTED_OUT_S
from reliablepub.certificates import TLS, CertificateFiles
from reliablepub.credentials import CredentialsProvider
from reliablepub.errors import TopologyError
from reliablepub.message import Message
from reliablepub.topology import Topology
from reliablepub.transport.address import Address, client_properties_of
from reliablepub.transport.base import host_and_port, says_expired, text
from reliablepub.transport.departures import LOOK_S, Departures, acknowledged, held_by_kernel
from reliablepub.transport.frames import PublishFrames, attempt_tag, encode_batch
from reliablepub.transport.login import Answer, Login, Tenure
from reliablepub.transport.pika_hooks import HookedConnection, HookFailed, WatchedLoop, hooks
from reliablepub.transport.pika_services import BoundedServices, ResolvingServices
from reliablepub.transport.provision import Provision
from reliablepub.transport.quiet import quiet_this_thread, quietly, unquiet_this_thread

_WORDS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (connection_workflow.AMQPConnectorStackTimeout, "the TLS handshake did not end in time"),
    (exceptions.ConnectionOpenAborted, "the AMQP handshake did not end in time"),
    (TimeoutError, "no answer to the TCP connection in time"),
    (exceptions.ProbableAccessDeniedError, "the broker refused access to the vhost"),
)

_ENDED_EARLY: Final = (
    "the peer ended the connection before the AMQP handshake: there is no broker behind it, or it "
    "wants a client certificate"
)
_NO_REPLY: Final = "the broker ended the login without a reply"
_LOGIN_BYTES: Final = 3_300
"""Bytes of user and secret that fit into the first frame of any RabbitMQ, beside what the client
says of itself. Before 4.1 it holds 4096 bytes (``FRAME_MIN_SIZE``), since then 8192
(``initial_frame_max``)."""
_WORDS_MAX: Final = 500
"""Characters of a reason: it goes into the log, the status file and a datagram of systemd."""
_PROBABLE: Final = (
    exceptions.ProbableAuthenticationError,
    exceptions.ProbableAccessDeniedError,
)
_REFUSALS: Final = (
    *_PROBABLE,
    ssl.SSLCertVerificationError,
)
_SAID: Final = re.compile(r"ConnectionClosedByBroker: \((\d+)\) ['\"](.*)['\"]$", re.DOTALL)
"""The broker's close in the text of pika's probable refusals; they keep nothing else of it."""
_REFUSAL_CODES: Final = (403, 530)
"""ACCESS_REFUSED and NOT_ALLOWED, the latter also for a vhost that does not exist."""
_LIMIT: Final = re.compile(r"limit \(\d+\) is reached")
_NO_TLS: Final = "WRONG_VERSION_NUMBER"
"""Part of OpenSSL's error name for a peer without TLS."""
_ALERT: Final = re.compile(r"\[SSL: \w*?ALERT_(\w+)\]")
"""OpenSSL's error name for a TLS alert of the peer (``TLSV13_ALERT_CERTIFICATE_REQUIRED``)."""


def explain(error: BaseException, login_bytes: int = 0) -> str:
    """The cause of a failed connection in a few words, without secrets."""
    error = unwrapped(error)
    known = (words for kind, words in _WORDS if isinstance(error, kind))
    if words := _login_words(error, login_bytes) or _alert_in(error) or next(known, ""):
        return words
    match error:
        case exceptions.ConnectionClosedByBroker():
            return f"{error.reply_code} {text(error.reply_text)}"
        case exceptions.IncompatibleProtocolError() if not is_refusal(error):
            return _ENDED_EARLY
        case OSError() if _NO_TLS in str(error):
            return f"the port does not speak TLS, which amqps:// asks for ({error})"
        case OSError():
            return error.strerror or str(error) or type(error).__name__
        case _:  # such as pika's, which may quote a frame of 128 KiB, escaped
            words = str(error) or type(error).__name__
            return words if len(words) <= _WORDS_MAX else f"{words[:_WORDS_MAX]}..."


def _login_words(error: BaseException, login_bytes: int) -> str:
    """Why a login failed; empty if that is not what has failed."""
    if isinstance(error, exceptions.AuthenticationError):
        if error.args == ("EXTERNAL",):
            return "the broker offers no login by certificate (auth_mechanisms lacks EXTERNAL)"
        return "the broker offers no login with a password (auth_mechanisms lacks PLAIN)"
    if isinstance(error, exceptions.ProbableAuthenticationError):
        if "mechanism EXTERNAL" in str(error):
            return "the broker refused the user that the client certificate names"
        return "the broker refused the credentials"
    if login_bytes > _LOGIN_BYTES and str(error).startswith(_NO_REPLY):
        return (
            f"{_NO_REPLY}: user and secret have {login_bytes} bytes, and the whole login may have "
            "4096 before RabbitMQ 4.1, and 8192 since (initial_frame_max); shorten the token"
        )
    return ""


def _alert_in(error: BaseException) -> str:
    """What the peer says of the TLS connection that it refuses; empty if it does not say that."""
    is_said = not isinstance(error, exceptions.ConnectionClosed)  # whose text is the broker's
    alert = _ALERT.search(str(error)) if is_said else None  # pika's error quotes OpenSSL's
    if alert is None:
        return ""
    return f"the broker refused the TLS connection: {alert[1].lower().replace('_', ' ')}"


def is_refusal(error: BaseException) -> bool:
    """Whether the broker refuses the credentials or the vhost, or TLS refuses the peer."""
    error = unwrapped(error)
    if isinstance(error, _REFUSALS) or _alert_in(error):
        return True
    return _NO_TLS in str(error) and not isinstance(error, exceptions.ConnectionClosed)


def unwrapped(error: BaseException) -> BaseException:
    """The underlying error, without the exceptions in which pika wraps it."""
    while True:
        if isinstance(error, connection_workflow.AMQPConnectionWorkflowFailed) and error.exceptions:
            error = error.exceptions[-1]
        elif isinstance(error, connection_workflow.AMQPConnectorPhaseErrorBase):
            error = error.exception
        elif type(error) is exceptions.AMQPConnectionError and _is_wrapper(error):
            error = error.args[0]
        elif isinstance(error, _PROBABLE):
            return _login_error(error)
        else:
            return error


def _login_error(error: BaseException) -> BaseException:
    """What ended a login: `error` only if the broker says that it refuses the user or the vhost.

    pika calls any end of a login a probable refusal. An overloaded broker ends a login too, after
    10 s (``handshake_timeout``) and without a reply; so does a broker that stops. A limit on
    connections has the code of a wrong vhost, and is not one.
    """
    said = _SAID.match(str(error))
    if said is None:
        return exceptions.StreamLostError(f"{_NO_REPLY}: it may be overloaded")
    code, words = int(said[1]), said[2]
    if code in _REFUSAL_CODES and not _LIMIT.search(words):
        return error
    return exceptions.ConnectionClosedByBroker(code, words)


def _is_wrapper(error: BaseException) -> bool:
    return len(error.args) == 1 and isinstance(error.args[0], BaseException)


MethodFrame: TypeAlias = Any
"""pika's ``frame.Method``; its ``method`` has the fields of the AMQP method as attributes."""

_BASIC_PUBLISH: Final = (spec.Basic.INDEX, spec.Basic.Publish.INDEX & 0xFFFF)
_CONNECT_TIMEOUT_S: Final = 10
_CLOSE_TIMEOUT_S: Final = 2.0
_ANSWER_TIMEOUT_S: Final = 60.0
"""How long the broker may take for one step of a `Provision`."""
_NOT_ALLOWED: Final = 530
_RINGS_MAX: Final = 4_096
_SILENT_QUARTERS: Final = 7
"""Quarters of a heartbeat interval without a received byte, after which a broker is dead.

RabbitMQ sends at least one heartbeat each interval; seven quarters are 1.75 to 2 intervals. pika's
own checker looks once every interval + 5 s, so at an interval of 10 s it may give up as late as
30 s after the last byte. Quarters are counted instead of measured by a clock, so that a suspended
process does not take its own pause for a silent broker.
"""


def connection_parameters(
    address: Address,
    *,
    timeout_s: float,  # for each step of connecting
    ssl_context: TLS = None,  # None trusts the system's certificate authorities
    heartbeat_s: int | None = None,  # None for the broker's proposal
    client_properties: Mapping[str, str] | None = None,
) -> pika.ConnectionParameters:
    """Return pika's parameters for one attempt to connect."""
    options = None
    if address.is_tls:
        host = address.host.partition("%")[0]  # no certificate names the zone of an IPv6 address
        context = ssl_context() if callable(ssl_context) else ssl_context  # may raise anything
        options = pika.SSLOptions(context or ssl.create_default_context(), host)
    login: pika.PlainCredentials | ExternalCredentials
    if address.is_external:
        login = ExternalCredentials()
    else:
        login = pika.PlainCredentials(address.user, address.password)
    return pika.ConnectionParameters(
        host=address.host,
        port=address.port,
        virtual_host=address.vhost,
        credentials=login,
        heartbeat=heartbeat_s,
        socket_timeout=timeout_s,
        stack_timeout=timeout_s,
        ssl_options=options,
        client_properties=dict(client_properties or client_properties_of()),
    )


class _Properties(pika.BasicProperties):
    """Encoded properties. pika only calls `encode` on them."""

    def __init__(self, encoded: bytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._encoded = encoded

    def encode(self) -> list[bytes]:
        return [self._encoded]


class _Listener:
    """Turns confirms and returns of one channel into events; called by the hooks."""

    def __init__(self, epoch: int, run: int, events: list[Event]) -> None:
        self._epoch = epoch
        self._run = run
        self._events = events

    def confirmed(self, is_ack: bool, tags: list[int], multiple: bool) -> None:  # noqa: FBT001
        """Append the events of a run of confirms."""
        if is_ack and not multiple:
            self._events.append(AckedEach(self._epoch, tags))
        else:
            kind = Acked if is_ack else Nacked
            self._events += [kind(self._epoch, tag, multiple) for tag in tags]

    def returned(self, method: spec.Basic.Return, headers: object, body_bytes: int) -> None:
        """Append the event of a returned message."""
        tag = attempt_tag(headers, self._run, self._epoch)
        said = text(method.reply_text)
        self._events.append(Returned(self._epoch, tag, method.reply_code, said, body_bytes))


class PikaTransport:
    """A `Transport` on pika."""

    def __init__(
        self,
        addresses: Sequence[Address],  # each `connect` uses the next one in turn
        *,
        run: int,
        heartbeat_s: int,  # a dead peer is detected within twice this time
        ssl_context: TLS = None,
        topology: Topology | None = None,  # declared or checked, before `Connected` is reported
        credentials: CredentialsProvider | None = None,  # asked again before they end
        client_properties: Mapping[str, str] | None = None,
    ) -> None:
        self.problems: Sequence[str] = ()  # differences from the topology on the last connection
        self._topology = topology
        self._reopen_after_s = 0.0  # for a `Provision`; more once the broker has refused a channel
        self._addresses = addresses
        self._next_address = 0
        self._where = ""
        self._run = run
        self._heartbeat_s = heartbeat_s
        self._ssl_context = ssl_context
        self._client_properties = client_properties
        self._login_bytes = 0
        self.certificate_ends_at: float | None = None
        self._events: list[Event] = []
        self._connection: SelectConnection | None = None
        self._bounded: BoundedServices | None = None
        self._services: ResolvingServices | None = None
        self._close: ConnectionClose | None = None  # the broker's ``connection.close``
        self._blocked: Blocked | None = None
        self._channels: dict[int, Channel] = {}
        self._frames: dict[int, PublishFrames] = {}
        self._departures = Departures()
        self._uncounted = 0  # bytes that have left, minus those that the kernel counts
        self._look_at = 0.0
        # pika's own way to wake its loop takes a lock. A signal handler that interrupts the holder
        # of that lock, and wakes the loop itself, would deadlock.
        self._bell, self._clapper = socket.socketpair()
        with quietly():
            self._loop = WatchedLoop()
            self._loop.activate_poller()
        for end in (self._bell, self._clapper):
            end.settimeout(0)
        self._loop.watch(self._bell.fileno(), self._on_bell)
        self._login = None if credentials is None else Login(credentials, self._loop, self.wake)
        self._tenure: Tenure | None = None
        quiet_this_thread()  # last: `close` ends it, if there is something to close

    @property
    def trying(self) -> str:
        """Host and port of the broker that the last `connect` tries."""
        return self._where

    @property
    def untried(self) -> int:
        """How many IP addresses of this broker's host name no `connect` has tried yet.

        0 until the name is resolved.
        """
        return 0 if self._services is None else self._services.untried

    def connect(self) -> None:
        """Start connecting to the next address."""
        self._services = None
        address = self._addresses[self._next_address % len(self._addresses)]
        self._next_address += 1
        self._where = host_and_port(address.host, address.port)
        if self._login is None:
            self._open(address)
        else:
            self._login.ask(partial(self._on_login, address))

    def _open(self, address: Address) -> None:
        """Start connecting. What fails at once, such as reading certificates, is a failed attempt.

        No other attempt would follow an exception: it would be swallowed with those of pika's loop.
        """
        try:
            self._begin(address)
        except Exception as error:  # noqa: BLE001 - any error ends only this attempt
            self._connection = None
            reason = f"connecting failed with {type(error).__name__}: {error}"
            self._events.append(ConnectionLost(self._there(reason)))

    def _begin(self, address: Address) -> None:
        self._close = self._blocked = None
        self._login_bytes = address.login_bytes
        self._bounded = BoundedServices(self._loop) if hooks.why_off() else None
        self._services = services = self._bounded or ResolvingServices(self._loop)
        # Each round of the addresses begins with the next IP address of each host name.
        services.turn = (self._next_address - 1) // len(self._addresses)
        connection_class = HookedConnection if self._bounded is None else SelectConnection
        self._connection = connection_class(
            connection_parameters(
                address,
                timeout_s=_CONNECT_TIMEOUT_S,
                ssl_context=self._ssl_context,
                heartbeat_s=self._heartbeat_s,
                client_properties=self._client_properties,
            ),
            on_open_callback=self._on_open,
            on_open_error_callback=self._on_lost,
            on_close_callback=self._on_lost,
            custom_ioloop=services,
        )
        if isinstance(self._ssl_context, CertificateFiles):  # read just now
            validity = self._ssl_context.validity
            self.certificate_ends_at = None if validity is None else validity.ends_at

    @property
    def hooks_off(self) -> str:
        """Why only pika's public interface is used; empty if the hooks are used."""
        return "" if isinstance(self._connection, HookedConnection) else hooks.why_off()

    def disconnect(self, reason: str) -> None:
        """Drop the connection at once, without a closing handshake."""
        connection, self._connection = self._connection, None
        if self._login is not None:
            self._login.cancel()
        self._forget_all()
        self._events.append(ConnectionLost(self._there(reason)))
        if connection is not None:
            self._abort(connection)

    def open_channel(self, epoch: int) -> None:
        """Open a channel in confirm mode."""
        if self._connection is None or not self._connection.is_open:
            return
        opened = partial(self._on_channel_open, epoch)
        try:
            channel = self._connection.channel(on_open_callback=opened)
        except exceptions.NoFreeChannels:
            self._events.append(NoChannel(epoch))
            return
        channel.add_on_close_callback(partial(self._on_channel_close, epoch))
        self._channels[epoch] = channel
        self._departs(self._connection, epoch, 0)

    def close_channel(self, epoch: int) -> None:
        """Close a channel. Its number is free again once the broker has answered."""
        channel = self._forget(epoch)
        if channel is not None and channel.is_open:
            channel.close()

    def send(self, epoch: int, first_tag: int, messages: Sequence[Message]) -> None:
        """Write publishes; those that do not leave this host become uncertain."""
        channel = self._channels.get(epoch)
        if self._connection is None or channel is None or not channel.is_open:
            return
        frame_max = _frame_max(self._connection)
        encoded = encode_batch(messages, self._run, epoch, first_tag, frame_max)
        if isinstance(self._connection, HookedConnection):
            pieces = self._frames[epoch].encode(messages, encoded)
            at = self._connection.bytes_sent
            for piece in pieces:
                at += len(piece.data)
                self._departures.add(at, epoch, first_tag + piece.first)
            try:
                self._connection.write_frames([piece.data for piece in pieces])
            except HookFailed as error:
                self.disconnect(str(error))
            return
        for tag, (message, properties) in enumerate(zip(messages, encoded, strict=True), first_tag):
            channel.basic_publish(
                message.exchange,
                message.routing_key,
                message.body,
                _Properties(properties),
                mandatory=True,
            )
            self._departs(self._connection, epoch, tag)

    def listen(self, timeout_s: float) -> list[Event]:
        """Run one iteration of pika's I/O loop; return the events."""
        if self._events:
            timeout_s = 0.0
        timer = self._loop.call_later(timeout_s, _nothing)
        self._turn_loop()
        self._loop.remove_timeout(timer)
        if self._departures.under_way and self._connection is not None:
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + LOOK_S
                self._look_what_left(self._connection)
        events = self._events.copy()
        self._events.clear()  # not replaced: the `_Listener`s hold this list
        return events

    def watch(self, fd: int) -> bool:
        """Watch a descriptor in pika's I/O loop; the caller reads from it."""
        self._loop.watch(fd, _ready)
        return True

    def wake(self) -> None:
        """Make `listen` return, from any thread."""
        with suppress(OSError):  # its buffer is full, so a wake-up is pending; or it is closed
            self._clapper.send(b"!")

    def close(self) -> None:
        """Close the connection and release all resources; waits at most 2 s for the broker."""
        connection, self._connection = self._connection, None
        if self._login is not None:
            self._login.close()
        try:
            if connection is not None:
                self._close_connection(connection)
            self._loop.call_later(0.0, _nothing)
            self._turn_loop()  # pika closes sockets in callbacks
        finally:
            self._loop.remove_handler(self._bell.fileno())
            self._loop.deactivate_poller()
            self._loop.close()
            self._bell.close()
            self._clapper.close()
            unquiet_this_thread()

    # ------------------------------------------------------------------ inside

    def _on_bell(self, _fd: int, _events: int) -> None:
        with suppress(OSError):
            self._bell.recv(_RINGS_MAX)
        if self._login is not None:
            self._login.look()

    def _on_login(self, address: Address, answer: Answer) -> None:
        """Connect with the credentials that the provider gave."""
        if answer.credentials is None:
            self._events.append(ConnectionLost(f"no credentials: {answer.problem}"))
            return
        assert self._login is not None
        self._tenure = Tenure(self._login, self._loop, answer)
        self._open(address.with_credentials(answer.credentials))

    def _close_connection(self, connection: SelectConnection) -> None:
        if not (connection.is_closing or connection.is_closed):
            connection.close()
        deadline = self._loop.call_later(_CLOSE_TIMEOUT_S, _nothing)
        while deadline.callback is not None and not connection.is_closed:
            self._turn_loop()
        self._abort(connection)

    def _abort(self, connection: SelectConnection) -> None:
        """Close the socket without the broker's answer; pika has no public method for this."""
        if not (connection.is_closing or connection.is_closed):
            connection.close()
        if not connection.is_closing:
            return
        transport = getattr(connection, "_transport", None)
        if transport is not None:
            transport.abort()
        else:
            self._loop.cut()

    def _there(self, reason: str) -> str:
        """The reason, prefixed with the broker's host and port."""
        # "Connection refused" follows a colon, so in lower case; "NOT_ALLOWED" stays.
        is_sentence = reason[:1].isupper() and reason[1:2].islower()
        words = reason[:1].lower() + reason[1:] if is_sentence else reason
        return f"{self._where}: {words}" if self._where else words

    def _turn_loop(self) -> None:
        """Run one iteration of pika's loop, in which pika reads, writes and calls back.

        pika's loop may raise on unusual behavior of a peer (`ValueError`, for a socket that is
        reset between ``connect`` and ``getpeername``). Such an error is treated as a lost
        connection, so that the relay reconnects.
        """
        try:
            self._loop.poll()
            self._loop.process_timeouts()
        except Exception as error:  # noqa: BLE001 - any error ends only this connection
            if self._connection is not None:
                self.disconnect(f"pika failed with {type(error).__name__}: {error}")

    def _on_open(self, connection: Connection) -> None:
        if connection is not self._connection:
            return
        closing = partial(self._on_connection_close, connection)
        # Undocumented in pika. Without it the reason may be lost if the socket ends at once.
        callbacks = getattr(connection, "callbacks", None)
        if callbacks is not None:
            callbacks.add(0, spec.Connection.Close, closing)
        connection.add_on_connection_blocked_callback(self._on_blocked)
        connection.add_on_connection_unblocked_callback(self._on_unblocked)
        self._watch(connection, received=-1, silent=0)
        if self._tenure is not None:
            is_current = partial(self._is_current, connection)
            self._tenure.begin(connection, is_current, self.disconnect)
        if connection is not self._connection:
            return  # dropped already: its credentials have ended, or the hooks are off
        if self._topology is None:
            self._events.append(Connected(self._where))
        else:
            assert isinstance(connection, SelectConnection)
            told = partial(self._on_provisioned, connection)
            provision = Provision(
                connection, self._topology, told, reopen_after_s=self._reopen_after_s
            )
            provision.start()
            self._watch_provision(connection, provision, 0)

    def _is_current(self, connection: Connection) -> bool:
        return connection is self._connection

    def _watch(self, connection: Connection, received: int, silent: int) -> None:
        """Check every quarter of a heartbeat interval whether the broker has sent anything."""
        if connection is not self._connection:
            return
        count = getattr(connection, "bytes_received", None)
        if count is None:
            return  # pika's own heartbeat checker remains
        if isinstance(connection, HookedConnection) and hooks.why_off():
            self.disconnect(f"hooks were switched off: {hooks.why_off()}")
            return
        silent = 0 if count != received else silent + 1
        if silent >= _SILENT_QUARTERS:
            expected = f"heartbeats (interval {self._heartbeat_s} s)"
            self.disconnect(f"the broker is silent: no {expected} arrived")
            return
        look = partial(self._watch, connection, count, silent)
        self._loop.call_later(self._heartbeat_s / 4, look)

    def _watch_provision(self, connection: Connection, provision: Provision, taken: int) -> None:
        """Drop the connection if the broker does not answer a step of the provision.

        A queue may hang while the broker goes on sending heartbeats.
        """
        if connection is not self._connection or not provision.awaits:
            return
        if provision.taken == taken and self._blocked is None:
            within = f"within {_ANSWER_TIMEOUT_S:g} s"
            self.disconnect(f"no answer {within} to {provision.awaits}")
            return
        look = partial(self._watch_provision, connection, provision, provision.taken)
        self._loop.call_later(_ANSWER_TIMEOUT_S, look)

    def _on_provisioned(self, connection: Connection, problems: list[str]) -> None:
        """Report the connection, or drop it if the broker differs from the topology.

        Nothing is published then; the relay reconnects, and the topology is checked again.
        """
        if connection is not self._connection:
            return
        self.problems = problems
        if problems:
            self.disconnect(str(TopologyError(problems)))
        else:
            self._events.append(Connected(self._where))
            if self._blocked is not None:  # meanwhile: a check of a topology publishes
                self._events.append(self._blocked)

    def _on_lost(self, connection: Connection, error: BaseException) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self._forget_all()
        ended = getattr(self._bounded or connection, "ended_because", "")
        reason = ended or explain(error, self._login_bytes)
        if isinstance(unwrapped(error), exceptions.ProbableAccessDeniedError):
            reason += f" {connection.params.virtual_host!r}"
        if self._close is not None:
            reason = f"{self._close.reply_code} {self._close.reply_text}"
        self._events.append(
            ConnectionLost(self._there(reason), self._close, is_refusal=is_refusal(error))
        )

    def _on_connection_close(self, connection: Connection, frame: MethodFrame) -> None:
        """Record ``connection.close``: pika may notice the end of the socket first."""
        if connection is self._connection:
            method = frame.method
            self._close = ConnectionClose(method.reply_code, text(method.reply_text))
            if method.reply_code == _NOT_ALLOWED:  # for a channel beyond the limit of the user
                self._reopen_after_s = COUNTED_OUT_S

    def _on_blocked(self, connection: Connection, frame: MethodFrame) -> None:
        if connection is self._connection:
            self._blocked = Blocked(text(frame.method.reason))
            self._events.append(self._blocked)

    def _on_unblocked(self, connection: Connection, _frame: MethodFrame) -> None:
        if connection is self._connection:
            self._blocked = None
            self._events.append(Unblocked())

    def _on_channel_open(self, epoch: int, channel: Channel) -> None:
        if self._channels.get(epoch) is not channel:  # closed again before it was open
            channel.close()
            return
        channel.add_on_return_callback(partial(self._on_return, epoch))
        channel.add_callback(partial(self._on_close_method, epoch), [spec.Channel.Close])
        channel.confirm_delivery(
            partial(self._on_confirm, epoch), callback=partial(self._on_confirm_selected, epoch)
        )
        if isinstance(self._connection, HookedConnection):
            number = int(channel.channel_number)
            self._frames[epoch] = PublishFrames(number, _frame_max(self._connection))
            self._connection.listen_on(number, _Listener(epoch, self._run, self._events))
        if self._connection is not None:
            self._departs(self._connection, epoch, 0)

    def _departs(self, connection: Connection, epoch: int, tag: int) -> None:
        """Note that pika was last given bytes of this publish, or of the channel's opening (0)."""
        self._departures.add(_bytes_sent(connection), epoch, tag)

    def _look_what_left(self, connection: Connection) -> None:
        """Report what has not left this host, if bytes are leaving.

        The size of pika's output buffer is not public. But pika watches the socket for room exactly
        while its buffer holds something.
        """
        fd, handed_over = self._loop.fd, _bytes_sent(connection)
        if fd is None:
            return
        counted = acknowledged(fd)
        if not self._loop.is_writing:
            left = handed_over - held_by_kernel(fd)
            self._uncounted = left - counted  # TLS adds bytes, so the difference grows
        elif counted:
            left = min(handed_over, counted + self._uncounted)
        else:  # not Linux: unknown. Report progress; heartbeats detect a dead peer
            left = self._departures.left + 1
        self._events += self._departures.look(left)

    def _on_confirm_selected(self, epoch: int, _frame: MethodFrame) -> None:
        self._events.append(ChannelOpened(epoch))

    def _on_confirm(self, epoch: int, frame: MethodFrame) -> None:
        method = frame.method
        kind = Acked if isinstance(method, spec.Basic.Ack) else Nacked
        self._events.append(kind(epoch, method.delivery_tag, method.multiple))

    def _on_return(
        self,
        epoch: int,
        _channel: Channel,
        method: spec.Basic.Return,
        properties: pika.BasicProperties,
        _body: bytes,
    ) -> None:
        body_bytes = self._bounded.returned_bytes if self._bounded is not None else 0
        _Listener(epoch, self._run, self._events).returned(method, properties.headers, body_bytes)

    def _on_close_method(self, epoch: int, frame: MethodFrame) -> None:
        """Report ``channel.close`` with its failed method, which pika's own callback leaves out."""
        method = frame.method
        by_publish = (method.class_id, method.method_id) == _BASIC_PUBLISH
        said = text(method.reply_text)
        if says_expired(method.reply_code, said):
            self.disconnect(said)  # no message is to blame; the next login has other credentials
            return
        self._forget(epoch)
        self._events.append(ChannelClosed(epoch, method.reply_code, said, by_publish))

    def _on_channel_close(self, epoch: int, channel: Channel, error: Exception) -> None:
        """Forget a channel that ended with the connection, or that this side closed."""
        if self._channels.get(epoch) is channel and not isinstance(
            error, exceptions.ChannelClosedByBroker
        ):
            self._forget(epoch)

    def _forget_all(self) -> None:
        if self._tenure is not None:
            self._tenure.end()
            self._tenure = None
        self._channels.clear()
        self._frames.clear()
        self._departures.clear()
        self._uncounted = 0

    def _forget(self, epoch: int) -> Channel | None:
        self._frames.pop(epoch, None)
        return self._channels.pop(epoch, None)


def _frame_max(connection: SelectConnection) -> int:
    return connection.params.frame_max or spec.FRAME_MAX_SIZE


def _bytes_sent(connection: Connection) -> int:
    """Bytes that pika was given to write so far. An undocumented attribute of pika."""
    return int(getattr(connection, "bytes_sent", 0))


def _ready(_fd: int, _events: int) -> None:
    """Handler of a watched descriptor: that it is readable has ended the poll."""


def _nothing() -> None:
    """Callback of timers whose only purpose is to end a poll."""
