"""Whether the broker has what a write names: asked on the driver, before any row is on its way.

Knows: which exchange or queue the options name. Must never know: rows.
"""

from __future__ import annotations

from typing import Final

from reliablepub import Exchange, Queue, Topology, TopologyError, provision
from spark_sink.address import ssl_context, urls
from spark_sink.schema import Columns
from spark_sink.settings import Settings

_TIMEOUT_S: Final = 30.0
_IS_OTHERWISE: Final = ": 406 PRECONDITION_FAILED"
"""It is there, with a type or arguments that we do not know and need not know."""


def check(settings: Settings, columns: Columns) -> None:
    """Ask, with the driver's environment and files; nothing is declared.

    Where columns name them, there is no telling which exchanges or queues will be meant; the
    connection and its credentials are tried all the same.

    Raises:
        TopologyError: with every problem there is; or no broker could be reached.
        ConfigurationError: the driver does not have what the options name.
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
        provision(urls(settings), topology, timeout=_TIMEOUT_S, ssl_context=ssl_context(settings))
    except TopologyError as error:
        problems = [problem for problem in error.problems if _IS_OTHERWISE not in problem]
        if problems:
            raise TopologyError(problems) from None
