"""What became of one attempt to publish: six outcomes, never a boolean.

Knows: the six words, and what each says about where the message may be. Must never know: how they
came about.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


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


class Concern(StrEnum):
    """What a refusal is about: what would be refused in the same way."""

    MESSAGE = "message"
    """This message, wherever it went (406: too large, a bad property)."""
    ADDRESS = "address"
    """Every message to this exchange with this routing key (nacked, returned)."""
    EXCHANGE = "exchange"
    """Every message to this exchange (404: it does not exist, 403: no permission)."""


_OF_THE_EXCHANGE: Final = frozenset({403, 404})
"""Reply codes of a refusal that concerns every message to its exchange."""


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

    @property
    def concern(self) -> Concern:
        """What a refusal (nacked, returned, refused) is about.

        RabbitMQ refuses a single routing key with 403 where users have topic permissions: "access
        to topic 'x' in exchange 'y' in vhost '/' refused".
        """
        if self.kind is not OutcomeKind.REFUSED:
            return Concern.ADDRESS
        if self.reply_code not in _OF_THE_EXCHANGE:
            return Concern.MESSAGE
        return Concern.ADDRESS if "access to topic '" in self.reply_text else Concern.EXCHANGE


CONFIRMED = Outcome(OutcomeKind.CONFIRMED)
NACKED = Outcome(OutcomeKind.NACKED, 0, "basic.nack")


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker has taken responsibility for the message: an ack, and no return.

    Attributes:
        message_id: the AMQP ``message_id`` under which consumers see it.
    """

    message_id: str
