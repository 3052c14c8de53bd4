"""The reply codes of AMQP 0-9-1 and the one exception that carries them.

This module knows RabbitMQ's names for the codes and which of them are hard, that is, end the
connection and not only the channel (rabbit_framing_amqp_0_9_1:is_amqp_hard_error_code).
It must never know a frame, a channel or a socket.
"""

from __future__ import annotations

NAMES = {
    311: "CONTENT_TOO_LARGE",
    312: "NO_ROUTE",
    313: "NO_CONSUMERS",
    320: "CONNECTION_FORCED",
    402: "INVALID_PATH",
    403: "ACCESS_REFUSED",
    404: "NOT_FOUND",
    405: "RESOURCE_LOCKED",
    406: "PRECONDITION_FAILED",
    501: "FRAME_ERROR",
    502: "SYNTAX_ERROR",
    503: "COMMAND_INVALID",
    504: "CHANNEL_ERROR",
    505: "UNEXPECTED_FRAME",
    506: "RESOURCE_ERROR",
    530: "NOT_ALLOWED",
    540: "NOT_IMPLEMENTED",
    541: "INTERNAL_ERROR",
}
SOFT = frozenset({311, 312, 313, 403, 404, 405, 406})

# reply-text is a short string: at most 255 bytes on the wire.
_TEXT_MAX_BYTES = 255


class AmqpError(Exception):
    """Ends a channel (soft) or a connection (hard) with a reply code and RabbitMQ's text."""

    def __init__(self, code: int, explanation: str) -> None:
        self.code = code
        self.ids = (0, 0)
        """The class and method that failed, as far as they are known."""
        self.reply_text = reply_text(code, explanation)
        super().__init__(self.reply_text)

    @property
    def is_hard(self) -> bool:
        """Whether the code ends the whole connection."""
        return self.code not in SOFT


def reply_text(code: int, explanation: str) -> str:
    """`NOT_FOUND - no exchange 'x' in vhost '/'`, cut to what a short string can carry."""
    text = f"{NAMES[code]} - {explanation}"
    return text.encode()[:_TEXT_MAX_BYTES].decode(errors="ignore")
