"""What tests/integrations/test_django.py has Django's own test runner run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import skipUnless
from unittest.mock import patch

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from celery import Celery
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connections, transaction
from django.db.utils import ConnectionHandler
from django.test import SimpleTestCase, TransactionTestCase, override_settings
from django.urls import reverse
from psycopg.conninfo import conninfo_to_dict

from reliablepub import Message, Outbox, Publisher, RetryPolicy, ScheduleChange
from reliablepub.integrations.celery import use_outbox
from reliablepub.integrations.django import DjangoOutbox, where_of
from reliablepub.integrations.django.checks import check_broker, check_databases
from reliablepub.integrations.django.creation import create
from reliablepub.integrations.django.models import ParkedMessage
from reliablepub.integrations.taskiq import OutboxBroker as TaskiqBroker
from reliablepub.outbox.postgres.server import Server
from reliablepub.testing import FakeBroker
from tests.policies import ONCE

URL = os.environ["SHOP_URL"]
QUEUE = os.environ["SHOP_QUEUE"]


class Undone(Exception):
    pass


class Case(TransactionTestCase):
    """Django empties its own tables after each test, and not the outbox."""

    databases = {"default", "archive"}  # noqa: RUF012 - as Django has it

    def setUp(self) -> None:
        self.before = {using: self.stored(using) for using in self.databases}

    def stored(self, using: str = "default") -> int:
        return DjangoOutbox(using).outbox.status().stored

    def order(self, number: int, using: str = "default") -> None:
        Group.objects.using(using).create(name=f"order {number}")
        DjangoOutbox(using).enqueue(Message(b"%d" % number, routing_key=QUEUE))

    def check(self, count: int, using: str = "default") -> None:
        assert Group.objects.using(using).count() == count
        assert self.stored(using) - self.before[using] == count


class Transactions(Case):
    def test_a_message_leaves_with_the_commit(self) -> None:
        with transaction.atomic():
            self.order(1)
            assert self.stored() == self.before["default"]
        self.check(1)

    def test_it_goes_with_the_rollback(self) -> None:
        with suppress(Undone), transaction.atomic():
            self.order(1)
            raise Undone
        self.check(0)

    def test_outside_of_a_block_it_is_stored_at_once(self) -> None:
        self.order(1)
        self.check(1)

    def test_an_inner_block_has_its_own_messages(self) -> None:
        with transaction.atomic():
            with transaction.atomic():
                self.order(1)
            with suppress(Undone), transaction.atomic():
                self.order(2)
                raise Undone
            connection = connections["default"]  # `transaction.savepoint` is renamed in Django 6.1
            point = connection.savepoint()
            self.order(3)
            connection.savepoint_rollback(point)
            self.order(4)
        self.check(2)

    def test_an_inner_block_goes_with_the_outer(self) -> None:
        with suppress(Undone), transaction.atomic():
            with transaction.atomic():
                self.order(1)
            raise Undone
        self.check(0)

    def test_a_block_that_has_failed_takes_no_message(self) -> None:
        with suppress(Undone), transaction.atomic():
            with suppress(DatabaseError), transaction.atomic(savepoint=False):
                Group.objects.create(name="x")
                Group.objects.create(name="x")
            with pytest.raises(transaction.TransactionManagementError):
                DjangoOutbox().enqueue(Message(b""))
            raise Undone
        self.check(0)

    def test_each_database_has_an_outbox(self) -> None:
        with suppress(Undone), transaction.atomic(), transaction.atomic("archive"):
            self.order(1)
            self.order(2, "archive")
            raise Undone
        with transaction.atomic("archive"):
            self.order(3, "archive")
        self.check(0)
        self.check(1, "archive")

    def test_many_messages_go_with_the_block(self) -> None:
        many = [Message(b"%d" % number, routing_key=QUEUE) for number in range(3)]
        with suppress(Undone), transaction.atomic():
            DjangoOutbox().enqueue_many(many)
            raise Undone
        assert self.stored() == self.before["default"]
        with transaction.atomic():
            assert len(DjangoOutbox().enqueue_many(many)) == 3
            assert self.stored() == self.before["default"]
        assert self.stored() - self.before["default"] == 3

    def test_outside_of_a_block_all_or_none_of_many_are_stored(self) -> None:
        def made() -> Iterator[Message]:
            yield from (Message(b"", routing_key=QUEUE) for _ in range(1_500))
            raise Undone

        with pytest.raises(Undone):
            DjangoOutbox().enqueue_many(made())
        assert self.stored() == self.before["default"]
        async_to_sync(DjangoOutbox().enqueue_many_async)([Message(b"", routing_key=QUEUE)] * 2)
        assert self.stored() - self.before["default"] == 2

    def test_a_key_is_stored_once(self) -> None:
        with transaction.atomic():
            key = f"{self.id()} once"
            first = DjangoOutbox().enqueue(Message(b""), key=key)
            assert DjangoOutbox().enqueue(Message(b""), key=key) == first

    def test_a_message_is_cancelled_with_the_block(self) -> None:
        when = datetime(2038, 1, 19, tzinfo=UTC)
        keys = [f"{self.id()} {n}" for n in range(3)]
        for key in keys[:2]:
            DjangoOutbox().enqueue(Message(b"", not_before=when), key=key)
        with suppress(Undone), transaction.atomic():
            assert DjangoOutbox().cancel(keys[0])
            raise Undone
        with transaction.atomic():
            assert DjangoOutbox().cancel(keys[0])
            DjangoOutbox().enqueue(Message(b"", not_before=when), key=keys[2])
            assert DjangoOutbox().cancel(keys[2])
        assert DjangoOutbox().cancel(keys[0]) is ScheduleChange.UNKNOWN
        assert DjangoOutbox().reschedule(keys[1], when)
        assert DjangoOutbox().outbox.cancel(keys[1])
        assert DjangoOutbox().outbox.audit().is_right

    def test_a_celery_task_belongs_to_the_block(self) -> None:
        app = Celery("shop", broker="amqp://127.0.0.1:9", set_as_current=False)
        use_outbox(app, DjangoOutbox())

        @app.task(name="ship", shared=False)
        def task(number: int) -> None: ...

        with suppress(Undone), transaction.atomic():
            task.delay(1)
            raise Undone
        with transaction.atomic():
            Group.objects.create(name="order 1")
            task.delay(1)
        self.check(1)

    def test_a_celery_task_is_sent_from_a_coroutine(self) -> None:
        app = Celery("shop", broker="amqp://127.0.0.1:9", set_as_current=False)
        use_outbox(app, DjangoOutbox())

        @app.task(name="ship", shared=False)
        def ship(number: int) -> None: ...

        async def view() -> None:
            with pytest.raises(SynchronousOnlyOperation):
                ship.delay(1)
            await sync_to_async(ship.delay)(1)

        async_to_sync(view)()
        assert self.stored() - self.before["default"] == 1

    def test_it_is_known_whether_a_message_joins_a_transaction(self) -> None:
        assert not DjangoOutbox().is_joined
        with transaction.atomic():
            assert DjangoOutbox().is_joined
            assert not DjangoOutbox("archive").is_joined

    def test_a_taskiq_task_belongs_to_the_block(self) -> None:
        """Though its message is stored below an event loop."""
        broker = TaskiqBroker(DjangoOutbox(), url="amqp://127.0.0.1:9")

        async def ship(number: int) -> None: ...

        task = broker.register_task(ship, task_name="ship")
        async_to_sync(broker.startup)()
        with suppress(Undone), transaction.atomic():
            async_to_sync(task.kiq)(1)
            raise Undone
        with transaction.atomic():
            Group.objects.create(name="order 1")
            async_to_sync(task.kiq)(1)
            assert self.stored() == self.before["default"]
        async_to_sync(broker.shutdown)()
        self.check(1)

    def test_a_transaction_that_it_does_not_join_is_told_once(self) -> None:
        with self.assertLogs("reliablepub.outbox", "WARNING") as logs:
            for number in range(2):
                with suppress(Undone), transaction.atomic():
                    self.order(number, "archive")
                    raise Undone
        self.check(2, "archive")
        (line,) = logs.output
        assert "stored at once in database 'archive', while a transaction of 'default'" in line
        with self.assertNoLogs("reliablepub.outbox"), transaction.atomic("archive"):
            self.order(2, "archive")

    def test_a_coroutine_enqueues(self) -> None:
        async_to_sync(DjangoOutbox().enqueue_async)(Message(b""), key=self.id())
        assert DjangoOutbox().outbox.cancel(self.id())

    def test_a_database_that_can_hold_none_says_so(self) -> None:
        with pytest.raises(ImproperlyConfigured, match=r"in memory.*TEST"):
            where_of(connections["memory"])

    def test_a_database_that_nothing_relays_is_refused(self) -> None:
        outbox, refused = DjangoOutbox("memory"), r"name it in .*'default', 'archive'"
        with pytest.raises(ImproperlyConfigured, match=refused):
            outbox.enqueue(Message(b""))
        with pytest.raises(ImproperlyConfigured, match=refused):
            print(outbox.where)

    def test_the_default_is_the_first_database_that_has_an_outbox(self) -> None:
        with override_settings(RELIABLEPUB={"DATABASES": ["archive"]}):
            DjangoOutbox().enqueue(Message(b"1"))
            with pytest.raises(ImproperlyConfigured, match="'archive'"):
                DjangoOutbox("default").enqueue(Message(b"1"))
        assert self.stored("archive") - self.before["archive"] == 1
        assert self.stored() == self.before["default"]

    def test_the_settings_are_checked(self) -> None:
        assert check_databases() == []
        with override_settings(RELIABLEPUB={"DATABASES": ["default", "memory", "nowhere"]}):
            assert [one.id for one in check_databases()] == ["reliablepub.W001", "reliablepub.E001"]
        with override_settings(RELIABLEPUB={"URL": "amqp://"}):
            assert check_broker() == []
        with override_settings(RELIABLEPUB={}):
            assert [one.id for one in check_broker()] == ["reliablepub.W002"]


class Places(SimpleTestCase):
    """Where the outbox is said to be is where Django connects to; nothing is opened."""

    def test_the_url_has_what_django_gives_to_libpq(self) -> None:
        for host, shown in (
            ("", "postgresql:///shop"),
            ("db.example", "postgresql://db.example:6432/shop"),
            ("/run/postgresql", "postgresql:///shop"),
            ("::1", "postgresql:///shop"),
            ("a,b", "postgresql:///shop"),
        ):
            given = {"USER": "us er", "PASSWORD": "p&w/@%", "HOST": host, "PORT": "6432"}
            options = {"sslmode": "require", "options": "-c search_path=shop", "pool": True}
            database = {"ENGINE": "django.db.backends.postgresql", "NAME": "shop", **given}
            handler = ConnectionHandler({"default": database | {"OPTIONS": options}})
            connection = handler["default"]
            server = Server.of(where_of(connection))
            assert str(server) == shown
            found = conninfo_to_dict(server.url)
            expected = conninfo_to_dict(
                **{
                    name: value
                    for name, value in connection.get_connection_params().items()
                    if name not in {"cursor_factory", "context", "prepare_threshold"}
                }
            )
            assert {name: found[name] for name in expected} == expected

    def test_the_path_of_a_uri_is_that_of_its_file(self) -> None:
        for name, path in (
            ("/srv/app.db", "/srv/app.db"),
            (Path("/srv/app.db"), "/srv/app.db"),
            ("file:app.db?mode=rw", "app.db"),
            ("file:/srv/an%20app.db?cache=private", "/srv/an app.db"),
            ("file:///srv/app.db", "/srv/app.db"),
        ):
            database = {"ENGINE": "django.db.backends.sqlite3", "NAME": name}
            assert where_of(ConnectionHandler({"default": database})["default"]) == path
        for name in (":memory:", "file::memory:?cache=shared", "file:x?mode=memory"):
            database = {"ENGINE": "django.db.backends.sqlite3", "NAME": name}
            with pytest.raises(ImproperlyConfigured, match="in memory"):
                where_of(ConnectionHandler({"default": database})["default"])

    def test_a_database_of_another_kind_says_so(self) -> None:
        connection: Any = SimpleNamespace(vendor="mysql", alias="default")
        with pytest.raises(ImproperlyConfigured, match=r"mysql.*SQLite or PostgreSQL"):
            where_of(connection)


class Migrations(Case):
    def test_the_outbox_is_there_before_a_message(self) -> None:
        for using in self.databases:
            tables = connections[using].introspection.table_names()
            assert "reliablepub_messages" in tables or connections[using].vendor == "postgresql"
            assert DjangoOutbox(using).outbox.status().open >= 0

    def test_an_outbox_that_is_there_is_kept(self) -> None:
        """Such as that of `reliablepub outbox create`, or of a migration that was undone."""
        for using in self.databases:
            self.order(1, using)
            call_command("migrate", "reliablepub", "zero", database=using, verbosity=0)
            call_command("migrate", "reliablepub", database=using, verbosity=0)
            self.check(1, using)
            assert ParkedMessage.objects.using(using).count() >= 0

    @skipUnless(connections["archive"].vendor == "postgresql", "SQLite's first message adds it")
    def test_migrate_adds_an_outbox_whose_migration_was_applied_without_it(self) -> None:
        """Because the settings did not name the database then."""
        with connections["archive"].cursor() as cursor:
            cursor.execute("DROP SCHEMA reliablepub CASCADE")
        with pytest.raises(DatabaseError):
            self.order(1, "archive")
        call_command("migrate", database="archive", verbosity=0)
        DjangoOutbox("archive").enqueue(Message(b""))
        assert self.stored("archive") == 1
        assert ParkedMessage.objects.using("archive").count() == 0

    @skipUnless(connections["default"].vendor == "postgresql", "SQLite has no users")
    def test_who_may_not_says_what_is_missing(self) -> None:
        connection = connections["default"]
        with connection.cursor() as cursor:
            cursor.execute("DROP VIEW reliablepub_parked_messages; DROP ROLE IF EXISTS plain")
            cursor.execute("CREATE ROLE plain; SET ROLE plain")
        try:
            with pytest.raises(CommandError, match=r"outbox create --sql.*--roles"):
                create(connection)
            with pytest.raises(DatabaseError) as denied:
                DjangoOutbox().enqueue(Message(b""))
            assert "needs the role" in str(denied.value.__notes__)
        finally:
            with connection.cursor() as cursor:
                cursor.execute("RESET ROLE; DROP ROLE plain")
        create(connection)
        assert ParkedMessage.objects.count() >= 0

    def test_migrate_upgrades_an_outbox_of_an_earlier_version(self) -> None:
        with patch.object(Outbox, "upgrade") as upgrade:
            call_command("migrate", database="archive", verbosity=0)
        assert upgrade.call_count == 1

    def test_the_sql_of_the_migration_names_the_command(self) -> None:
        told = StringIO()
        call_command("sqlmigrate", "reliablepub", "create_outbox", stdout=told)
        assert "-- Create the outbox; its SQL: reliablepub outbox create --sql" in told.getvalue()

    def test_none_is_missing(self) -> None:
        call_command("makemigrations", "--check", "--dry-run", verbosity=0)


class Relaying(Case):
    def relay(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        environment = {"RELIABLEPUB_URL": URL, **environment}
        for using in self.databases:
            name = connections[using].settings_dict["NAME"]
            environment[f"SHOP_{using.upper()}"] = str(name)
        return subprocess.run(
            [sys.executable, "-m", "django", "relay_outbox", *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def test_the_command_relays_an_outbox(self) -> None:
        self.order(1)
        self.order(2, "archive")
        done = self.relay("--", "--drain")
        assert done.returncode == 0, done.stderr
        assert DjangoOutbox().outbox.status().open == 0
        assert DjangoOutbox("archive").outbox.status().open > 0
        done = self.relay("--database", "archive", "--", "--drain")
        assert done.returncode == 0, done.stderr
        assert DjangoOutbox("archive").outbox.status().open == 0

    def test_the_exit_code_is_the_relays(self) -> None:
        assert self.relay("--", "--no-such-option").returncode == 2

    def test_a_broker_is_needed(self) -> None:
        url = os.environ.pop("RELIABLEPUB_URL", None)
        with pytest.raises(CommandError, match="RELIABLEPUB"):
            call_command("relay_outbox")
        assert url is None


class Admin(Case):
    def park(self, using: str, number: int) -> None:
        """Have a broker return a message, and the policy give it up at once."""
        with transaction.atomic(using):
            DjangoOutbox(using).enqueue(Message(b"", routing_key=f"missing-{number}"))
        where = DjangoOutbox(using).where
        with (
            FakeBroker() as broker,
            Publisher(broker.url, outbox=where, retry=RetryPolicy(returned=ONCE)) as publisher,
        ):
            broker.declare_queue(QUEUE)
            publisher.flush(timeout_s=30)

    def page(self, **query: str) -> Any:
        return self.client.get(reverse("admin:reliablepub_parkedmessage_changelist"), query)

    def test_parked_messages_are_listed_and_retried(self) -> None:
        self.client.force_login(User.objects.create_superuser("operator", password="x"))
        self.park("default", 1)
        self.park("archive", 2)
        page = self.page()
        self.assertContains(page, "missing-1")
        self.assertContains(page, "NO_ROUTE")
        self.assertNotContains(page, "missing-2")
        self.assertContains(self.page(database="archive"), "missing-2")
        self.assertNotContains(self.page(database="archive"), "missing-1")
        self.assertNotContains(self.page(database="memory"), "missing-2")
        for using, query in (("archive", "?database=archive"), ("default", "")):
            (parked,) = DjangoOutbox(using).outbox.parked()
            edited = reverse("admin:reliablepub_parkedmessage_change", args=[parked.id])
            assert self.client.post(edited + query, {"exchange": "other"}).status_code in {302, 403}
            assert DjangoOutbox(using).outbox.parked() == [parked]
            address = reverse("admin:reliablepub_parkedmessage_changelist") + query
            chosen = {"action": "retry", "_selected_action": [parked.id]}
            answer = self.client.post(address, chosen, follow=True)
            self.assertContains(answer, "1 of 1 will be sent again")
            assert DjangoOutbox(using).outbox.parked() == []

    def test_an_outbox_that_cannot_be_read_is_a_message(self) -> None:
        self.client.force_login(User.objects.create_superuser("operator", password="x"))
        said = "permission denied for schema reliablepub"
        with patch.object(admin.ModelAdmin, "changelist_view", side_effect=DatabaseError(said)):
            address = reverse("admin:reliablepub_parkedmessage_changelist")
            answer = self.client.get(address, follow=True)
        self.assertContains(answer, f"The outbox cannot be shown: {said}")

    def test_who_may_only_look_cannot_retry(self) -> None:
        viewer = User.objects.create_user("viewer", password="x", is_staff=True)
        self.client.force_login(viewer)
        assert self.page().status_code == 403
