"""A server that refuses a connection: what no wait heals is told at once, and names the setting."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from reliablepub import Message, Outbox, OutboxError, OutboxUnreachable, Publisher
from reliablepub.testing import FakeBroker
from tests import postgres
from tests.certificates import signed
from tests.postgres import PostgresServer
from tests.waiting import until

RULES = """\
host all unwelcome all reject
host all secretive all scram-sha-256
hostssl all all all trust
host all all all trust
"""


@pytest.fixture(scope="module")
def strict(_postgres: PostgresServer) -> Iterator[PostgresServer]:
    """It asks one user for a password, and refuses others."""
    with PostgresServer() as server:
        (server.data / "pg_hba.conf").write_text(RULES)
        server.execute("CREATE ROLE unwelcome LOGIN")
        server.execute("SELECT pg_reload_conf()")
        until(lambda: not postgres.can_connect(server.url_of(user="unwelcome")))
        server.execute("CREATE ROLE secretive LOGIN PASSWORD 'old'")
        for user in ("full", "app"):
            server.execute("CREATE ROLE {} LOGIN", user)
        server.execute("ALTER ROLE full CONNECTION LIMIT 0")
        server.execute("CREATE ROLE grouped NOLOGIN")
        for name in ("closed", "private"):
            server.execute("CREATE DATABASE {}", name)
        server.execute("ALTER DATABASE closed ALLOW_CONNECTIONS false")
        server.execute("REVOKE CONNECT ON DATABASE private FROM PUBLIC")
        yield server


def refused(url: str) -> OutboxError:
    with Outbox(url) as outbox, pytest.raises(OutboxError) as caught:
        outbox.enqueue(Message(b"", routing_key="q"))
    return caught.value


@pytest.mark.parametrize(
    ("user", "place", "setting"),
    [
        ("app", "nowhere", "create the database"),
        ("app", "private", "grant its user CONNECT"),
        ("nobody", "postgres", "user and password"),
        ("grouped", "postgres", "user and password"),
        ("unwelcome", "postgres", "pg_hba.conf"),
        ("secretive", "postgres", "PGPASSWORD"),
        ("secretive:canary", "postgres", "password file"),
        ("app", "postgres?options=-c%20no_such%3D1", "`options`"),
        ("app", "postgres?options=-c%20fsync%3Doff", "`options`"),
        ("app", "postgres?options=-c%20work_mem%3Dx", "`options`"),
        ("app", "postgres?sslmode=require", "sslmode"),
        ("app", "postgres?sslmode=bogus", "correct it in its URL"),
        ("app", "postgres?channel_binding=require", "channel_binding"),
        ("app", "?service=none", "pg_service.conf"),
    ],
)
def test_what_no_wait_heals_is_not_tried_again(
    strict: PostgresServer, user: str, place: str, setting: str
) -> None:
    error = refused(strict.url_of(place, user=user))
    assert type(error) is OutboxError
    assert not error.retryable
    assert setting in str(error)
    assert "canary" not in str(error)


@pytest.mark.parametrize(("user", "place"), [("full", "postgres"), ("app", "closed")])
def test_what_may_pass_is_tried_again(strict: PostgresServer, user: str, place: str) -> None:
    assert isinstance(refused(strict.url_of(place, user=user)), OutboxUnreachable)


def test_a_server_that_is_not_there_is_tried_again(strict: PostgresServer) -> None:
    for host in ("127.0.0.1:1", "no-such-host.invalid", f"127.0.0.1:1,127.0.0.1:{strict.port}"):
        error = refused(f"postgresql://app@{host}/nowhere?connect_timeout=2")
        assert isinstance(error, OutboxUnreachable), host
        assert error.retryable


def test_one_address_of_a_host_is_enough(strict: PostgresServer) -> None:
    """As of `localhost`, at whose address ::1 nothing may listen."""
    two = f"hostaddr=127.0.0.2,127.0.0.1&port={strict.port}"
    assert type(refused(f"postgresql://app@db,db/nowhere?{two}")) is OutboxError


@pytest.fixture
def certified(strict: PostgresServer, tmp_path: Path) -> Iterator[str]:
    """The URL of the server while it has a certificate for another name."""
    both = signed(tmp_path, "DNS:db.example.com")
    for name, source in (("server.crt", tmp_path / "one.crt"), ("server.key", both)):
        target = strict.data / name
        shutil.copy(source, target)
        target.chmod(0o600)
        shutil.chown(target, strict.data.owner(), strict.data.group())
    url = strict.url_of(user="app") + "?sslmode=require"

    def switch(*, on: bool) -> None:
        strict.execute("ALTER SYSTEM SET ssl = on" if on else "ALTER SYSTEM SET ssl = off")
        strict.execute("SELECT pg_reload_conf()")
        until(lambda: postgres.can_connect(url) == on)

    switch(on=True)
    yield url.replace("require", "verify-full")
    switch(on=False)


def test_certificates_are_told(certified: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    signed(other, "DNS:db.example.com")
    for root, said in (
        ("none", 'root certificate file "'),
        ("ca.crt", "does not match host name"),
        ("other/ca.crt", "certificate verify failed"),
    ):
        error = refused(f"{certified}&sslrootcert={tmp_path / root}")
        assert type(error) is OutboxError
        assert said in str(error)


@pytest.mark.skipif(not postgres.is_pgbouncer_installed(), reason="needs PgBouncer")
def test_a_pooler_that_takes_no_options_is_told(pgbouncer_url: str) -> None:
    error = refused(f"{pgbouncer_url}?options=-c%20work_mem%3D1MB")
    assert type(error) is OutboxError
    assert "ignore_startup_parameters" in str(error)


def test_a_relay_outlives_the_change_of_its_password(strict: PostgresServer) -> None:
    """Whoever changes it first on the server, and then in the password file, needs no restart."""
    name = strict.create_database()
    strict.execute("GRANT CREATE ON DATABASE {} TO secretive", name)
    url = strict.url_of(name, user="secretive:old")
    with Outbox(url) as outbox:
        outbox.create()
    with FakeBroker() as fake, Publisher(fake.url, outbox=url) as publisher:
        fake.declare_queue("q")
        strict.execute("ALTER ROLE secretive PASSWORD 'new'")
        strict.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'secretive'"
        )
        until(lambda: "cannot be reached" in publisher.status.trouble)
        error = refused(url)
        assert isinstance(error, OutboxUnreachable)
        assert "password authentication failed" in str(error)
        strict.execute("ALTER ROLE secretive PASSWORD 'old'")
        until(lambda: not publisher.status.trouble)
        publisher.publish(b"", routing_key="q").result(20)
