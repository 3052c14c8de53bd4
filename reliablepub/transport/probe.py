"""What can be learned of a broker by asking, without changing anything there.

Knows: pika's connection and loop, passive declarations, and what a broker says of itself. Must
never know: the outbox, or who asks.

A broker does not say everything: ``max_message_size`` and alarms that have not hit a publisher are
not on the wire. What is not known is not reported.
"""

from __future__ import annotations

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

from reliablepub.transport.address import Address, connection_parameters
from reliablepub.transport.base import text
from reliablepub.transport.incoming import BadFrame
from reliablepub.transport.pika import explain, unwrapped
from reliablepub.transport.pika_bounded import BoundedServices
from reliablepub.transport.pika_hooks import WatchedLoop
from reliablepub.transport.quiet import quiet_this_thread, unquiet_this_thread

TIMEOUT_S: Final = 5.0
_REMEDIES: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (
        ssl.SSLCertVerificationError,
        "trust the authority that signed it (--tls-ca), or use the name in the certificate",
    ),
    (ssl.SSLError, "is the port one for TLS? 5671 usually is"),
    (socket.gaierror, "correct the name, or the DNS"),
    (ConnectionRefusedError, "start the broker, or correct host and port"),
    (TimeoutError, "look at firewalls and routes on the way"),
    (BadFrame, "is it RabbitMQ that listens there? look at host and port"),
    (ProbableAuthenticationError, "correct user and password; guest works on localhost only"),
    (ProbableAccessDeniedError, "rabbitmqctl list_vhosts; rabbitmqctl set_permissions"),
)


@dataclass(slots=True)
class Probe:
    """What was learned.

    Attributes:
        address: of whom, without the password.
        problem: why there is no connection; empty when there is one.
        remedy: what to do about it.
        seconds: how long it took to be connected.
        product: name and version, as the broker says.
        frame_max: largest frame that was agreed on, in bytes.
        channel_max: most channels on a connection.
        heartbeat_s: agreed on.
        can_confirm: whether it has publisher confirms.
        missing: exchanges and queues that are not there, or may not be looked at: name of the
            kind, its name, and the broker's words.
    """

    address: str
    problem: str = ""
    remedy: str = ""
    seconds: float = 0.0
    product: str = ""
    frame_max: int = 0
    channel_max: int = 0
    heartbeat_s: int = 0
    can_confirm: bool = False
    missing: list[tuple[str, str, str]] = field(default_factory=list)


def probe(
    address: Address,
    *,
    exchanges: Sequence[str],
    queues: Sequence[str],
    ssl_context: ssl.SSLContext | None = None,
) -> Probe:
    """Connect, ask, and leave.

    Args:
        address: of the broker.
        exchanges: names to look for.
        queues: likewise.
        ssl_context: for ``amqps``, instead of the system's authorities.
    """
    found = Probe(str(address))
    quiet_this_thread()
    try:
        with closing(_Asking()) as asking:
            begun = time.monotonic()
            connection = asking.connect(address, ssl_context)
            found.seconds = time.monotonic() - begun
            _note(connection, found)
            for kind, names in (("exchange", exchanges), ("queue", queues)):
                for name in names:
                    if words := asking.look(connection, kind, name):
                        found.missing.append((kind, name, words))
    except (AMQPError, AMQPConnectorException, OSError, BadFrame) as error:
        found.problem, found.remedy = explain(error), _remedy(unwrapped(error))
    finally:
        unquiet_this_thread()
    return found


class _Asking:
    """One question after the other, each with `TIMEOUT_S` for its answer."""

    def __init__(self) -> None:
        self._loop = WatchedLoop()
        self._loop.activate_poller()
        self._services = BoundedServices(self._loop)
        self._answers: list[Any] = []
        self._connection: SelectConnection | None = None

    def connect(self, address: Address, ssl_context: ssl.SSLContext | None) -> SelectConnection:
        """An open connection; pika gives each step of that `TIMEOUT_S`.

        Raises:
            AMQPError: there is none.
            OSError: likewise.
            BadFrame: the broker said what it must not say.
        """
        parameters = connection_parameters(address, timeout_s=TIMEOUT_S, ssl_context=ssl_context)
        self._connection = SelectConnection(
            parameters,
            on_open_callback=self._answers.append,
            on_open_error_callback=lambda _, error: self._answers.append(error),
            on_close_callback=lambda _, error: self._answers.append(error),
            custom_ioloop=self._services,
        )
        self._answer(None)
        return self._connection

    def look(self, connection: SelectConnection, kind: str, name: str) -> str:
        """The broker's words if there is no such thing; it closes the channel then."""
        connection.channel(on_open_callback=self._answers.append)
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
        """Take leave, and close what is left."""
        connection = self._connection
        try:
            if connection is not None:
                self._answers.clear()
                with suppress(AMQPError, OSError, BadFrame):
                    if connection.is_open:
                        connection.close()
                        self._answer()
                self._loop.cut()
                while not connection.is_closed:
                    self._loop.poll()
                    self._loop.process_timeouts()
        finally:
            self._loop.deactivate_poller()
            self._loop.close()

    def _answer(self, timeout_s: float | None = TIMEOUT_S) -> Any:  # noqa: ANN401 - pika's own
        """What pika calls back with next; raised, if it is an error."""
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


def _note(connection: SelectConnection, found: Probe) -> None:
    """What the broker has said of itself."""
    says: dict[str, Any] = connection.server_properties or {}
    product, version = text(says.get("product", "unknown")), text(says.get("version"))
    found.product = f"{product} {version}".strip()
    found.can_confirm = bool(says.get("capabilities", {}).get("publisher_confirms"))
    parameters: Any = connection.params  # as they were agreed on
    found.frame_max = parameters.frame_max
    found.channel_max = parameters.channel_max
    found.heartbeat_s = parameters.heartbeat or 0


def _remedy(cause: BaseException) -> str:
    """What to do about a connection that cannot be made; the special cases first."""
    for kind, remedy in _REMEDIES:
        if isinstance(cause, kind):
            return remedy
    return "look into the broker's log"
