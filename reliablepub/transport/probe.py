"""What can be learned of a broker by asking, without changing anything there.

Knows: pika's blocking connection, passive declarations, and what a broker says of itself. Must
never know: the outbox, or who asks.

A broker does not say everything: ``max_message_size`` and alarms that have not hit a publisher are
not on the wire. What is not known is not reported.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import (
    AMQPError,
    ChannelClosedByBroker,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from reliablepub.transport.address import Address
from reliablepub.transport.parameters import connection_parameters
from reliablepub.transport.quiet import quiet_this_thread, unquiet_this_thread
from reliablepub.transport.reasons import explain, unwrapped
from reliablepub.transport.words import text

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
        begun = time.monotonic()
        connection = pika.BlockingConnection(
            connection_parameters(
                address,
                timeout_s=TIMEOUT_S,
                blocked_timeout_s=TIMEOUT_S,
                ssl_context=ssl_context,
            )
        )
        found.seconds = time.monotonic() - begun
        try:
            _ask(connection, found, exchanges, queues)
        finally:
            connection.close()
    except (AMQPError, OSError) as error:
        found.problem, found.remedy = explain(error), _remedy(unwrapped(error))
    finally:
        unquiet_this_thread()
    return found


def _ask(
    connection: pika.BlockingConnection,
    found: Probe,
    exchanges: Sequence[str],
    queues: Sequence[str],
) -> None:
    inner: Any = connection._impl  # noqa: SLF001 - pika keeps these from its blocking connection
    says: dict[str, Any] = inner.server_properties or {}
    product, version = text(says.get("product", "unknown")), text(says.get("version"))
    found.product = f"{product} {version}".strip()
    found.can_confirm = bool(says.get("capabilities", {}).get("publisher_confirms"))
    found.frame_max = inner.params.frame_max
    found.channel_max = inner.params.channel_max
    found.heartbeat_s = inner.params.heartbeat or 0
    for name in exchanges:
        _look(connection, found, "exchange", name)
    for name in queues:
        _look(connection, found, "queue", name)


def _look(connection: pika.BlockingConnection, found: Probe, kind: str, name: str) -> None:
    """A passive declaration; the broker closes the channel when there is no such thing."""
    channel: BlockingChannel = connection.channel()
    try:
        if kind == "exchange":
            channel.exchange_declare(name, passive=True)
        else:
            channel.queue_declare(name, passive=True)
    except ChannelClosedByBroker as error:
        found.missing.append((kind, name, f"{error.reply_code} {text(error.reply_text)}"))
    else:
        channel.close()


def _remedy(cause: BaseException) -> str:
    """What to do about a connection that cannot be made; the special cases first."""
    for kind, remedy in _REMEDIES:
        if isinstance(cause, kind):
            return remedy
    return "look into the broker's log"
