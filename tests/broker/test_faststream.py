"""FastStream applications on the fake broker: they open direct reply-to when they start."""

import asyncio

from faststream import FastStream
from faststream.rabbit import RabbitBroker

from reliablepub.testing import FakeBroker

WAIT_S = 30.0


def test_an_application_starts_and_answers_requests(fake_broker: FakeBroker) -> None:
    broker = RabbitBroker(fake_broker.url)
    application = FastStream(broker)

    @broker.subscriber("double")
    async def double(number: int) -> int:
        return number * 2

    async def ask() -> list[object]:
        await application.start()
        try:
            answers = [await broker.request(str(one), "double", timeout=WAIT_S) for one in (2, 21)]
            return [await answer.decode() for answer in answers]
        finally:
            await application.stop()

    assert asyncio.run(asyncio.wait_for(ask(), WAIT_S)) == [4, 42]
