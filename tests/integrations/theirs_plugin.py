"""A pytest plugin in the frameworks' own test runs: puts our producer in place of theirs.

Knows: `THEIRS`, the framework; `THEIRS_URL`, the broker; `THEIRS_OUTBOX`, the outbox, empty to
leave their producer where it is.
"""

import functools
import os
import sys
from types import ModuleType
from typing import Any
from unittest import mock

from reliablepub import Message, Outbox, Publisher

FRAMEWORK = os.environ["THEIRS"]
URL = os.environ["THEIRS_URL"]
OUTBOX = os.environ["THEIRS_OUTBOX"]


class Flushed:
    """Stores, and has the relay publish at once: their tests look into queues right away.

    A worker that was forked stores for the relay of its parent.
    """

    def __init__(self) -> None:
        self._outbox = Outbox(OUTBOX)
        self._publisher = Publisher(URL, outbox=OUTBOX)
        self._pid = os.getpid()

    def enqueue(self, message: Message, *, key: str | None = None) -> str:
        stored = self._outbox.enqueue(message, key=key)
        if os.getpid() == self._pid:
            self._publisher.flush(timeout_s=5)
        return stored


class InMemory:
    """Publishes to the broker in memory of Celery's unit tests: to where the relay would."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it without its application, which holds it: one that is unpickled gets its own."""
        return InMemory, (None,)

    def enqueue(self, message: Message, *, key: str | None = None) -> str:
        with self._app.connection_for_write() as connection:
            channel = connection.default_channel
            properties = {
                name: getattr(message, name)
                for name in ("correlation_id", "reply_to")
                if getattr(message, name) is not None
            }
            prepared = channel.prepare_message(
                message.body,
                priority=message.priority,
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                headers=dict(message.headers or {}),
                properties=properties,
            )
            channel.basic_publish(prepared, message.exchange, message.routing_key)
        return message.message_id or ""


def celery_with(outbox_of: Any) -> None:
    from celery import Celery  # noqa: PLC0415

    from reliablepub.integrations.celery import use_outbox  # noqa: PLC0415

    made = Celery.__init__

    @functools.wraps(made)
    def make(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        use_outbox(self, outbox_of(self))

    Celery.__init__ = make


def celery() -> None:
    if OUTBOX:
        flushed = Flushed()
        celery_with(lambda _: flushed)


def celery_memory() -> None:
    from reliablepub.integrations import celery as ours  # noqa: PLC0415

    if OUTBOX:
        ours._check_broker = lambda app: None
        show_mocks(ours._Sending)
        celery_with(InMemory)


def show_mocks(sending: Any) -> None:
    """Let a test that passes in a producer with a mock of `publish` see what ours publishes."""
    made = sending.send_task_message.func

    def send_task_message(self: Any) -> Any:
        send = made(self)

        def shown(producer: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(producer.publish, mock.NonCallableMock):
                return send(producer, *args, **options)
            with mock.patch.object(self.Producer, "publish", producer.publish):
                return send(producer, *args, **options)

        return shown

    sending.send_task_message = functools.cached_property(send_task_message)
    sending.send_task_message.__set_name__(sending, "send_task_message")


def dramatiq() -> None:
    for name in ("pylibmc", "redis"):  # of their other tests
        sys.modules.setdefault(name, ModuleType(name))
    import pika  # noqa: PLC0415
    from dramatiq.brokers import rabbitmq  # noqa: PLC0415

    from reliablepub.integrations.dramatiq import OutboxBroker  # noqa: PLC0415

    pika.connection.Parameters.DEFAULT_PORT = pika.URLParameters(URL).port
    if not OUTBOX:
        return
    flushed = Flushed()

    class Broker(OutboxBroker):
        def __init__(self, **options: Any) -> None:
            super().__init__(flushed, **options)

    rabbitmq.RabbitmqBroker = Broker  # type: ignore[misc]


def taskiq() -> None:
    import taskiq_aio_pika  # noqa: PLC0415
    from taskiq_aio_pika import broker  # noqa: PLC0415

    from reliablepub.integrations.taskiq import OutboxBroker  # noqa: PLC0415

    if not OUTBOX:
        return
    flushed = Flushed()

    class Broker(OutboxBroker):
        def __init__(self, url: str | None = None, **options: Any) -> None:
            super().__init__(flushed, url=url, **options)

    broker.AioPikaBroker = taskiq_aio_pika.AioPikaBroker = Broker  # type: ignore[assignment,misc]


{"celery": celery, "celery-memory": celery_memory, "dramatiq": dramatiq, "taskiq": taskiq}[
    FRAMEWORK
]()
