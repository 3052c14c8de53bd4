"""`connect_robust()`, `channel()` (with confirms by default), then `exchange.publish(timeout=...)`.

Where unroutable messages are to be reported, the channel is opened with `on_return_raises=True`.
Any number of publishes is in flight.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import aio_pika
from aio_pika.exceptions import AMQPError, DeliveryError, PublishError

from tests.clients.letters import (
    CONFIRM_TIMEOUT_S,
    CONFIRMED,
    NACKED,
    RETURNED,
    Letter,
    Tell,
    unsure,
)

DISTRIBUTION = "aio-pika"
TRANSPORTS = ("aiormq",)


def publish_all(url: str, letters: Sequence[Letter], tell: Tell) -> None:
    asyncio.run(_publish_all(url, letters, tell))


async def _publish_all(url: str, letters: Sequence[Letter], tell: Tell) -> None:
    connection = await aio_pika.connect_robust(url)
    is_told = any(letter.mandatory for letter in letters)
    channel = await connection.channel(on_return_raises=is_told)
    exchanges = {
        name: await channel.get_exchange(name, ensure=False)
        for name in {letter.exchange for letter in letters} - {""}
    } | {"": channel.default_exchange}
    await asyncio.gather(
        *(_publish(exchanges[letter.exchange], letter, tell) for letter in letters)
    )


async def _publish(exchange: aio_pika.abc.AbstractExchange, letter: Letter, tell: Tell) -> None:
    message = aio_pika.Message(
        letter.body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT, message_id=letter.message_id
    )
    options: dict[str, Any] = {}
    if letter.mandatory is not None:
        options["mandatory"] = letter.mandatory
    publishing = exchange.publish(message, letter.name, timeout=CONFIRM_TIMEOUT_S, **options)
    await tell_outcome(letter, publishing, tell)


async def tell_outcome(letter: Letter, publishing: Awaitable[object], tell: Tell) -> None:
    """Tell of a letter what its publish returns or raises."""
    try:
        await publishing
    except PublishError:
        tell(letter, RETURNED)
    except DeliveryError:
        tell(letter, NACKED)
    except (AMQPError, OSError, TimeoutError, asyncio.CancelledError) as error:
        tell(letter, unsure(error))
    else:
        tell(letter, CONFIRMED)
