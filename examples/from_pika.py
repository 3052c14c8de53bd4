"""Migration from plain pika: the same ten orders, published by pika and then by reliablepub.

The third order names a queue that does not exist. The seventh names an exchange that does not
exist, so the broker closes the channel. Needs only reliablepub; starts a fake broker::

    python examples/from_pika.py

or uses your own: ``python examples/from_pika.py amqp://guest:guest@localhost/``

It prints::

    before: 5 of 10 in the queue, and nothing says which
    after: 8 of 10 in the queue, and 2 parked:
      order 2: 312 NO_ROUTE
      order 6: 404 NOT_FOUND - no exchange 'nowhere' in vhost '/'
"""

import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pika
import pika.exceptions
from pika.adapters.blocking_connection import BlockingChannel

from reliablepub import Outbox, Publisher, RetryPolicy
from reliablepub.testing import FakeBroker

UNROUTABLE, REFUSED = 2, 6  # the orders that fail


def orders(queue: str) -> list[tuple[str, str, str]]:
    """Exchange, routing key and text of each order."""
    found = [("", queue, f"order {n}") for n in range(10)]
    found[UNROUTABLE] = ("", "nobody", f"order {UNROUTABLE}")
    found[REFUSED] = ("nowhere", queue, f"order {REFUSED}")
    return found


def before(url: str, queue: str) -> None:
    """Publish as most tutorials do: without confirms and without mandatory."""
    parameters = pika.URLParameters(url)
    with (
        suppress(pika.exceptions.AMQPChannelError),
        pika.BlockingConnection(parameters) as connection,
    ):
        channel = connection.channel()
        for exchange, routing_key, text in orders(queue):
            properties = pika.BasicProperties(delivery_mode=2)
            channel.basic_publish(exchange, routing_key, text.encode(), properties)
            connection.process_data_events(time_limit=0.05)
    # The exception does not say which orders have arrived.


def after(url: str, queue: str, outbox: Path) -> None:
    """Publish with the same arguments; each order is on disk when `publish` returns."""
    # By default messages wait for a missing exchange; here they are given up after a few attempts.
    with Publisher(url, outbox=outbox, retry=RetryPolicy.prompt()) as publisher:
        for exchange, routing_key, text in orders(queue):
            publisher.publish(
                text.encode(), exchange=exchange, routing_key=routing_key, message_id=text
            )


def arrived(channel: BlockingChannel, queue: str) -> int:
    """Empty the queue, and count the different orders in it."""
    texts = set()
    while (body := channel.basic_get(queue, auto_ack=True)[2]) is not None:
        texts.add(body)
    return len(texts)


def main() -> None:
    """Run both, and compare."""
    with ExitStack() as stack:
        outbox = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "outbox.db"
        url = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(FakeBroker()).url
        channel = stack.enter_context(pika.BlockingConnection(pika.URLParameters(url))).channel()
        queue = channel.queue_declare("", exclusive=True).method.queue

        before(url, queue)
        print(f"before: {arrived(channel, queue)} of 10 in the queue, and nothing says which")

        after(url, queue, outbox)
        parked = Outbox(outbox).parked()
        print(f"after: {arrived(channel, queue)} of 10 in the queue, and {len(parked)} parked:")
        for message in sorted(parked, key=lambda message: message.message_id):
            print(f"  {message.message_id}: {message.reply_code} {message.reply_text}")


if __name__ == "__main__":
    main()
