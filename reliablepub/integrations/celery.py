"""`use_outbox`: the tasks of a Celery application leave through an outbox.

Knows: where Celery hands a finished task message to kombu, and how kombu writes it with py-amqp.
Must never know: routing, serialization, protocols of tasks, workers, results.

Celery does everything that it does without an outbox, signals included, up to
``kombu.Producer.publish``; kombu serializes and compresses. Only the channel is another one: it
stores what py-amqp would have written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

from celery import Celery
from celery.signals import beat_init
from celery.utils.objects import FallbackContext
from kombu import Exchange as KombuExchange
from kombu import Queue as KombuQueue
from kombu.common import Broadcast
from kombu.exceptions import LimitExceeded
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    MAX_LEVEL,
    level_name,
)
from kombu.utils.imports import symbol_by_name

from reliablepub import Binding, ConfigurationError, Exchange, Queue, Topology
from reliablepub.integrations import Enqueues
from reliablepub.integrations.celery_channel import channel_of

_OPTIONS: Final = ("expires", "message_ttl", "max_length", "max_length_bytes", "max_priority")


def use_outbox(app: Celery, outbox: Enqueues, *, hold_eta: bool = False) -> None:
    """Have every task that this process sends leave through an outbox.

    That is ``delay``, ``apply_async``, ``send_task``, chains, groups and chords, retries by a
    worker, and the schedule of beat. Workers need nothing; a worker whose tasks send tasks, or are
    retried, calls this as well, to store them too.

    Args:
        app: the application. Its broker URL stays: workers, remote control and results use it.
        outbox: where tasks are stored: an `Outbox` stores each at once, an outbox of SQLAlchemy or
            Django makes it part of their transaction.
        hold_eta: whether a task with an ETA or a countdown waits in the outbox, not in a worker. It
            is sent when it is due. Until then its id is its key in the outbox: `Outbox.cancel` and
            `Outbox.reschedule` reach it. The key of a retry is ``"<id> retry <number>"``.

    Raises:
        ConfigurationError: the broker of the application is not reached by AMQP.
    """
    base = app.amqp_cls.base if isinstance(app.amqp_cls, _Way) else app.amqp_cls
    app.amqp_cls = way = _Way(base, outbox, hold_eta)
    if "amqp" in vars(app):  # it was used before
        way.change(app, app.amqp)


@dataclass
class _Way:
    """Makes the part of an application that sends tasks: ``amqp_cls``. Pickled with it.

    Attributes:
        base: Celery's class, or its name.
        outbox: where tasks are stored.
        hold_eta: whether a task with an ETA waits there.
    """

    base: Any
    outbox: Enqueues
    hold_eta: bool

    def __call__(self, app: Celery) -> Any:  # noqa: ANN401 - Celery has no types
        """Make it for an application."""
        amqp = symbol_by_name(self.base)(app)
        self.change(app, amqp)
        return amqp

    def change(self, app: Celery, amqp: Any) -> None:  # noqa: ANN401
        """Put the outbox into what Celery has made."""
        amqp.__class__ = type("OutboxAMQP", (_Sending, symbol_by_name(self.base)), {})
        amqp.way = self
        vars(amqp).pop("send_task_message", None)
        app.producer_or_acquire = partial(_producer, app)


class _Sending:
    """The change to Celery's ``AMQP``."""

    app: Celery
    way: _Way
    Producer: Any
    _create_task_sender: Any

    @cached_property
    def send_task_message(self) -> Any:  # noqa: ANN401
        _check_broker(self.app)
        send = self._create_task_sender()
        producer_of: Any = type("OutboxProducer", (self.Producer,), {"maybe_declare": _not_here})

        def send_task_message(_: object, name: str, message: Any, **options: Any) -> Any:  # noqa: ANN401
            hold_in = self.app.timezone if self.way.hold_eta else None
            channel = channel_of(message, self.way.outbox, hold_in)
            producer = producer_of(channel, auto_declare=False)
            if self.way.hold_eta:
                options = _without_native_delay(options)
            # Events of monitors may have no consumer, and an outbox keeps what has none.
            message = message._replace(sent_event=None)
            return send(producer, name, message, **(options | {"retry": False}))

        return send_task_message


def _producer(app: Celery, producer: Any = None) -> Any:  # noqa: ANN401
    """Lend a producer. A thread that waits for the outbox must not hold up the one it waits for."""

    def acquired() -> Any:  # noqa: ANN401
        try:
            connection = app.pool.acquire()
        except LimitExceeded:
            connection = app.connection_for_write()
        lent = app.amqp.Producer(connection, auto_declare=False)
        lent.release = connection.release
        return lent

    return FallbackContext(producer, acquired)


def topology(app: Celery) -> Topology:
    """Return the queues of an application, for the relay: ``Publisher(topology=...)``.

    Celery's own producer declares the queue of each task. A relay declares them when it connects,
    so that tasks find their queue before a worker was ever started. A queue that is only named
    where a task is sent is declared by its worker.

    Args:
        app: the application; of its configuration, ``task_queues`` or the default queue.
    """
    exchanges: dict[str, Exchange] = {}
    queues: list[Queue] = []
    bindings: list[Binding] = []
    for queue in app.amqp.queues.values():
        if queue.exchange.name:
            exchanges[queue.exchange.name] = _exchange(queue.exchange)
        if queue.exclusive or isinstance(queue, Broadcast):
            continue  # its consumer declares it
        options = {name: getattr(queue, name) for name in _OPTIONS}
        arguments = to_rabbitmq_queue_arguments(queue.queue_arguments or {}, **options)
        queues.append(Queue(queue.name, queue.durable, queue.auto_delete, arguments))
        bindings += _bindings(queue)
    return Topology(tuple(exchanges.values()), tuple(queues), tuple(bindings))


def _exchange(exchange: KombuExchange) -> Exchange:
    return Exchange(
        exchange.name,
        exchange.type,
        durable=exchange.durable,
        auto_delete=exchange.auto_delete,
        arguments=exchange.arguments or {},
    )


def _bindings(queue: KombuQueue) -> list[Binding]:
    if not queue.exchange.name:
        return []
    arguments = queue.binding_arguments or {}
    key = queue.routing_key or ""
    return [Binding(queue.exchange.name, queue.name, routing_key=key, arguments=arguments)]


def _check_broker(app: Celery) -> None:
    transport = app.connection_for_write().transport_cls
    if transport not in {"amqp", "amqps", "pyamqp", "librabbitmq"}:
        msg = f"broker_url is of transport {transport!r}; tasks in the outbox go to RabbitMQ"
        raise ConfigurationError(msg)


def _without_native_delay(options: dict[str, Any]) -> dict[str, Any]:
    """Send a task, which Celery would delay in RabbitMQ's quorum queues, to where it comes out."""
    if getattr(options.get("exchange"), "name", None) != level_name(MAX_LEVEL):
        return options
    return options | {"exchange": CELERY_DELAYED_DELIVERY_EXCHANGE}


@beat_init.connect  # with the module, which is also imported where an application is unpickled
def _connect_no_beat(sender: Any, **_: object) -> None:  # noqa: ANN401 - beat's service
    """Spare beat the connection that it makes, and waits for, before it sends a task."""
    if isinstance(sender.app.amqp_cls, _Way):
        vars(sender.scheduler)["producer"] = None  # a cached property: what it would compute


def _not_here(*_: object, **__: object) -> bool:
    """Declare nothing: the relay is told by `topology`."""
    return False
