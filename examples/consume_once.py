"""A consumer that handles each ``message_id`` once, although delivery is at-least-once.

The fake broker drops the publisher's connection after accepting a message and before confirming it,
so the message is published twice. Needs only reliablepub::

    python examples/consume_once.py

With your own broker, which drops no connection, the example publishes the message twice under one
id: ``python examples/consume_once.py amqp://guest:guest@localhost/``

It prints::

    handled
    known already
    greetings: ['hello']
"""

import sqlite3
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pika

from reliablepub import Publisher
from reliablepub.testing import FakeBroker, faults


def handle_once(db: sqlite3.Connection, message_id: str | None, body: bytes) -> bool:
    """Handle a message unless its id was handled before, in one transaction."""
    if not message_id:  # of another publisher: all such messages would pass for one
        raise ValueError("the message has no message_id, so it may be a duplicate or not")
    with db:
        new = db.execute("INSERT OR IGNORE INTO handled VALUES (?)", (message_id,)).rowcount
        if new:
            db.execute("INSERT INTO greetings VALUES (?)", (body.decode(),))
    return bool(new)


def main() -> None:
    """Publish once, receive twice, handle once."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = None if len(sys.argv) > 1 else stack.enter_context(FakeBroker())
        url = broker.url if broker else sys.argv[1]
        channel = stack.enter_context(pika.BlockingConnection(pika.URLParameters(url))).channel()
        queue = channel.queue_declare("", exclusive=True).method.queue
        with Publisher(url, outbox=folder / "outbox.db") as publisher:
            if broker:
                broker.inject(faults.DropConnection(accepted=True))
            receipt = publisher.publish(b"hello", routing_key=queue)
            receipt.result(timeout_s=30)
            if not broker:
                publisher.publish(b"hello", routing_key=queue, message_id=receipt.message_id)

        db = sqlite3.connect(folder / "consumer.db")
        db.execute("CREATE TABLE handled (message_id TEXT PRIMARY KEY)")
        db.execute("CREATE TABLE greetings (text TEXT)")
        for method, properties, body in channel.consume(queue, inactivity_timeout=0.5):
            if method is None or properties is None or body is None:
                break
            is_new = handle_once(db, properties.message_id, body)
            channel.basic_ack(method.delivery_tag)
            print("handled" if is_new else "known already")
        print("greetings:", [row[0] for row in db.execute("SELECT text FROM greetings")])
        db.close()


if __name__ == "__main__":
    main()
