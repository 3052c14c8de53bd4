"""Whether the broker's words, when it closes a channel, name a message: by its exchange.

Knows: how RabbitMQ writes an exchange into a reply text. Must never know: what is decided on it.

A hint and no proof: it says with whom to begin among those who were in flight.
"""

from __future__ import annotations

from reliablepub.outbox.entry import Entry


def names(entry: Entry, words: str) -> bool:
    """Whether the words hold "exchange 'x' in vhost", and x is where the message goes.

    So it is in 404 (no such exchange) and 403 (no permission, or an internal one); see
    rabbit_misc:rs in RabbitMQ's source. A text cut at 255 bytes may name nobody. Permissions on the
    default exchange are those on "amq.default".
    """
    return f"exchange '{entry.message.exchange or 'amq.default'}' in vhost" in words
