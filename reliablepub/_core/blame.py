"""Whether the broker blames a publish when it closes the whole connection.

Knows: reply codes, and what ``connection.close`` says of the method that failed (AMQP 0-9-1,
1.4.2.6; which code comes with which method was observed on RabbitMQ 3.10). Must never know: which
messages were in flight.

    ==================================  ====================  =====================================
    reply code                          method named          blames
    ==================================  ====================  =====================================
    501 frame error, 502 syntax error,  basic.publish, or     what we wrote: a publish, since no
    503 command invalid,                none (the frame was   other frame of ours can be at fault
    505 unexpected frame                never understood)
    530 not allowed,                    basic.publish         the publish
    540 not implemented
    everything else                     any                   nobody: an operator (320), a race of
                                                              channels (504), a lack of resources
                                                              (506), an error of its own (541)
    ==================================  ====================  =====================================

Who is not blamed is not refused, however often it happens: an outage looks just the same.
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
        close: the broker's words; None where it gave none.
    """
    if close is None:
        return False
    if close.reply_code in _OF_FRAMES:
        return close.method in {BASIC_PUBLISH, _NO_METHOD}
    return close.reply_code in _OF_METHODS and close.method == BASIC_PUBLISH
