"""Traces: a caller's context reaches consumers, and every attempt is a span that links to it."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.baggage import get_all, set_baggage
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context, attach, detach
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import (
    Getter,
    Setter,
    TextMapPropagator,
    default_getter,
    default_setter,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from reliablepub import AsyncPublisher, ConfigurationError, Message, Outbox, Publisher
from reliablepub.hooks import Watched
from reliablepub.message import HEADER_BYTES_MAX
from reliablepub.observe.tracing import Tracing
from reliablepub.testing import FakeBroker, faults
from tests.policies import AT_ONCE
from tests.sqlite import sql


class Exported:
    """An application's OpenTelemetry, and what it has exported."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("application")

    def attempts(self) -> Sequence[ReadableSpan]:
        """The spans of attempts, as they have ended."""
        return [span for span in self._exporter.get_finished_spans() if span.kind.name == "CLIENT"]


@pytest.fixture
def exported() -> Iterator[Exported]:
    exported = Exported()
    yield exported
    exported.provider.shutdown()


@pytest.fixture
def tracing(exported: Exported) -> Tracing:
    return Tracing(tracer_provider=exported.provider, propagator=TraceContextTextMapPropagator())


class Prefixing(TextMapPropagator):
    """Writes each item of baggage into a header of its own, as Jaeger's propagator does."""

    def inject(
        self, carrier: Any, context: Context | None = None, setter: Setter[Any] = default_setter
    ) -> None:
        for name, value in get_all(context).items():
            setter.set(carrier, f"uberctx-{name}", str(value))

    def extract(
        self, carrier: Any, context: Context | None = None, getter: Getter[Any] = default_getter
    ) -> Context:
        found = Context() if context is None else context
        for name in getter.keys(carrier):
            if name.startswith("uberctx-"):
                values = getter.get(carrier, name)
                assert values is not None, "of a name that it has told"
                found = set_baggage(name.removeprefix("uberctx-"), values[0], found)
        return found

    @property
    def fields(self) -> set[str]:
        return set()


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def ids(context: SpanContext) -> tuple[int, int]:
    return context.trace_id, context.span_id


def consumed(broker: FakeBroker) -> list[tuple[int, int]]:
    """The contexts from which consumers of `q` go on."""
    found = []
    for message in broker.messages("q"):
        headers: Any = message.properties.headers
        context = TraceContextTextMapPropagator().extract(headers)
        found.append(ids(trace.get_current_span(context).get_span_context()))
    return found


def test_an_attempt_is_a_span_of_its_own_that_links_to_the_caller(
    broker: FakeBroker, exported: Exported, tracing: Tracing
) -> None:
    headers = {"mine": 1}
    with (
        Publisher(broker.url, outbox=None, hooks=[tracing]) as publisher,
        exported.tracer.start_as_current_span("checkout") as caller,
    ):
        receipt = publisher.publish(b"x", routing_key="q", headers=headers)
        receipt.result(30)
        publisher.flush(30)
    context = caller.get_span_context()
    assert headers == {"mine": 1}
    assert consumed(broker) == [ids(context)]
    (span,) = exported.attempts()
    assert span.name == "publish amq.default"
    assert span.parent is None
    assert links(span) == [ids(context)]
    assert span.context is not None
    assert span.context.trace_id != context.trace_id
    assert span.attributes == {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "q",
        "messaging.rabbitmq.destination.routing_key": "q",
        "messaging.rabbitmq.message.delivery_tag": 1,
        "messaging.message.id": receipt.message_id,
        "server.address": "127.0.0.1",
        "server.port": broker.port,
        "reliablepub.outcome": "confirmed",
        "reliablepub.attempt": 1,
    }
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time < span.end_time


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_ipv6_address_is_told_without_the_brackets_of_a_url(
    exported: Exported, tracing: Tracing
) -> None:
    broker = FakeBroker(host="::1")
    try:
        broker.start()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with broker, Publisher(broker.url, outbox=None, hooks=[tracing]) as publisher:
        broker.declare_queue("q")
        publisher.publish(b"x", routing_key="q").result(30)
        publisher.flush(30)
        assert publisher.status.server == f"[::1]:{broker.port}"
    (span,) = exported.attempts()
    assert span.attributes is not None
    assert span.attributes["server.address"] == "::1"
    assert span.attributes["server.port"] == broker.port


def test_each_publisher_has_its_own(
    broker: FakeBroker, exported: Exported, tracing: Tracing
) -> None:
    """It names the broker of the publisher in the spans."""
    with FakeBroker() as other:
        other.declare_queue("q")
        with Publisher(broker.url, outbox=None, hooks=[tracing]) as publisher:
            with pytest.raises(ConfigurationError, match="in use by another publisher"):
                Publisher(other.url, outbox=None, hooks=[tracing])
            publisher.publish(b"x", routing_key="q").result(30)
        with Publisher(other.url, outbox=None, hooks=[tracing]) as publisher:  # the first has ended
            publisher.publish(b"x", routing_key="q").result(30)
        ports = [(span.attributes or {})["server.port"] for span in exported.attempts()]
        assert ports == [broker.port, other.port]


def test_a_publisher_that_could_not_be_opened_leaves_its_tracing_free(
    broker: FakeBroker, tracing: Tracing
) -> None:
    class Refuses:
        def watch(self, _publisher: Watched) -> None:
            raise ConfigurationError("in use elsewhere")

    with pytest.raises(ConfigurationError, match="elsewhere"):
        Publisher(broker.url, outbox=None, hooks=[tracing, Refuses()])
    Publisher(broker.url, outbox=None, hooks=[tracing]).close()


def test_attempts_that_fail_say_how(
    broker: FakeBroker, exported: Exported, tracing: Tracing
) -> None:
    broker.inject(faults.DropConnection())
    with (
        Publisher(broker.url, outbox=None, retry=AT_ONCE, hooks=[tracing]) as publisher,
        exported.tracer.start_as_current_span("checkout") as caller,
    ):
        publisher.publish(b"x", routing_key="q").result(60)  # uncertain, then confirmed
        for message in (
            Message(b"x", exchange="amq.topic", routing_key="order.17"),
            Message(b"x", exchange="no-such"),
        ):
            publisher.publish_many([message]).wait(30)
        publisher.flush(30)
    spans = exported.attempts()
    assert all(links(span) == [ids(caller.get_span_context())] for span in spans)
    told = [
        (
            span.name,
            (span.attributes or {}).get("messaging.destination.name"),
            (span.attributes or {}).get("reliablepub.attempt"),
            (span.attributes or {}).get("error.type"),
        )
        for span in spans
    ]
    assert told == [
        ("publish amq.default", "q", 1, "uncertain"),
        ("publish amq.default", "q", 2, None),
        ("publish amq.topic", "amq.topic:order.17", 1, "returned"),
        ("publish no-such", "no-such", 1, "refused"),
    ]
    assert [span.status.status_code for span in spans] == [
        StatusCode.ERROR,
        StatusCode.UNSET,
        StatusCode.ERROR,
        StatusCode.ERROR,
    ]
    assert spans[2].status.description == "312 NO_ROUTE"
    assert (spans[3].status.description or "").startswith("404 NOT_FOUND")


def test_streams_and_asyncio_carry_the_context_of_their_caller(
    broker: FakeBroker, exported: Exported, tracing: Tracing
) -> None:
    callers = []

    def stream() -> Iterator[Message]:
        for _ in range(3):  # each message of a stream may be another caller's
            with exported.tracer.start_as_current_span("row") as row:
                callers.append(ids(row.get_span_context()))
                yield Message(b"x", routing_key="q")

    async def one(publisher: AsyncPublisher) -> None:
        with exported.tracer.start_as_current_span("task") as task:
            callers.append(ids(task.get_span_context()))
            await (await publisher.publish(b"x", routing_key="q"))
            await (await publisher.publish_many(stream())).wait(30)

    async def main() -> None:
        async with AsyncPublisher(broker.url, outbox=None, hooks=[tracing]) as publisher:
            await asyncio.gather(one(publisher), one(publisher))

    with Publisher(broker.url, outbox=None, hooks=[tracing]) as publisher:
        publisher.publish_many(stream()).wait(30)
    asyncio.run(main())
    assert len(callers) == 11
    assert sorted(consumed(broker)) == sorted(callers)
    assert sorted(link for span in exported.attempts() for link in links(span)) == sorted(callers)


ENQUEUE = """
import sqlite3, sys
from opentelemetry.sdk.trace import TracerProvider
from reliablepub import Message, Outbox
from reliablepub.observe.tracing import Tracing

tracer = TracerProvider().get_tracer("application")
with sqlite3.connect(sys.argv[1]) as db, tracer.start_as_current_span("order") as span:
    db.execute("CREATE TABLE orders (id)")
    Outbox(sys.argv[1], hooks=[Tracing()]).enqueue(Message(b"x", routing_key="q"), connection=db)
    print(span.get_span_context().trace_id, span.get_span_context().span_id)
db.close()
"""


def test_a_transaction_of_another_process_is_linked_by_the_relay(
    broker: FakeBroker, exported: Exported, tracing: Tracing, outbox: Path
) -> None:
    command = [sys.executable, "-W", "error", "-c", ENQUEUE, str(outbox)]
    printed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert printed.returncode == 0, printed.stderr
    trace_id, span_id = map(int, printed.stdout.split())
    with Publisher(broker.url, outbox=outbox, hooks=[tracing]) as publisher:
        assert publisher.flush(30).is_flushed
    (span,) = exported.attempts()
    assert links(span) == consumed(broker) == [(trace_id, span_id)]
    assert span.kind is SpanKind.CLIENT


def test_without_a_context_nothing_is_added_and_nothing_linked(
    broker: FakeBroker, exported: Exported, tracing: Tracing
) -> None:
    message = Message(b"x", routing_key="q")
    assert tracing.stamp(message) is message
    foreign = Message(b"x", routing_key="q", headers={"traceparent": b"\x00", "tracestate": 1})
    with Publisher(broker.url, outbox=None, hooks=[tracing]) as publisher:
        publisher.publish_many([message, foreign]).wait(30)
        publisher.flush(30)
    assert [links(span) for span in exported.attempts()] == [[], []]


def test_a_context_that_the_application_has_set_counts(
    exported: Exported, tracing: Tracing
) -> None:
    own = Message(b"x", headers={"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"})
    with exported.tracer.start_as_current_span("checkout"):
        assert tracing.stamp(own) is own


def test_all_that_the_propagator_writes_goes_along(exported: Exported) -> None:
    propagator = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
    tracing = Tracing(tracer_provider=exported.provider, propagator=propagator)
    token = attach(set_baggage("tenant", "acme"))
    try:
        with exported.tracer.start_as_current_span("checkout"):
            stamped = tracing.stamp(Message(b"x", headers={"mine": 1}, message_id="m"))
    finally:
        detach(token)
    assert stamped.message_id == "m"
    assert stamped.headers is not None
    assert set(stamped.headers) == {"mine", "traceparent", "baggage"}
    assert stamped.headers["baggage"] == "tenant=acme"


def test_baggage_of_the_application_keeps_no_context_away(exported: Exported) -> None:
    propagator = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
    tracing = Tracing(tracer_provider=exported.provider, propagator=propagator)
    own_parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    token = attach(set_baggage("tenant", "acme"))
    try:
        with exported.tracer.start_as_current_span("checkout") as span:
            with_baggage = tracing.stamp(Message(b"x", headers={"baggage": "mine=1"}))
            with_parent = tracing.stamp(Message(b"x", headers={"traceparent": own_parent}))
            with_state = tracing.stamp(Message(b"x", headers={"tracestate": "mine=1"}))
    finally:
        detach(token)
    assert with_baggage.headers is not None
    assert with_baggage.headers["baggage"] == "mine=1"
    assert format(span.get_span_context().trace_id, "032x") in str(with_baggage.headers)
    assert with_parent.headers == {"traceparent": own_parent, "baggage": "tenant=acme"}
    assert with_state.headers is not None
    assert "traceparent" in with_state.headers


def test_baggage_can_be_kept_off_the_disk(exported: Exported) -> None:
    propagator = CompositePropagator(
        [TraceContextTextMapPropagator(), W3CBaggagePropagator(), Prefixing()]
    )
    tracing = Tracing(tracer_provider=exported.provider, propagator=propagator, baggage=False)
    token = attach(set_baggage("tenant", "acme"))
    try:
        with exported.tracer.start_as_current_span("checkout"):
            stamped = tracing.stamp(Message(b"x"))
            own = tracing.stamp(Message(b"x", headers={"baggage": "mine=1"}))
    finally:
        detach(token)
    assert set(stamped.headers or ()) == {"traceparent"}
    assert (own.headers or {})["baggage"] == "mine=1"


def test_a_propagator_that_fails_keeps_no_message_away(
    exported: Exported, caplog: pytest.LogCaptureFixture
) -> None:
    propagator = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
    tracing = Tracing(tracer_provider=exported.provider, propagator=propagator)
    message = Message(b"x")
    token = attach(set_baggage("file", os.fsdecode(b"\xff")))  # cannot be encoded
    try:
        with exported.tracer.start_as_current_span("checkout"):
            assert [tracing.stamp(message), tracing.stamp(message)] == [message, message]
    finally:
        detach(token)
    assert [vars(record)["event"] for record in caplog.records] == ["callback_failed"]
    assert "UnicodeEncodeError" in caplog.text


def test_a_header_that_is_no_text_is_not_read_as_context(
    broker: FakeBroker, exported: Exported
) -> None:
    propagator = CompositePropagator([TraceContextTextMapPropagator(), Prefixing()])
    tracing = Tracing(tracer_provider=exported.provider, propagator=propagator)
    with (
        Publisher(broker.url, outbox=None, hooks=[tracing]) as publisher,
        exported.tracer.start_as_current_span("checkout") as caller,
    ):
        publisher.publish(b"x", routing_key="q", headers={"uberctx-depth": 1}).result(30)
        publisher.flush(30)
    assert [links(span) for span in exported.attempts()] == [[ids(caller.get_span_context())]]


def test_a_message_without_room_goes_without(exported: Exported, tracing: Tracing) -> None:
    full = Message(b"x", headers={"h": "x" * (HEADER_BYTES_MAX - 20)})
    with exported.tracer.start_as_current_span("checkout"):
        assert tracing.stamp(full) is full


def test_what_a_stamp_raises_the_caller_gets_and_nothing_is_stored(
    broker: FakeBroker, outbox: Path
) -> None:
    class Strict:
        def stamp(self, message: Message) -> Message:
            if message.body == b"bad":
                raise LookupError("no tenant")
            return message

    with Publisher(broker.url, outbox=outbox, hooks=[Strict()]) as publisher:
        with pytest.raises(LookupError):
            publisher.publish(b"bad", routing_key="q")
        many = [Message(b"good", routing_key="q"), Message(b"bad", routing_key="q")]
        with pytest.raises(LookupError):
            publisher.publish_many(many)
    with closing(Outbox(outbox, hooks=[Strict()])) as opened, pytest.raises(LookupError):
        opened.enqueue(Message(b"bad", routing_key="q"))
    [(stored,)] = sql(outbox, "SELECT stored FROM reliablepub_ledger")
    assert stored == 0
