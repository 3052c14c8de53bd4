"""Every way to publish, ours and others', as something that takes a number of messages.

It knows reliablepub's front doors and the peers. It must never know what is measured.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import aio_pika

from reliablepub import AsyncPublisher, Message, Publisher
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.speed import gopher, peers
from tests.speed.gopher import Gopher
from tests.speed.measuring import Way
from tests.speed.peers import BODY

WAIT_S = 300.0

CEILING = "raw socket, frames encoded before: the ceiling"
CEILING_WITH_IDS = "the same with ids: `message_id` and a header, as ours"
GO = "Go amqp091, deferred confirmations"
GO_WITH_IDS = "Go amqp091 with ids"
GO_NARROW = "Go amqp091 in a window of 1 000"
GO_NEWEST = "Go amqp091, its newest version"
GO_NEWEST_WITH_IDS = "Go amqp091, its newest version, with ids"
SELECT = "pika `SelectConnection`, a window counted by hand"
UNCONFIRMED = "pika `BlockingConnection`, no confirms at all"
BLOCKING = "pika `BlockingConnection`, confirms"
AIO_PIKA = "aio-pika, 1 000 tasks"
DURABLE = "`Publisher`, on disk"
MEMORY = "`Publisher`, in memory"
RAM_DISK = "`Publisher`, its outbox on a RAM disk"
ASYNC_DURABLE = "`AsyncPublisher`, on disk"
ASYNC_MEMORY = "`AsyncPublisher`, in memory"
GUEST = "`AsyncPublisher(connection=...)`, on disk"
RAW_UNCONFIRMED = "raw socket, no confirms at all"
GO_UNCONFIRMED = "Go amqp091, no confirms at all"

_Peer = Callable[[str, Sequence[str], int], None]


class Ways:
    """Ways to publish at one broker to some queues.

    Args:
        folder: for outboxes, and for what Go makes.
    """

    def __init__(self, url: str, queues: Sequence[str], folder: Path) -> None:
        self._url, self._queues, self._folder = url, queues, folder
        self._outbox = folder / "outbox.db"
        SqliteStore(self._outbox).close()  # which is made once in its life

    def every(self) -> dict[str, Way]:
        """With confirms, and one without for comparison."""
        return {
            CEILING: self._their(peers.raw_socket),
            CEILING_WITH_IDS: self._their(peers.raw_socket_with_ids),
            **self._go(
                {
                    GO: Gopher.confirmed,
                    GO_WITH_IDS: Gopher.confirmed_with_ids,
                    GO_NARROW: Gopher.confirmed_in_narrow,
                }
            ),
            **self._newest_go(),
            SELECT: self._their(peers.pika_select),
            UNCONFIRMED: self._their(peers.pika_unconfirmed),
            BLOCKING: self._their(peers.pika_blocking, share=0.05),
            AIO_PIKA: self._their(peers.aio_pika_tasks),
            DURABLE: Way(self._durable),
            MEMORY: Way(self._in_memory),
            ASYNC_DURABLE: Way(lambda count: asyncio.run(self._async(count, self._outbox))),
            ASYNC_MEMORY: Way(lambda count: asyncio.run(self._async(count, None))),
            GUEST: Way(lambda count: asyncio.run(self._guest(count))),
        }

    def by_safety(self) -> dict[str, Way]:
        """The fastest there are without confirms, with confirms, and with confirms and a disk."""
        return {
            RAW_UNCONFIRMED: self._their(peers.raw_unconfirmed),
            **self._go({GO_UNCONFIRMED: Gopher.unconfirmed}),
            UNCONFIRMED: self._their(peers.pika_unconfirmed),
            CEILING: self._their(peers.raw_socket),
            **self._go({GO: Gopher.confirmed}),
            MEMORY: Way(self._in_memory),
            DURABLE: Way(self._durable),
        }

    def _their(self, publish: _Peer, share: float = 1.0) -> Way:
        return Way(lambda count: publish(self._url, self._queues, count), share)

    def _go(self, methods: dict[str, Callable[..., None]]) -> dict[str, Way]:
        """As far as it is installed; a line tells what to install where it is not."""
        reason = gopher.missing()
        if reason is not None:
            print(f"\n{reason}")
            return {}
        program = Gopher.of_debian(self._folder)
        return {name: self._their(partial(run, program)) for name, run in methods.items()}

    def _newest_go(self) -> dict[str, Way]:
        """As far as it was made: ``make go-newest``."""
        program = Gopher.newest()
        if program is None:
            print("\nthe newest Go does not take part: make go-newest")
            return {}
        return {
            GO_NEWEST: self._their(program.confirmed),
            GO_NEWEST_WITH_IDS: self._their(program.confirmed_with_ids),
        }

    def _messages(self, count: int) -> Iterator[Message]:
        queues = itertools.islice(itertools.cycle(self._queues), count)
        return (Message(BODY, routing_key=queue) for queue in queues)

    def _durable(self, count: int) -> None:
        self._publish(count, self._outbox)

    def _in_memory(self, count: int) -> None:
        self._publish(count, None)

    def _publish(self, count: int, outbox: Path | None) -> None:
        with Publisher(self._url, outbox=outbox) as publisher:
            publisher.publish(BODY, routing_key=self._queues[0]).result(30)  # connected from here
            assert publisher.publish_many(self._messages(count)).wait(WAIT_S).confirmed == count

    async def _async(self, count: int, outbox: Path | None) -> None:
        async with AsyncPublisher(self._url, outbox=outbox) as publisher:
            await self._awaited(publisher, count)

    async def _guest(self, count: int) -> None:
        async with (
            await aio_pika.connect(self._url) as connection,
            AsyncPublisher(connection=connection, outbox=self._outbox) as publisher,
        ):
            await self._awaited(publisher, count)

    async def _awaited(self, publisher: AsyncPublisher, count: int) -> None:
        await (await publisher.publish(BODY, routing_key=self._queues[0])).result(30)
        receipt = await publisher.publish_many(self._messages(count))
        assert (await receipt.wait(WAIT_S)).confirmed == count
