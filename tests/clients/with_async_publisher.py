"""`await AsyncPublisher.publish()` is a receipt, and `await receipt` the outcome.

Each retry budget is one attempt, so that the first refusal is reported; uncertain messages are
sent again. Any number of publishes is in flight.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from reliablepub import AsyncPublisher, Nacked, Refused, Unroutable
from tests.clients.letters import (
    CONFIRM_TIMEOUT_S,
    CONFIRMED,
    NACKED,
    REFUSED,
    RETURNED,
    Letter,
    Tell,
)
from tests.clients.with_publisher import POLICY

DISTRIBUTION = "reliablepub"


def publish_all(url: str, letters: Sequence[Letter], tell: Tell) -> None:
    asyncio.run(_publish_all(url, letters, tell))


async def _publish_all(url: str, letters: Sequence[Letter], tell: Tell) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncPublisher(
            url,
            outbox=Path(folder) / "outbox.db",
            confirm_timeout_s=CONFIRM_TIMEOUT_S,
            retry=POLICY,
        ) as publisher:
            await asyncio.gather(*(_publish(publisher, letter, tell) for letter in letters))


async def _publish(publisher: AsyncPublisher, letter: Letter, tell: Tell) -> None:
    receipt = await publisher.publish(
        letter.body, exchange=letter.exchange, routing_key=letter.name, message_id=letter.message_id
    )
    try:
        await receipt
    except Unroutable:
        tell(letter, RETURNED)
    except Nacked:
        tell(letter, NACKED)
    except Refused:
        tell(letter, REFUSED)
    else:
        tell(letter, CONFIRMED)
