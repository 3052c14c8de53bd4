"""The state of the broker connection in words, and a line for each change of it.

Knows: `Status`. Must never know: how a connection is made.
"""

from __future__ import annotations

from collections.abc import Callable

from reliablepub.printable import one_line
from reliablepub.relay.status import Link, Outage, Status


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


class LinkNotes:
    """Prints a line for each change of the connection."""

    def __init__(self, say: Callable[[str], None], *, is_eager: bool) -> None:
        self._say = say
        # A first connection that succeeds at once is a change only if eager
        self._last = "" if is_eager else "connected to the broker"
        self._connects = 0 if is_eager else 1
        self._outage = Outage()

    def look(self, status: Status) -> None:
        """Print the state if it has changed, or if the broker was connected to again since.

        Another attempt to connect is not a change. Each reason for failing is printed once in an
        outage: with several hosts, the reasons alternate.
        """
        if status.link not in (Link.CONNECTED, Link.BLOCKED) and not status.reason:
            return
        words = describe(status)
        trying = status.link in (Link.CONNECTING, Link.DISCONNECTED)
        # The connection may be lost and back between two looks.
        is_again = not trying and status.connects > self._connects
        if (words == self._last and not is_again) or (trying and not self._outage.is_new(words)):
            return
        self._last, self._connects = words, status.connects
        if not trying:
            self._outage.end()
        self._say(f"{words}; trying again" if trying else words)
