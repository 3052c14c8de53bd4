"""The transactional outbox: an order and its message are stored together, or neither is.

Run it with nothing installed but reliablepub; it brings a broker along::

    python examples/orders_in_a_transaction.py

It prints::

    order 2 was rolled back
    waiting in the outbox: 2
    published: [1, 3]
    orders: [1, 3]
"""

import json
import sqlite3
import tempfile
from pathlib import Path

from reliablepub import Message, Outbox, Publisher
from reliablepub.testing import FakeBroker


class CardDeclinedError(Exception):
    """The payment did not go through, after everything had been written."""


def place_order(db: sqlite3.Connection, outbox: Outbox, number: int, *, is_paid: bool) -> None:
    """Write an order and announce it, in one transaction."""
    with db:  # commits, or rolls back both
        db.execute("INSERT INTO orders VALUES (?)", (number,))
        body = json.dumps({"order": number}).encode()
        message = Message(body, exchange="orders", routing_key="created")
        outbox.enqueue(message, connection=db)
        if not is_paid:
            raise CardDeclinedError


def main() -> None:
    """Place three orders, one of which fails; then relay the outbox."""
    with tempfile.TemporaryDirectory() as folder, FakeBroker() as broker:
        broker.declare_exchange("orders", "topic")
        broker.declare_queue("invoices")
        broker.bind("invoices", "orders", "created")

        path = Path(folder) / "app.db"
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY)")
        outbox = Outbox(path)
        place_order(db, outbox, 1, is_paid=True)
        try:
            place_order(db, outbox, 2, is_paid=False)
        except CardDeclinedError:
            print("order 2 was rolled back")
        place_order(db, outbox, 3, is_paid=True)
        print("waiting in the outbox:", outbox.status().open)

        # Here in the same program; usually one `reliablepub relay` for all processes of a host.
        with Publisher(broker.url, outbox=path) as relay:
            relay.flush(timeout=30)
        print("published:", [json.loads(m.body)["order"] for m in broker.messages("invoices")])
        print("orders:", [row[0] for row in db.execute("SELECT number FROM orders")])
        db.close()


if __name__ == "__main__":
    main()
