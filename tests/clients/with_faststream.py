"""`RabbitBroker.publish(persist=True, timeout=...)`, on a channel of aio-pika.

Where unroutable messages are to be reported, the channel is `Channel(on_return_raises=True)`.
0.7.8 does not pass the timeout on. Any number of publishes is in flight.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from faststream.rabbit import Channel, RabbitBroker

from tests.clients.letters import CONFIRM_TIMEOUT_S, Letter, Tell
from tests.clients.with_aio_pika import tell_outcome

DISTRIBUTION = "faststream"
TRANSPORTS = ("aio-pika", "aiormq")


def publish_all(url: str, letters: Sequence[Letter], tell: Tell) -> None:
    asyncio.run(_publish_all(url, letters, tell))


async def _publish_all(url: str, letters: Sequence[Letter], tell: Tell) -> None:
    is_told = any(letter.mandatory for letter in letters)
    broker = RabbitBroker(url, default_channel=Channel(on_return_raises=is_told), logger=None)
    await broker.connect()
    await asyncio.gather(*(_publish(broker, letter, tell) for letter in letters))


async def _publish(broker: RabbitBroker, letter: Letter, tell: Tell) -> None:
    options: dict[str, Any] = {}
    if letter.mandatory is not None:
        options["mandatory"] = letter.mandatory
    publishing = broker.publish(
        letter.body,
        exchange=letter.exchange,
        routing_key=letter.name,
        persist=True,
        timeout=CONFIRM_TIMEOUT_S,
        message_id=letter.message_id,
        **options,
    )
    await tell_outcome(letter, publishing, tell)
