"""`use_outbox`: stores in an outbox the tasks that a Celery application sends.

Knows: where Celery hands a finished task message to kombu, and which messages end the running task.
Must never know: routing, serialization, workers, results.

Celery runs unchanged, signals included, up to ``kombu.Producer.publish``, and kombu serializes and
compresses. Only the channel is replaced: it stores the message that py-amqp would have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from traceback import walk_stack
from typing import Any, Final

from celery import Celery
from celery.app import amqp as celery_amqp
from celery.app.task import Task
from celery.backends.base import Backend
from celery.canvas import Signature
from celery.signals import beat_init
from celery.utils.objects import FallbackContext
from kombu import Exchange as KombuExchange
from kombu import Queue as KombuQueue
from kombu import binding as KombuBinding  # noqa: N812 - it is a class
from kombu.common import Broadcast
from kombu.entity import INTERNAL_EXCHANGE_PREFIX
from kombu.exceptions import LimitExceeded
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    MAX_LEVEL,
    level_name,
)
from kombu.utils.imports import symbol_by_name

from reliablepub import Binding, ConfigurationError, Exchange, Queue, Topology
from reliablepub.integrations import Enqueues, warn_of_direct
from reliablepub.integrations.celery_channel import channel_of, fields_of, nesting_of

_OPTIONS: Final = ("expires", "message_ttl", "max_length", "max_length_bytes", "max_priority")
_FOLLOWS: Final[ContextVar[bool]] = getattr(
    celery_amqp, "_callback_publish_retry", ContextVar("never_set", default=False)
)
"""Whether Celery sends what follows a task that has succeeded. It does not say so before 5.7."""
_ERRBACKS: Final = getattr(getattr(Backend, "_call_task_errbacks", None), "__code__", None)
"""The code that sends what follows a task or a chord that has failed: `_follows_failure`."""
_BODIES: Final = (Signature.__call__.__code__, Task.apply.__code__)
"""The code by which Celery runs an errback at once instead: its body sends tasks of its own."""


def use_outbox(app: Celery, outbox: Enqueues, *, hold_eta: bool = False) -> None:
    """Store in an outbox every task that this process sends.

    Covers ``delay``, ``apply_async``, ``send_task``, chains, groups and chords, retries by a
    worker, and the schedule of beat. Workers need no change. A worker whose tasks send or retry
    tasks calls this too, to store those as well.

    ``self.retry()`` and ``self.replace()`` raise, which rolls back the transaction of the task.
    Within a joined transaction, their tasks are therefore published directly, as without an outbox.
    So are the errbacks (``link_error``) of a failed task, if its transaction is still open. A
    worker also publishes these tasks, and those that follow a task (links, the rest of a chain, the
    body of a chord), directly if they cannot be stored, for instance because the database is down.

    Args:
        app: the application. Its broker URL stays: workers, remote control and results use it. It
            must use AMQP, or sending a task raises `ConfigurationError`; so does this function if
            the application has already read its configuration.
        outbox: stores the tasks: an `Outbox` stores each at once, an outbox of SQLAlchemy or Django
            as part of its transaction.
        hold_eta: whether a task with an ETA or a countdown waits in the outbox, not in a worker. It
            is sent when due. Until then, the task id is its key in the outbox, for `Outbox.cancel`
            and `Outbox.reschedule`. The key of a retry is ``"<id> retry <number>"``.

    Raises:
        ConfigurationError: ``outbox`` cannot store messages, or the broker does not use AMQP.
    """
    if not hasattr(outbox, "enqueue"):
        kind = type(outbox).__name__
        raise ConfigurationError(f"outbox is of type {kind}; give an Outbox, or a framework's")
    if app.configured:
        _check_broker(app)
    else:  # not `conf`, which would load the rest, perhaps before Django's settings
        _check_transport(vars(app).get("_preconf", {}).get("broker_url"))
    base = app.amqp_cls.base if isinstance(app.amqp_cls, _Way) else app.amqp_cls
    app.amqp_cls = way = _Way(base, outbox, hold_eta)
    if "amqp" in vars(app):  # a cached property, already computed
        way.change(app, app.amqp)


@dataclass
class _Way:
    """The factory of the part of an application that sends tasks (``amqp_cls``); pickled with it.

    Attributes:
        base: Celery's class, or its name.
        outbox: stores the tasks.
        hold_eta: whether a task with an ETA waits in the outbox.
    """

    base: Any
    outbox: Enqueues
    hold_eta: bool

    def __call__(self, app: Celery) -> Any:  # noqa: ANN401 - Celery has no types
        """Make Celery's ``AMQP`` for an application, and change it."""
        amqp = symbol_by_name(self.base)(app)
        self.change(app, amqp)
        return amqp

    def change(self, app: Celery, amqp: Any) -> None:  # noqa: ANN401
        """Make Celery's ``AMQP`` store tasks in the outbox."""
        amqp.__class__ = type("OutboxAMQP", (_Sending, symbol_by_name(self.base)), {})
        amqp.way = self
        vars(amqp).pop("send_task_message", None)
        app.producer_or_acquire = partial(_producer, app)


class _Sending:
    """The methods of Celery's ``AMQP`` that differ with an outbox."""

    app: Celery
    way: _Way
    Producer: Any
    _create_task_sender: Any

    @cached_property
    def send_task_message(self) -> Any:  # noqa: ANN401
        _check_broker(self.app)
        send = self._create_task_sender()
        producer_of: Any = type("OutboxProducer", (self.Producer,), {"maybe_declare": _not_here})

        def store(name: str, message: Any, options: dict[str, Any]) -> Any:  # noqa: ANN401
            hold_in = self.app.timezone if self.way.hold_eta else None
            channel = channel_of(message, self.way.outbox, hold_in)
            producer = producer_of(channel, auto_declare=False)
            if self.way.hold_eta:
                options = _without_native_delay(options)
            # Events for monitors may have no consumer, and an outbox would park them as unroutable.
            message = message._replace(sent_event=None)
            return send(producer, name, message, **(options | {"retry": False}))

        def send_task_message(given: Any, name: str, message: Any, **options: Any) -> Any:  # noqa: ANN401
            ends = _ends_task(self.app, message) or _follows_failure()
            if not (ends or _FOLLOWS.get()):
                return store(name, message, options)
            # The worker acknowledges the running task next, so this one must not be lost. The
            # exception with which the running task has failed, or with which a retry ends it, rolls
            # back an open transaction.
            if not (ends and getattr(self.way.outbox, "is_joined", False)):
                try:
                    return store(name, message, options)
                except Exception as error:  # noqa: BLE001 - of any database
                    warn_of_direct(fields_of(message)["id"], error)
            return send(given, name, message, **options)

        return send_task_message


def _ends_task(app: Celery, message: Any) -> bool:  # noqa: ANN401
    """Whether a message is a retry of the task that a worker runs now, or replaces it."""
    task = app.current_worker_task
    if task is None:
        return False
    fields, request = fields_of(message), task.request
    is_retry = fields["id"] == request.id and fields["retries"] > (request.retries or 0)
    return is_retry or nesting_of(message) > (request.get("replaced_task_nesting") or 0)


def _follows_failure() -> bool:
    """Whether Celery sends the errback of a task that has failed, which it says nowhere else."""
    for frame, _ in walk_stack(None):  # from the inside
        if frame.f_code is _ERRBACKS:
            return True
        if frame.f_code in _BODIES:
            return False
    return False


def _producer(app: Celery, producer: Any = None) -> Any:  # noqa: ANN401
    """Lend a producer, with a connection of its own if the pool is exhausted.

    A thread that waits for the outbox must not block the thread that it waits for.
    """

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

    Celery's own producer declares the queue of each task. With an outbox, the relay declares them
    when it connects, so that tasks are routed even before any worker has started. A queue named
    only in ``task_routes`` or in a call that sends a task is declared by its worker.

    Args:
        app: the application, whose ``task_queues`` or default queue are returned.
    """
    exchanges: dict[str, Exchange] = {}
    queues: list[Queue] = []
    bindings: list[Binding] = []
    for queue in app.amqp.queues.values():
        if queue.no_declare:
            continue
        bound = _bindings_of(queue)
        for exchange in (one.exchange for one in bound):
            if not _is_theirs(exchange):
                exchanges[exchange.name] = _exchange(exchange)
        if queue.exclusive or isinstance(queue, Broadcast):
            continue  # its consumer declares it
        options = {name: getattr(queue, name) for name in _OPTIONS}
        arguments = to_rabbitmq_queue_arguments(queue.queue_arguments or {}, **options)
        queues.append(Queue(queue.name, queue.durable, queue.auto_delete, arguments))
        bindings += [_binding(queue.name, one) for one in bound]
    return Topology(tuple(exchanges.values()), tuple(queues), tuple(bindings))


def _is_theirs(exchange: KombuExchange) -> bool:
    """Whether an exchange exists without Celery, which never declares it: ``amq.topic``."""
    return bool(exchange.no_declare) or exchange.name.startswith(INTERNAL_EXCHANGE_PREFIX)


def _exchange(exchange: KombuExchange) -> Exchange:
    return Exchange(
        exchange.name,
        exchange.type,
        durable=exchange.durable,
        auto_delete=exchange.auto_delete,
        arguments=exchange.arguments or {},
    )


def _bindings_of(queue: KombuQueue) -> list[KombuBinding]:
    main = KombuBinding(queue.exchange, queue.routing_key, queue.binding_arguments)
    return [one for one in (main, *queue.bindings) if one.exchange and one.exchange.name]


def _binding(queue: str, bound: KombuBinding) -> Binding:
    arguments = bound.arguments or {}
    return Binding(
        bound.exchange.name, queue, routing_key=bound.routing_key or "", arguments=arguments
    )


def _check_broker(app: Celery) -> None:
    _check_transport(app.conf.broker_transport or app.conf.broker_write_url)


def _check_transport(url: str | Sequence[str] | None) -> None:
    """Check the scheme of a broker's URL, several URLs, or None for Celery's default."""
    first = (url if isinstance(url, str) else next(iter(url or ()), "")) or "amqp"
    transport = first.partition(";")[0].partition("://")[0]
    if transport not in {"amqp", "amqps", "pyamqp", "librabbitmq"}:
        msg = f"broker_url is of transport {transport!r}; tasks in the outbox go to RabbitMQ"
        if transport == "memory":
            msg += ". In a test, take the URL of reliablepub.testing.FakeBroker"
        raise ConfigurationError(msg)


def _without_native_delay(options: dict[str, Any]) -> dict[str, Any]:
    """Skip Celery's delay in RabbitMQ's quorum queues: send the task to their last exchange."""
    if getattr(options.get("exchange"), "name", None) != level_name(MAX_LEVEL):
        return options
    return options | {"exchange": CELERY_DELAYED_DELIVERY_EXCHANGE}


@beat_init.connect  # when this module is imported, which unpickling an application does too
def _connect_no_beat(sender: Any, **_: object) -> None:  # noqa: ANN401 - beat's service
    """Spare beat the broker connection that it opens, and waits for, before it sends a task."""
    if isinstance(sender.app.amqp_cls, _Way):
        # Of the class: `close`, after which beat may go on, drops what the scheduler itself has.
        kind = type(sender.scheduler)
        sender.scheduler.__class__ = type(kind.__name__, (kind,), {"producer": None})


def _not_here(*_: object, **__: object) -> bool:
    """Declare nothing: the relay declares `topology`."""
    return False
