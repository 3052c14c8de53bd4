"""`channel.enable_publisher_confirms()`, then `Message.publish()`, whose result is True or False.

It has no timeout for a confirm, and one publish in flight.
"""

import time
from collections.abc import Sequence
from typing import Any

import rabbitpy
from rabbitpy.exceptions import MessageReturnedException, RabbitpyException

from tests.clients.letters import CONFIRMED, NACKED, RECONNECT_S, RETURNED, Letter, Tell, unsure

DISTRIBUTION = "rabbitpy"


def publish_all(url: str, letters: Sequence[Letter], tell: Tell) -> None:
    channel = _open(url)
    for letter in letters:
        properties: dict[str, Any] = {"delivery_mode": 2}
        if letter.message_id is not None:
            properties["message_id"] = letter.message_id
        message = rabbitpy.Message(channel, letter.body, properties)
        options = {} if letter.mandatory is None else {"mandatory": letter.mandatory}
        try:
            is_acked = message.publish(letter.exchange, letter.name, **options)
        except MessageReturnedException:
            tell(letter, RETURNED)
        except (RabbitpyException, OSError) as error:
            tell(letter, unsure(error))
            channel = _open(url)  # whatever was closed: `channel.closed` does not say yet
        else:
            tell(letter, CONFIRMED if is_acked else NACKED)


def _open(url: str) -> Any:
    while True:
        try:
            channel = rabbitpy.Connection(url).channel()
        except (RabbitpyException, OSError, RuntimeError):
            time.sleep(RECONNECT_S)
        else:
            channel.enable_publisher_confirms()
            return channel
