"""The brokers that the facts are held against: the fake one, and the RabbitMQ that is here.

A fact that depends on the version says so where it is stated, by `site.version`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from reliablepub.testing import FakeBroker
from tests.amqp_probe import unique
from tests.facts.raw_client import RawClient
from tests.facts.site import FakeSite, RealSite, Site

Connect = Callable[[], RawClient]
"""Opens a connection on which nothing was said yet."""


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.rabbit)])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A broker and the few things that can be done to either kind."""
    if request.param == "real":
        yield RealSite(request.getfixturevalue("rabbitmq_node"))
        return
    with FakeBroker(options=FakeSite.options()) as broker:
        yield FakeSite(broker)


@pytest.fixture
def connect(site: Site) -> Iterator[Connect]:
    """Opens connections on which nothing was said yet."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(RawClient(site.url))


@pytest.fixture
def client(connect: Connect) -> RawClient:
    """A connection whose channel 1 is in confirm mode."""
    return connect().opened()


@pytest.fixture
def queue(client: RawClient) -> str:
    """A durable classic queue."""
    return client.declare(unique("queue"))


@pytest.fixture
def of_3_10(site: Site) -> None:
    """Facts that the fake follows, and that were held against RabbitMQ 3.10 only."""
    if site.version[:2] != (3, 10):
        pytest.skip("a fact of RabbitMQ 3.10")
