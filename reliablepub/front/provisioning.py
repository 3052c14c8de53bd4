"""`provision`: declares or checks a topology once, without a publisher. For deployments.

Knows: addresses, `PikaTransport`, and how long to wait. Must never know: pika itself, messages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from reliablepub._core.events import Connected, ConnectionLost
from reliablepub.certificates import TLS
from reliablepub.credentials import CredentialsProvider
from reliablepub.errors import ConfigurationError, TopologyError
from reliablepub.front.waits import is_number
from reliablepub.topology import Topology
from reliablepub.transport.address import (
    check_login,
    client_properties_of,
    parse_addresses,
)
from reliablepub.transport.pika import PikaTransport


def provision(
    url: str | Sequence[str],
    topology: Topology,
    *,
    timeout_s: float = 30.0,
    ssl_context: TLS = None,
    credentials: CredentialsProvider | None = None,
) -> None:
    """Declare or check a topology on the first broker that answers.

    Args:
        url: ``amqp://user:password@host:port/vhost`` or ``amqps://...``, or several for failover.
        topology: the topology; ``topology.declare`` says whether to declare or to check it.
        timeout_s: seconds for the whole call; each broker, and each IP address of its host name,
            gets an equal share of the time left.
        ssl_context: for ``amqps``: a context, `CertificateFiles`, or another callable that returns
            a context for each connection; None verifies certificates and host names against the
            system's certificate authorities.
        credentials: a callable that returns `Credentials`, called for each connection; None takes
            the user and password from the URL.

    Raises:
        TopologyError: the broker differs from the topology (the error lists every problem), or no
            broker answered in time (it lists the reasons).
        ConfigurationError: an argument is invalid.
        OSError: this process has no file descriptors left.
    """
    addresses = parse_addresses(url, ssl_context=ssl_context, credentials=credentials)
    check_login(addresses, ssl_context, credentials)
    if not isinstance(topology, Topology):
        raise ConfigurationError(f"topology is of type {type(topology).__name__}, not Topology")
    if not (is_number(timeout_s) and timeout_s > 0):
        raise ConfigurationError(f"timeout_s is {timeout_s!r}; it must be more than 0")
    deadline = time.monotonic() + timeout_s
    transport = PikaTransport(
        addresses,
        run=0,
        heartbeat_s=10,
        ssl_context=ssl_context,
        topology=topology,
        credentials=credentials,
        client_properties=client_properties_of("reliablepub provision"),
    )
    reasons: dict[str, None] = {}
    is_worth_a_round = True
    with closing(transport):
        while is_worth_a_round:
            is_worth_a_round = False
            for untried in range(len(addresses), 0, -1):
                end = _end(transport, deadline, untried)
                if isinstance(end, Connected):
                    return
                if transport.problems:
                    raise TopologyError(transport.problems)
                reasons[end.reason] = None
                # An IP address of a host name may have accepted TCP, and no more.
                is_worth_a_round |= transport.untried > 0 and not end.is_refusal
            is_worth_a_round &= time.monotonic() < deadline
    what = "declared" if topology.declare else "checked"
    raise TopologyError(list(reasons), f"the topology was not {what}, because no connection held")


def _end(transport: PikaTransport, deadline: float, untried: int) -> Connected | ConnectionLost:
    """Try the next broker; return how that ended.

    Args:
        transport: the transport.
        deadline: when the call of `provision` ends.
        untried: number of brokers that share what is left of its time.
    """
    begun = time.monotonic()
    transport.connect()
    while True:
        share_s = (deadline - begun) / (untried + transport.untried)  # more once it is resolved
        left_s = begun + share_s - time.monotonic()
        if left_s <= 0:
            transport.disconnect("no answer in time")
        for event in transport.listen(max(0.0, left_s)):
            if isinstance(event, Connected | ConnectionLost):
                return event
