"""The state of the broker connection in words, and a line for each change of it.

Knows: `Status`. Must never know: how a connection is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from reliablepub.printable import one_line
from reliablepub.relay.status import Link, Status


def spoken(reason: str) -> str:
    """A reason as the end of a sentence; error texts of the system begin with a capital letter."""
    is_sentence = reason[:1].isupper() and reason[1:2].islower()
    return one_line(reason[:1].lower() + reason[1:] if is_sentence else reason)


def describe(status: Status) -> str:
    """The state of the connection, and the reason for it."""
    match status.link:
        case Link.CONNECTED:
            trouble = status.trouble or status.reason
            return f"connected to the broker{'; ' if trouble else ''}{trouble}"
        case Link.BLOCKED:
            return f"blocked by the broker: {status.reason or 'no reason given'}"
        case Link.FAILED:
            return one_line(status.reason)
        case _ if status.reason:
            return f"not connected to the broker: {spoken(status.reason)}"
        case _:
            return "not connected to the broker yet"


_TOLD_MAX: Final = 100


class LinkNotes:
    """Prints a line for each change of the connection.

    Args:
        say: prints a line.
        is_eager: whether to report the first connection too, if it succeeds at once.
    """

    def __init__(self, say: Callable[[str], None], *, is_eager: bool) -> None:
        self._say = say
        self._last = "" if is_eager else "connected to the broker"
        self._told: set[str] = set()  # in this outage

    def look(self, status: Status) -> None:
        """Print the state if it has changed.

        Another attempt to connect is not a change. Each reason for failing is printed once in an
        outage: with several hosts, the reasons alternate.
        """
        if status.link not in (Link.CONNECTED, Link.BLOCKED) and not status.reason:
            return
        words = describe(status)
        if words == self._last or words in self._told:
            return
        self._last = words
        trying = status.link in (Link.CONNECTING, Link.DISCONNECTED)
        if not trying:
            self._told.clear()
        elif len(self._told) < _TOLD_MAX:
            self._told.add(words)
        self._say(f"{words}; trying again" if trying else words)
