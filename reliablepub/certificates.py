"""`CertificateFiles`: a TLS context from files that are replaced while a program runs.

Knows: PEM files, and where a certificate keeps the times between which it is valid. Must never
know: connections.
"""

from __future__ import annotations

import calendar
import logging
import os
import re
import ssl
import time
from binascii import a2b_base64
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from reliablepub.errors import ConfigurationError

LOGGER: Final = logging.getLogger("reliablepub.link")

ContextProvider: TypeAlias = Callable[[], ssl.SSLContext]
"""A callable that returns a TLS context. It is called for each connection, and must not block."""

TLS: TypeAlias = ssl.SSLContext | ContextProvider | None
"""A TLS context, what returns one, or None for one that trusts the system's authorities."""

_Stamp: TypeAlias = tuple[tuple[int, int, int], ...]


class Validity(NamedTuple):
    """Start and end of a certificate's validity, in seconds since 1970."""

    begins_at: float
    ends_at: float


class CertificateFiles:
    """TLS settings in PEM files, which are read again at the next connection if they have changed.

    Certificates can therefore be renewed while a publisher runs. If the new files cannot be used,
    this is logged, and the previous settings stay in use.

    Args:
        authorities: CA certificates that verify the broker; None for those of the system.
        certificate: a client certificate, followed by its chain; None if there is none.
        key: the key of the client certificate; None if it is in the same file.

    Attributes:
        validity: validity period of the client certificate in use; None if there is none.

    Raises:
        ConfigurationError: a file cannot be used; the text names it.
    """

    def __init__(
        self,
        *,
        authorities: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
    ) -> None:
        if key is not None and certificate is None:
            raise ConfigurationError("a key was given without its certificate")
        self._authorities = authorities
        self._certificate = certificate
        self._key = key
        self.validity: Validity | None = None
        self._stamp = self._stamp_now()
        self._context = self._load()

    def __repr__(self) -> str:
        """The names of the files."""
        names = (self._authorities, self._certificate, self._key)
        return f"{type(self).__name__}({', '.join(map(repr, names))})"

    def __call__(self) -> ssl.SSLContext:
        """Return the TLS context, from the files of now if they can be used."""
        now = self._stamp_now()  # before they are read: what is written meanwhile is read next time
        if now != self._stamp:
            self._stamp = now
            try:
                self._context = self._load()
            except ConfigurationError as error:
                words = "%s; what was read before stays in use"
                LOGGER.warning(words, error, extra={"event": "not_renewed", "reason": str(error)})
        return self._context

    @property
    def has_certificate(self) -> bool:
        """Whether there is a client certificate."""
        return self._certificate is not None

    def _stamp_now(self) -> _Stamp:
        """What tells another content of the files, also behind symbolic links."""
        stamps = []
        for file in (self._authorities, self._certificate, self._key):
            try:
                found = Path(file or os.devnull).stat()
            except OSError:
                stamps.append((0, 0, 0))
            else:
                stamps.append((found.st_ino, found.st_mtime_ns, found.st_size))
        return tuple(stamps)

    def _load(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self._authorities)
        except OSError as error:  # ssl.SSLError is an OSError
            raise ConfigurationError(
                f"the authorities in {self._authorities} cannot be used: {_reason(error)}"
            ) from None
        if self._certificate is not None:
            try:
                context.load_cert_chain(self._certificate, self._key, password=self._refuse_to_ask)
            except OSError as error:
                files = str(self._certificate) + (f" with {self._key}" if self._key else "")
                raise ConfigurationError(
                    f"the certificate in {files} cannot be used: {_reason(error)}"
                ) from None
            self.validity = _validity(Path(self._certificate))
        return context

    def _refuse_to_ask(self) -> str:
        """Refuse an encrypted key.

        Without this callback OpenSSL prompts for the password on the terminal, and a service would
        wait for ever.
        """
        file = self._certificate if self._key is None else self._key
        raise ConfigurationError(f"the key in {file} is encrypted; give an unencrypted key")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a PEM file of that kind, or certificate and key do not match ({error.reason})"
    return error.strerror or str(error)


_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----([^-]+)-----END CERTIFICATE-----")
_VERSION: Final = 0xA0
_SHORT_TIME: Final = 0x17


def _validity(path: Path) -> Validity | None:
    """Read the validity from a certificate (RFC 5280, section 4.1); None if it has none to read."""
    try:
        pem = _PEM.search(path.read_bytes())
        return None if pem is None else _validity_in(a2b_base64(pem[1]))
    except (OSError, ValueError, IndexError):
        return None


def _validity_in(der: bytes) -> Validity:
    """Walk to the fourth field of the part that is signed, or the fifth after a version.

    Raises:
        ValueError, IndexError: it is no certificate.
    """
    _, at, _ = _element(der, 0)
    _, at, _ = _element(der, at)
    kind, _, end = _element(der, at)
    for _ in range(4 if kind == _VERSION else 3):  # serial number, algorithm, issuer
        _, _, end = _element(der, at)
        at = end
    _, at, _ = _element(der, at)
    _, _, end = _element(der, at)
    return Validity(_time(der, at), _time(der, end))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Kind, begin and end of the element at a position (X.690, section 8.1)."""
    kind, length, begin = der[at], der[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        length = int.from_bytes(der[begin : begin + count], "big")
        begin += count
    return kind, begin, begin + length


def _time(der: bytes, at: int) -> float:
    kind, begin, end = _element(der, at)
    text = der[begin:end].decode("ascii")
    form = "%y%m%d%H%M%SZ" if kind == _SHORT_TIME else "%Y%m%d%H%M%SZ"
    return float(calendar.timegm(time.strptime(text, form)))
