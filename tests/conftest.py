"""Fixtures for every test: brokers, fake and real, databases, and unique names.

Tests share one broker and keep apart by fresh queue names: a name costs nothing, a virtual host of
one's own costs half a second of rabbitmqctl. They share one PostgreSQL, with a database for each
test: it costs 25 ms. With CI=true a missing RabbitMQ or PostgreSQL fails; it never skips.
"""

import asyncio
import inspect
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import HealthCheck, Phase, settings

from reliablepub.testing import FakeBroker, NodeOptions
from tests.amqp_probe import AmqpProbe
from tests.amqp_probe import unique as unique_name
from tests.disks import folder_in_memory
from tests.missing import miss
from tests.packaging import support
from tests.rabbitmq import ROOT, RabbitMQNode, is_installed
from tests.stores import DURABLE, Where, outbox_of

if TYPE_CHECKING:  # it needs psycopg, which tests without a PostgreSQL do not
    from tests.postgres import PostgresServer

URL_VARIABLE = "RELIABLEPUB_TEST_AMQP_URL"
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
    """What a script starts with `&` ignores Ctrl-C, and what `nohup` starts ignores a hangup.

    What the tests start would inherit that.
    """
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, hangup)
    signal.signal(signal.SIGINT, interrupt)


@pytest.fixture(autouse=True)
def _loggers_are_enabled() -> None:
    """Frameworks that configure logging in another test disable the loggers they do not know.

    And the command line, which other tests call in this process, has pika say less.
    """
    logging.getLogger("pika").setLevel(logging.NOTSET)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("reliablepub") and isinstance(logger, logging.Logger):
            logger.disabled = False


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger at level INFO; its level and handlers are restored."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    root.setLevel(logging.INFO)
    yield root
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the private PostgreSQL, before marks choose what runs: none is forgotten."""
    for item in items:
        if "_postgres" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.postgres)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: by the fixture `run` if it has one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given: dict[str, Any] = pyfuncitem.funcargs
    run = given.get("run", asyncio.run)
    run(pyfuncitem.obj(**{name: given[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write down which versions were tested, if that was asked for."""
    support.finished(session, exitstatus)


def _miss(server: str, package: str) -> NoReturn:
    miss(f"no {server} here: apt-get install {package}")


@pytest.fixture(scope="session")
def _node() -> Iterator[RabbitMQNode]:
    if not is_installed(ROOT):
        _miss("RabbitMQ", "rabbitmq-server")
    with RabbitMQNode(max_message_size=MAX_MESSAGE_SIZE, root=ROOT) as node:
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the outbox of a test is to be."""
    return tmp_path / "outbox.db"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory where a sync costs nothing."""
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(params=DURABLE)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    """Where the outbox of a test is to be: a file, then a database."""
    found = outbox_of(request.param, request, tmp_path)
    assert found is not None
    return found


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.rabbit)])
def broker(request: pytest.FixtureRequest) -> Iterator[AmqpProbe]:
    """A probe into the fake broker, then into the real one: for what must hold at both."""
    if request.param == "real":
        yield request.getfixturevalue("rabbitmq")
        return
    with FakeBroker(options=NodeOptions(max_message_size=MAX_MESSAGE_SIZE)) as fake:
        yield AmqpProbe(fake.url)


@pytest.fixture(scope="session")
def _postgres() -> "Iterator[PostgresServer]":
    from reliablepub.outbox.postgres import server as product  # noqa: PLC0415
    from tests import postgres  # noqa: PLC0415 - see above

    if not postgres.is_installed():
        _miss("PostgreSQL", "postgresql")
    with postgres.PostgresServer() as server, pytest.MonkeyPatch.context() as patch:
        # A machine that stands still for 3 s must not fail the test that connects at this moment.
        patch.setitem(product._PATIENCE, "connect_timeout", "20")
        yield server


@pytest.fixture
def postgres_server(_postgres: "PostgresServer") -> "Iterator[PostgresServer]":
    """A private PostgreSQL that the test may kill, freeze and stop; it is well again afterwards."""
    yield _postgres
    _postgres.recover()


@pytest.fixture
def postgres_database(postgres_server: "PostgresServer") -> Iterator[str]:
    """The name of a database that no other test has, empty; with it go its connections."""
    name = postgres_server.create_database()
    yield name
    postgres_server.recover()
    postgres_server.drop_database(name)


@pytest.fixture
def postgres_url(postgres_server: "PostgresServer", postgres_database: str) -> str:
    """The URL of that database."""
    return postgres_server.url_of(postgres_database)


@pytest.fixture(scope="session")
def _outbox_template(_postgres: "PostgresServer") -> str:
    from reliablepub.outbox.postgres.database import create_outbox  # noqa: PLC0415
    from reliablepub.outbox.postgres.server import Server  # noqa: PLC0415 - see above

    name = _postgres.create_database()
    create_outbox(Server.of(_postgres.url_of(name)))
    return name


@pytest.fixture
def new_postgres_outbox(
    postgres_server: "PostgresServer", _outbox_template: str
) -> Iterator[Callable[[], str]]:
    """Make an empty outbox in a database of its own; its URL. A copy is made in half the time."""
    names: list[str] = []

    def make() -> str:
        names.append(postgres_server.create_database(_outbox_template))
        return postgres_server.url_of(names[-1])

    yield make
    postgres_server.recover()
    for name in names:
        postgres_server.drop_database(name)


@pytest.fixture
def postgres_outbox(new_postgres_outbox: Callable[[], str]) -> str:
    """The URL of an empty outbox that no other test has."""
    return new_postgres_outbox()


@pytest.fixture
def pgbouncer_url(
    request: pytest.FixtureRequest, postgres_server: "PostgresServer", postgres_database: str
) -> Iterator[str]:
    """The URL of that database behind a PgBouncer, which lends its connections by transaction.

    A test may ask for another mode by an indirect parameter.

    It ends with the test: a smart stop of the server would wait for its connections.
    """
    from tests import postgres  # noqa: PLC0415 - see above

    if not postgres.is_pgbouncer_installed():
        _miss("PgBouncer", "pgbouncer")
    mode = getattr(request, "param", "transaction")
    with postgres.pgbouncer(postgres_server, pool_mode=mode) as port:
        yield postgres_server.url_of(postgres_database, port=port)


@pytest.fixture(scope="session")
def java_client() -> Path:
    """The jar of RabbitMQ's Java client."""
    jar = Path("/usr/share/java/amqp-client.jar")
    if not jar.exists():
        _miss("RabbitMQ client for Java", "librabbitmq-client-java")
    return jar


@pytest.fixture
def unique() -> Callable[[str], str]:
    """`unique("orders")`: a name that no other test has."""
    return unique_name
