"""Environment variables that say where to publish: for `Publisher.from_env` and the command line.

Knows: their names and the form of their values. Must never know: how a URL or an outbox is used.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from reliablepub.errors import ConfigurationError
from reliablepub.front.options import PublisherOptions
from reliablepub.outbox.encryption import OutboxKeys, exposure

LOGGER: Final = logging.getLogger("reliablepub.link")
OUTBOX_VARIABLE: Final = "RELIABLEPUB_OUTBOX"
KEYS_VARIABLE: Final = "RELIABLEPUB_OUTBOX_KEYS"
URL_VARIABLE: Final = "RELIABLEPUB_URL"
PASSWORD_VARIABLE: Final = "RELIABLEPUB_PASSWORD_FILE"  # noqa: S105 - a name


def read_password(path: Path) -> str:
    """Return the password that a file holds; a line end behind it is not part of it.

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


def urls_of_environment() -> list[str]:
    """Return the broker's URLs, with the password of the file if there is one.

    Raises:
        ConfigurationError: no URL is set, or the password file cannot be used.
    """
    urls = _value(URL_VARIABLE, "amqp://user:password@host/").split()
    path = os.environ.get(PASSWORD_VARIABLE)
    if not path:
        return urls
    if words := exposure(path):
        LOGGER.warning("%s", words)
    from reliablepub.transport.address import with_password  # noqa: PLC0415 - it imports pika

    password = read_password(Path(path))
    return [with_password(url, password) for url in urls]


def outbox_of_environment() -> str:
    """Return the path or URL of the outbox.

    Raises:
        ConfigurationError: none is set.
    """
    return _value(OUTBOX_VARIABLE, "a path or postgresql://...")


def options_of_environment(options: PublisherOptions) -> PublisherOptions:
    """Return the options, with the keys that the environment names if none are given.

    Raises:
        ConfigurationError: the file of keys cannot be used.
    """
    path = os.environ.get(KEYS_VARIABLE)
    if path and "outbox_keys" not in options:
        return {**options, "outbox_keys": OutboxKeys.read(path)}
    return options


def _value(name: str, example: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigurationError(f"{name} is not set; it takes {example}")
    return value
