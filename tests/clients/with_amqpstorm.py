"""`channel.confirm_deliveries()`, then `channel.basic.publish()`, whose result is True or False.

The timeout of a confirm is the `rpc_timeout` of its channel. One publish is in flight.
"""

import time
from collections.abc import Sequence
from typing import Any

import amqpstorm
from amqpstorm.exception import AMQPConnectionError, AMQPError, AMQPMessageError

from tests.clients.letters import (
    CONFIRM_TIMEOUT_S,
    CONFIRMED,
    NACKED,
    RECONNECT_S,
    RETURNED,
    Letter,
    Tell,
    unsure,
)

DISTRIBUTION = "AMQPStorm"


def publish_all(url: str, letters: Sequence[Letter], tell: Tell) -> None:
    channel = _open(url)
    for letter in letters:
        if not channel.is_open:
            channel = _open(url)
        properties: dict[str, Any] = {"delivery_mode": 2}
        if letter.message_id is not None:
            properties["message_id"] = letter.message_id
        options = {} if letter.mandatory is None else {"mandatory": letter.mandatory}
        try:
            is_acked = channel.basic.publish(
                letter.body, letter.name, letter.exchange, properties, **options
            )
        except AMQPMessageError:
            tell(letter, RETURNED)
        except AMQPError as error:
            tell(letter, unsure(error))
        else:
            tell(letter, CONFIRMED if is_acked else NACKED)


def _open(url: str) -> Any:
    while True:
        try:
            channel = amqpstorm.UriConnection(url).channel(rpc_timeout=CONFIRM_TIMEOUT_S)
        except AMQPConnectionError:
            time.sleep(RECONNECT_S)
        else:
            channel.confirm_deliveries()
            return channel
