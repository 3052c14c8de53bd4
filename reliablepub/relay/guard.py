"""Contains the application's callbacks: what one raises is logged and counted, and harms nothing.

Knows: names of callbacks, and since when one has been running. Must never know: what they are for.

What a callback raises is of any kind: a `SystemExit` out of a hook must not end the relay either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from reliablepub.relay.clock import Clock
from reliablepub.relay.scribe import write

LOGGER: Final = logging.getLogger("reliablepub.hooks")


class Running(NamedTuple):
    """A callback that has not returned.

    Attributes:
        name: of the callback.
        since: monotonic seconds.
    """

    name: str
    since: float


class Guard:
    """Stands between the relay and the application's callbacks.

    Args:
        log: writes a line of the log, as `Scribe.write` does.

    Attributes:
        errors: how often one has raised.
        running: which one runs now; read from other threads.
    """

    def __init__(self, log: Callable[..., None] = write) -> None:
        self.errors = 0
        self.running: Running | None = None
        self._log = log
        self._monotonic = Clock().monotonic  # those who look are threads, and not in a simulation
        self._told: set[str] = set()

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Call a callback in here; what it raises is logged the first time, and always counted."""
        self.running = Running(name, self._monotonic())
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - the relay goes on, whatever it is
            self.errors += 1
            if name not in self._told:
                self._told.add(name)
                said = f"{name} has failed and is passed over; this is said once"
                self._log(LOGGER, logging.ERROR, said, {"event": "callback_failed"}, error)
        finally:
            self.running = None
