"""The demo's queues, and a consumer that counts what arrives in them.

Knows: pika's blocking connection, as used by any consumer. Must never know: the outbox, or a
message's state in the publisher.

The first delivery of a record counts; a later one, redelivered by the broker or published again, is
a duplicate. Duplicates are expected. Each must carry the ``message_id`` of the first delivery of
its record.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

import click
import pika
from pika import spec
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from reliablepub.printable import one_line

_PREFETCH: Final = 500
_RECONNECT_S: Final = 0.1
_REQUEUED_S: Final = 0.5


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what pika raises into an error of one line, without the URL and its password."""
    try:
        yield
    except (AMQPError, OSError) as error:
        cause = _innermost(error)
        words = one_line(str(cause)) or type(cause).__name__
        raise click.UsageError(f"the broker of --url cannot be used: {words}") from error


def _innermost(error: BaseException) -> BaseException:
    """The error that pika has wrapped, as it does with those of sockets."""
    inner: object = getattr(error, "exception", None) or next(iter(error.args), None)
    return _innermost(inner) if isinstance(inner, BaseException) else error


@dataclass(frozen=True, slots=True)
class Topology:
    """An exchange, and a durable queue for each carrier."""

    exchange: str
    carriers: tuple[str, ...]

    def queues(self) -> Iterable[tuple[str, str]]:
        """Name and binding key of each queue."""
        for carrier in self.carriers:
            yield f"{self.exchange}.{carrier}", f"flight.{carrier}.*"

    def declare(self, url: str) -> None:
        """Create the exchange, the queues and their bindings; all of them or none."""
        with _explained(), pika.BlockingConnection(pika.URLParameters(url)) as connection:
            try:
                self._declare(connection.channel())
            except BaseException:  # interrupted, or refused after some of them
                with suppress(AMQPError):
                    self._delete(connection.channel())
                raise

    def delete(self, url: str) -> None:
        """Delete the queues and the exchange."""
        with _explained(), pika.BlockingConnection(pika.URLParameters(url)) as connection:
            self._delete(connection.channel())

    def _declare(self, channel: BlockingChannel) -> None:
        channel.exchange_declare(self.exchange, "topic", durable=True)
        for queue, binding in self.queues():
            channel.queue_declare(queue, durable=True)
            channel.queue_bind(queue, self.exchange, binding)

    def _delete(self, channel: BlockingChannel) -> None:
        for queue, _ in self.queues():
            channel.queue_delete(queue)
        channel.exchange_delete(self.exchange)


@dataclass(slots=True)
class Count:
    """Counts of deliveries."""

    ids: dict[int, str | None] = field(default_factory=dict)  # record -> its first ``message_id``
    duplicates: int = 0  # deliveries of a record after its first
    redelivered: int = 0  # duplicates that the broker redelivered
    unknown_ids: int = 0  # duplicates with another ``message_id`` than the record's first delivery
    damaged: int = 0  # deliveries whose body differs from the record's line
    crashes: int = 0  # of the broker, seen as refused connections

    def add(self, record: int, message_id: str | None, *, redelivered: bool) -> None:
        """Count one delivery."""
        if record not in self.ids:
            self.ids[record] = message_id
            return
        self.duplicates += 1
        self.redelivered += redelivered
        self.unknown_ids += message_id is None or message_id != self.ids[record]


class Consumer(threading.Thread):
    """A thread that consumes all queues, and reconnects whenever the broker is gone."""

    def __init__(
        self, url: str, topology: Topology, checksums: Sequence[int], say: Callable[[str], None]
    ) -> None:
        super().__init__(name="demo-consumer", daemon=True)
        self.count: Final = Count()
        self._last_at = time.monotonic()
        self._parameters = pika.URLParameters(url)
        self._topology = topology
        self._checksums = checksums  # CRC-32 of the body of each record
        self._say = say
        self._ending = threading.Event()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last delivery."""
        return time.monotonic() - self._last_at

    def end(self) -> None:
        """Stop consuming."""
        self._ending.set()
        self.join()

    def fetch_rest(self) -> None:
        """Stop consuming, and empty the queues: what has not arrived then is in none of them."""
        self.end()
        with _explained(), pika.BlockingConnection(self._parameters) as connection:
            channel = connection.channel()
            is_empty = False
            while not is_empty:
                # RabbitMQ may put unacknowledged deliveries back a little after their connection
                # has closed.
                connection.sleep(_REQUEUED_S)
                is_empty = not self._fetch(channel)

    def _fetch(self, channel: BlockingChannel) -> int:
        """Take all messages that are ready; return their number."""
        number = 0
        for queue, _ in self._topology.queues():
            while True:
                method, properties, body = channel.basic_get(queue)
                if method is None or properties is None or body is None:
                    break
                self._on_delivery(channel, method, properties, body)
                number += 1
        return number

    def run(self) -> None:
        """Consume until told to end."""
        is_gone = False
        while not self._ending.is_set():
            try:
                connection = pika.BlockingConnection(self._parameters)
            except Exception:  # noqa: BLE001 - also ValueError: reset between connect and getpeername
                if not is_gone:
                    is_gone = True
                    self.count.crashes += 1
                    self._say("[red]broker crashed[/]: its port refuses connections")
                self._ending.wait(_RECONNECT_S)
                continue
            if is_gone:
                is_gone = False
                self._say("[green]broker is back[/]: the consumer is connected again")
            try:
                self._consume(connection)
            except (AMQPError, OSError):
                continue
            finally:
                if connection.is_open:
                    connection.close()

    def _consume(self, connection: pika.BlockingConnection) -> None:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=_PREFETCH)
        for queue, _ in self._topology.queues():
            channel.basic_consume(queue, self._on_delivery)
        while not self._ending.is_set():
            connection.process_data_events(time_limit=0.1)

    def _on_delivery(
        self,
        channel: BlockingChannel,
        method: spec.Basic.Deliver | spec.Basic.GetOk,
        properties: pika.BasicProperties,
        body: bytes,
    ) -> None:
        record = json.loads(body)["n"]
        self.count.add(record, properties.message_id, redelivered=bool(method.redelivered))
        self.count.damaged += crc32(body) != self._checksums[record - 1]
        self._last_at = time.monotonic()
        channel.basic_ack(method.delivery_tag)
