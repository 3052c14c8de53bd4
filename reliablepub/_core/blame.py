"""Whether a ``connection.close`` blames a publish.

Knows: reply codes, and the failed method in ``connection.close`` (AMQP 0-9-1, 1.4.2.9; the pairs
of code and method were observed on RabbitMQ 3.10). Must never know: which messages were in flight.

    ==================================  ======================  ===================================
    reply code                          method named            blames
    ==================================  ======================  ===================================
    501 frame error, 502 syntax error,  basic.publish, or none  a publish: no other frame of this
    503 command invalid,                (the broker could not   client can be at fault
    505 unexpected frame                parse the frame)
    530 not allowed,                    basic.publish           a publish
    540 not implemented
    any other                           any                     no publish: operator (320), channel
                                                                race (504), lack of resources
                                                                (506), internal error (541)
    ==================================  ======================  ===================================

A message that is not blamed is never refused, however many connections are lost: to the client, a
message that crashes the broker and an outage look alike.
"""

from __future__ import annotations

from typing import Final, TypeGuard

from reliablepub._core.events import ConnectionClose

BASIC_PUBLISH: Final = (60, 40)
_NO_METHOD: Final = (0, 0)
_OF_FRAMES: Final = frozenset({501, 502, 503, 505})
_OF_METHODS: Final = frozenset({530, 540})


def blames_a_publish(close: ConnectionClose | None) -> TypeGuard[ConnectionClose]:
    """Whether a publish made the broker close the connection.

    Args:
        close: the broker's ``connection.close``; None if it sent none.
    """
    if close is None:
        return False
    if close.reply_code in _OF_FRAMES:
        return close.method in {BASIC_PUBLISH, _NO_METHOD}
    return close.reply_code in _OF_METHODS and close.method == BASIC_PUBLISH
