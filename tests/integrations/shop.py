"""A Celery application on SQLAlchemy, as a worker and as a producer of tests runs it.

    python -m celery --app=tests.integrations.shop:app worker

Knows: `SHOP_URL`, the broker; `SHOP_FOLDER`, with the results and what has run; `SHOP_DATABASE`, a
SQLite file or the URL of a PostgreSQL database.
"""

import os
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_init
from kombu import Exchange, Queue
from sqlalchemy import text
from sqlalchemy.orm import Session

from reliablepub import Outbox
from reliablepub.integrations.celery import use_outbox
from reliablepub.integrations.sqlalchemy import SessionOutbox
from tests.integrations.engines import engine_of

FOLDER = Path(os.environ["SHOP_FOLDER"])
DATABASE = os.environ["SHOP_DATABASE"]
RAN = FOLDER / "ran"

app = Celery("shop", broker=os.environ["SHOP_URL"], backend=f"file://{FOLDER}/results")
app.conf.update(
    task_acks_late=True,
    task_queues=[Queue("shop", Exchange("shop"), routing_key="shop")],
    task_default_queue="shop",
    worker_enable_remote_control="SHOP_REMOTE_CONTROL" in os.environ,
    worker_prefetch_multiplier=100,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    result_chord_retry_interval=0.2,
)
outbox = SessionOutbox(Outbox(DATABASE))
use_outbox(app, outbox, hold_eta=True)
if "SHOP_USES_ITS_DATABASE" in os.environ:  # before a worker forks
    used = engine_of(DATABASE)
    with used.begin() as connection:
        connection.execute(text("SELECT 1 FROM orders"))
    worker_init.connect(lambda **_: used.dispose(), weak=False)


def note(what: object) -> None:
    """Say what has run: one write of a line, which no kill can tear."""
    with RAN.open("ab", buffering=0) as ran:
        ran.write(f"{what}\n".encode())


@app.task(ignore_result=True)
def ship(what: int | str) -> None:
    note(what)


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(ignore_result=True)
def tell(result: Any, name: str) -> None:
    note(f"{name} {result}")


@app.task(ignore_result=True, bind=True, max_retries=3)
def stubborn(self: Any) -> None:
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    note(f"stubborn {self.request.retries}")


@app.task(ignore_result=True)
def parent() -> None:
    ship.delay(1001)


def place_orders(numbers: range, items: int) -> None:
    """Place orders until this process is killed: each is a row and a task an item, or nothing."""
    engine = engine_of(DATABASE)
    for number in numbers:
        with Session(engine) as session, outbox.joined(session):
            session.execute(text("INSERT INTO orders VALUES (:n)"), {"n": number})
            for item in range(items):
                ship.delay(f"{number}.{item}")
            if number % 3:
                session.commit()
    engine.dispose()
