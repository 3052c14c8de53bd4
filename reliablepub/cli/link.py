"""The connection to the broker in words, one line for each change that matters.

Knows: `Status`. Must never know: how a connection is made.
"""

from __future__ import annotations

from collections.abc import Callable

from reliablepub.printable import one_line
from reliablepub.relay.status import Link, Status


def spoken(reason: str) -> str:
    """A reason as the end of a sentence: the system's own begin with a capital."""
    is_sentence = reason[:1].isupper() and reason[1:2].islower()
    return one_line(reason[:1].lower() + reason[1:] if is_sentence else reason)


def describe(status: Status) -> str:
    """Where the connection stands, with the reason."""
    match status.link:
        case Link.CONNECTED:
            trouble = f"; {status.trouble}" if status.trouble else ""
            return f"connected to the broker{trouble}"
        case Link.BLOCKED:
            return f"blocked by the broker: {status.reason or 'no reason given'}"
        case Link.FAILED:
            return one_line(status.reason)
        case _ if status.reason:
            return f"not connected to the broker: {spoken(status.reason)}"
        case _:
            return "not connected to the broker yet"


class LinkNotes:
    """Says how the connection changes.

    Args:
        say: prints a line.
        is_eager: also say that the first connection was made, which nobody doubted.
    """

    def __init__(self, say: Callable[[str], None], *, is_eager: bool) -> None:
        self._say = say
        self._last = "" if is_eager else "connected to the broker"

    def look(self, status: Status) -> None:
        """Say it if it is new. To be trying again is no news, to fail for another reason is."""
        if status.link not in (Link.CONNECTED, Link.BLOCKED) and not status.reason:
            return
        words = describe(status)
        if words != self._last:
            self._last = words
            trying = status.link in (Link.CONNECTING, Link.DISCONNECTED)
            self._say(f"{words}; trying again" if trying else words)
