"""`BlockingConnection`, `confirm_delivery()`, then `basic_publish()`, which waits for the confirm.

It has no timeout for a confirm, and one publish in flight.
"""

import time
from collections.abc import Sequence

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError, NackError, UnroutableError

from tests.clients.letters import CONFIRMED, NACKED, RECONNECT_S, RETURNED, Letter, Tell, unsure

DISTRIBUTION = "pika"


def publish_all(url: str, letters: Sequence[Letter], tell: Tell) -> None:
    channel = _open(url)
    for letter in letters:
        if channel.is_closed:
            channel = _open(url)
        properties = pika.BasicProperties(delivery_mode=2, message_id=letter.message_id)
        options = {} if letter.mandatory is None else {"mandatory": letter.mandatory}
        try:
            channel.basic_publish(letter.exchange, letter.name, letter.body, properties, **options)
        except UnroutableError:
            tell(letter, RETURNED)
        except NackError:
            tell(letter, NACKED)
        except AMQPError as error:
            tell(letter, unsure(error))
        else:
            tell(letter, CONFIRMED)


def _open(url: str) -> BlockingChannel:
    while True:
        try:
            channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
        except AMQPError:
            time.sleep(RECONNECT_S)
        else:
            channel.confirm_delivery()
            return channel
