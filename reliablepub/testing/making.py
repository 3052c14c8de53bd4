"""Messages that a test puts into the broker, without a client.

This module knows how a content header is encoded. It must never know queues or exchanges.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import Any, Final

from pamqp import commands, header

from reliablepub.testing.history import Fate, Publish

_PERSISTENT: Final = 2


def made_publish(exchange: str, routing_key: str, body: bytes, named: dict[str, Any]) -> Publish:
    """A publish as it would have arrived from a client.

    Raises:
        ValueError: There is no such property, or its value cannot be encoded.
    """
    if unknown := sorted(named.keys() - set(commands.Basic.Properties.attributes())):
        raise ValueError(f"there is no property {unknown[0]!r}")
    try:
        if isinstance(named.get("timestamp"), int):
            named = named | {"timestamp": datetime.fromtimestamp(named["timestamp"], UTC)}
        properties = commands.Basic.Properties(**{"delivery_mode": _PERSISTENT} | named)
        encoded = header.ContentHeader(0, len(body), properties).marshal()
    except (TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise ValueError(f"a property cannot be encoded: {error}") from error
    return Publish(
        exchange=exchange,
        routing_key=routing_key,
        mandatory=False,
        header=encoded,
        body=body,
        connection=0,
        channel=0,
        fate=Fate.ACCEPTED,
    )
