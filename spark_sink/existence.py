"""The check for the exchange or queue that a write names, on the driver before any row is sent.

Knows: which exchange or queue the options name. Must never know: rows.
"""

from __future__ import annotations

from typing import Final

from reliablepub import Exchange, Queue, Topology, TopologyError, provision
from spark_sink.address import credentials, ssl_context, urls
from spark_sink.schema import Columns
from spark_sink.settings import Settings

_TIMEOUT_S: Final = 30.0
_IS_OTHERWISE: Final = ": 406 PRECONDITION_FAILED"
"""The exchange or queue exists, with another type or other arguments, which do not matter here."""


def check(settings: Settings, columns: Columns) -> None:
    """Ask the broker, with the driver's environment and files; nothing is declared.

    Exchanges and routing keys that columns give are not checked: they are unknown before the rows
    are read. The connection and its credentials are tried in any case.

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
            timeout_s=_TIMEOUT_S,
            ssl_context=ssl_context(settings),
            credentials=credentials(settings),
        )
    except TopologyError as error:
        problems = [problem for problem in error.problems if _IS_OTHERWISE not in problem]
        if len(problems) == len(error.problems):
            raise
        if problems:
            raise TopologyError(problems) from None
