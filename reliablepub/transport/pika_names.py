"""Resolves host names for pika, also where no thread can be started for it.

Knows: pika's documented I/O interface (`nbio_interface`). Must never know: why pika connects.

pika resolves each name on a new thread. Python 3.12 starts none while the interpreter shuts down;
in 3.12.0 and 3.12.1 that begins with the end of the main thread, while others may still publish.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter


class ResolvingServices(SelectorIOServicesAdapter):
    """pika's adapter to its own I/O loop; resolves on the loop's thread if there is no other."""

    def getaddrinfo(  # noqa: PLR0917 - pika's own
        self,
        host: str,
        port: int,
        on_done: Callable[..., None],
        family: int = 0,
        socktype: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> Any:  # noqa: ANN401 - pika's own
        """Resolve as pika does; the callback gets what was found, or an exception."""
        try:
            return super().getaddrinfo(host, port, on_done, family, socktype, proto, flags)
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise  # too many threads: the relay tries again, and does not wait for DNS itself
        try:
            found: object = socket.getaddrinfo(host, port, family, socktype, proto, flags)
        except (OSError, UnicodeError) as error:
            found = error
        return self.call_later(0, partial(on_done, found))
