"""The broker's own words as text, whatever bytes they are.

Knows: that RabbitMQ cuts a reply text at 252 bytes and puts ``...`` behind it, also inside a
character. Must never know: what the words are about.

pika hands over `bytes` where a short string is not UTF-8. What is stored, compared and shown has to
be text, so it is made text here, where it enters; what cannot be read becomes U+FFFD.
"""

from __future__ import annotations


def text(words: str | bytes | None) -> str:
    """The words as text, which can be stored and shown; empty for None."""
    if words is None:
        return ""
    return words.decode(errors="replace") if isinstance(words, bytes) else words
