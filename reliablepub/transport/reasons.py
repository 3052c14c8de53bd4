"""Why there is no connection, in a few words, out of pika's nested errors.

Knows: how pika wraps what has happened. Must never know: what is done about it.
"""

from __future__ import annotations

import ssl
from typing import Final

from pika import exceptions
from pika.adapters.utils import connection_workflow

from reliablepub.transport.words import text

_WORDS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (connection_workflow.AMQPConnectorStackTimeout, "the TLS handshake did not end in time"),
    (exceptions.ConnectionOpenAborted, "the AMQP handshake did not end in time"),
    (TimeoutError, "no answer to the TCP connection in time"),
    (exceptions.ProbableAuthenticationError, "the broker refused the credentials"),
    (exceptions.ProbableAccessDeniedError, "the broker refused access to the vhost"),
)

_REFUSALS: Final = (
    exceptions.ProbableAuthenticationError,
    exceptions.ProbableAccessDeniedError,
    ssl.SSLCertVerificationError,
)
_TLS_REFUSALS: Final = ("WRONG_VERSION_NUMBER", "_ALERT_")
"""Parts of OpenSSL's names for "the other side speaks no TLS" and "the other side refuses ours"."""


def explain(error: BaseException) -> str:
    """In a few words, without anything secret."""
    error = unwrapped(error)
    for kind, words in _WORDS:
        if isinstance(error, kind):
            return words
    match error:
        case exceptions.ConnectionClosedByBroker():
            return f"{error.reply_code} {text(error.reply_text)}"
        case OSError():
            return error.strerror or str(error) or type(error).__name__
        case _:
            return str(error) or type(error).__name__


def is_refusal(error: BaseException) -> bool:
    """Whether the broker refuses the credentials or the vhost, or TLS the other side."""
    error = unwrapped(error)
    if isinstance(error, _REFUSALS):
        return True
    if isinstance(error, exceptions.ConnectionClosed):
        return False  # the words are the broker's
    return any(words in str(error) for words in _TLS_REFUSALS)  # pika quotes what it heard of TLS


def unwrapped(error: BaseException) -> BaseException:
    """What has happened, without what pika has put around it."""
    while True:
        if isinstance(error, connection_workflow.AMQPConnectionWorkflowFailed) and error.exceptions:
            error = error.exceptions[-1]
        elif isinstance(error, connection_workflow.AMQPConnectorPhaseErrorBase):
            error = error.exception
        elif type(error) is exceptions.AMQPConnectionError and _is_wrapper(error):
            error = error.args[0]
        else:
            return error


def _is_wrapper(error: BaseException) -> bool:
    return len(error.args) == 1 and isinstance(error.args[0], BaseException)
