"""Whether the broker lets us in at all: what will not change by trying again, told at once.

Knows: the reasons that a publisher gives for having no connection. Must never know: rows.

A broker that is down comes back; wrong credentials do not become right. The first is waited for
(``deliveryTimeout``), the second fails a task within seconds, and on the driver before any task
starts.
"""

from __future__ import annotations

import time
from typing import Final

from reliablepub import ConfigurationError, Status, Topology, TopologyError, provision
from spark_sink.address import ssl_context, urls
from spark_sink.failures import BrokerRefused
from spark_sink.settings import Settings

_FOR_GOOD: Final = (
    "refused the credentials",
    "refused access to the vhost",
    "CERTIFICATE_VERIFY_FAILED",
    "WRONG_VERSION_NUMBER",
    "_ALERT_",
)
"""What `TopologyError` holds when the broker has refused us, or TLS (the last three)."""
_REFUSED_FOR_S: Final = 3.0
"""A broker that starts may refuse credentials for a moment, while its users are loaded."""
_ASK_TIMEOUT_S: Final = 5.0
_ASKED_FOR_S: Final = 60.0

_asked: dict[tuple[object, ...], float] = {}
"""When this process asked last, for each connection; a micro-batch asks no more than that."""


def is_for_good(reason: str) -> bool:
    """Whether trying again would not help."""
    return any(words in reason for words in _FOR_GOOD)


class Refusals:
    """Watches a publisher that waits for its connection."""

    def __init__(self) -> None:
        self._since: float | None = None

    def look(self, status: Status, now: float) -> None:
        """Fail once nothing but refusals has come for a few seconds.

        Raises:
            BrokerRefused: that is so.
        """
        if not status.is_refused:
            self._since = None
            return
        if self._since is None:
            self._since = now
        if now - self._since >= _REFUSED_FOR_S:
            raise BrokerRefused(status.reason)


def ask(settings: Settings) -> None:
    """Connect once from the driver, so that a refusal is told once, before any task.

    A driver that does not have the URL, or no way to the broker, leaves it to the tasks.

    Raises:
        BrokerRefused: the broker or TLS refuses this connection.
    """
    try:
        addresses = tuple(urls(settings))
        context = ssl_context(settings)
    except ConfigurationError:
        return  # what the options name is on the executors alone
    key = (*settings.connection, addresses)
    now = time.monotonic()
    if now - _asked.get(key, -_ASKED_FOR_S) < _ASKED_FOR_S:
        return
    nothing = Topology([], [], declare=False)
    try:
        provision(addresses, nothing, timeout=_ASK_TIMEOUT_S, ssl_context=context)
    except TopologyError as error:
        reason = error.problems[-1]
        if is_for_good(reason):
            raise BrokerRefused(reason) from None
    _asked[key] = now
