"""Where a broker is and who we are there: parsed once, printed without the password.

Knows: the AMQP URI scheme (RabbitMQ "URI Specification"), pika's connection parameters. Must never
know: sockets, what the connection is for.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

import pika

from reliablepub.errors import ConfigurationError

_DEFAULT_PORT = {"amqp": 5672, "amqps": 5671}
_SHORT_STRING_MAX = 255
_NO_SECRET = "guest"  # noqa: S105
"""Everybody knows it, and RabbitMQ takes it from its own machine only."""
LOGGER = logging.getLogger("reliablepub.link")
_warned_of: set[str] = set()


@dataclass(frozen=True, slots=True)
class Address:
    """One broker.

    Attributes:
        host: name or IP address.
        port: 5672 for ``amqp``, 5671 for ``amqps`` unless given.
        user: ``guest`` unless given.
        password: never printed.
        vhost: ``/`` unless given.
        is_tls: ``amqps``; the certificate is verified.
    """

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    vhost: str
    is_tls: bool

    def __str__(self) -> str:
        """Name the broker without the credentials."""
        return f"{'amqps' if self.is_tls else 'amqp'}://{self.host}:{self.port}/{self.vhost}"

    @property
    def is_local(self) -> bool:
        """Whether what is sent there stays on this machine."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")

    @property
    def is_exposed(self) -> bool:
        """Whether a password goes there that others can read on the way."""
        return not (self.is_tls or self.is_local or self.password == _NO_SECRET)


def parse_addresses(
    url: str | Sequence[str], *, ssl_context: object | None = None
) -> tuple[Address, ...]:
    """Read one URL, or several for failover.

    Args:
        url: each begins with ``amqp://``, or each with ``amqps://``.
        ssl_context: what was given for TLS; it must be of use.

    Raises:
        ConfigurationError: naming what is wrong, and not the URL (it may hold a password).
    """
    urls = [url] if isinstance(url, str) else list(url)
    if not urls:
        msg = "no URL given; for example amqp://guest:guest@localhost:5672/%2F"
        raise ConfigurationError(msg)
    addresses = tuple(_parse(one) for one in urls)
    are_tls = {address.is_tls for address in addresses}
    if len(are_tls) > 1:
        raise ConfigurationError(
            "some URLs are amqps and some are amqp: whoever makes the first ones fail would have "
            "the password and the messages in clear; give one kind"
        )
    if ssl_context is not None and True not in are_tls:
        raise ConfigurationError(
            "certificates for TLS were given, and the URL is amqp://, which is not encrypted; "
            "write amqps://"
        )
    return addresses


def warn_of_exposed(addresses: Sequence[Address]) -> None:
    """Log, once for each host, that a password is sent to it in clear."""
    for address in addresses:
        if address.is_exposed and address.host not in _warned_of:
            _warned_of.add(address.host)
            LOGGER.warning("%s", words_of_exposed(address))


def words_of_exposed(address: Address) -> str:
    """The same, in one sentence."""
    return f"the password and every message go to {address} unencrypted; use amqps://"


def has_password(url: str) -> bool:
    """Whether somebody who reads the URL knows a password then."""
    try:
        return urlsplit(url).password is not None
    except ValueError:
        return "@" in url


def with_password(url: str, password: str) -> str:
    """The URL with a password from elsewhere; without a user it is that of ``guest``.

    Raises:
        ConfigurationError: it has one already, or cannot be read.
    """
    parts, _ = _split(url)
    if parts.password is not None:
        raise ConfigurationError("the URL has a password, and one was given in a file too; drop it")
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"{user or 'guest'}:{quote(password, safe='')}@{host}"
    return urlunsplit(parts._replace(netloc=netloc))


def _split(url: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigurationError(_explain("the URL cannot be read")) from None
    return parts, port


def _parse(url: str) -> Address:
    parts, port = _split(url)
    if parts.scheme not in _DEFAULT_PORT:
        raise ConfigurationError(_explain(f"the URL's scheme is {parts.scheme[:20]!r}"))
    if not parts.hostname:
        raise ConfigurationError(_explain("the URL names no host"))
    if parts.query or parts.fragment:
        msg = "the URL has a query or fragment; options are arguments, and none is set by accident"
        raise ConfigurationError(msg)
    return Address(
        host=parts.hostname,
        port=port if port is not None else _DEFAULT_PORT[parts.scheme],
        user=unquote(parts.username) if parts.username is not None else "guest",
        password=unquote(parts.password) if parts.password is not None else "guest",
        vhost=_vhost(parts),
        is_tls=parts.scheme == "amqps",
    )


def _vhost(parts: SplitResult) -> str:
    """RabbitMQ: no path and ``/`` mean the default vhost, anything else is one encoded segment."""
    path = parts.path.removeprefix("/")
    if "/" in path:
        raise ConfigurationError(_explain("the vhost holds a '/'; write it as %2F"))
    vhost = unquote(path) or "/"
    if len(vhost.encode()) > _SHORT_STRING_MAX:
        raise ConfigurationError(_explain("the vhost has more than 255 bytes"))
    return vhost


def _explain(problem: str) -> str:
    return f"{problem}; expected amqp://user:password@host:port/vhost or amqps://..."


def connection_parameters(
    address: Address,
    *,
    timeout_s: float,
    ssl_context: ssl.SSLContext | None = None,
    heartbeat_s: int | None = None,
) -> pika.ConnectionParameters:
    """Parameters for one attempt to connect.

    Args:
        address: of the broker; certificates are verified if it is one for TLS.
        timeout_s: how long each step of connecting may take.
        ssl_context: instead of the system's authorities.
        heartbeat_s: as the broker says, if None.
    """
    options = None
    if address.is_tls:
        options = pika.SSLOptions(ssl_context or ssl.create_default_context(), address.host)
    return pika.ConnectionParameters(
        host=address.host,
        port=address.port,
        virtual_host=address.vhost,
        credentials=pika.PlainCredentials(address.user, address.password),
        heartbeat=heartbeat_s,
        socket_timeout=timeout_s,
        stack_timeout=timeout_s,
        ssl_options=options,
        client_properties={"product": "reliablepub"},
    )
