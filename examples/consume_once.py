"""The other end of at-least-once: a consumer that handles each ``message_id`` once.

The broker drops the publisher's connection after taking a message and before confirming it, so the
message is published twice. Run it with nothing installed but reliablepub::

    python examples/consume_once.py

It prints::

    handled
    known already
    greetings: ['hello']
"""

import sqlite3
import tempfile
from pathlib import Path

import pika

from reliablepub import Publisher
from reliablepub.testing import FakeBroker, faults


def handle_once(db: sqlite3.Connection, message_id: str, body: bytes) -> bool:
    """Handle a message unless its id was handled before; both in one transaction."""
    with db:
        new = db.execute("INSERT OR IGNORE INTO handled VALUES (?)", (message_id,)).rowcount
        if new:
            db.execute("INSERT INTO greetings VALUES (?)", (body.decode(),))
    return bool(new)


def main() -> None:
    """Publish once, receive twice, handle once."""
    with tempfile.TemporaryDirectory() as folder, FakeBroker() as broker:
        broker.declare_queue("greetings")
        broker.inject(faults.DropConnection(accepted=True))
        with Publisher(broker.url, outbox=Path(folder) / "outbox.db") as publisher:
            publisher.publish(b"hello", routing_key="greetings").result(timeout=30)

        db = sqlite3.connect(Path(folder) / "consumer.db")
        db.execute("CREATE TABLE handled (message_id TEXT PRIMARY KEY)")
        db.execute("CREATE TABLE greetings (text TEXT)")
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            for method, properties, body in channel.consume("greetings", inactivity_timeout=0.5):
                if method is None or properties is None or body is None:
                    break
                is_new = handle_once(db, properties.message_id or "", body)
                channel.basic_ack(method.delivery_tag)
                print("handled" if is_new else "known already")
        print("greetings:", [row[0] for row in db.execute("SELECT text FROM greetings")])
        db.close()


if __name__ == "__main__":
    main()
