"""`transport_options={"confirm_publish": True}`, then `Producer.publish(confirm_timeout=...)`.

Its transport is py-amqp. One publish is in flight.
"""

import time
from collections.abc import Sequence
from typing import Any

import kombu
from amqp.exceptions import AMQPError, MessageNacked

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

DISTRIBUTION = "kombu"
TRANSPORTS = ("amqp",)
NO_ROUTE = 312


def publish_all(url: str, letters: Sequence[Letter], tell: Tell) -> None:
    connection, producer = _open(url)
    for letter in letters:
        if not connection.connected or not producer.channel.is_open:
            connection, producer = _open(url)
        options: dict[str, Any] = {"message_id": letter.message_id}
        if letter.mandatory is not None:
            options["mandatory"] = letter.mandatory
        try:
            producer.publish(
                letter.body,
                letter.name,
                exchange=letter.exchange,
                delivery_mode=2,
                confirm_timeout=CONFIRM_TIMEOUT_S,
                **options,
            )
        except MessageNacked:
            tell(letter, NACKED)
        except AMQPError as error:
            is_returned = error.reply_code == NO_ROUTE
            tell(letter, RETURNED if is_returned else unsure(error))
        except OSError as error:  # timeouts too
            tell(letter, unsure(error))
        else:
            tell(letter, CONFIRMED)


def _open(url: str) -> tuple[Any, Any]:
    while True:
        connection = kombu.Connection(url, transport_options={"confirm_publish": True})
        try:
            return connection, connection.Producer()
        except OSError:
            time.sleep(RECONNECT_S)
