"""The ways in which a TCP connection ends.

This module must never know why a connection ends.
"""

from __future__ import annotations

import enum


class Ending(enum.Enum):
    """How the server ends a socket."""

    FLUSH = "flush"
    """Send the remaining output, then FIN."""
    FLUSH_RESET = "flush, reset"
    """Send the remaining output, then RST."""
    FIN = "fin"
    """FIN at once."""
    RESET = "reset"
    """RST at once."""

    @property
    def flushes(self) -> bool:
        """Whether the remaining output is sent first."""
        return self in (Ending.FLUSH, Ending.FLUSH_RESET)

    @property
    def resets(self) -> bool:
        """Whether the connection ends with RST."""
        return self in (Ending.RESET, Ending.FLUSH_RESET)
