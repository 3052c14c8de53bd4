"""A relay in the lifespan of a Starlette or FastAPI application, and routes for its health.

Knows: ASGI lifespans, and requests and routes of Starlette, on which FastAPI is built. Must never
know: databases; a message joins a transaction through `SessionOutbox` or `Outbox`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from reliablepub import AsyncPublisher, ConfigurationError
from reliablepub.observe.health import Health

_NAME: Final = "reliablepub"
_OK, _UNAVAILABLE = 200, 503


def lifespan(
    open_publisher: Callable[[], AsyncPublisher],
    inner: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None,
) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    """Return a lifespan: a publisher that is open as long as the application runs.

    The publisher also relays messages enqueued by an earlier run of the application. An outbox has
    one relay at a time: with several worker processes, do not use this; run one
    ``reliablepub relay`` beside them.

    Args:
        open_publisher: makes the publisher at each start of the application, such as
            ``lambda: AsyncPublisher(url, outbox="app.db")``.
        inner: the application's own lifespan, if any. The publisher is open while it runs.

    Example:
        In FastAPI::

            app = FastAPI(lifespan=lifespan(lambda: AsyncPublisher(url, outbox="app.db")))
    """

    @asynccontextmanager
    async def opened(app: Any) -> AsyncIterator[Any]:  # noqa: ANN401 - Starlette, or a subclass
        async with open_publisher() as publisher:
            setattr(app.state, _NAME, publisher)
            try:
                if inner is None:
                    yield None
                else:
                    async with inner(app) as state:
                        yield state
            finally:
                delattr(app.state, _NAME)

    return opened


def publisher_of(connection: HTTPConnection) -> AsyncPublisher:
    """Return the publisher of an application: a dependency for FastAPI.

    ``Depends(publisher_of)`` passes it to an endpoint that publishes outside of a transaction, or
    reads its status. In Starlette, call it with the request.

    Args:
        connection: the request or the websocket.

    Raises:
        ConfigurationError: the application does not use `lifespan`, or has not started.
    """
    return _publisher(connection.app)


def _publisher(app: Starlette) -> AsyncPublisher:
    publisher = getattr(app.state, _NAME, None)
    if not isinstance(publisher, AsyncPublisher):
        raise ConfigurationError(
            "the application has no publisher: give it lifespan=lifespan(lambda: "
            "AsyncPublisher(...)), and start its lifespan (TestClient does in a with block)"
        )
    return publisher


def health_routes(prefix: str = "/outbox") -> list[Route]:
    """Return routes for probes: ``/outbox/live`` and ``/outbox/ready``, with status 200 or 503.

    *Live*: the relay takes turns; otherwise only a restart helps. *Ready*: messages can be stored,
    whether the broker is there or not.

    Args:
        prefix: path before ``/live`` and ``/ready``.

    Example:
        In FastAPI, ``app.router.routes.extend(health_routes())``; in Starlette,
        ``Starlette(routes=[..., *health_routes()])``.
    """

    async def live(request: Request) -> JSONResponse:
        return _answer(*Health(lambda: publisher_of(request).status).live())

    async def ready(request: Request) -> JSONResponse:
        return _answer(*Health(lambda: publisher_of(request).status).ready())

    return [Route(f"{prefix}/live", live), Route(f"{prefix}/ready", ready)]


def _answer(is_well: bool, told: dict[str, object]) -> JSONResponse:  # noqa: FBT001 - as Health has it
    return JSONResponse(told, _OK if is_well else _UNAVAILABLE)
