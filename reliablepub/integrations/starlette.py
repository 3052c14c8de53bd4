"""A relay in the lifespan of a Starlette or FastAPI application, and routes for its health.

Knows: ASGI lifespans, and requests and routes of Starlette, on which FastAPI is built. Must never
know: databases; a message joins a transaction through `SessionOutbox` or `Outbox`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from reliablepub import (
    AsyncPublisher,
    ConfigurationError,
    Link,
    OutboxInUse,
    ReliablePubError,
    Status,
)
from reliablepub.observe.health import Health

_NAME: Final = "reliablepub"
_OK, _UNAVAILABLE = 200, 503
_LOOK_S: Final = 0.5
"""Seconds between two tries to take an outbox over."""
_LOGGER: Final = logging.getLogger("reliablepub.integrations")


def lifespan(
    open_publisher: Callable[[], AsyncPublisher],
    inner: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None,
    *,
    standby: bool = False,
) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    """Return a lifespan that keeps a publisher open while the application runs.

    The publisher also relays messages enqueued by an earlier run of the application. An outbox has
    one relay at a time: with several worker processes, pass ``standby=True``, or run one
    ``reliablepub relay`` alongside.

    Args:
        open_publisher: makes the publisher each time the application starts, such as
            ``lambda: AsyncPublisher(url, outbox="app.db")``.
        inner: the application's own lifespan, if any. The publisher is open while it runs.
        standby: start even while another process relays the outbox, as in a rolling deployment.
            Endpoints enqueue with an `Outbox`, and this process takes over when the other ends. If
            False, the start then raises `OutboxInUse`.

    Example:
        In FastAPI::

            app = FastAPI(lifespan=lifespan(lambda: AsyncPublisher(url, outbox="app.db")))
    """

    @asynccontextmanager
    async def opened(app: Any) -> AsyncIterator[Any]:  # noqa: ANN401 - Starlette, or a subclass
        relay = _standing_by if standby else _relaying
        async with relay(app, open_publisher):
            if inner is None:
                yield None
            else:
                async with inner(app) as state:
                    yield state

    return opened


@asynccontextmanager
async def _relaying(app: Any, open_publisher: Callable[[], AsyncPublisher]) -> AsyncIterator[None]:  # noqa: ANN401
    async with open_publisher() as publisher:
        setattr(app.state, _NAME, publisher)
        try:
            yield
        finally:
            delattr(app.state, _NAME)


@asynccontextmanager
async def _standing_by(
    app: Any,  # noqa: ANN401
    open_publisher: Callable[[], AsyncPublisher],
) -> AsyncIterator[None]:
    """Relay whenever no other process does; the first try decides whether the application starts.

    The task that opens a publisher also closes it.
    """
    is_begun = asyncio.Event()

    async def relay() -> None:
        while True:
            try:
                async with open_publisher() as publisher:
                    setattr(app.state, _NAME, publisher)
                    is_begun.set()
                    while publisher.status.link is not Link.FAILED:  # noqa: ASYNC110 - of a thread
                        await asyncio.sleep(_LOOK_S)
            except ReliablePubError as error:
                if not (is_begun.is_set() or isinstance(error, OutboxInUse)):
                    raise
                if not isinstance(getattr(app.state, _NAME, None), _Standby):
                    said = {"event": "standing_by", "reason": str(error)}
                    _LOGGER.info("standing by: %s", error, extra=said)
                setattr(app.state, _NAME, _Standby(str(error)))
                is_begun.set()
            await asyncio.sleep(_LOOK_S)

    task = asyncio.create_task(relay())
    begun = asyncio.create_task(is_begun.wait())
    await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
    try:
        if task.done():
            task.result()  # raises why the first publisher could not be opened
        yield
    finally:
        begun.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if hasattr(app.state, _NAME):
            delattr(app.state, _NAME)


@dataclass(frozen=True)
class _Standby:
    """In place of a publisher, while another process relays the outbox."""

    reason: str


def publisher_of(connection: HTTPConnection) -> AsyncPublisher:
    """Return the publisher of an application, as a dependency for FastAPI.

    ``Depends(publisher_of)`` passes it to an endpoint that publishes outside a transaction, or
    reads its status. In Starlette, call it with the request.

    Args:
        connection: the request or the websocket.

    Raises:
        ConfigurationError: the application does not use `lifespan`, or has not started.
        OutboxInUse: this process is on standby, because another one relays the outbox.
    """
    publisher = getattr(connection.app.state, _NAME, None)
    if isinstance(publisher, _Standby):
        raise OutboxInUse(f"this process stands by, and only enqueues: {publisher.reason}")
    if not isinstance(publisher, AsyncPublisher):
        raise ConfigurationError(
            "the application has no publisher: give it lifespan=lifespan(lambda: "
            "AsyncPublisher(...)), and start its lifespan (TestClient does in a with block)"
        )
    return publisher


def health_routes(prefix: str = "/outbox") -> list[Route]:
    """Return routes for probes: ``/outbox/live`` and ``/outbox/ready``, with status 200 or 503.

    *Live*: the relay takes turns; otherwise only a restart helps. *Ready*: messages can be stored,
    whether or not the broker is there. A process on standby is both.

    Args:
        prefix: path before ``/live`` and ``/ready``.

    Example:
        In FastAPI, ``app.router.routes.extend(health_routes())``; in Starlette,
        ``Starlette(routes=[..., *health_routes()])``.
    """

    async def live(request: Request) -> JSONResponse:
        return _answer(*Health(lambda: _status(request)).live())

    async def ready(request: Request) -> JSONResponse:
        return _answer(*Health(lambda: _status(request)).ready())

    return [Route(f"{prefix}/live", live), Route(f"{prefix}/ready", ready)]


def _status(request: Request) -> Status:
    try:
        return publisher_of(request).status
    except OutboxInUse:
        return Status()


def _answer(is_well: bool, told: dict[str, object]) -> JSONResponse:  # noqa: FBT001 - as Health has it
    return JSONResponse(told, _OK if is_well else _UNAVAILABLE)
