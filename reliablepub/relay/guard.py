"""What the application has us call may fail: that is logged, counted, and harms nobody.

Knows: names of callbacks. Must never know: what they are for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LOGGER: Final = logging.getLogger("reliablepub.hooks")


class Guard:
    """Stands between the relay and the application's callbacks.

    Attributes:
        errors: how often one has raised.
    """

    def __init__(self) -> None:
        self.errors = 0
        self._told: set[str] = set()

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Call a callback in here; what it raises is logged the first time, and always counted."""
        try:
            yield
        except Exception:
            self.errors += 1
            if name not in self._told:
                self._told.add(name)
                LOGGER.exception("%s has failed and is passed over; this is said once", name)
