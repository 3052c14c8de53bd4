"""An `AsyncPublisher` that can be used like a `Publisher`: its event loop has a thread of its own.

So one suite says what holds for both. It knows asyncio and both front doors' verbs; it must never
know brokers.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, Self, TypeVar

from aio_pika import RobustConnection
from yarl import URL

from reliablepub import AsyncPublisher, Confirmed, Message, Status
from reliablepub.front.async_receipt import AsyncBatchReceipt, AsyncReceipt

T = TypeVar("T")


class LoopThread:
    """An event loop, and a way to wait for what is run in it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="driven")
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class DrivenReceipt:
    """An `AsyncReceipt`, waited for by a thread."""

    def __init__(self, receipt: AsyncReceipt, loop: LoopThread) -> None:
        self._receipt = receipt
        self._loop = loop

    def result(self, timeout: float | None = None) -> Confirmed:
        return self._loop.run(self._receipt.result(timeout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receipt, name)


class DrivenBatchReceipt:
    """An `AsyncBatchReceipt`, waited for by a thread."""

    def __init__(self, receipt: AsyncBatchReceipt, loop: LoopThread) -> None:
        self._receipt = receipt
        self._loop = loop

    def wait(self, timeout: float | None = None) -> Self:
        self._loop.run(self._receipt.wait(timeout))
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receipt, name)


class DrivenPublisher:
    """An `AsyncPublisher`, opened and used by threads, in a loop of the test's."""

    def __init__(self, loop: LoopThread, url: str, **options: Any) -> None:
        self._loop = loop
        self._publisher = AsyncPublisher(**self._way_in(url), **options)
        loop.run(self._publisher.open())

    def _way_in(self, url: str) -> dict[str, Any]:
        return {"url": url}

    def publish(self, body: bytes, **properties: Any) -> DrivenReceipt:
        receipt = self._loop.run(self._publisher.publish(body, **properties))
        return DrivenReceipt(receipt, self._loop)

    def publish_many(self, messages: Iterable[Message]) -> DrivenBatchReceipt:
        receipt = self._loop.run(self._publisher.publish_many(messages))
        return DrivenBatchReceipt(receipt, self._loop)

    @property
    def status(self) -> Status:
        return self._publisher.status

    def flush(self, timeout_s: float | None = None) -> Status:
        return self._loop.run(self._publisher.flush(timeout_s))

    def close(self, timeout_s: float | None = None) -> Status:
        return self._loop.run(self._publisher.aclose(timeout_s))

    def let_go(self) -> None:
        """Of what is not the publisher's own, after it has failed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GuestPublisher(DrivenPublisher):
    """The same on a robust connection of the application's, which the test is."""

    def _way_in(self, url: str) -> dict[str, Any]:
        return {"connection": self._loop.run(self._host(url))}

    async def _host(self, url: str) -> RobustConnection:
        """A connection that may come up later: the broker can be away when a test begins."""
        host = RobustConnection(URL(url), reconnect_interval=0.1, fail_fast=False)
        self._connecting = asyncio.create_task(host.connect())
        self._connection = host
        return host

    def close(self, timeout_s: float | None = None) -> Status:
        status = super().close(timeout_s)
        self.let_go()
        return status

    def let_go(self) -> None:
        self._loop.run(self._leave())

    async def _leave(self) -> None:
        self._connecting.cancel()
        await asyncio.wait([self._connecting])
        await self._connection.close()
