"""What the application has us call may raise and log; a relay that fails is loud.

The bundled broker, since it is no question of brokers.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from tenacity import wait_none

from reliablepub import (
    GiveUp,
    Link,
    Message,
    Publisher,
    PublisherFailed,
    Refusal,
    Retries,
    RetryPolicy,
)
from reliablepub.observe.health import Health
from reliablepub.outbox.admin.inspection import read_relays
from reliablepub.outbox.database import Relaying
from reliablepub.outbox.opening import outbox_at
from reliablepub.relay.relay import Relay
from reliablepub.testing import FakeBroker
from tests.conformance.conftest import FrontDoor
from tests.conformance.driven import DrivenPublisher
from tests.policies import ONCE
from tests.stores import Where
from tests.waiting import until

AWAY = "amqp://guest:guest@127.0.0.1:1"


@pytest.fixture
def broker(fake: FakeBroker) -> FakeBroker:
    fake.declare_queue("q")
    return fake


def lose_connection(broker: FakeBroker, publisher: Publisher) -> None:
    """Have the connection cut, and wait until there is another one."""
    connects = publisher.status.connects
    broker.drop_connections()
    until(lambda: publisher.status.connects > connects)


# -------------------------------------------------------------------- callbacks that raise


@pytest.mark.parametrize(
    "kind", [ZeroDivisionError, SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration]
)
def test_whatever_a_callback_raises_is_counted_and_logged_and_ends_nothing(
    broker: FakeBroker,
    outbox: Where,
    front_door: FrontDoor,
    kind: type[BaseException],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> Any:
        raise kind("by a callback")

    class Everything:
        on_stored = on_sent = on_confirmed = on_returned = on_parked = on_connected = fail

    class Stop:
        def __call__(self, _state: object) -> bool:
            raise kind("by a strategy")

    def decide(_refusal: Refusal) -> GiveUp:
        raise kind("by a decision")

    policy = RetryPolicy(ONCE, Retries(Stop(), wait_none()), ONCE, decide=decide)
    with front_door(
        broker.url, outbox=outbox, hooks=[Everything()], retry=policy, close_timeout_s=0.2
    ) as publisher:
        publisher.publish(b"x", routing_key="q").result(30)
        publisher.publish(b"x", routing_key="nowhere")
        until(lambda: publisher.status.callback_errors >= 7)
        publisher.publish(b"x", routing_key="q").result(30)
        assert publisher.status.link is Link.CONNECTED
    told = [r for r in caplog.records if r.name == "reliablepub.hooks"]
    assert {record.levelno for record in told} == {logging.ERROR}
    assert all(record.exc_info and record.exc_info[0] is kind for record in told)
    assert len({record.getMessage() for record in told}) == len(told) >= 6


# -------------------------------------------------------------------- logging


class PublishingHandler(logging.Handler):
    """Publishes what is logged, and holds its lock meanwhile, as every handler does."""

    def __init__(self, publish: Callable[[bytes], object]) -> None:
        super().__init__(logging.INFO)
        self.publish = publish
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.publish(record.getMessage().encode())
        self.said.append(record.getMessage())


def test_a_log_handler_may_publish(
    broker: FakeBroker, outbox: Where, front_door: FrontDoor, root_logger: logging.Logger
) -> None:
    """Our own lines as well, while the application's threads hold the lock of the handler."""
    with front_door(broker.url, outbox=outbox, close_timeout_s=5) as publisher:
        handler = PublishingHandler(lambda body: publisher.publish(body, routing_key="q"))
        # aio-pika logs on the loop that it would have to wait for.
        handler.addFilter(lambda record: record.name.startswith(("app", "reliablepub")))
        root_logger.addHandler(handler)

        def log() -> None:
            for n in range(100):
                logging.getLogger("app").info("line %d", n)

        threads = [threading.Thread(target=log) for _ in range(3)]
        for one in threads:
            one.start()
        for _ in range(3):
            lose_connection(broker, publisher)
        for one in threads:
            one.join(60)
            assert not one.is_alive()
        until(lambda: any("connected to the broker" in said for said in handler.said))
        root_logger.removeHandler(handler)
        assert publisher.flush(30).is_flushed
    assert sum(said.startswith("line") for said in handler.said) == 300


# -------------------------------------------------------------------- a relay that fails


def test_a_relay_that_fails_is_loud(
    broker: FakeBroker,
    outbox: Where,
    front_door: FrontDoor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    turn = Relay.turn
    publisher = front_door(broker.url, outbox=outbox, close_timeout_s=0)
    try:
        receipt = publisher.publish(b"x", routing_key="nowhere")
        until(lambda: publisher.status.link is Link.CONNECTED)
        monkeypatch.setattr(Relay, "turn", Mock(side_effect=ZeroDivisionError("a bug\nof ours")))
        until(lambda: publisher.status.link is Link.FAILED)
        said = "the relay has failed: ZeroDivisionError: a bug of ours"
        assert publisher.status.reason == said
        for verb in (
            lambda: publisher.publish(b"y"),
            lambda: publisher.publish_many([Message(b"y")]),
            publisher.flush,
            receipt.result,
            publisher.close,
            publisher.close,
        ):
            with pytest.raises(PublisherFailed, match=said) as caught:
                verb()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        health = Health(lambda: publisher.status)
        because = ["the relay has failed; the log has the cause"]
        assert health.live() == (False, {"live": False, "reasons": because})
        assert health.ready()[1]["reasons"] == because
    finally:
        monkeypatch.setattr(Relay, "turn", turn)
        if isinstance(publisher, DrivenPublisher):
            publisher.let_go()
    [line] = [r for r in caplog.records if r.name == "reliablepub.relay"]
    assert line.levelno == logging.CRITICAL
    assert said in line.getMessage()
    assert line.exc_info is not None
    database = outbox_at(outbox)
    picture = Relaying.first(read_relays(database)).status
    assert (picture["link"], picture["reason"]) == ("failed", said)
    with Publisher(AWAY, outbox=outbox, close_timeout_s=0) as successor:
        assert successor.status.open == 1
        until(lambda: Relaying.first(read_relays(database)).status.get("link") == "disconnected")
    assert not Relaying.first(read_relays(database)).status
