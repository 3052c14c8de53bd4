"""Publish one message and wait until the broker has taken responsibility for it.

Needs only reliablepub; starts a fake broker::

    python examples/hello.py

or uses your own: ``python examples/hello.py amqp://guest:guest@localhost/``

It prints::

    confirmed
    parked: 312 NO_ROUTE
"""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pika

from reliablepub import Publisher, RetryPolicy, Unroutable
from reliablepub.testing import FakeBroker


def main() -> None:
    """Publish to a queue that exists, and to one that does not."""
    with ExitStack() as stack:
        url = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(FakeBroker()).url
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            queue = connection.channel().queue_declare("", exclusive=True).method.queue
            prompt = RetryPolicy.prompt()  # parked after a few attempts
            with Publisher(url, outbox=folder / "outbox.db", retry=prompt) as publisher:
                publisher.publish(b"hello", routing_key=queue).result(timeout_s=30)
                print("confirmed")
                try:
                    publisher.publish(b"hello?", routing_key="nowhere").result(timeout_s=30)
                except Unroutable as error:
                    print(f"parked: {error.reply_code} {error.reply_text}")


if __name__ == "__main__":
    main()
