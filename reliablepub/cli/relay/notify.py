"""Notifications to the service manager, by systemd's protocol (sd_notify(3)).

Knows: a datagram socket and three environment variables. Must never know: what the notifications
say.

The whole protocol is lines of ``NAME=value`` in a datagram, so no library is needed for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


class Notifier:
    """Sends notifications to the service manager; does nothing if there is none.

    Args:
        environment: the process's environment, with the address that the service manager has set.

    Attributes:
        watchdog_s: interval of ``WATCHDOG=1`` in seconds, half of the service manager's timeout;
            None if it expects none.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # "@" stands for the leading zero byte of an abstract socket address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s: float | None = None
        patience_us = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if self._address and is_ours and patience_us.isdecimal() and int(patience_us):
            self.watchdog_s = int(patience_us) / 2e6

    def tell(self, **variables: str | int) -> None:
        """Send variables; errors are ignored, because a missing listener must not end the relay."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in variables.items())
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as own:
            own.sendto(text.encode(), self._address)
