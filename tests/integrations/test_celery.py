"""What Celery publishes through an outbox is what its own producer publishes, to the byte."""

import copy
import itertools
import pickle
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kombu.pools
import pytest
from celery import Celery, Task, chain, chord, group, signals
from celery.app import amqp as celery_amqp
from celery.app.trace import build_tracer
from celery.beat import Scheduler, Service
from celery.exceptions import Retry
from celery.schedules import crontab
from kombu import Exchange, Queue, binding
from kombu.common import Broadcast
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
)
from kombu.utils.uuid import uuid as new_uuid
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from reliablepub import ConfigurationError, Outbox, OutboxFull, Publisher
from reliablepub.integrations.celery import topology, use_outbox
from reliablepub.integrations.sqlalchemy import SessionOutbox
from reliablepub.outbox.admin.interventions import intervene
from reliablepub.outbox.admin.scheduling import rescheduling
from reliablepub.outbox.opening import outbox_at
from reliablepub.testing import FakeBroker
from tests.integrations.engines import engine_of
from tests.waiting import until

NOW = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
ATTEMPT = struct.pack(">B10sc", 10, b"rp-attempt", b"l")
"""The header that the relay adds, without its number of 8 bytes."""
ID_BIT = 1 << 7
"""Property flag of ``message_id``."""


@pytest.fixture
def same_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have Celery's ids count from 1, in the future from 1 again."""

    def begin() -> None:
        numbers = itertools.count(1)
        defaults = (lambda: uuid.UUID(int=next(numbers)),)
        monkeypatch.setattr(new_uuid, "__defaults__", defaults)

    return begin


def make_app(url: str, protocol: int = 2) -> Celery:
    app = Celery("shop", broker=url, backend="cache+memory://", set_as_current=False)
    app.conf.update(
        task_protocol=protocol,
        task_serializer="json",
        accept_content=["json", "pickle", "yaml"],
        broker_transport_options={"confirm_publish": True},
        task_queues=[
            Queue("celery", Exchange("celery"), routing_key="celery"),
            Queue("urgent", Exchange("urgent"), routing_key="urgent", max_priority=9),
            Queue("reports", Exchange("reports", type="topic"), routing_key="report.#"),
        ],
    )
    app.now = lambda: NOW
    app._local.oid = "answers"  # of the application and the thread
    make_tasks(app)
    return app


def make_tasks(app: Celery) -> None:
    @app.task(name="add", shared=False)
    def add(x: int, y: int = 0) -> int:
        return x + y

    @app.task(name="total", shared=False)
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @app.task(name="stubborn", bind=True, max_retries=9, shared=False)
    def stubborn(self: Any, number: int) -> None:
        raise self.retry(countdown=7, kwargs={"number": number + 1})


def retry_of_celery_alone(app: Celery) -> None:
    """As a worker calls a task that wants to be tried again."""
    task = app.tasks["stubborn"]
    task.push_request(id="task-7", kwargs={"number": 1}, called_directly=False, retries=1)
    try:
        with pytest.raises(Retry):
            task.run(1)
    finally:
        task.pop_request()


def beats(app: Celery) -> None:
    """As beat sends what is due: a task by its function, and one that it only has the name of."""
    app.conf.beat_schedule = {
        "every minute": {"task": "add", "schedule": 60, "args": (1,), "kwargs": {"y": 2}},
        "later": {"task": "add", "schedule": 60, "args": (3,), "options": {"countdown": 5.5}},
        "at night": {
            "task": "reports.night",
            "schedule": crontab(hour=3, minute=30),
            "options": {"queue": "urgent", "priority": 7, "expires": 90, "headers": {"day": 5}},
        },
    }
    service = Service(app, scheduler_cls=Scheduler)
    signals.beat_init.send(sender=service)
    scheduler = service.scheduler
    for _, entry in sorted(scheduler.schedule.items()):
        scheduler.apply_entry(entry, producer=scheduler.producer)
    if "connection" in vars(scheduler):
        scheduler.connection.release()


SENT: dict[str, Callable[[Celery], object]] = {
    "delay": lambda app: app.tasks["add"].delay(1, y=2),
    "nothing but a name": lambda app: app.send_task("unknown.task", ["é", None, 1.5, 2**40]),
    "countdown": lambda app: app.tasks["add"].apply_async((1,), countdown=60),
    "eta": lambda app: app.tasks["add"].apply_async((1,), eta=NOW + timedelta(days=1)),
    "expires in seconds": lambda app: app.tasks["add"].apply_async((1,), expires=90.5),
    "expires at": lambda app: app.tasks["add"].apply_async((1,), expires=NOW + timedelta(hours=1)),
    "expired": lambda app: app.tasks["add"].apply_async((1,), expires=NOW - timedelta(hours=1)),
    "priority": lambda app: app.tasks["add"].apply_async((1,), queue="urgent", priority=9),
    "transient": lambda app: app.tasks["add"].apply_async((1,), delivery_mode=1),
    "compressed": lambda app: app.tasks["add"].apply_async((1,), compression="zlib"),
    "pickle": lambda app: app.tasks["add"].apply_async(({1},), serializer="pickle"),
    "yaml": lambda app: app.tasks["add"].apply_async((1,), serializer="yaml"),
    "links": lambda app: app.tasks["add"].apply_async(
        (1,), link=app.tasks["add"].s(2), link_error=app.tasks["add"].si(3)
    ),
    "limits": lambda app: app.tasks["add"].apply_async((1,), time_limit=9, soft_time_limit=5),
    "bytes in headers": lambda app: app.tasks["add"].apply_async(
        (1,), headers={"tenant": b"north", "depth": {"a": [b"x"]}}
    ),
    "headers": lambda app: app.tasks["add"].apply_async(
        (1,), headers={"tenant": "north", "depth": {"a": [1, None, True]}}
    ),
    "properties": lambda app: app.tasks["add"].apply_async(
        (1,),
        app_id="shop",
        type="task",
        timestamp=1_900_000_000,
        reply_to="answers",
        ignored="of ours",
    ),
    "a topic exchange": lambda app: app.tasks["add"].apply_async(
        (1,), exchange="reports", routing_key="report.daily", exchange_type="topic"
    ),
    "a queue of a topic exchange": lambda app: app.tasks["add"].apply_async((1,), queue="reports"),
    "shadow": lambda app: app.tasks["add"].apply_async((1,), shadow="plus", ignore_result=True),
    "chain": lambda app: chain(*(app.tasks["add"].s(n) for n in (1, 2, 3)), app=app)(),
    "group": lambda app: group((app.tasks["add"].s(n) for n in range(3)), app=app)(),
    "chord": lambda app: chord(
        [app.tasks["add"].s(n) for n in range(3)], app.tasks["total"].s(), app=app
    )(),
    "stamped": lambda app: app.tasks["add"].s(1).set(stamped_headers=["day"], day="5").delay(),
    "chunks": lambda app: app.tasks["add"].chunks(zip(range(4), range(4), strict=True), 2)(),
    "starmap": lambda app: app.tasks["add"].starmap([(1, 2), (3, 4)]).delay(),
    "a retry": retry_of_celery_alone,
    "beat": beats,
}


@dataclass
class Sides:
    """The broker to which both producers publish, and the outbox of one of them."""

    broker: FakeBroker
    outbox: Outbox


def sent(sides: Sides, send: Callable[[], object]) -> list[tuple[str, str, bytes, bytes]]:
    """Exchange, routing key, header frame and body of each message that came to the broker."""
    before = sides.broker.published_count
    send()
    until(lambda: sides.outbox.status().open == 0)
    publishes = list(sides.broker._node.history._publishes)[before:]
    return [(p.exchange, p.routing_key, without_ours(p.header), p.body) for p in publishes]


def without_ours(header: bytes) -> bytes:
    """The content header without what the relay adds: ``message_id``, and the attempt's number."""
    prefix = header[:12]  # class, weight, body size
    (flags,) = struct.unpack_from(">H", header, 12)
    if not flags & ID_BIT:
        return header
    at = 14
    for bit in (15, 14):  # content_type, content_encoding
        if flags & 1 << bit:
            at += 1 + header[at]
    (length,) = struct.unpack_from(">I", header, at)
    table, rest = header[at + 4 : at + 4 + length], header[at + 4 + length :]
    assert table[-19 - 1 : -8] == ATTEMPT
    table = table[: -len(ATTEMPT) - 8]
    end = 0
    for bit, size in ((12, 1), (11, 1), (10, None), (9, None), (8, None)):  # up to message_id
        if flags & 1 << bit:
            end += size or 1 + rest[end]
    rest = rest[:end] + rest[end + 1 + rest[end] :]
    flags ^= ID_BIT
    return (
        prefix
        + struct.pack(">H", flags)
        + header[14:at]
        + struct.pack(">I", len(table))
        + table
        + rest
    )


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    path = tmp_path_factory.mktemp("celery") / "app.db"
    with FakeBroker() as broker, Publisher(broker.url, outbox=path):
        broker.declare_exchange("reports", "topic")
        broker.declare_queue("celery")
        broker.declare_queue("urgent", arguments={"x-max-priority": 9})
        broker.declare_queue("reports")
        broker.bind("reports", "reports", "report.#")
        with Outbox(path) as outbox:
            outbox.create()
            yield Sides(broker, outbox)
    kombu.pools.reset()


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("case", SENT)
def test_it_is_what_celery_publishes(
    case: str, protocol: int, sides: Sides, same_again: Callable[[], None]
) -> None:
    app, ours = (make_app(sides.broker.url, protocol) for _ in range(2))
    use_outbox(ours, sides.outbox)

    same_again()
    expected = sent(sides, lambda: SENT[case](app))
    same_again()
    stored = sides.outbox.status().stored
    found = sent(sides, lambda: SENT[case](ours))
    assert found == expected
    assert len(found) == sides.outbox.status().stored - stored > 0
    assert sides.outbox.parked() == []


HELD = {
    "countdown": "2031-05-06 07:09:09",
    "eta": "2031-05-07 07:08:09",
    "a retry": "2031-05-06 07:08:16",
    "beat": "2031-05-06 07:08:14",
}
"""Until when a task is held."""


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("case", HELD)
def test_a_held_task_is_sent_as_celery_would_have(
    case: str, protocol: int, sides: Sides, same_again: Callable[[], None]
) -> None:
    app, ours = (make_app(sides.broker.url, protocol) for _ in range(2))
    use_outbox(ours, sides.outbox, hold_eta=True)
    same_again()
    expected = sent(sides, lambda: SENT[case](app))
    same_again()

    def send() -> None:
        SENT[case](ours)
        held = list(sides.outbox.rows("open"))
        assert {row["due_at"] for row in held if row["due_at"]} == {HELD[case]}
        past = rescheduling(NOW - timedelta(days=9_999), "")
        intervene(outbox_at(sides.outbox.path), [int(str(row["id"])) for row in held], past)

    assert sorted(sent(sides, send)) == sorted(expected)


def test_a_held_task_is_cancelled_and_rescheduled_by_its_id(offline: tuple[Celery, Outbox]) -> None:
    app, outbox = offline
    use_outbox(app, outbox, hold_eta=True)
    results = [app.tasks["add"].apply_async((n,), countdown=60) for n in range(2)]
    app.tasks["add"].delay(3)
    retry_of_celery_alone(app)
    assert outbox.cancel(results[0].id)
    assert outbox.reschedule(results[1].id, NOW + timedelta(days=1))
    assert outbox.cancel("task-7 retry 2")
    due = [row["due_at"] for row in outbox.rows("open")]
    assert due == ["2031-05-07 07:08:09", None]


def test_a_task_with_an_id_that_was_used_is_stored_as_well(offline: tuple[Celery, Outbox]) -> None:
    app, outbox = offline
    use_outbox(app, outbox, hold_eta=True)
    for _ in range(3):
        app.tasks["add"].apply_async((1,), countdown=60, task_id="7")
    assert outbox.status().open == 3
    assert outbox.cancel("7")
    assert outbox.status().open == 2


def test_an_eta_without_a_time_zone_is_read_as_a_worker_reads_it(
    offline: tuple[Celery, Outbox],
) -> None:
    app, outbox = offline
    app.conf.timezone = "Asia/Tokyo"
    use_outbox(app, outbox, hold_eta=True)
    app.tasks["add"].apply_async((1,), eta=datetime(2031, 1, 2, 12, 0))  # noqa: DTZ001
    (row,) = outbox.rows("open")
    assert row["due_at"] == "2031-01-02 12:00:00"


def test_what_celery_would_delay_in_quorum_queues_is_held_too(
    fake_broker: FakeBroker, path: Path
) -> None:
    app = make_app(fake_broker.url)
    queue = Queue(
        "big", Exchange("big", type="topic"), "big", queue_arguments={"x-queue-type": "quorum"}
    )
    app.amqp.queues.add(queue)
    with app.connection_for_write() as connection:  # as a worker does
        declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
        queue.bind(connection.channel()).declare()
        bind_queue_to_native_delayed_delivery_exchange(connection, queue)
    with Outbox(path) as outbox, Publisher(fake_broker.url, outbox=path) as relay:
        use_outbox(app, outbox, hold_eta=True)
        result = app.tasks["add"].apply_async((1,), queue="big", countdown=3_600)
        assert outbox.status().open == 1
        assert outbox.reschedule(result.id, datetime.now(UTC))
        relay.flush(timeout_s=60)
    assert len(fake_broker.messages("big")) == 1
    kombu.pools.reset()


def test_numbers_of_64_bits_have_the_letter_that_rabbitmq_documents(sides: Sides) -> None:
    """Letter ``l`` where py-amqp writes ``L``; the number is the same."""
    ours = make_app(sides.broker.url)
    use_outbox(ours, sides.outbox)
    sent(sides, lambda: ours.tasks["add"].apply_async((1,), headers={"big": 2**40}))
    headers = sides.broker.published[-1].properties.headers
    assert headers is not None
    assert headers["big"] == 2**40


def test_every_message_has_an_id_and_a_queue(sides: Sides) -> None:
    ours = make_app(sides.broker.url)
    use_outbox(ours, sides.outbox)
    sent(sides, lambda: [ours.tasks["add"].delay(n) for n in range(3)])
    last = sides.broker.published[-3:]
    assert all(each.mandatory for each in last)
    assert len({each.properties.message_id for each in last}) == 3


# ------------------------------------------------------------------------------ with a broker down


NOWHERE = "amqp://127.0.0.1:9"


@pytest.fixture
def offline(path: Path) -> Iterator[tuple[Celery, Outbox]]:
    """An application whose broker is down."""
    app = make_app(NOWHERE)
    with Outbox(path) as outbox:
        outbox.create()
        use_outbox(app, outbox)
        yield app, outbox
    kombu.pools.reset()


def test_tasks_are_sent_while_the_broker_is_down(offline: tuple[Celery, Outbox]) -> None:
    app, outbox = offline
    add = app.tasks["add"]
    add.delay(1)
    add.apply_async((1,), countdown=60)
    chain(add.s(1), add.s(2), app=app)()
    group([add.s(1), add.s(2)], app=app)()
    chord([add.s(1), add.s(2)], app.tasks["total"].s(), app=app)()
    retry_of_celery_alone(app)
    assert outbox.status().stored == 1 + 1 + 1 + 2 + 2 + 1
    assert outbox.audit().is_right


def test_a_retry_does_not_pass_on_the_header_of_an_attempt(
    offline: tuple[Celery, Outbox], path: Path
) -> None:
    app, outbox = offline
    task = app.tasks["stubborn"]
    headers = {"rp-attempt": 77, "tenant": "north"}
    task.push_request(id="7", kwargs={"number": 1}, called_directly=False, headers=headers)
    with pytest.raises(Retry):
        task.run(1)
    task.pop_request()
    with (
        FakeBroker() as broker,
        Publisher(broker.url, outbox=path, topology=topology(app)) as relay,
    ):
        relay.flush(timeout_s=60)
        (published,) = broker.published
    assert published.properties.headers is not None
    assert published.properties.headers["tenant"] == "north"
    assert published.properties.headers["rp-attempt"] != 77
    assert outbox.parked() == []


def test_beat_sends_while_the_broker_is_down(offline: tuple[Celery, Outbox], path: Path) -> None:
    app, outbox = offline
    app.now = lambda: datetime.now(UTC)
    app.conf.beat_schedule = {"often": {"task": "add", "schedule": 0.01, "args": (1, 2)}}
    app.conf.beat_max_loop_interval = 0.05
    service = Service(app, schedule_filename=str(path.with_name("schedule")))
    beat = threading.Thread(target=service.start)
    beat.start()
    try:
        until(lambda: outbox.status().stored >= 3)
    finally:
        service.stop()
        beat.join()


def test_a_scheduler_that_was_closed_still_needs_no_broker(
    offline: tuple[Celery, Outbox], path: Path
) -> None:
    app, _ = offline
    service = Service(app, schedule_filename=str(path.with_name("schedule")))
    signals.beat_init.send(sender=service)
    service.scheduler.close()  # as when it reads its database again
    assert service.scheduler.producer is None


def test_signals_are_sent_as_ever(offline: tuple[Celery, Outbox]) -> None:
    app, _ = offline
    heard: list[tuple[str, str]] = []

    def before(sender: str, routing_key: str, declare: list[Queue], **_: object) -> None:
        heard.append(("before", routing_key))
        assert [queue.name for queue in declare] == ["celery"]

    def after(sender: str, routing_key: str, **_: object) -> None:
        heard.append(("after", routing_key))

    signals.before_task_publish.connect(before)
    signals.after_task_publish.connect(after)
    try:
        app.tasks["add"].delay(1)
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)
    assert heard == [("before", "celery"), ("after", "celery")]


def test_a_monitors_event_of_a_task_is_not_sent(offline: tuple[Celery, Outbox]) -> None:
    app, outbox = offline
    app.conf.task_send_sent_event = True
    app.tasks["add"].delay(1)
    assert outbox.status().stored == 1


def test_the_error_of_the_outbox_reaches_the_caller(path: Path) -> None:
    app = make_app(NOWHERE)
    use_outbox(app, Outbox(path, open_messages_max=1))
    app.tasks["add"].delay(1)
    with pytest.raises(OutboxFull):
        app.tasks["add"].delay(2)
    kombu.pools.reset()


# ------------------------------------------------------------------------------------- transactions


def test_a_task_belongs_to_the_transaction(database: str, engine: Engine) -> None:
    app = make_app(NOWHERE)
    outbox = SessionOutbox(Outbox(database))
    use_outbox(app, outbox)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id integer)"))
    for number in range(4):
        with Session(engine) as session, outbox.joined(session):
            session.execute(text("INSERT INTO orders VALUES (:n)"), {"n": number})
            app.tasks["add"].delay(number)
            group([app.tasks["add"].s(1), app.tasks["add"].s(2)], app=app)()
            if number % 2:
                session.commit()
    app.tasks["add"].delay(9)
    assert outbox.outbox.status().stored == 2 * 3 + 1
    kombu.pools.reset()


ENDS: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "retry": (lambda task: task.retry(countdown=7), ["job"]),
    "replace": (lambda task: task.replace(task.app.tasks["add"].s(1)), ["add"]),
    "replace by a chain": (
        lambda task: task.replace(task.app.tasks["add"].s(1) | task.app.tasks["add"].s(2)),
        ["add"],
    ),
    "replace by a group": (
        lambda task: task.replace(group(task.app.tasks["add"].s(n) for n in range(2))),
        ["add", "add"],
    ),
    "replace by a chord": (
        lambda task: task.replace(
            chord([task.app.tasks["add"].s(1)] * 2, task.app.tasks["total"].s())
        ),
        ["add", "add"],
    ),
    "replace by a group in a chain": (
        lambda task: task.replace(
            group(task.app.tasks["add"].s(n) for n in range(2)) | task.app.tasks["total"].s()
        ),
        ["add", "add"],
    ),
}
"""Calls that end a task by an exception, and the tasks that they send."""


@pytest.mark.parametrize("is_polled", [False, True], ids=["backend counts", "backend is polled"])
@pytest.mark.parametrize("case", ENDS)
def test_what_ends_a_task_is_not_rolled_back_with_its_transaction(
    case: str,
    database: str,
    engine: Engine,
    fake_broker: FakeBroker,
    tmp_path: Path,
    *,
    is_polled: bool,
) -> None:
    """The worker acknowledges the task, which would be lost otherwise."""
    app, outbox = make_app(fake_broker.url), SessionOutbox(Outbox(database))
    use_outbox(app, outbox, hold_eta=True)
    outbox.outbox.create()
    end, sent = ENDS[case]
    if is_polled:  # a task waits for the header of a chord, and sends its body
        app.conf.result_backend = f"file://{tmp_path}"
        sent = ["celery.chord_unlock", *sent] if len(sent) > 1 else sent

    @app.task(name="job", bind=True, shared=False)
    def job(self: Any) -> None:
        with Session(engine) as session, session.begin(), outbox.joined(session):
            session.execute(text("SELECT 1"))
            app.tasks["total"].delay([1])  # of the transaction, so it is rolled back
            app.tasks["add"].apply_async((1,), task_id=self.request.id)  # so is this
            end(self)

    app.finalize()
    request = {"id": "7", "is_eager": False, "called_directly": False, "root_id": "7"}
    build_tracer("job", job, app=app)("7", (), {}, request)
    until(lambda: fake_broker.published_count == len(sent))
    headers = [each.properties.headers or {} for each in fake_broker.published]
    assert [each["task"] for each in headers] == sent
    assert outbox.outbox.status().stored == 0
    kombu.pools.reset()


def test_a_retry_that_cannot_be_stored_is_published_directly(
    path: Path, fake_broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The database may be down, which may be why; and Celery would reject the task, and lose it."""
    app, outbox = make_app(fake_broker.url), Outbox(path, open_messages_max=1)
    use_outbox(app, outbox, hold_eta=True)
    app.tasks["add"].delay(1)  # the outbox is full now

    @app.task(name="job", bind=True, shared=False)
    def job(self: Any) -> None:
        with pytest.raises(OutboxFull):
            app.tasks["add"].delay(2)
        raise self.retry(countdown=7)

    app.finalize()
    request = {"id": "7", "is_eager": False, "called_directly": False, "root_id": "7"}
    build_tracer("job", job, app=app)("7", (), {}, request)
    until(lambda: fake_broker.published_count)
    (published,) = fake_broker.published
    assert published.properties.headers is not None
    assert (published.properties.headers["id"], published.properties.headers["retries"]) == ("7", 1)
    assert "task 7 is published directly, as storing it raised OutboxFull" in caplog.text
    assert outbox.status().stored == 1
    kombu.pools.reset()


def run_as_worker(app: Celery, name: str, request: dict[str, Any]) -> None:
    """As a worker runs a task: `trace.py` sends what follows it, and takes every exception."""
    given = {"is_eager": False, "called_directly": False, "root_id": request["id"], **request}
    given["delivery_info"] = {}
    build_tracer(name, app.tasks[name], app=app)(request["id"], (1,), {}, given)


@pytest.mark.skipif(
    not hasattr(celery_amqp, "_callback_publish_retry"), reason="Celery does not say so before 5.7"
)
def test_what_follows_a_task_is_published_directly_if_it_cannot_be_stored(
    path: Path, fake_broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The task has succeeded and is acknowledged, so Celery would never send the rest again."""
    app, outbox = make_app(fake_broker.url), Outbox(path, open_messages_max=2)
    use_outbox(app, outbox)
    app.finalize()
    body = app.signature("body of its chord")
    parts = chord([app.tasks["add"].s(n) for n in range(2)], body, app=app)().parent
    for part in parts.results:  # the outbox is full of them
        request = {"id": part.id, "group": parts.id, "chord": app.signature("body of its chord")}
        request["callbacks"] = [app.signature("its link")]
        request["chain"] = [app.signature("last of its chain"), app.signature("next of its chain")]
        run_as_worker(app, "add", request)
    expected = [*["its link", "next of its chain"] * 2, "body of its chord"]
    until(lambda: fake_broker.published_count == len(expected))
    published = [each.properties.headers or {} for each in fake_broker.published]
    assert [each["task"] for each in published] == expected
    assert caplog.text.count("is published directly, as storing it raised OutboxFull") == 5
    assert [part.state for part in parts.results] == ["SUCCESS", "SUCCESS"]
    assert outbox.status().stored == 2
    kombu.pools.reset()


def test_what_follows_a_task_belongs_to_a_transaction_that_is_still_open(
    database: str, engine: Engine
) -> None:
    """Of a `task_prerun` signal, which a `task_postrun` signal commits."""
    app, outbox = make_app(NOWHERE), SessionOutbox(Outbox(database))
    use_outbox(app, outbox)
    app.finalize()
    outbox.outbox.create()
    with Session(engine) as session, session.begin(), outbox.joined(session):
        run_as_worker(app, "add", {"id": "7", "chain": [app.signature("next of its chain")]})
        assert outbox.outbox.status().stored == 0
    assert outbox.outbox.status().stored == 1
    kombu.pools.reset()


def test_what_follows_a_failed_task_is_published_directly_if_it_cannot_be_stored(
    path: Path, fake_broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The database may be down, which may be why it failed; Celery would only log the error."""
    app, outbox = make_app(fake_broker.url), Outbox(path, open_messages_max=2)
    use_outbox(app, outbox)

    @app.task(name="broken", shared=False)
    def broken(_: int) -> None:
        with pytest.raises(OutboxFull):
            app.tasks["add"].delay(2)
        raise ZeroDivisionError

    app.finalize()
    app.tasks["add"].delay(1)
    body = app.signature("body of its chord").set(task_id="8")
    body.on_error(app.signature("errback of its chord"))
    parts = chord([broken.s(1)], body, app=app)().parent  # the outbox is full now
    request = {"id": parts.results[0].id, "group": parts.id, "chord": body}
    run_as_worker(app, "broken", {**request, "errbacks": [app.signature("its errback")]})
    until(lambda: fake_broker.published_count == 2)
    published = [each.properties.headers or {} for each in fake_broker.published]
    assert [each["task"] for each in published] == ["errback of its chord", "its errback"]
    assert caplog.text.count("is published directly, as storing it raised OutboxFull") == 2
    assert outbox.status().stored == 2
    kombu.pools.reset()


def test_what_follows_a_failed_task_is_not_rolled_back_with_its_transaction(
    database: str, engine: Engine, fake_broker: FakeBroker
) -> None:
    """Of a `task_prerun` signal, which a `task_postrun` signal rolls back."""
    app, outbox = make_app(fake_broker.url), SessionOutbox(Outbox(database))
    use_outbox(app, outbox)

    @app.task(name="broken", shared=False)
    def broken(_: int) -> None:
        app.tasks["add"].delay(1)  # of the transaction, so it is rolled back
        raise ZeroDivisionError

    app.finalize()
    outbox.outbox.create()
    with Session(engine) as session, session.begin(), outbox.joined(session):
        run_as_worker(app, "broken", {"id": "7", "errbacks": [app.signature("its errback")]})
        session.rollback()
    until(lambda: fake_broker.published_count == 1)
    assert [(each.properties.headers or {})["task"] for each in fake_broker.published] == [
        "its errback"
    ]
    assert outbox.outbox.status().stored == 0
    kombu.pools.reset()


@pytest.mark.parametrize("is_rolled_back", [False, True], ids=["committed", "rolled back"])
@pytest.mark.parametrize("way", ["called", "called by its class", "applied"])
def test_what_an_errback_sends_belongs_to_its_transaction(
    way: str, database: str, engine: Engine, fake_broker: FakeBroker, *, is_rolled_back: bool
) -> None:
    """Celery may run its body within the code that otherwise sends the errback."""
    app, outbox = make_app(fake_broker.url), SessionOutbox(Outbox(database))
    use_outbox(app, outbox)

    class Own(Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    def compensate(*_: object) -> None:
        with Session(engine) as session, session.begin(), outbox.joined(session):
            app.tasks["add"].delay(5)
            if is_rolled_back:
                session.rollback()

    @app.task(name="broken", shared=False)
    def broken(_: int) -> None:
        raise ZeroDivisionError

    @app.task(name="called", base=Own if way == "called by its class" else Task, shared=False)
    def called(request: Any, error: Any, traceback: Any) -> None:
        compensate(request, error, traceback)

    @app.task(name="applied", shared=False)
    def applied(id_: str) -> None:
        compensate(id_)

    app.finalize()
    outbox.outbox.create()
    if way == "applied":
        broken.apply((1,), link_error=applied.s(), throw=False)
    else:
        run_as_worker(app, "broken", {"id": "7", "errbacks": [called.s()]})
    assert outbox.outbox.status().stored == (0 if is_rolled_back else 1)
    assert fake_broker.published_count == 0
    kombu.pools.reset()


# ------------------------------------------------------------------------------------ configuration


def test_it_may_be_called_at_any_time_and_again(path: Path) -> None:
    app = make_app(NOWHERE)
    assert app.amqp.queues
    assert app.amqp.send_task_message
    use_outbox(app, Outbox(path))
    app.tasks["add"].delay(1)
    other = Outbox(path.with_name("other.db"))
    use_outbox(app, other)
    app.tasks["add"].delay(2)
    assert (Outbox(path).status().stored, other.status().stored) == (1, 1)
    kombu.pools.reset()


def test_a_copy_of_an_application_has_its_own_outbox(path: Path) -> None:
    app = make_app(NOWHERE)
    use_outbox(app, Outbox(path))
    other = Outbox(path.with_name("other.db"))
    use_outbox(copy.copy(app), other)
    app.tasks["add"].delay(1)
    assert Outbox(path).status().stored == 1
    kombu.pools.reset()


@pytest.mark.parametrize("was_used", [True, False], ids=["used", "new"])
def test_threads_that_wait_for_the_outbox_hold_up_no_other(path: Path, *, was_used: bool) -> None:
    """They hold Celery's connections, and wait for the transaction that sends the next task."""
    app, outbox = make_app(NOWHERE), SessionOutbox(Outbox(path))
    app.conf.broker_pool_limit = 2
    if was_used:
        assert app.amqp.send_task_message
    use_outbox(app, outbox)
    outbox.outbox.create()
    engine = engine_of(str(path))
    with Session(engine) as session, session.begin(), outbox.joined(session):
        app.tasks["add"].delay(0)
        others = [threading.Thread(target=app.tasks["add"].delay, args=(n,)) for n in range(3)]
        for other in others:
            other.start()
        until(app.pool._resource.empty)
        group([app.tasks["add"].s(1), app.tasks["add"].s(2)], app=app)()
        assert all(other.is_alive() for other in others), "they have given up"
    for other in others:
        other.join()
    assert outbox.outbox.status().stored == 1 + 2 + 3
    engine.dispose()
    kombu.pools.reset()


def test_a_task_is_also_published_directly_when_all_connections_are_lent(
    fake_broker: FakeBroker, path: Path
) -> None:
    """By an application's own `with app.producer_or_acquire()`."""
    app = make_app(fake_broker.url)
    app.conf.broker_pool_limit = 1
    use_outbox(app, Outbox(path))
    fake_broker.declare_queue("direct")
    with app.producer_or_acquire() as first, app.producer_or_acquire() as second:
        assert first is not second
        second.publish({}, routing_key="direct", exchange="")
        until(lambda: len(fake_broker.messages("direct")) == 1)
        assert second.connection.connected
    assert not second.connection.connected
    with app.producer_or_acquire() as again, app.producer_or_acquire(again) as given:
        assert again.connection is first.connection
        assert given is again
    kombu.pools.reset()


SPAWNED = """
import pickle, sys
app = pickle.load(sys.stdin.buffer)
app.send_task("held", countdown=60, task_id="7")
app.send_task("add")
"""


@pytest.mark.parametrize("was_used", [True, False], ids=["used", "new"])
def test_an_application_is_pickled_with_its_outbox(path: Path, *, was_used: bool) -> None:
    app = make_app(NOWHERE)
    if was_used:
        assert app.amqp.send_task_message
    use_outbox(app, SessionOutbox(Outbox(path, open_messages_max=2)), hold_eta=True)
    pickled = pickle.dumps(app)
    subprocess.run([sys.executable, "-c", SPAWNED], input=pickled, check=True)
    assert [bool(row["due_at"]) for row in Outbox(path).rows("open")] == [True, False]
    with pytest.raises(OutboxFull):
        pickle.loads(pickled).send_task("add")
    assert Outbox(path).cancel("7")
    kombu.pools.reset()


def test_a_task_of_an_unpickled_application_belongs_to_the_transaction(path: Path) -> None:
    app, outbox, engine = make_app(NOWHERE), SessionOutbox(Outbox(path)), engine_of(str(path))
    use_outbox(app, outbox)
    again = pickle.loads(pickle.dumps(app))
    outbox.outbox.create()
    with Session(engine) as session, outbox.joined(session):
        again.send_task("add")
        session.rollback()
    assert outbox.outbox.status().stored == 0
    engine.dispose()
    kombu.pools.reset()


def test_another_broker_than_rabbitmq_is_refused(path: Path) -> None:
    said = r"memory.* reliablepub\.testing\.FakeBroker"
    app = make_app("memory://")
    app.finalize()
    with pytest.raises(ConfigurationError, match=said):  # it has read its configuration
        use_outbox(app, Outbox(path))
    app = Celery("shop", broker="memory://", set_as_current=False)
    with pytest.raises(ConfigurationError, match=said):
        use_outbox(app, Outbox(path))
    app = Celery("shop", set_as_current=False)
    app.config_from_object(SimpleNamespace(broker_url="memory://"))
    use_outbox(app, Outbox(path))
    with pytest.raises(ConfigurationError, match=said):
        app.send_task("add")
    app = Celery("shop", broker=["redis://localhost"], set_as_current=False)  # redis is not here
    with pytest.raises(ConfigurationError, match="transport 'redis'"):
        use_outbox(app, Outbox(path))
    kombu.pools.reset()
    with pytest.raises(ConfigurationError, match="outbox is of type PosixPath; give an Outbox"):
        use_outbox(app, path)  # type: ignore[arg-type]


def test_the_relay_declares_what_celery_would(fake_broker: FakeBroker, path: Path) -> None:
    """First the relay, then Celery's own producer: each argument has to be the same."""
    app = make_app(fake_broker.url)
    queues = app.amqp.queues
    queues.add(Queue("kept", Exchange("kept"), "kept", message_ttl=60, max_length=5, expires=600))
    queues.add(
        Queue("big", Exchange("big"), "big", queue_arguments={"x-overflow": "reject-publish"})
    )
    queues.add(Queue("plain", Exchange(""), "plain"))
    queues.add(Broadcast("everywhere"))
    declared = topology(app)
    assert [queue.name for queue in declared.queues] == [
        *("celery", "urgent", "reports", "kept", "big", "plain")
    ]
    assert "everywhere" in [exchange.name for exchange in declared.exchanges]
    with Publisher(fake_broker.url, outbox=path, topology=declared) as relay:
        relay.flush(timeout_s=60)
    for queue in declared.queues:
        app.tasks["add"].apply_async((1,), queue=queue.name)
        assert fake_broker.messages(queue.name)
    kombu.pools.reset()


def test_the_relay_declares_each_binding_and_nothing_that_celery_would_not(path: Path) -> None:
    app = make_app(NOWHERE)
    events = Exchange("events", type="topic")
    app.conf.task_queues = [
        Queue("several", [binding(events, "a.#"), binding(events, "b.#", {"x-match": "all"})]),
        Queue("theirs", Exchange("theirs"), "theirs", no_declare=True),
        Queue("built in", Exchange("amq.topic", type="topic"), "x.#"),
        Queue("of them", Exchange("fixed", type="topic", no_declare=True), "y.#"),
    ]
    declared = topology(app)
    default = app.conf.task_default_queue
    assert {each.name for each in declared.queues} == {"several", "built in", "of them"}
    assert {each.name for each in declared.exchanges} == {"events", default}
    assert {(each.exchange, each.queue, each.routing_key) for each in declared.bindings} == {
        ("events", "several", "a.#"),
        ("events", "several", "b.#"),
        (default, "several", default),
        ("amq.topic", "built in", "x.#"),
        ("fixed", "of them", "y.#"),
    }
