"""What became of one attempt to publish: six outcomes, never a boolean.

Knows: the six words, and what each says about where the message may be. Must never know: how they
came about.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OutcomeKind(StrEnum):
    """The six ways an attempt can end."""

    CONFIRMED = "confirmed"
    RETURNED = "returned"
    NACKED = "nacked"
    REFUSED = "refused"
    UNCERTAIN = "uncertain"
    EXPIRED = "expired"


class Persistence(StrEnum):
    """Whether a queue may hold the message after an attempt (after librdkafka's three values)."""

    NOT_WRITTEN = "not written"
    POSSIBLY_PERSISTED = "possibly persisted"
    PERSISTED = "persisted"


# A nack may come from one queue of several while the others keep the message, and an expired
# message may have been in flight: both are honest only as "possibly".
_PERSISTENCE = {
    OutcomeKind.CONFIRMED: Persistence.PERSISTED,
    OutcomeKind.RETURNED: Persistence.NOT_WRITTEN,
    OutcomeKind.NACKED: Persistence.POSSIBLY_PERSISTED,
    OutcomeKind.REFUSED: Persistence.NOT_WRITTEN,
    OutcomeKind.UNCERTAIN: Persistence.POSSIBLY_PERSISTED,
    OutcomeKind.EXPIRED: Persistence.POSSIBLY_PERSISTED,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended, in the broker's own words where it gave any.

    Attributes:
        kind: which of the six.
        reply_code: the AMQP reply code (312 for a return, 404 for a missing exchange), or 0.
        reply_text: the broker's text, or ours where the broker said nothing.
        known: where the message may be, if more is known than the kind says.
    """

    kind: OutcomeKind
    reply_code: int = 0
    reply_text: str = ""
    known: Persistence | None = None

    @property
    def persistence(self) -> Persistence:
        """Whether a queue may hold the message after this attempt."""
        return self.known or _PERSISTENCE[self.kind]


CONFIRMED = Outcome(OutcomeKind.CONFIRMED)
NACKED = Outcome(OutcomeKind.NACKED, 0, "basic.nack")


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker has taken responsibility for the message: an ack, and no return.

    Attributes:
        message_id: the AMQP ``message_id`` under which consumers see it.
    """

    message_id: str
