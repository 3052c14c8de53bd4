"""How a service tells systemd how it is doing (sd_notify(3)).

Knows: a datagram socket and two environment variables. Must never know: what is told.

The protocol is lines of ``NAME=value`` in a datagram, and that is all of it: less than a library
for it would have to be trusted with.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


class Notifier:
    """Tells whoever started this process; without such a one, nobody.

    Args:
        environment: where the service manager has left its address.

    Attributes:
        watchdog_s: how often it wants to hear ``WATCHDOG=1``, at half its patience; None: never.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # "@" stands for the zero byte of an address that is no file.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s: float | None = None
        patience_us = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if self._address and is_ours and patience_us.isdecimal() and int(patience_us):
            self.watchdog_s = int(patience_us) / 2e6

    def tell(self, **variables: str | int) -> None:
        """Send variables; that nobody listens any more is no reason to end."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in variables.items())
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as own:
            own.sendto(text.encode(), self._address)
