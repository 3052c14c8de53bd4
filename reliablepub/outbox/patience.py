"""How long a store waits for an answer of its database: not without a word, and not beyond the end.

Knows: the clock, and the log. Must never know: which database, or what was asked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf
from typing import Final

TOLD_S: Final = 5.0
"""Waits that last longer are told."""
_LOGGER: Final = logging.getLogger("reliablepub.outbox")


class Patience:
    """The waits of one thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since: float | None = None
        self._is_told = False
        self.end_at: Callable[[], float | None] = lambda: None  # when waits end (monotonic)
        self.lock_wait_s: float = 0.0  # spent so far in waiting for other writers

    def begin(self) -> None:
        """A wait begins."""
        self._since, self._is_told = time.monotonic(), False

    def goes_on(self) -> bool:
        """Whether the wait may go on; tell it if it lasts."""
        if not self._is_told and self.held_up:
            self._is_told = True
            _LOGGER.warning("outbox %s: %s", self._name, self.held_up)
        return not self.is_over

    def end(self) -> None:
        """The wait is over."""
        since, self._since = self._since, None
        if self._is_told and since is not None:
            waited_s = time.monotonic() - since
            _LOGGER.warning("outbox %s: no wait any more, after %.0f s", self._name, waited_s)

    @property
    def left_s(self) -> float:
        """Seconds for which a wait may still last, or infinity; below 0 if none may begin."""
        end_at = self.end_at()
        return inf if end_at is None else end_at - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether no wait may begin or go on."""
        return self.left_s < 0

    @property
    def held_up(self) -> str:
        """That a wait lasts; empty otherwise. Other threads read this."""
        since = self._since
        if since is None or time.monotonic() - since < TOLD_S:
            return ""
        return (
            "the database does not answer: is it frozen, or does a commit wait for a synchronous "
            "replica that is gone?"
        )
