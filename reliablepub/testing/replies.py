"""The reply codes of AMQP 0-9-1, and the exception that carries one.

Knows: RabbitMQ's names and texts, and which codes are hard: these end the connection and not only
the channel (rabbit_framing_amqp_0_9_1:is_amqp_hard_error_code). Must never know: channels, sockets.
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

# reply-text is a short string: at most 255 bytes on the wire. RabbitMQ cuts it by bytes, not by
# characters (rabbit_binary_generator:amqp_exception_explanation).
_TEXT_MAX_BYTES = 255
_ELLIPSIS = "..."
_OCTETS_SHOWN = 16


class AmqpError(Exception):
    """Ends a channel (soft) or a connection (hard) with a reply code and RabbitMQ's text."""

    def __init__(
        self, code: int, explanation: str = "", ids: tuple[int, int] | None = None
    ) -> None:
        self.code = code
        self.ids = ids
        """Class and method id of the method that failed; (0, 0) for none, None if not known yet."""
        self.reply_text: str = reply_text(code, explanation)
        super().__init__(self.reply_text)

    @property
    def is_hard(self) -> bool:
        """Whether the code ends the whole connection."""
        return self.code not in SOFT


def crashed() -> AmqpError:
    """Make a 541: a process of RabbitMQ crashes."""
    return AmqpError(541, ids=(0, 0))


class SilentlyRefused(Exception):
    """The socket is closed without a reply."""


def reply_text(code: int, explanation: str) -> str:
    """Return a text such as `NOT_FOUND - no exchange 'x' in vhost '/'`, cut to a short string.

    If the cut splits a character, its bytes become lone surrogates, which `encode_close` encodes.
    """
    text = f"{NAMES[code]} - {explanation}" if explanation else NAMES[code]
    data = text.encode(errors="surrogateescape")  # names need not be UTF-8
    if len(data) <= _TEXT_MAX_BYTES:
        return text
    return data[: _TEXT_MAX_BYTES - len(_ELLIPSIS)].decode(errors="surrogateescape") + _ELLIPSIS


def erlang_binary(data: bytes) -> str:
    """Format bytes as RabbitMQ does in its reply texts (io_lib's ~p)."""
    if data and all(0x20 <= byte < 0x7F for byte in data):  # noqa: PLR2004 - printable ASCII
        return f'<<"{data.decode()}">>'
    return f"<<{','.join(str(byte) for byte in data)}>>"


def frame_error(kind: int, payload: bytes, reason: str) -> AmqpError:
    """Make a 501 for a malformed frame (rabbit_reader:frame_error)."""
    return AmqpError(501, f"{_shown(kind, payload)}: {reason}", (0, 0))


def unexpected_frame(kind: int, payload: bytes) -> AmqpError:
    """Make a 505 for a frame that is not allowed now (rabbit_reader:unexpected_frame)."""
    return AmqpError(505, _shown(kind, payload), (0, 0))


def _shown(kind: int, payload: bytes) -> str:
    octets = "all octets" if len(payload) <= _OCTETS_SHOWN else f"first {_OCTETS_SHOWN} octets"
    shown = erlang_binary(payload[:_OCTETS_SHOWN])
    return f"type {kind}, {octets} = {shown}"
