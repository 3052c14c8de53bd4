"""Django and Celery: a task is sent in the transaction of its order, and runs if that commits.

Placing an order needs no broker: tasks wait in the database. Here the relay runs in this process;
in production it is ``python manage.py relay_outbox``, and the worker is ``celery worker``.

Needs django and celery; starts a fake broker::

    python examples/django_celery.py

or uses your own: ``python examples/django_celery.py amqp://guest:guest@localhost/``

It prints::

    order 1: placed
    order 2: the card was declined
    order 3: placed
    in the outbox: 2 tasks
    invoices sent by the worker: [1, 3]
"""

import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import django
from celery import Celery
from celery.contrib.testing.worker import start_worker
from django.conf import settings
from django.core.management import call_command
from django.db import connection, transaction
from kombu import Exchange, Queue

from reliablepub import Publisher
from reliablepub.integrations.celery import topology, use_outbox
from reliablepub.integrations.django import DjangoOutbox
from reliablepub.testing import FakeBroker

NAME = "example-shop"  # deleted from the broker when the example ends
ORDERS = {1: True, 2: False, 3: True}
"""Order number, and whether its card has enough credit."""

app = Celery("shop")
sent: list[int] = []
are_sent = threading.Event()


@app.task(ignore_result=True)
def send_invoice(order: int) -> None:
    """Send an invoice; runs in the worker."""
    sent.append(order)
    if len(sent) == sum(ORDERS.values()):
        are_sent.set()


def place_order(number: int, *, is_covered: bool) -> None:
    """Store an order and its task, or neither."""
    with transaction.atomic():
        with connection.cursor() as cursor:  # in a project: Order.objects.create(id=number)
            cursor.execute("INSERT INTO orders VALUES (%s)", [number])
        send_invoice.delay(number)
        if not is_covered:
            raise ValueError("the card was declined")


def configure(database: Path, url: str) -> None:
    """Configure Django and Celery, as settings.py and celery.py of a project would."""
    options = {"transaction_mode": "IMMEDIATE", "timeout": 20}
    settings.configure(
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": database,
                "OPTIONS": options,
            }
        },
        INSTALLED_APPS=["reliablepub.integrations.django"],
    )
    django.setup()
    call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    exchange = Exchange(NAME, durable=False, auto_delete=True)
    app.conf.update(
        broker_url=url,
        task_default_queue=NAME,
        task_queues=[Queue(NAME, exchange, routing_key=NAME, auto_delete=True)],
        worker_enable_remote_control=False,
        broker_heartbeat=1,  # also how often this worker checks whether to stop
    )
    use_outbox(app, DjangoOutbox())


def main() -> None:
    """Place the orders, then run a relay and a worker."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(FakeBroker()).url
        configure(folder / "app.db", url)
        for number, is_covered in ORDERS.items():
            try:
                place_order(number, is_covered=is_covered)
                print(f"order {number}: placed")
            except ValueError as error:
                print(f"order {number}: {error}")
        outbox = DjangoOutbox().outbox
        print(f"in the outbox: {outbox.status().open} tasks")
        connection.close()

        publisher = Publisher(url, outbox=outbox.path, topology=topology(app))
        with publisher, start_worker(app, perform_ping_check=False, pool="solo"):
            are_sent.wait(timeout=60)
        print("invoices sent by the worker:", sorted(sent))


if __name__ == "__main__":
    main()
