"""A broker that refuses every login: told within seconds, by the driver once, and by tasks."""

import sys
import time
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from reliablepub import ConfigurationError, Link, Message, Status
from reliablepub.testing import FakeBroker, NodeOptions
from reliablepub.testing.faults import RefuseHandshake
from spark_sink import BrokerRefused, RabbitMQDataSource, ReportNotWritten, connection, contact
from spark_sink.contact import Refusals, ask
from spark_sink.failures import PartitionStalled
from spark_sink.options import parse
from spark_sink.report import Counts, Written
from spark_sink.settings import Settings
from spark_sink.task import Sending
from tests.amqp_probe import AmqpProbe
from tests.certificates import broker_with, signed
from tests.rabbitmq import RabbitMQNode

SCHEMA = StructType([StructField("value", StringType())])
SOON_S = 50.0  # seconds, on a busy machine; without a refusal, a minute or two


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe a refusal sooner; the test of a certificate waits as long as users do."""
    monkeypatch.setattr(contact, "_REFUSED_FOR_S", 0.6)


def wrong(url: str, kind: str) -> str:
    base, _, vhost = url.rpartition("/")
    return f"{base}/nowhere" if kind == "vhost" else f"{base.replace(':guest@', ':wrong@')}/{vhost}"


@pytest.mark.parametrize(
    ("kind", "words"), [("password", "refused the credentials"), ("vhost", "refused access to the")]
)
def test_the_driver_is_refused_once_before_any_task(
    broker: AmqpProbe, impatient: None, kind: str, words: str
) -> None:
    since = time.monotonic()
    with pytest.raises(BrokerRefused, match=words) as caught:
        RabbitMQDataSource({"url": wrong(broker.url, kind), "routing_key": "q"}).writer(
            SCHEMA, overwrite=False
        )
    assert time.monotonic() - since < SOON_S
    assert "wrong@" not in str(caught.value)


@pytest.mark.parametrize("use_daemon", [True, False])
def test_a_micro_batch_is_committed_whatever_has_changed_since_it_was_sent(
    broker: AmqpProbe,
    impatient: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    use_daemon: bool,
) -> None:
    """The password, the report; a checkpoint of this host may be an old one of its name."""
    (tmp_path / "file").touch()
    (tmp_path / "metadata").touch()
    options = {"url": wrong(broker.url, "password"), "routing_key": "q"}
    options |= {"report": f"{tmp_path}/file/report", "checkpointLocation": str(tmp_path)}
    source = RabbitMQDataSource(options)
    with pytest.raises(ConfigurationError, match="continuous"):
        source.streamWriter(SCHEMA, overwrite=False)
    committer = "pyspark.sql.worker.python_streaming_sink_runner"
    assert find_spec(committer) is not None, "Spark has renamed it"
    if use_daemon:
        monkeypatch.setitem(sys.modules, committer, ModuleType(committer))
    else:
        spec = ModuleSpec(committer, None)
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    writer = source.streamWriter(SCHEMA, overwrite=False)
    message = Written("q-7", 0, Counts(rows=5, confirmed=5), None)
    with pytest.raises(ReportNotWritten, match="all 5 rows are settled"):
        writer.commit([message], 7)


@pytest.mark.parametrize("kind", ["password", "vhost"])
def test_a_task_is_refused_within_seconds(broker: AmqpProbe, impatient: None, kind: str) -> None:
    settings = parse({"url": wrong(broker.url, kind), "deliverytimeout": "120"})
    since = time.monotonic()
    with pytest.raises(BrokerRefused):
        publish(settings)
    assert time.monotonic() - since < SOON_S


def test_a_login_that_ends_without_a_word_is_an_outage(fake: FakeBroker, impatient: None) -> None:
    """As with eight hundred tasks at a broker that cannot serve all of them in time."""
    fake.inject(RefuseHandshake(code=None, keep=True))
    with pytest.raises(PartitionStalled, match="the login without a reply"):
        publish(parse({"url": fake.url, "deliverytimeout": "3"}))


@pytest.mark.rabbit
def test_a_limit_on_connections_is_an_outage(
    rabbitmq: AmqpProbe, rabbitmq_node: RabbitMQNode, impatient: None
) -> None:
    queue = rabbitmq.declare_queue("q")
    settings = parse({"url": rabbitmq.url, "routing_key": queue, "deliverytimeout": "5"})
    rabbitmq_node.ctl("set_vhost_limits", "-p", "/", '{"max-connections": 0}')
    try:
        with pytest.raises(PartitionStalled, match=r"connection limit \(0\) is reached"):
            publish(settings)
    finally:
        rabbitmq_node.ctl("clear_vhost_limits", "-p", "/")
    publish(settings)
    connection.close_idle()


def publish(settings: Settings) -> None:
    with connection.publisher(settings) as lent:
        sending = Sending(lent, settings, partition=0)
        list(sending.send([Message(b"", routing_key="q", message_id="1")], 0))
        list(sending.finish())


def test_an_unknown_certificate(tmp_path: Path) -> None:
    tls = broker_with(signed(tmp_path, "DNS:localhost", "IP:127.0.0.1"))
    try:
        settings = parse({"url": tls.url})
        for work in (ask, publish):
            since = time.monotonic()
            with pytest.raises(BrokerRefused, match="CERTIFICATE_VERIFY_FAILED"):
                work(settings)
            assert 3.0 < time.monotonic() - since < SOON_S
    finally:
        tls.stop()


def test_tls_where_the_broker_has_none(fake: FakeBroker, impatient: None) -> None:
    with pytest.raises(BrokerRefused, match="WRONG_VERSION_NUMBER"):
        ask(parse({"url": fake.url.replace("amqp:", "amqps:")}))


def test_a_broker_that_is_away_or_unknown_is_left_to_the_tasks(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = Mock(wraps=contact._connect)
    monkeypatch.setattr(contact, "_connect", attempts)
    url = fake.url
    fake.stop()
    for _ in range(2):
        ask(parse({"url": url}))
    assert attempts.call_count == 1, "not with each micro-batch"
    ask(parse({"urlfile": "/only/on/executors"}))
    assert attempts.call_count == 1


def test_a_broker_that_refuses_while_another_is_away_is_left_to_the_tasks(
    fake: FakeBroker, impatient: None
) -> None:
    """The other one may let them in."""
    ask(parse({"url": f"amqp://127.0.0.1:1/,{wrong(fake.url, 'password')}"}))


def test_the_driver_asks_again_before_it_believes_a_refusal(fake: FakeBroker) -> None:
    """A broker that is starting has not loaded its users."""
    fake.inject(RefuseHandshake(code=403, times=2))
    ask(parse({"url": fake.url}))


def test_the_driver_asks_once_for_each_connection(impatient: None) -> None:
    """A stream asks with each micro-batch; once it runs, refusals are for its tasks."""
    with FakeBroker(options=NodeOptions(users={"user": "secret"})) as guarded:
        settings = parse({"url": guarded.url_of("user")})
        ask(settings)
        guarded.inject(RefuseHandshake(code=403, keep=True))
        ask(settings)
        with pytest.raises(BrokerRefused):
            ask(parse({"url": guarded.url_of("user"), "heartbeat": "20"}))


def test_a_refusal_that_passes_fails_nothing() -> None:
    """While a broker starts, or its users are in a directory that is away for a moment."""
    refusals = Refusals()
    refusals.look(refused(1), 0.0)
    refusals.look(Status(link=Link.CONNECTED), 2.0)
    refusals.look(refused(1), 4.0)
    refusals.look(refused(2), 5.0)
    refusals.look(Status(link=Link.DISCONNECTED, reason="Connection refused"), 6.0)
    refusals.look(refused(1), 8.0)
    refusals.look(refused(2), 10.0)
    with pytest.raises(BrokerRefused):
        refusals.look(refused(3), 11.5)


def test_one_refusal_fails_nothing_however_long_the_next_attempt_takes() -> None:
    """After a long outage, the publisher waits up to 15 s between two attempts."""
    refusals = Refusals()
    for tenths in range(0, 150, 5):
        refusals.look(refused(1), tenths / 10)
    with pytest.raises(BrokerRefused):
        refusals.look(refused(2), 15.0)


def test_refusals_in_quick_succession_are_one() -> None:
    refusals = Refusals()
    for count in range(1, 6):
        refusals.look(refused(count), count * 0.5)
    refusals.look(refused(5), 12.0)
    refusals.look(refused(1), 12.5)  # of another series
    refusals.look(refused(2), 13.0)


def refused(times: int) -> Status:
    words = "the broker refused the credentials"
    return Status(link=Link.DISCONNECTED, reason=words, refusals=times)


def test_without_a_broker_the_error_says_what_sql_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELIABLEPUB_URL", raising=False)
    with pytest.raises(ConfigurationError, match="In SQL: INSERT INTO t WITH"):
        publish(Settings())
