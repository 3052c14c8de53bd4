"""Early failure: connections that the broker refuses, and exchanges or queues that do not exist.

Knows: the reasons that a publisher gives for having no connection, and which exchange or queue the
options name. Must never know: rows.

A broker that is down comes back, so a task waits for it (``deliveryTimeout``). Wrong credentials
stay wrong, so they fail a task within seconds, and a write on the driver before any task starts.
"""

from __future__ import annotations

import ssl
from typing import Final

from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    stop_all,
    wait_fixed,
)

from reliablepub import (
    ConfigurationError,
    Exchange,
    PasswordFile,
    Queue,
    Status,
    Topology,
    TopologyError,
    provision,
)
from spark_sink.address import credentials, ssl_context, urls
from spark_sink.failures import BrokerRefused
from spark_sink.schema import Columns
from spark_sink.settings import Settings

_FOR_GOOD: Final = (
    "refused the credentials",
    "refused access to the vhost",
    "CERTIFICATE_VERIFY_FAILED",
    "WRONG_VERSION_NUMBER",
    "_ALERT_",
)
"""Texts in a `TopologyError` when the broker refused the connection; the last three are TLS's."""
_REFUSED_FOR_S: Final = 3.0
"""A starting broker may refuse valid credentials for a moment, until it has loaded its users."""
_IS_OTHERWISE: Final = ": 406 PRECONDITION_FAILED"
"""The exchange or queue exists, with another type or other arguments, which do not matter here."""
_ASK_TIMEOUT_S: Final = 5.0
_ASK_AGAIN_S: Final = 0.5
_CHECK_TIMEOUT_S: Final = 30.0

_asked: Final[set[tuple[object, ...]]] = set()
"""Connections that this process has made or tried, so that few micro-batches make one: once a
stream runs, its tasks notice a refusal. Spark 4.0 has a process for each micro-batch, and later
versions end one that has been idle for a minute."""


def is_for_good(reason: str) -> bool:
    """Whether the reason is permanent, so that another attempt is useless."""
    return any(words in reason for words in _FOR_GOOD)


class Refusals:
    """Watches the status of a publisher that has no connection."""

    def __init__(self) -> None:
        self._seen = 0
        self._since = 0.0

    def look(self, status: Status, now: float) -> None:
        """Fail when two attempts, at least 3 seconds apart, and all between them were refused.

        The age of one refusal proves nothing: after a long outage, the next attempt comes late.

        Raises:
            BrokerRefused: the broker or TLS has refused every attempt.
        """
        before, self._seen = self._seen, status.refusals
        if before == 0 or self._seen < before:  # none so far, or another attempt was not refused
            self._since = now
        elif self._seen > before and now - self._since >= _REFUSED_FOR_S:
            raise BrokerRefused(status.reason)


def ask(settings: Settings, *, again: bool = False) -> None:
    """Connect from the driver, so that a refusal is reported once, before any task starts.

    A refusal is believed if it is repeated after 3 seconds. A driver that does not know the URL, or
    finds a broker that cannot be reached, leaves the question to the tasks.

    Args:
        settings: the options.
        again: whether to connect although this process has done so before.

    Raises:
        BrokerRefused: every broker, or TLS, refuses this connection.
    """
    try:
        addresses = tuple(urls(settings))
        context, provider = ssl_context(settings), credentials(settings)
    except ConfigurationError:
        return  # the named files and variables may exist on the executors alone
    key = (*settings.connection, addresses)
    if key in _asked and not again:
        return
    attempts = Retrying(
        retry=retry_if_exception_type(BrokerRefused),
        wait=wait_fixed(_ASK_AGAIN_S),
        stop=stop_all(stop_after_delay(_REFUSED_FOR_S), stop_after_attempt(2)),
        reraise=True,
    )
    attempts(_connect, addresses, context, provider)
    _asked.add(key)


def _connect(
    addresses: tuple[str, ...], context: ssl.SSLContext | None, provider: PasswordFile | None
) -> None:
    nothing = Topology([], [], declare=False)
    try:
        provision(
            addresses, nothing, timeout_s=_ASK_TIMEOUT_S, ssl_context=context, credentials=provider
        )
    except TopologyError as error:
        if all(is_for_good(reason) for reason in error.problems):
            raise BrokerRefused("; ".join(error.problems)) from None


def check(settings: Settings, columns: Columns) -> None:
    """Ask the broker for the exchange or queue that a write names; nothing is declared.

    Runs on the driver, with its environment and files, before any row is sent. Exchanges and
    routing keys that columns give are not checked: they are unknown before the rows are read. The
    connection and its credentials are tried in any case.

    Raises:
        TopologyError: with every problem found; or no broker could be reached.
        ConfigurationError: the driver lacks a file or variable that the options name.
    """
    exchange = columns.fixed.get("exchange", "")
    queue = columns.fixed.get("routing_key", "")
    exchanges, queues = [], []
    if "exchange" not in columns.positions:
        if exchange:
            exchanges.append(Exchange(str(exchange)))
        elif queue:
            queues.append(Queue(str(queue)))
    topology = Topology(exchanges, queues, declare=False)
    try:
        provision(
            urls(settings),
            topology,
            timeout_s=_CHECK_TIMEOUT_S,
            ssl_context=ssl_context(settings),
            credentials=credentials(settings),
        )
    except TopologyError as error:
        problems = [problem for problem in error.problems if _IS_OTHERWISE not in problem]
        if len(problems) == len(error.problems):
            raise
        if problems:
            raise TopologyError(problems) from None
