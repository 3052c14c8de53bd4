"""An address as pika's connection parameters.

Knows: what pika wants to be told of a broker. Must never know: what the connection is for.
"""

from __future__ import annotations

import ssl

import pika

from reliablepub.transport.address import Address


def connection_parameters(
    address: Address,
    *,
    timeout_s: float,
    ssl_context: ssl.SSLContext | None = None,
    heartbeat_s: int | None = None,
) -> pika.ConnectionParameters:
    """Parameters for one attempt to connect.

    Args:
        address: of the broker; certificates are verified if it is one for TLS.
        timeout_s: how long each step of connecting may take.
        ssl_context: instead of the system's authorities.
        heartbeat_s: as the broker says, if None.
    """
    options = None
    if address.is_tls:
        options = pika.SSLOptions(ssl_context or ssl.create_default_context(), address.host)
    return pika.ConnectionParameters(
        host=address.host,
        port=address.port,
        virtual_host=address.vhost,
        credentials=pika.PlainCredentials(address.user, address.password),
        heartbeat=heartbeat_s,
        socket_timeout=timeout_s,
        stack_timeout=timeout_s,
        ssl_options=options,
        client_properties={"product": "reliablepub"},
    )
