"""`Credentials`: user, secret and lifetime, as a provider returns them; `PasswordFile`, a provider.

Knows: files, and where a JSON Web Token keeps its expiry. Must never know: connections, or when a
provider is asked.
"""

from __future__ import annotations

import binascii
import json
import os
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TypeAlias

from reliablepub.errors import ConfigurationError


def _can_be_sent(value: object) -> bool:
    try:
        return isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True, slots=True)
class Credentials:
    """The user and secret with which a publisher logs in, and how long the secret is valid.

    Attributes:
        secret: password or token. Never printed.
        user: user name; None for the one in the URL. RabbitMQ ignores it with an OAuth 2 token.
        lifetime_s: seconds from now for which the secret is valid; None if it never expires. Before
            it expires, the publisher calls its provider again and passes the new secret to the
            broker.

    Raises:
        ConfigurationError: the secret is not a string or is empty; the secret or user has a
            character U+0000 or one that cannot be encoded as UTF-8; or the lifetime is not a finite
            number greater than 0.
    """

    secret: str = field(repr=False)
    user: str | None = None
    lifetime_s: float | None = None

    def __post_init__(self) -> None:
        if not self.secret or not _can_be_sent(self.secret):
            raise ConfigurationError("a secret must be a non-empty text in UTF-8 without U+0000")
        if self.user is not None and not _can_be_sent(self.user):
            raise ConfigurationError("the user must be a text in UTF-8 without U+0000")
        if self.lifetime_s is not None and not (
            type(self.lifetime_s) in (int, float) and 0 < self.lifetime_s < inf
        ):
            raise ConfigurationError(
                f"the lifetime of credentials is {self.lifetime_s!r:.80}; it must be a number of "
                "seconds, finite and more than 0: have they expired?"
            )


_EXP_MAX = 1e12
"""An ``exp`` from this on is not a time in seconds: it would be in the year 33658."""

CredentialsProvider: TypeAlias = Callable[[], Credentials]
"""A callable that returns current credentials. It runs on its own thread, and may block or raise:
the publisher then does not connect, and calls it again later."""


@dataclass(frozen=True, slots=True)
class PasswordFile:
    """A provider that reads a rotated password or token from a file at each connection.

    The secret is the whole file, without trailing line breaks. If it is a JSON Web Token, its
    ``exp`` says how long it is valid; any other secret is read only at each connection.

    Args:
        path: path of the file.
        user: user name; None for the one in the URL.
    """

    path: str | os.PathLike[str]
    user: str | None = None

    def __call__(self) -> Credentials:
        """Read the file.

        Raises:
            ConfigurationError: the file cannot be read, is empty, has a character U+0000, or holds
                an expired token.
        """
        secret = read_password(Path(self.path))
        expires_at = _expiry(secret)
        if expires_at is None:
            return Credentials(secret, self.user)
        lifetime_s = expires_at - time.time()
        if lifetime_s <= 0:
            raise ConfigurationError(f"the token in {self.path} expired {-lifetime_s:.0f} s ago")
        return Credentials(secret, self.user, lifetime_s)


def read_password(path: Path) -> str:
    """Return the password that a file holds, without trailing line ends.

    Raises:
        ConfigurationError: the file cannot be read, or is empty.
    """
    try:
        password = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        msg = f"cannot read the password file {path}: {reason}"
        raise ConfigurationError(msg) from None
    if not password:
        raise ConfigurationError(f"the password file {path} is empty")
    return password


def _expiry(secret: str) -> float | None:
    """The ``exp`` of a JSON Web Token, in seconds since 1970; None for any other text.

    The signature is not checked: the broker does that. This only says when to read again.
    """
    parts = secret.split(".")
    if len(parts) != 3:  # noqa: PLR2004 - header, claims, signature
        return None
    try:  # a token leaves the padding of its parts out (RFC 7515)
        claims = json.loads(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return None
    exp = claims.get("exp") if isinstance(claims, dict) else None
    if isinstance(exp, bool) or not isinstance(exp, int | float):
        return None
    return float(exp) if abs(exp) < _EXP_MAX else None
