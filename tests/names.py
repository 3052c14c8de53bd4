"""A host name with two IP addresses, of which the first accepts TCP and no more."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from reliablepub.testing import FakeBroker, faults

HANGS_UP = faults.CutStream(sent=0, reset=False, keep=True)


@contextmanager
def half_dead_name(broker: FakeBroker, fault: faults.Fault = HANGS_UP) -> Iterator[str]:
    """Yield the URL of a broker by such a name.

    A container's proxy on ::1 is like the first address, and so is a node that hangs.
    """
    real = socket.getaddrinfo
    port = broker.port

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        names = ["127.0.0.2", "127.0.0.1"] if host == "broker.example" else [host]
        return [found for name in names for found in real(name, *arguments, **options)]

    with FakeBroker(host="127.0.0.2", port=port) as proxy:
        proxy.inject(fault)
        with patch.object(socket, "getaddrinfo", resolve):
            yield f"amqp://guest:guest@broker.example:{port}/"
