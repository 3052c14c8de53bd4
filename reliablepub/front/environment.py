"""Environment variables that say where to publish: for `Publisher.from_env` and the command line.

Knows: their names and the form of their values. Must never know: how a URL or an outbox is used.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reliablepub.credentials import PasswordFile, read_password
from reliablepub.errors import ConfigurationError
from reliablepub.outbox.encryption import OutboxKeys, exposure

if TYPE_CHECKING:  # what it imports is the relay, which most commands do not need
    from reliablepub.front.options import PublisherOptions

LOGGER: Final = logging.getLogger("reliablepub.link")
OUTBOX_VARIABLE: Final = "RELIABLEPUB_OUTBOX"
KEYS_VARIABLE: Final = "RELIABLEPUB_OUTBOX_KEYS"
URL_VARIABLE: Final = "RELIABLEPUB_URL"
PASSWORD_VARIABLE: Final = "RELIABLEPUB_PASSWORD_FILE"  # noqa: S105 - a name


def urls_of_environment() -> list[str]:
    """Return the broker's URLs."""
    return _value(URL_VARIABLE, "amqp://user:password@host/").split()


def outbox_of_environment() -> str:
    """Return the path or URL of the outbox."""
    return _value(OUTBOX_VARIABLE, "a path or postgresql://...")


def options_of_environment(options: PublisherOptions) -> PublisherOptions:
    """Return the options; keys and password file are those of the environment if none are given."""
    path = os.environ.get(KEYS_VARIABLE)
    if path and "outbox_keys" not in options:
        options = {**options, "outbox_keys": OutboxKeys.read(path)}
    path = os.environ.get(PASSWORD_VARIABLE)
    if path and "credentials" not in options:
        if words := exposure(path):
            LOGGER.warning("%s", words, extra={"event": "exposed"})
        read_password(Path(path))  # a file that is missing from the start is a mistake, no outage
        options = {**options, "credentials": PasswordFile(Path(path))}
    return options


def _value(name: str, example: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigurationError(f"{name} is not set; it takes {example}")
    return value
