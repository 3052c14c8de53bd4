"""What passes between a script, the client that plays it, and the judge: letters and what was told.

It must never know a client library or a broker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONFIRM_TIMEOUT_S = 1
"""Given to every client that knows such a thing."""
RECONNECT_S = 0.1


@dataclass(frozen=True)
class Letter:
    """One message. Its name is its routing key and, of what is told, the subject.

    Attributes:
        mandatory: None leaves the client its default.
    """

    name: str
    exchange: str = ""
    message_id: str | None = None
    mandatory: bool | None = True

    @property
    def body(self) -> bytes:
        """The name again, so that the broker's history can be searched for it."""
        return self.name.encode()


CONFIRMED = "confirmed"
RETURNED = "returned"
NACKED = "nacked"
REFUSED = "refused"


def unsure(error: BaseException) -> str:
    """The caller got an error that leaves open whether the broker has the message."""
    return f"unsure ({type(error).__name__})"


Tell = Callable[[Letter, str], None]
PublishAll = Callable[[str, Sequence[Letter], Tell], None]
"""An adapter: publish these at this URL, at once where the client can, else one after the other, go
on after an error as an application would, and tell of each what the client told."""
