"""How a connection ends on the wire.

This module must never know why.
"""

from __future__ import annotations

import enum


class Ending(enum.Enum):
    """How the server shall end the socket."""

    FLUSH = "flush"
    """Send what is left, then FIN."""
    FLUSH_RESET = "flush, reset"
    """Send what is left, then RST."""
    FIN = "fin"
    """FIN at once."""
    RESET = "reset"
    """RST at once."""

    @property
    def flushes(self) -> bool:
        """Whether what is left is sent first."""
        return self in (Ending.FLUSH, Ending.FLUSH_RESET)

    @property
    def resets(self) -> bool:
        """Whether it is RST."""
        return self in (Ending.RESET, Ending.FLUSH_RESET)
