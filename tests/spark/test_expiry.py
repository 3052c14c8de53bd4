"""Tokens that end while a task sends: it goes on with the next one, and no row is lost."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from reliablepub import Link, Message
from reliablepub.testing import FakeBroker
from spark_sink import connection, contact
from spark_sink.connection import Lent
from spark_sink.options import parse
from spark_sink.settings import Settings
from spark_sink.task import Sending
from tests.amqp_probe import AmqpProbe
from tests.oauth import Issuer, node_with_oauth
from tests.waiting import until

PATIENCE_S = 60.0
SOAK_S = 60


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is refused fails soon."""
    monkeypatch.setattr(contact, "_REFUSED_FOR_S", 0.2)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return tmp_path / "token"


@pytest.fixture
def settings(fake: FakeBroker, secret: Path) -> Settings:
    url = fake.url.replace("guest:guest@", "whoever@")
    return parse({"url": url, "passwordFile": str(secret)})


@contextmanager
def task(settings: Settings) -> Iterator[tuple[Lent, Callable[[int], None]]]:
    """A task that sends a row when it is told to."""
    with connection.publisher(settings) as lent:
        sending = Sending(lent, settings, partition=7)

        def send(number: int) -> None:
            row = Message(b"", routing_key="q", message_id=str(number))
            assert not [*sending.send([row], number), *sending.finish()]

        yield lent, send


def rows(fake: FakeBroker) -> list[str | None]:
    return [message.properties.message_id for message in fake.messages("q")]


def test_a_task_renews_its_token_without_reconnecting(
    fake: FakeBroker, secret: Path, settings: Settings
) -> None:
    secret.write_text(fake.issue_token(6))
    with task(settings) as (lent, send):
        send(0)
        secret.write_text(fake.issue_token(PATIENCE_S))
        time.sleep(6.1)  # the first one has expired
        send(1)
        assert lent.publisher.status.connects == 1
    assert rows(fake) == ["0", "1"]


def test_a_task_whose_token_is_revoked_logs_in_with_the_next_one(
    fake: FakeBroker, secret: Path, settings: Settings
) -> None:
    secret.write_text(fake.issue_token(PATIENCE_S))
    with task(settings) as (lent, send):
        send(0)
        secret.write_text(fake.issue_token(PATIENCE_S))
        fake.expire_tokens()
        secret.write_text(fake.issue_token(PATIENCE_S))
        send(1)
        assert lent.publisher.status.connects == 2
    assert rows(fake) == ["0", "1"]


def test_a_task_waits_for_a_token_that_comes_late(
    fake: FakeBroker, secret: Path, settings: Settings
) -> None:
    secret.write_text(fake.issue_token(3))
    with task(settings) as (lent, send):
        send(0)
        until(lambda: lent.publisher.status.link is Link.DISCONNECTED)
        until(lambda: "token expired" in lent.publisher.status.reason)
        rotation = threading.Timer(0.5, lambda: secret.write_text(fake.issue_token(PATIENCE_S)))
        rotation.start()  # longer than a refusal may last
        send(1)
        rotation.join()
    assert rows(fake) == ["0", "1"]


def test_the_next_task_has_the_same_connection(
    fake: FakeBroker, secret: Path, settings: Settings
) -> None:
    secret.write_text(fake.issue_token(PATIENCE_S))
    with task(settings) as (first, send):
        send(0)
    secret.write_text(fake.issue_token(PATIENCE_S))
    with task(settings) as (second, send):
        send(1)
    assert first is second


@pytest.mark.soak
@pytest.mark.rabbit
@pytest.mark.timeout(300)
def test_tasks_that_outlive_six_tokens(spark: SparkSession, tmp_path: Path, secret: Path) -> None:
    """RabbitMQ with the OAuth 2 plugin, tokens of 10 s and two tasks of a minute."""
    issuer, over = Issuer(), threading.Event()

    def rotate() -> None:
        while not over.wait(3):
            new = tmp_path / "new"
            new.write_text(issuer.token(10))
            new.rename(secret)

    secret.write_text(issuer.token(10))
    rotation = threading.Thread(target=rotate)
    rotation.start()
    count = 1_000 * SOAK_S
    try:
        with node_with_oauth(issuer) as node:
            probe = AmqpProbe(node.url)
            queue = probe.declare_queue("q")
            url = node.url.replace("guest:guest@", "whoever@")
            begun = time.monotonic()
            (
                spark.range(0, count, 1, 2)
                .selectExpr("string(id) value", "string(id) message_id")
                .write.format("rabbitmq")
                .options(url=url, passwordFile=str(secret), routing_key=queue)
                .options(maxRowsPerSecond="1000", report=str(tmp_path / "report"))
                .mode("append")
                .save()
            )
            lasted_s = time.monotonic() - begun
            arrived = Counter(str(p.message_id) for _, p in probe.drain(queue, count))
            probe.close()
    finally:
        over.set()
        rotation.join()
    print(f"\n{issuer.issued} tokens, {lasted_s:.0f} s, {arrived.total() - len(arrived)} twice")
    assert set(arrived) == {str(number) for number in range(count)}
    assert lasted_s > SOAK_S - 10
    assert arrived.total() == count, "an attempt was repeated, or a connection was lost"
