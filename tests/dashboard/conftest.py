"""A dashboard without a server: requests go straight to the application."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from reliablepub import Outbox, OutboxKeys, Publisher, RetryPolicy
from reliablepub.dashboard.app import Desk, new_app
from reliablepub.dashboard.guard import Secrets
from reliablepub.outbox.opening import outbox_at
from reliablepub.testing import FakeBroker
from tests.stores import DURABLE, outbox_of
from tests.waiting import until

KNOWN = Secrets("right-token", "right-cookie")


class Client:
    """Sends requests to an application, and keeps its cookies."""

    def __init__(self, app: Starlette) -> None:
        self._loop = asyncio.Runner()
        transport = httpx.ASGITransport(app)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8025")
        self.cookies = self._http.cookies

    def get(self, path: str, **options: Any) -> httpx.Response:
        options = {"follow_redirects": True, **options}
        return self._loop.run(self._http.get(path, **options))

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self._loop.run(self._http.post(path, **options))

    def close(self) -> None:
        self._loop.run(self._http.aclose())
        self._loop.close()


@dataclass
class Browser:
    """A client that has opened the printed address."""

    client: Client
    person: str = ""

    def get(self, path: str, status: int = 200) -> str:
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text
        return answer.text

    def post(self, path: str, **fields: Any) -> str:
        headers = {"X-Form-Token": KNOWN.form_token(self.person)}
        answer = self.client.post(path, data=fields, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.text


Open = Callable[..., Browser]


@pytest.fixture(params=DURABLE)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    where = str(outbox_of(request.param, request, tmp_path))
    Outbox(where).create()
    return where


@pytest.fixture
def browse(where: str) -> Iterator[Open]:
    """Opens a dashboard of the outbox."""
    opened: list[Client] = []

    def browse(
        *, may_change: bool = True, keys: OutboxKeys | None = None, **options: Any
    ) -> Browser:
        shows_bodies = options.pop("shows_bodies", True)
        user_header, hosts = options.pop("user_header", None), frozenset(options.pop("hosts", ()))
        desk = Desk(outbox_at(where), may_change, shows_bodies, keys, KNOWN)
        app = new_app(desk, user_header=user_header, hosts=hosts)
        client = Client(app)
        opened.append(client)
        if user_header is None:
            client.get("/?token=right-token")
        return Browser(client)

    yield browse
    for client in opened:
        client.close()


@pytest.fixture
def parked(where: str) -> str:
    """The outbox, with five messages that no binding routes, and one that was confirmed."""
    with FakeBroker() as broker:
        broker.declare_exchange("orders", "topic")
        broker.declare_queue("q")
        options: dict[str, Any] = {"outbox": where, "keep_confirmed_s": 60.0}
        with Publisher(broker.url, retry=RetryPolicy.prompt(), **options) as publisher:
            for n in range(5):
                publisher.publish(b'{"n": 1}', exchange="orders", routing_key=f"order.{n}")
            publisher.publish(b"x", routing_key="q", message_id="came").result(20)
            until(lambda: Outbox(where).status().parked == 5)
    return where
