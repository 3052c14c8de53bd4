"""The outcome of an attempt to publish, or the end of a message that expired: one of six kinds.

Knows: the six kinds, and what each says about whether a queue holds the message. Must never know:
how an outcome is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class OutcomeKind(StrEnum):
    """How an attempt ended. `EXPIRED` describes a message, not an attempt."""

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


# A nack may come from one of several queues while the others keep the message. An expired message
# may have been in flight. So both are only "possibly" persisted.
_PERSISTENCE = {
    OutcomeKind.CONFIRMED: Persistence.PERSISTED,
    OutcomeKind.RETURNED: Persistence.NOT_WRITTEN,
    OutcomeKind.NACKED: Persistence.POSSIBLY_PERSISTED,
    OutcomeKind.REFUSED: Persistence.NOT_WRITTEN,
    OutcomeKind.UNCERTAIN: Persistence.POSSIBLY_PERSISTED,
    OutcomeKind.EXPIRED: Persistence.POSSIBLY_PERSISTED,
}


class Concern(StrEnum):
    """Which messages the broker would refuse for the reason of one refusal."""

    MESSAGE = "message"
    """Only this message, at any destination (406: too large, or an invalid property)."""
    ADDRESS = "address"
    """Every message to this exchange with this routing key (nacked, returned)."""
    EXCHANGE = "exchange"
    """Every message to this exchange (404: it does not exist; 403: no permission)."""
    USER = "user"
    """Every message with this ``user_id``, which is not the user of the connection (406)."""


_OF_THE_EXCHANGE: Final = frozenset({403, 404})
"""Reply codes of refusals that concern every message to the exchange."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended, with the broker's reply.

    Attributes:
        kind: one of the six kinds.
        reply_code: AMQP reply code (312 for a return, 404 for a missing exchange); 0 if there is
            none.
        reply_text: the broker's reply text, or reliablepub's own if the broker sent none.
        known: whether a queue holds the message, if more is known than the kind says.
        shown: which messages the broker refuses, if other refusals have shown more than the reply
            says.
    """

    kind: OutcomeKind
    reply_code: int = 0
    reply_text: str = ""
    known: Persistence | None = None
    shown: Concern | None = None

    @property
    def persistence(self) -> Persistence:
        """Whether a queue may hold the message after this attempt."""
        return self.known or _PERSISTENCE[self.kind]

    @property
    def concern(self) -> Concern:
        """Which messages the broker would refuse for the same reason (nacked, returned, refused).

        With topic permissions, RabbitMQ's 403 concerns a single routing key: "access to topic 'x'
        in exchange 'y' in vhost '/' refused". Its 406 for a ``user_id`` is "user_id property set to
        'x' but authenticated user was 'y'" (``rabbit_channel:check_user_id_header``).
        """
        if self.shown is not None:
            return self.shown
        if self.kind is not OutcomeKind.REFUSED:
            return Concern.ADDRESS
        if "user_id property set to '" in self.reply_text:
            return Concern.USER
        if self.reply_code not in _OF_THE_EXCHANGE:
            return Concern.MESSAGE
        return Concern.ADDRESS if "access to topic '" in self.reply_text else Concern.EXCHANGE


CONFIRMED = Outcome(OutcomeKind.CONFIRMED)
NACKED = Outcome(OutcomeKind.NACKED, 0, "basic.nack")


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker has taken responsibility for the message: an ack, and no return.

    Attributes:
        message_id: AMQP ``message_id``, as consumers see it.
    """

    message_id: str
