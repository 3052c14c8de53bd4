"""Tracing with OpenTelemetry: the message carries the caller's context; each attempt is a span.

Knows: events, headers, opentelemetry-api. Must never know: where spans are exported, or what a turn
of the relay does.

A message may be sent hours after `publish`, by another process. So the caller's context is not kept
in memory but stored with the message, in the headers from which consumers continue the trace
(``traceparent``, or those of the configured propagator). The span of an attempt is created when the
attempt has ended, with the attempt's times. It is *linked* to the stored context and no child of
it: a child that starts a week later would distort the caller's trace.

Names and attributes follow OpenTelemetry's semantic conventions for RabbitMQ (version 1.45). A
span's name contains only the exchange: span names should be few, and a routing key may contain an
order number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from reliablepub.errors import ConfigurationError, InvalidMessage
from reliablepub.headers import FieldValue
from reliablepub.hooks import AttemptEnded, Watched
from reliablepub.message import Message
from reliablepub.outcome import OutcomeKind
from reliablepub.version import installed_version

try:
    from opentelemetry import propagate, trace
    from opentelemetry.baggage import clear as without_baggage
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import Getter, TextMapPropagator
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TracerProvider
except ImportError as _missing:
    msg = "tracing needs opentelemetry-api: install reliablepub with the extra observe"
    raise ImportError(msg) from _missing

_LOGGER: Final = logging.getLogger("reliablepub.hooks")
Headers = Mapping[str, FieldValue]
_EMPTY: Final[Headers] = {}
_BAGGAGE: Final = "baggage"
"""Header of W3C's baggage."""


class _HeaderGetter(Getter[Headers]):
    """Reads string headers. A header of another type may have any name, so it is ignored."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        value = carrier.get(key)
        return [value] if isinstance(value, str) else None

    def keys(self, carrier: Headers) -> list[str]:
        return [name for name, value in carrier.items() if isinstance(value, str)]


_GETTER: Final = _HeaderGetter()


class Tracing:
    """A hook that traces messages from the caller to the broker's confirm and on to consumers.

    Where messages are accepted, it stores the current context with them. Where they are relayed, it
    creates a span for each attempt. Each side may use its own object; publishers that are open at
    the same time must not share one::

        Publisher(url, outbox="outbox.db", hooks=[Tracing()])  # both sides

        Outbox("app.db", hooks=[Tracing()]).enqueue(...)       # accepts messages
        # reliablepub relay --tracing ...                      # relays them

    Use a ``BatchSpanProcessor``: with a ``SimpleSpanProcessor`` the relay's thread waits for the
    collector after each attempt.

    Args:
        tracer_provider: tracer provider; the global one unless given.
        propagator: propagator of the context; the global one unless given.
        baggage: whether the caller's baggage, which may hold personal data, is written into the
            message, and so reaches disk and consumers, if the propagator writes it.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        propagator: TextMapPropagator | None = None,
        baggage: bool = True,
    ) -> None:
        self._tracer = trace.get_tracer("reliablepub", installed_version(), tracer_provider)
        self._propagator = propagator
        self._with_baggage = baggage
        self._publisher: Watched | None = None
        self._has_failed = False

    def watch(self, publisher: Watched) -> None:
        """Name this publisher's broker in the spans from now on, unless another is still open."""
        if self._publisher is not None and not self._publisher.is_ended:
            raise ConfigurationError(
                "this Tracing is in use by another publisher; give this one its own Tracing"
            )
        self._publisher = publisher

    # -------------------------------------------------------------- where messages are accepted

    def stamp(self, message: Message) -> Message:
        """Return the message with the current context in its headers.

        Headers of the application are not changed. A context that the application has set is kept
        as a whole (``traceparent`` and ``tracestate`` belong together). Its ``baggage`` is kept
        too, independently of the context. A message without room for more headers is returned
        unchanged, as is each message while the propagator fails; the first failure is logged.
        """
        found = self._injected()
        headers = message.headers or _EMPTY
        baggage = found.pop(_BAGGAGE, None)
        if any(name in headers for name in found):
            found = {}
        if baggage is not None and _BAGGAGE not in headers:
            found[_BAGGAGE] = baggage
        if not found:
            return message
        try:
            return replace(message, headers={**headers, **found})
        except InvalidMessage:
            return message

    def _injected(self) -> dict[str, str]:
        """The headers of the current context; none if the propagator fails."""
        found: dict[str, str] = {}
        # Taken from the context, because each propagator has header names of its own for baggage.
        context = None if self._with_baggage else without_baggage()
        try:
            self._text_map().inject(found, context)
        except Exception:  # of any propagator; the message is worth more
            if not self._has_failed:
                self._has_failed = True
                said = "the propagator has raised an exception; further ones are not logged"
                _LOGGER.exception(said, extra={"event": "callback_failed"})
            return {}
        return found

    # -------------------------------------------------------------- where messages are relayed

    def on_confirmed(self, events: Sequence[AttemptEnded]) -> None:
        """Create a span for each attempt; a failed one unless the attempt was confirmed."""
        ended_at = time.time_ns()
        server = _server(self._publisher)
        for event in events:
            span = self._tracer.start_span(
                f"publish {event.exchange or 'amq.default'}",
                context=Context(),  # empty: the relay's thread has no context of a caller
                kind=SpanKind.CLIENT,  # not PRODUCER: consumers continue from the caller's context
                attributes={**_attributes(event), **server},
                links=self._links(event),
                start_time=ended_at - int(event.latency_s * 1e9),
            )
            if event.outcome.kind is not OutcomeKind.CONFIRMED:
                span.set_attribute("error.type", event.outcome.kind.value)
                code, text = event.outcome.reply_code, event.outcome.reply_text
                span.set_status(Status(StatusCode.ERROR, f"{code} {text}" if code else text))
            span.end(ended_at)

    on_returned = on_confirmed
    on_nacked = on_confirmed
    on_refused = on_confirmed
    on_uncertain = on_confirmed

    def _links(self, event: AttemptEnded) -> list[Link]:
        if not event.headers:
            return []
        stored = self._text_map().extract(event.headers, Context(), _GETTER)
        context = trace.get_current_span(stored).get_span_context()
        return [Link(context)] if context.is_valid else []

    def _text_map(self) -> TextMapPropagator:
        """The propagator. Looked up each time: the application may set the global one later."""
        return self._propagator or propagate.get_global_textmap()


def is_exported() -> bool:
    """Whether the application has configured a tracer provider behind OpenTelemetry's API."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _attributes(event: AttemptEnded) -> dict[str, str | int]:
    is_confirmed = event.outcome.kind is OutcomeKind.CONFIRMED
    destination = [part for part in (event.exchange, event.routing_key) if part]
    attributes: dict[str, str | int] = {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": ":".join(destination) or "amq.default",
        "messaging.message.id": event.message_id,
        "reliablepub.outcome": event.outcome.kind.value,
        "reliablepub.attempt": event.attempts + is_confirmed,
    }
    if event.routing_key:
        attributes["messaging.rabbitmq.destination.routing_key"] = event.routing_key
    if event.tag:
        attributes["messaging.rabbitmq.message.delivery_tag"] = event.tag
    return attributes


def _server(publisher: Watched | None) -> dict[str, str | int]:
    """The broker that the attempt was sent to; nothing without a connection so far."""
    host, _, port = ("" if publisher is None else publisher.status.server).rpartition(":")
    if not (host and port.isdecimal()):
        return {}
    return {"server.address": host.strip("[]"), "server.port": int(port)}
