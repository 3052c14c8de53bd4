"""Declaring or checking a topology once, without a publisher: for deployments.

Knows: addresses, and how long to wait. Must never know: pika, what is to be published.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from contextlib import closing

from reliablepub._core.events import Connected, ConnectionLost
from reliablepub.errors import TopologyError
from reliablepub.topology import Topology
from reliablepub.transport.address import parse_addresses, warn_of_exposed
from reliablepub.transport.pika import PikaTransport


def provision(
    url: str | Sequence[str],
    topology: Topology,
    *,
    timeout: float = 30.0,
    ssl_context: ssl.SSLContext | None = None,
) -> None:
    """Make or check what a topology says, at the first broker that answers.

    Args:
        url: as for `Publisher`.
        topology: ``topology.declare`` says whether anything is made.
        timeout: seconds for all of it.
        ssl_context: as for `Publisher`.

    Raises:
        TopologyError: with every problem there is; or no broker could be asked.
        ConfigurationError: a URL cannot be used.
    """
    addresses = parse_addresses(url, ssl_context=ssl_context)
    warn_of_exposed(addresses)
    deadline = time.monotonic() + timeout
    transport = PikaTransport(
        addresses, run=0, heartbeat_s=10, ssl_context=ssl_context, topology=topology
    )
    reason = f"no answer within {timeout:g} s"
    with closing(transport):
        for _ in addresses:
            transport.connect()
            end = None
            while end is None and time.monotonic() < deadline:
                events = transport.listen(max(0.0, deadline - time.monotonic()))
                end = next((e for e in events if isinstance(e, Connected | ConnectionLost)), None)
            if isinstance(end, Connected):
                return
            if transport.problems:
                raise TopologyError(transport.problems)
            if end is not None:
                reason = end.reason
    raise TopologyError([f"no broker could be asked: {reason}"])
