"""Probes a broker without changing anything on it: connection, properties, existing objects.

Knows: pika's connection and loop, passive declarations, and the broker's server properties. Must
never know: the outbox, or the purpose of the probe.

AMQP does not transmit ``max_message_size``, nor alarms before a publish. The probe does not report
what it cannot know.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from pika.adapters.select_connection import SelectConnection
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.channel import Channel
from pika.exceptions import (
    AMQPConnectionError,
    AMQPError,
    ChannelClosedByBroker,
    ChannelClosedByClient,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from reliablepub.certificates import TLS
from reliablepub.transport.address import Address, client_properties_of
from reliablepub.transport.base import text
from reliablepub.transport.incoming import BadFrame
from reliablepub.transport.pika import connection_parameters, explain, is_refusal, unwrapped
from reliablepub.transport.pika_hooks import WatchedLoop
from reliablepub.transport.pika_services import BoundedServices
from reliablepub.transport.quiet import quiet_this_thread, unquiet_this_thread

TIMEOUT_S: Final = 5.0
_FAILURES: Final = (AMQPError, AMQPConnectorException, OSError, BadFrame)
_REMEDIES: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (
        ssl.SSLCertVerificationError,
        "trust the authority that signed it (--tls-ca), or use the name in the certificate",
    ),
    (ssl.SSLError, "is the port one for TLS? 5671 usually is"),
    (socket.gaierror, "correct the name, or the DNS"),
    (ConnectionRefusedError, "start the broker, or correct host and port"),
    (TimeoutError, "check firewalls and routes"),
    (BadFrame, "check host and port: is RabbitMQ listening there?"),
    (ProbableAuthenticationError, "correct user and password; guest works on localhost only"),
    (ProbableAccessDeniedError, "rabbitmqctl list_vhosts; rabbitmqctl set_permissions"),
)


@dataclass(slots=True)
class Probe:
    """The result of a probe."""

    address: str  # without credentials
    problem: str = ""  # why the connection failed; empty if it succeeded
    remedy: str = ""
    seconds: float = 0.0  # duration of connecting
    product: str = ""  # name and version, as the broker reports them
    frame_max: int = 0  # negotiated, in bytes
    channel_max: int = 0  # negotiated
    heartbeat_s: int = 0  # negotiated
    can_confirm: bool = False
    # Kind, name, and the broker's reply; also of what the user may not access.
    missing: list[tuple[str, str, str]] = field(default_factory=list)


def probe(
    address: Address,
    *,
    exchanges: Sequence[str],
    queues: Sequence[str],
    ssl_context: TLS = None,
) -> Probe:
    """Probe a broker: connect, look for exchanges and queues, and disconnect."""
    found = Probe(str(address))
    quiet_this_thread()
    try:
        with closing(_connected(address, ssl_context, found)) as asking:
            for kind, names in (("exchange", exchanges), ("queue", queues)):
                for name in names:
                    if words := asking.look(kind, name):
                        found.missing.append((kind, name, words))
    except _FAILURES as error:
        found.problem, found.remedy = explain(error, address.login_bytes), _remedy(unwrapped(error))
    finally:
        unquiet_this_thread()
    return found


def _connected(address: Address, ssl_context: TLS, found: Probe) -> _Asking:
    """Connect, at another IP address of the host name if one accepts TCP and no more."""
    for turn in itertools.count():
        asking = _Asking(turn)
        begun = time.monotonic()
        try:
            _note(asking.connect(address, ssl_context), found)
        except BaseException as error:
            asking.close()
            if not isinstance(error, _FAILURES) or is_refusal(error) or not asking.untried:
                raise
        else:
            found.seconds = time.monotonic() - begun
            return asking
    raise AssertionError("a name has a number of addresses")


class _Asking:
    """A connection on which one request at a time is made and its answer awaited (`TIMEOUT_S`)."""

    def __init__(self, turn: int) -> None:
        self._loop = WatchedLoop()
        self._loop.activate_poller()
        self._services = BoundedServices(self._loop)
        self._services.turn = turn  # which IP address of the host name is tried first
        self._answers: list[Any] = []
        self._connection: SelectConnection | None = None

    @property
    def untried(self) -> int:
        """How many IP addresses of the host name have not been tried, in this turn or before."""
        return self._services.untried

    def connect(self, address: Address, ssl_context: TLS) -> SelectConnection:
        """Open the connection. Each step of connecting may take `TIMEOUT_S`."""
        parameters = connection_parameters(
            address,
            timeout_s=TIMEOUT_S,
            ssl_context=ssl_context,
            client_properties=client_properties_of("reliablepub doctor"),
        )
        self._connection = SelectConnection(
            parameters,
            on_open_callback=self._answers.append,
            on_open_error_callback=lambda _, error: self._answers.append(error),
            on_close_callback=lambda _, error: self._answers.append(error),
            custom_ioloop=self._services,
        )
        self._answer(None)
        return self._connection

    def look(self, kind: str, name: str) -> str:
        """Look for an object by passive declaration; the broker's reply if it is missing or denied.

        Each call has a channel of its own, since the broker closes it if the object is missing.
        """
        assert self._connection is not None
        self._connection.channel(on_open_callback=self._answers.append)
        channel: Channel = self._answer()
        channel.add_on_close_callback(lambda _, error: self._answers.append(error))
        declare = channel.exchange_declare if kind == "exchange" else channel.queue_declare
        declare(name, passive=True, callback=self._answers.append)
        try:
            self._answer()
            channel.close()
            self._answer()
        except ChannelClosedByBroker as error:
            return f"{error.reply_code} {text(error.reply_text)}"
        except ChannelClosedByClient:
            pass
        return ""

    def close(self) -> None:
        """Close the connection, and release all resources."""
        connection = self._connection
        try:
            if connection is not None:
                self._answers.clear()
                # The AssertionError is pika's own, after it has aborted an AMQP handshake.
                with suppress(AMQPError, OSError, BadFrame, AssertionError):
                    if not (connection.is_closing or connection.is_closed):
                        connection.close()  # if it is still opening, pika tries no other address
                        self._answer()
                self._loop.cut()
                while not connection.is_closed:
                    self._loop.poll()
                    self._loop.process_timeouts()
        finally:
            self._loop.deactivate_poller()
            self._loop.close()

    def _answer(self, timeout_s: float | None = TIMEOUT_S) -> Any:  # noqa: ANN401 - pika's own
        """Wait for pika's next callback; return its argument, or raise it if it is an error."""
        late = None
        if timeout_s is not None:
            silent = AMQPConnectionError(f"the broker has not answered within {timeout_s:g} s")
            late = self._loop.call_later(timeout_s, lambda: self._answers.append(silent))
        while not self._answers:
            self._loop.poll()
            self._loop.process_timeouts()
        if late is not None:
            self._loop.remove_timeout(late)
        answer = self._answers.pop(0)
        if self._services.ended_because:
            raise BadFrame(self._services.ended_because)
        if isinstance(answer, BaseException):
            raise unwrapped(answer)
        return answer


_PRODUCT_MAX: Final = 100
"""Characters of a product and version that are shown; a broker can send 128 KiB."""


def _note(connection: SelectConnection, found: Probe) -> None:
    """Record the server properties and the negotiated parameters."""
    says: dict[str, Any] = connection.server_properties or {}
    product, version = text(says.get("product", "unknown")), text(says.get("version"))
    found.product = f"{product} {version}".strip()[:_PRODUCT_MAX]
    able = says.get("capabilities")
    found.can_confirm = isinstance(able, dict) and bool(able.get("publisher_confirms"))
    parameters: Any = connection.params  # as negotiated
    found.frame_max = parameters.frame_max
    found.channel_max = parameters.channel_max
    found.heartbeat_s = parameters.heartbeat or 0


def _remedy(cause: BaseException) -> str:
    """What to do about a failed connection. Subclasses come first in the table."""
    for kind, remedy in _REMEDIES:
        if isinstance(cause, kind):
            return remedy
    return "look at the broker's log"
