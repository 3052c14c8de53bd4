"""Tests of the shop in django_celery.py, to copy: ``pytest examples/test_django_celery.py``.

The fixture `fake_broker` comes with reliablepub. It is a broker in this process, so these tests
need no RabbitMQ. With pytest-django, use its fixture `transactional_db` instead of `shop`.
"""

from collections.abc import Iterator

import pytest
from celery.contrib.testing.worker import start_worker
from django.db import connection
from django_celery import app, configure, place_order, sent

from reliablepub import Outbox, Publisher
from reliablepub.integrations.celery import topology
from reliablepub.integrations.django import DjangoOutbox
from reliablepub.testing import FakeBroker

NOWHERE = "amqp://127.0.0.1:9"  # nothing listens there: tasks are stored anyway


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A database with the tables of the shop; Django is configured once."""
    configure(tmp_path_factory.mktemp("shop") / "app.db", NOWHERE)


@pytest.fixture
def shop(database: None) -> Iterator[Outbox]:
    """The outbox of the shop, which has no orders."""
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM orders")
    yield DjangoOutbox().outbox
    connection.close()


def test_a_task_is_stored_with_its_order(shop: Outbox) -> None:
    before = shop.status().stored
    place_order(1, is_covered=True)
    assert shop.status().stored == before + 1


def test_a_task_goes_with_an_order_that_is_declined(shop: Outbox) -> None:
    before = shop.status().stored
    with pytest.raises(ValueError, match="declined"):
        place_order(2, is_covered=False)
    assert shop.status().stored == before


def test_the_worker_sends_the_invoices(shop: Outbox, fake_broker: FakeBroker) -> None:
    place_order(3, is_covered=True)
    app.conf.broker_url = fake_broker.url
    relay = Publisher(fake_broker.url, outbox=DjangoOutbox().where, topology=topology(app))
    with relay, start_worker(app, perform_ping_check=False, pool="solo"):
        fake_broker.wait_for(lambda: 3 in sent, timeout_s=60)
    assert 2 not in sent
    assert shop.status().open == 0
