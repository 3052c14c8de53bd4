"""Reply texts that are not UTF-8, read by pamqp without ending the application's connection.

Knows: pamqp's table of methods, and how ``close`` methods are laid out. Must never know: channels,
connections, whose they are.

RabbitMQ cuts a reply text at 252 bytes, also inside a character. pamqp raises on that, and aiormq
gives up the whole connection, the application's own channels with it; and since the text is lost,
nobody learns which message was refused. So, from the first connection that is lent on, pamqp reads
``channel.close`` and ``connection.close`` by the classes below: the same, but that what cannot be
decoded becomes U+FFFD. This holds for the whole process, where it spares others the same.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from pamqp import commands
from pamqp.base import Frame

from reliablepub.transport.words import text

_CODE_AND_LENGTH: Final = Struct(">HB")
_IDS: Final = Struct(">HH")


def _read(method: commands.Channel.Close | commands.Connection.Close, data: bytes) -> None:
    """Set the arguments of a ``close`` from its bytes."""
    method.reply_code, length = _CODE_AND_LENGTH.unpack_from(data)
    end = _CODE_AND_LENGTH.size + length
    method.reply_text = text(data[_CODE_AND_LENGTH.size : end])
    method.class_id, method.method_id = _IDS.unpack_from(data, end)


class ChannelClose(commands.Channel.Close):
    """A ``channel.close`` with any reply text."""

    def unmarshal(self, data: bytes) -> None:
        """Read its arguments; pamqp calls this."""
        _read(self, data)


class ConnectionClose(commands.Connection.Close):
    """A ``connection.close`` with any reply text."""

    def unmarshal(self, data: bytes) -> None:
        """Read its arguments; pamqp calls this."""
        _read(self, data)


def read_any_reply_text() -> None:
    """Have pamqp use the classes above from now on, unless it uses other ones than its own."""
    methods: dict[int, type[Frame]] = commands.INDEX_MAPPING
    for own, ours in (
        (commands.Channel.Close, ChannelClose),
        (commands.Connection.Close, ConnectionClose),
    ):
        if methods.get(own.index) is own:
            methods[own.index] = ours
