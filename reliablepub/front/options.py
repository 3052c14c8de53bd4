"""The options of both publishers: their names, types, defaults and checks, and the relay they make.

Knows: which store and which transport an option asks for. Must never know: how a caller waits, what
a turn of the relay does.

`PublisherOptions` names and documents each option once: `Publisher` and `AsyncPublisher` take
``**options: Unpack[PublisherOptions]``. `new_client` has the defaults; mypy compares the two.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Final, TypedDict

from reliablepub._core.rate import Rate
from reliablepub._core.session import Session
from reliablepub.certificates import TLS, ContextProvider
from reliablepub.credentials import CredentialsProvider
from reliablepub.errors import ConfigurationError
from reliablepub.front.relay_client import RelayClient
from reliablepub.front.waits import is_number
from reliablepub.outbox.database import Database
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import Store, size_of
from reliablepub.outbox.opening import Where, outbox_at
from reliablepub.outbox.patience import Patience
from reliablepub.policy import RetryPolicy
from reliablepub.relay.callbacks import calls_of
from reliablepub.relay.connection import names
from reliablepub.relay.handover import WINDOW_BYTES_MAX, WINDOW_MAX, WINDOW_MIN, limits
from reliablepub.relay.pauses import exchange_of
from reliablepub.relay.thread import Parts
from reliablepub.topology import Topology
from reliablepub.transport.base import Transport

HEARTBEAT_S_MAX: Final = 65_535
"""AMQP transmits the heartbeat as 16 bits."""


class PublisherOptions(TypedDict, total=False):
    """Options of `Publisher` and `AsyncPublisher`. All are optional."""

    outbox_keys: OutboxKeys | None
    """Keys that encrypt bodies and properties in the outbox; None, the default, stores both
    unencrypted."""
    keep_confirmed_s: float
    """Seconds for which the outbox keeps confirmed messages, for operators to inspect; 0, the
    default, deletes them at once."""
    window_min: int
    """Maximum number of messages in flight on a new connection; 32 by default. The window then
    adapts, unless ``window_max`` equals ``window_min``."""
    window_max: int
    """Maximum number of messages in flight at any time; 4096 by default."""
    window_bytes_max: int
    """Maximum number of bytes in flight; 16 MiB by default. A larger message is sent alone."""
    rate_max: float | None
    """Maximum number of messages sent per second; None, the default, sets no limit but the window.
    Use it if a whole backlog, sent at once, would overwhelm consumers or queues."""
    rate_burst: int | None
    """With ``rate_max``, maximum number of messages sent at once after an idle time; None, the
    default, allows as many as ``rate_max`` does in one second."""
    confirm_timeout_s: float
    """Seconds that the broker may take to confirm the oldest message in flight, once it has left
    this host; 30 by default. After that, new messages use another channel. The old one is closed
    once only overdue messages are left on it, and these are sent again."""
    heartbeat_s: int
    """AMQP heartbeat in seconds; 10 by default. A dead broker is detected within twice that time. A
    ``connection`` passed to an `AsyncPublisher` has its own heartbeat."""
    retry: RetryPolicy | None
    """How often to retry messages that the broker refuses, and what to do with them afterwards;
    None, the default, means ``RetryPolicy()``."""
    hooks: Sequence[object]
    """Objects with callbacks for events (`reliablepub.hooks`), invoked on the relay's thread."""
    topology: Topology | None
    """Exchanges, queues and bindings to declare or check on each connection. While the broker does
    not match them, nothing is sent, and ``status.reason`` lists every problem."""
    open_messages_max: int | None
    """Maximum number of open messages in the outbox. None, the default, means 10 million, or
    without an outbox four times ``window_max``, but at least 2000."""
    open_bytes_max: int | None
    """Maximum size of the open messages in the outbox, in bytes. None, the default, means 8 GiB, or
    without an outbox twice ``window_bytes_max``, but at least 32 MiB."""
    full_timeout_s: float | None
    """Seconds that ``publish`` waits for room in the outbox before it raises `OutboxFull`; None,
    the default, waits without limit; 0 raises at once."""
    close_timeout_s: float
    """Seconds that closing the publisher, or leaving its ``with`` block, waits for open messages
    unless another timeout is given; 10 by default."""
    ssl_context: ssl.SSLContext | ContextProvider | None
    """For ``amqps``: a context, `CertificateFiles`, or another callable that returns a context for
    each connection; None, the default, verifies certificates and host names against the system's
    certificate authorities."""
    credentials: CredentialsProvider | None
    """A callable that returns `Credentials`, called for each connection and before their lifetime
    ends; None, the default, takes user and password from the URL. The callable runs on its own
    thread. While it raises or hangs, there is no connection, and ``status.reason`` says why."""
    connection_name: str | None
    """Name of the connection on RabbitMQ's management page; None, the default, names the outbox,
    the host and the process."""


def check_names(options: Iterable[str]) -> None:
    """Check that names are names of `PublisherOptions`.

    Raises:
        TypeError: one is not; the text names the nearest ones.
    """
    known = PublisherOptions.__annotations__
    for name in options:
        if name not in known:
            from difflib import get_close_matches

            near = get_close_matches(name, known)
            hint = f"did you mean {' or '.join(near)}?" if near else "see PublisherOptions"
            if name == "connection":
                hint = "only the constructor of an AsyncPublisher takes one"
            elif name in ("url", "outbox"):  # both are arguments of the constructors
                hint = f"from_env takes it from RELIABLEPUB_{name.upper()}"
            raise TypeError(f"unexpected keyword argument {name!r}: {hint}")


def new_client(
    url: str | Sequence[str] | None,
    connection: object,
    /,
    *,
    outbox: Where | None,
    outbox_keys: OutboxKeys | None = None,
    keep_confirmed_s: float = 0.0,
    window_min: int = WINDOW_MIN,
    window_max: int = WINDOW_MAX,
    window_bytes_max: int = WINDOW_BYTES_MAX,
    rate_max: float | None = None,
    rate_burst: int | None = None,
    confirm_timeout_s: float = 30.0,
    heartbeat_s: int = 10,
    retry: RetryPolicy | None = None,
    hooks: Sequence[object] = (),
    topology: Topology | None = None,
    open_messages_max: int | None = None,
    open_bytes_max: int | None = None,
    full_timeout_s: float | None = None,
    close_timeout_s: float = 10.0,
    ssl_context: TLS = None,
    credentials: CredentialsProvider | None = None,
    connection_name: str | None = None,
) -> RelayClient:
    """Check the arguments of a publisher, and make its relay and its side of it from them.

    Raises:
        ConfigurationError: an argument cannot be used.
    """
    database = None if outbox is None else outbox_at(outbox)
    open_transport = _transport(
        url,
        connection=connection,
        heartbeat_s=heartbeat_s,
        ssl_context=ssl_context,
        topology=topology,
        credentials=credentials,
        connection_name=connection_name,
        outbox="" if database is None else database.name,
    )
    _check_positive(confirm_timeout_s=confirm_timeout_s)
    _check_whole(window_min=window_min, window_max=window_max, window_bytes_max=window_bytes_max)
    _check_heartbeat(heartbeat_s)
    _check_spans(keep_confirmed_s, full_timeout_s, close_timeout_s)
    _check_types(
        hooks, retry=retry, topology=topology, outbox_keys=outbox_keys, ssl_context=ssl_context
    )
    policy, rate = retry or RetryPolicy(), _rate(rate_max, rate_burst)
    parts = Parts(
        *_store(database, keep_confirmed_s, outbox_keys),
        open_transport=open_transport,
        open_session=lambda: Session(
            size_of,
            window_min=window_min,
            window_max=window_max,
            window_bytes_max=window_bytes_max,
            confirm_timeout_s=confirm_timeout_s,
            is_named=names,
            place_of=exchange_of,
            is_weighed=policy.breaker is not None,
            rate=rate,
        ),
        policy=policy,
        hooks=calls_of(hooks),
        limits=limits(
            open_messages_max,
            open_bytes_max,
            window_max=window_max,
            window_bytes_max=window_bytes_max,
            is_durable=outbox is not None,
        ),
    )
    return RelayClient(parts, hooks, full_timeout_s=full_timeout_s, close_timeout_s=close_timeout_s)


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (is_number(value) and 0 < value < inf):
            msg = f"{name} is {value!r}; it must be more than 0, and finite"
            raise ConfigurationError(msg)


def _check_whole(**numbers: int) -> None:
    _check_positive(**numbers)
    for name, value in numbers.items():
        if not isinstance(value, int):
            raise ConfigurationError(f"{name} is {value!r}; it must be a whole number")


def _check_heartbeat(heartbeat_s: int) -> None:
    _check_whole(heartbeat_s=heartbeat_s)
    if heartbeat_s > HEARTBEAT_S_MAX:
        msg = f"heartbeat_s is {heartbeat_s!r}; it must be a whole number up to {HEARTBEAT_S_MAX}"
        raise ConfigurationError(msg)


def _rate(rate_max: float | None, rate_burst: int | None) -> Rate | None:
    """The limit of messages per second; None for none.

    Raises:
        ConfigurationError: a number cannot be used, or ``rate_burst`` stands alone.
    """
    if rate_max is None:
        if rate_burst is not None:
            raise ConfigurationError("rate_burst needs rate_max, which was not given")
        return None
    _check_positive(rate_max=rate_max)
    if rate_burst is None:
        return Rate(rate_max, max(1.0, rate_max))
    _check_whole(rate_burst=rate_burst)
    return Rate(rate_max, rate_burst)


def _check_spans(
    keep_confirmed_s: float, full_timeout_s: float | None, close_timeout_s: float
) -> None:
    """Check times that may be 0.

    Raises:
        ConfigurationError: one is negative, or not a number.
    """
    for name, value in (
        ("keep_confirmed_s", keep_confirmed_s),
        ("full_timeout_s", 0 if full_timeout_s is None else full_timeout_s),
        ("close_timeout_s", close_timeout_s),
    ):
        if not (is_number(value) and value >= 0):
            msg = f"{name} is {value!r}; it must be a number of seconds, 0 or more"
            raise ConfigurationError(msg)


def _check_types(
    hooks: object,
    *,
    retry: RetryPolicy | None,
    topology: Topology | None,
    outbox_keys: OutboxKeys | None,
    ssl_context: TLS,
) -> None:
    """Check options that would fail later, on the relay's thread.

    Raises:
        ConfigurationError: one has another type.
    """
    kinds: tuple[tuple[str, object, type], ...] = (
        ("retry", retry, RetryPolicy),
        ("topology", topology, Topology),
        ("outbox_keys", outbox_keys, OutboxKeys),
        ("ssl_context", None if callable(ssl_context) else ssl_context, ssl.SSLContext),
    )
    for name, value, kind in kinds:
        if value is not None and not isinstance(value, kind):
            msg = f"{name} is of type {type(value).__name__}, not {kind.__name__}"
            raise ConfigurationError(msg)
    if not isinstance(hooks, Sequence):
        msg = f"hooks is of type {type(hooks).__name__}; it takes a list of hooks"
        raise ConfigurationError(msg)


def _transport(
    url: str | Sequence[str] | None,
    *,
    connection: object,
    heartbeat_s: int,
    ssl_context: TLS,
    topology: Topology | None,
    credentials: CredentialsProvider | None,
    connection_name: str | None,
    outbox: str,
) -> Callable[[int], Transport]:
    """A function that opens the transport, given the number of the store's run."""
    if connection is None and url is not None:
        from reliablepub.transport.address import (
            check_login,
            client_properties_of,
            parse_addresses,
        )
        from reliablepub.transport.pika import PikaTransport

        addresses = parse_addresses(url, ssl_context=ssl_context, credentials=credentials)
        check_login(addresses, ssl_context, credentials)
        name = _checked_name(connection_name)
        return lambda run: PikaTransport(
            addresses,
            run=run,
            heartbeat_s=heartbeat_s,
            ssl_context=ssl_context,
            topology=topology,
            credentials=credentials,
            client_properties=client_properties_of(name, outbox),
        )
    if connection is None:
        msg = (
            "the URL is None; expected amqp://user:password@host:port/vhost or amqps://... (an "
            "AsyncPublisher takes either a URL or a connection)"
        )
        raise ConfigurationError(msg)
    if url is not None or ssl_context is not None:
        raise ConfigurationError("give either a URL or a connection, which has its own TLS")
    if topology is not None:
        raise ConfigurationError("declare the topology on your connection: this option needs a URL")
    if credentials is not None:
        raise ConfigurationError("give the credentials to your connection: this option needs a URL")
    if connection_name is not None:
        raise ConfigurationError("name the connection that you give: connection_name needs a URL")
    from reliablepub.transport.aio_pika import AioPikaTransport, lent

    host = lent(connection)
    return lambda run: AioPikaTransport(host, run=run)


_NAME_BYTES_MAX: Final = 255


def _checked_name(name: str | None) -> str:
    """Check a name of a connection; empty if there is none.

    Raises:
        ConfigurationError: it is no text, or too long for the first frame.
    """
    if name is None:
        return ""
    try:
        if isinstance(name, str) and 0 < len(name.encode()) <= _NAME_BYTES_MAX:
            return name
    except UnicodeEncodeError:
        pass
    msg = f"connection_name is {name!r:.80}; it must be a text of 1 to {_NAME_BYTES_MAX} bytes"
    raise ConfigurationError(msg)


def _store(
    database: Database | None, keep_confirmed_s: float, keys: OutboxKeys | None
) -> tuple[Patience, Callable[[], Store]]:
    """The patience of the store, and a function that opens it."""
    if database is None:
        from reliablepub.outbox.memory import MemoryStore

        return Patience(""), MemoryStore
    patience = Patience(database.name)
    open_store = partial(database.open_store, keep_confirmed_s=keep_confirmed_s, keys=keys)
    return patience, partial(open_store, patience=patience)
