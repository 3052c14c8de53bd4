"""Fixtures for every test: brokers, fake and real, and names that nobody else uses.

Tests share one broker and keep apart by fresh queue names: a name costs nothing, a virtual host of
one's own costs half a second of rabbitmqctl. With CI=true a missing RabbitMQ fails; it never skips.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from reliablepub.testing import FakeBroker, NodeOptions
from tests.amqp_probe import AmqpProbe
from tests.amqp_probe import unique as unique_name
from tests.rabbitmq import RabbitMQNode, is_installed

URL_VARIABLE = "RELIABLEPUB_TEST_AMQP_URL"
ROOT_VARIABLE = "RELIABLEPUB_TEST_RABBITMQ_ROOT"
"""The folder of another Debian whose RabbitMQ the private node shall be: make rabbitmq-versions."""
MAX_MESSAGE_SIZE = 1024 * 1024

# For `make check` and for mutants: few examples, the same ones each time, and none made smaller.
settings.register_profile(
    "quick",
    database=None,
    derandomize=True,
    max_examples=8,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """What a script starts with `&` ignores Ctrl-C; what the tests start would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def _node() -> Iterator[RabbitMQNode]:
    root = Path(os.environ.get(ROOT_VARIABLE, "/"))
    if not is_installed(root):
        reason = "no RabbitMQ here: apt-get install rabbitmq-server"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with RabbitMQNode(max_message_size=MAX_MESSAGE_SIZE, root=root) as node:
        yield node


@pytest.fixture
def rabbitmq_node(_node: RabbitMQNode) -> Iterator[RabbitMQNode]:
    """A private RabbitMQ that the test may kill, freeze and alarm; it is well again afterwards."""
    yield _node
    _node.recover()


@pytest.fixture(scope="session")
def rabbitmq_url(request: pytest.FixtureRequest) -> str:
    """A real RabbitMQ: the one at RELIABLEPUB_TEST_AMQP_URL, or else the private one."""
    url = os.environ.get(URL_VARIABLE)
    if url:
        return url
    node: RabbitMQNode = request.getfixturevalue("_node")
    return node.url


@pytest.fixture
def rabbitmq(rabbitmq_url: str) -> Iterator[AmqpProbe]:
    """A probe into a real RabbitMQ, which the test must leave as it is."""
    probe = AmqpProbe(rabbitmq_url)
    yield probe
    probe.close()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.rabbit)])
def broker(request: pytest.FixtureRequest) -> Iterator[AmqpProbe]:
    """A probe into the fake broker, then into the real one: for what must hold at both."""
    if request.param == "real":
        yield request.getfixturevalue("rabbitmq")
        return
    with FakeBroker(options=NodeOptions(max_message_size=MAX_MESSAGE_SIZE)) as fake:
        yield AmqpProbe(fake.url)


@pytest.fixture
def unique() -> Callable[[str], str]:
    """`unique("orders")`: a name that no other test has."""
    return unique_name
