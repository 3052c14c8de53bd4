"""Broker addresses: AMQP URLs, parsed once and printed without the password.

Knows: the AMQP URI scheme (RabbitMQ "URI Specification"), what a connection tells its broker. Must
never know: sockets, client libraries, or what the connection is for.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit, urlunsplit

from reliablepub.certificates import TLS, CertificateFiles
from reliablepub.credentials import Credentials, CredentialsProvider
from reliablepub.errors import ConfigurationError
from reliablepub.headers import SHORT_STRING_MAX
from reliablepub.printable import printable
from reliablepub.transport.base import host_and_port
from reliablepub.version import installed_version

_DEFAULT_PORT = {"amqp": 5672, "amqps": 5671}
_NO_SECRET = "guest"  # noqa: S105
"""RabbitMQ's default password. It is public, and RabbitMQ accepts it from localhost only."""
_MECHANISM = "auth_mechanism"
"""Name of RabbitMQ's "URI Query Parameters" for how to log in."""
LOGGER = logging.getLogger("reliablepub.link")
_warned_of: set[str] = set()


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one broker, with credentials."""

    host: str  # an IPv6 address may have a zone, as ``fe80::1%eth0``
    port: int
    user: str
    password: str = field(repr=False)  # by default ``guest`` on a loopback address, else empty
    vhost: str
    is_tls: bool
    is_external: bool = False  # SASL EXTERNAL: the certificate names the user, `user` is empty

    def __str__(self) -> str:
        """The URL without credentials, in a form that every client understands alike.

        The default vhost is written as no path at all: some clients take the path ``/`` for a vhost
        with an empty name.
        """
        scheme = "amqps" if self.is_tls else "amqp"
        path = "" if self.vhost == "/" else f"/{quote(self.vhost, safe='')}"
        return f"{scheme}://{host_and_port(self.host, self.port)}{path}"

    def with_credentials(self, credentials: Credentials) -> Address:
        """The address with other credentials; the user stays if they name none."""
        user = self.user if credentials.user is None else credentials.user
        return replace(self, user=user, password=credentials.secret)

    @property
    def login_bytes(self) -> int:
        """Length of user and secret, in bytes."""
        return len(f"{self.user}{self.password}".encode())

    @property
    def is_local(self) -> bool:
        """Whether the host is a loopback address, so that traffic stays on this host."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")

    @property
    def is_exposed(self) -> bool:
        """Whether a secret password is sent over the network unencrypted."""
        return not (self.is_tls or self.is_local or self.password == _NO_SECRET)


def parse_addresses(
    url: str | Sequence[str],
    *,
    ssl_context: TLS = None,  # requires ``amqps://``
    credentials: CredentialsProvider | None = None,  # the URLs hold no password then
) -> tuple[Address, ...]:
    """Parse one URL, or several for failover; each may name several hosts, separated by commas.

    No error shows a URL, which may hold a password.
    """
    urls = _listed(url)
    addresses = tuple(_parse(one) for several in urls for one in _each_host(several))
    are_tls = {address.is_tls for address in addresses}
    if len(are_tls) > 1:
        raise ConfigurationError(
            "some URLs are amqps and some are amqp: an attacker who blocks the amqps ones would "
            "receive the password and the messages unencrypted; use one scheme for all"
        )
    if ssl_context is not None and True not in are_tls:
        raise ConfigurationError(
            "certificates for TLS were given, but the URL is amqp://, which is not encrypted; "
            "write amqps://"
        )
    if credentials is None:
        return addresses
    _check_provider(urls, credentials)
    return tuple(replace(address, password="") for address in addresses)


def _listed(url: str | Sequence[str]) -> list[str]:
    """Return one URL or several as a list."""
    given: object = url
    is_one = isinstance(given, str | bytes) or not isinstance(given, Sequence)
    urls: list[str] = [given] if is_one else list(url)  # type: ignore[list-item]  # checked below
    for one in urls:
        if not isinstance(one, str):
            raise ConfigurationError(_explain(f"the URL is of type {type(one).__name__}, not str"))
    if not urls:
        msg = "no URL given; for example amqp://guest:guest@localhost:5672/%2F"
        raise ConfigurationError(msg)
    return urls


def _check_provider(urls: Sequence[str], credentials: CredentialsProvider) -> None:
    """Check what goes with a provider of credentials."""
    if not callable(credentials):
        raise ConfigurationError("credentials must be a callable that returns Credentials")
    if any(map(has_password, urls)):
        raise ConfigurationError(
            "the URL has a password, and a provider of credentials was given too; remove it from "
            "the URL"
        )


def check_login(
    addresses: Sequence[Address], ssl_context: TLS, credentials: CredentialsProvider | None
) -> None:
    """Check that there is a password, or a client certificate that replaces it.

    Log a warning, once, of a host that gets the password unencrypted.
    """
    if any(address.is_external for address in addresses):
        _check_external(ssl_context, credentials)
    for address in addresses:
        if credentials is None and not (address.password or address.is_external):
            raise ConfigurationError(
                f"the URL has no password for {address}; the default one, guest, is for localhost "
                "alone. To log in by a client certificate, write "
                f"amqps://host/vhost?{_MECHANISM}=external"
            )
        if address.is_exposed and address.host not in _warned_of:
            _warned_of.add(address.host)
            LOGGER.warning("%s", words_of_exposed(address), extra={"event": "exposed"})


def _check_external(ssl_context: TLS, credentials: CredentialsProvider | None) -> None:
    """Check what goes with a login by certificate."""
    if credentials is not None:
        msg = "the URL asks for a login by certificate, and a password was given; remove one"
        raise ConfigurationError(msg)
    is_bare = isinstance(ssl_context, CertificateFiles) and not ssl_context.has_certificate
    if ssl_context is None or is_bare:
        raise ConfigurationError(
            "the URL asks for a login by certificate, and there is none; give a client certificate"
        )


def words_of_exposed(address: Address) -> str:
    """The warning that a password is sent to this address unencrypted."""
    return f"the password and every message go to {address} unencrypted; use amqps://"


def has_password(url: str) -> bool:
    """Whether the URL contains a password. True if the URL is invalid and might contain one."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "@" in url
    # After a `/`, `?` or `#`, a `@` ends a password in which these are not escaped.
    return parts.password is not None or bool(parts.netloc and "@" in "".join(parts[2:]))


def with_password(url: str, password: str) -> str:
    """Return the URL, which has none, with a password; without a user, it is that of ``guest``."""
    parts = _split(url)
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"{user or 'guest'}:{quote(password, safe='')}@{host}"
    return urlunsplit(parts._replace(netloc=netloc))


def _each_host(url: str) -> list[str]:
    """Return a URL for each of the hosts that one URL names."""
    url, mark, query = url.strip().partition("?")
    scheme, separator, rest = url.partition("://")
    if "://" in rest:
        raise ConfigurationError(
            "the URL holds another URL; give several as a list, or several hosts in one URL: "
            "amqp://user:password@first,second/vhost"
        )
    netloc, slash, path = rest.partition("/")
    user, at, hosts = netloc.rpartition("@")
    if "," not in hosts:
        return [f"{url}{mark}{query}"]
    base, tail = f"{scheme}{separator}{user}{at}", f"{slash}{path}{mark}{query}"
    return [f"{base}{host}{tail}" for host in hosts.split(",")]


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        raise ConfigurationError(_explain("the URL cannot be read")) from None


def _parse(url: str) -> Address:
    try:
        url.encode()
    except UnicodeEncodeError:  # as the value of an environment variable can have
        problem = "the URL has a character that cannot be encoded as UTF-8; write it as %XX"
        raise ConfigurationError(problem) from None
    parts = _split(url)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        problem = (
            "the URL cannot be read: its port is not a number from 1 to 65535; the vhost comes "
            "after a /; write / in a password as %2F"
        )
        raise ConfigurationError(_explain(problem))
    if parts.scheme not in _DEFAULT_PORT:
        problem = f"the URL's scheme is {parts.scheme[:20]!r}"
        if parts.scheme in ("http", "https"):
            problem += ", which is RabbitMQ's management interface; AMQP has a port of its own"
        raise ConfigurationError(_explain(problem))
    if not parts.hostname:
        raise ConfigurationError(_explain("the URL names no host"))
    if not _can_be_looked_up(parts.hostname):
        problem = "the URL's host is no host name: each part between dots has 1 to 63 characters"
        raise ConfigurationError(_explain(problem))
    is_external = _is_external(parts)
    host, zone, name = parts.hostname.partition("%25")
    if ":" in host and name:  # RFC 6874 writes the % before an IPv6 zone like this
        zone = "%"
    parsed = Address(
        host=host + zone + name,
        port=port if port is not None else _DEFAULT_PORT[parts.scheme],
        user=unquote(parts.username or ("" if is_external else "guest")),
        password=unquote(parts.password or ""),
        vhost=_vhost(parts),
        is_tls=parts.scheme == "amqps",
        is_external=is_external,
    )
    has_default = parts.password is None and parsed.is_local and not is_external
    return replace(parsed, password=_NO_SECRET) if has_default else parsed


def _is_external(parts: SplitResult) -> bool:
    """Whether the query asks for a login by certificate."""
    if not parts.query and not parts.fragment:
        return False
    if parts.fragment or parse_qsl(parts.query.lower()) != [(_MECHANISM, "external")]:
        raise ConfigurationError(
            f"the URL has a query other than {_MECHANISM}=external, or a fragment; give options as "
            "arguments instead"
        )
    if parts.scheme != "amqps" or parts.username is not None or parts.password is not None:
        raise ConfigurationError(
            "a login by certificate needs amqps://, and a URL without user and password: the "
            "certificate names the user; expected amqps://host:port/vhost?auth_mechanism=external"
        )
    return True


def _can_be_looked_up(host: str) -> bool:
    """Whether `socket.getaddrinfo` takes the host; for others it raises no OSError."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return "\0" not in host


def _vhost(parts: SplitResult) -> str:
    """Parse the path: none and ``/`` mean the default vhost; any other is one encoded segment."""
    path = parts.path.removeprefix("/")
    if "@" in path:  # the end of a password, which errors would show as a part of the vhost
        raise ConfigurationError(
            _explain(
                "there is a '@' after a '/': write / in a password as %2F, @ in a vhost as %40"
            )
        )
    if "/" in path:
        raise ConfigurationError(_explain("the vhost holds a '/'; write it as %2F"))
    vhost = unquote(path) or "/"
    if len(vhost.encode()) > SHORT_STRING_MAX:
        raise ConfigurationError(_explain("the vhost has more than 255 bytes"))
    return vhost


def _explain(problem: str) -> str:
    return f"{problem}; expected amqp://user:password@host:port/vhost or amqps://..."


_SHOWN_MAX = 255
"""Characters of a client property."""


def client_properties_of(name: str = "", outbox: str = "") -> dict[str, str]:
    """Return what the broker shows its operators of a connection (``client-properties``)."""
    host, process = socket.gethostname(), str(os.getpid())
    what = " ".join(["reliablepub", *outbox.split("/")[-1:]]).strip()
    found = {
        "product": "reliablepub",
        "version": installed_version() or "unknown",
        # RabbitMQ's management page shows it beside the address.
        "connection_name": name or f"{what} on {host} ({process})",
        "host": host,
        "pid": process,
        "outbox": outbox,
    }
    # A path need not be UTF-8, and may be longer than the first frame.
    return {key: printable(value)[-_SHOWN_MAX:] for key, value in found.items() if value}
