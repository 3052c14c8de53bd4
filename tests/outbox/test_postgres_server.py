"""The PostgreSQL server of the other tests: it syncs, dies by kill, and leaves nothing behind."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.postgres import PostgresServer, can_connect
from tests.waiting import until

Connection = psycopg.Connection[Any]

KILLED = """
import os, signal, sys
from tests.postgres import PostgresServer
server = PostgresServer().__enter__()
print(server.folder, flush=True)
server.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def connection(postgres_url: str) -> Iterator[Connection]:
    with closing(psycopg.connect(postgres_url, autocommit=True)) as connection:
        connection.execute("CREATE TABLE rows (n integer)")
        yield connection


def insert(connection: Connection, n: int) -> None:
    connection.execute("INSERT INTO rows VALUES (%s)", (n,))


def stored(url: str) -> list[int]:
    with closing(psycopg.connect(url)) as connection:
        return [n for (n,) in connection.execute("SELECT n FROM rows ORDER BY n")]


def test_it_is_a_server_that_loses_nothing(connection: Connection) -> None:
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        assert connection.execute(f"SHOW {setting}").fetchone() == ("on",), setting
    assert connection.execute("SHOW listen_addresses").fetchone() == ("127.0.0.1",)


def test_each_test_has_a_database_of_its_own(
    postgres_server: PostgresServer, postgres_url: str, connection: Connection
) -> None:
    other = postgres_server.create_database()
    assert postgres_server.url_of(other) != postgres_url
    with pytest.raises(psycopg.errors.UndefinedTable):
        stored(postgres_server.url_of(other))
    postgres_server.drop_database(other)
    assert not can_connect(postgres_server.url_of(other))


def test_what_was_committed_outlives_kill(
    postgres_server: PostgresServer, postgres_url: str, connection: Connection
) -> None:
    insert(connection, 1)
    connection.execute("BEGIN")
    insert(connection, 2)
    postgres_server.kill()
    assert postgres_server.processes() == []
    assert not can_connect(postgres_url)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("COMMIT")
    postgres_server.start()
    assert stored(postgres_url) == [1]


def test_a_smart_stop_waits_for_its_clients(
    postgres_server: PostgresServer, postgres_url: str, connection: Connection
) -> None:
    postgres_server.stop("smart", wait=False)
    until(lambda: not can_connect(postgres_url))
    insert(connection, 1)
    assert postgres_server.is_running
    connection.close()
    until(lambda: not postgres_server.is_running)


def test_a_paused_server_can_be_killed(
    postgres_server: PostgresServer, postgres_url: str, connection: Connection
) -> None:
    insert(connection, 1)
    postgres_server.pause()
    postgres_server.kill()
    postgres_server.start()
    assert stored(postgres_url) == [1]


def test_pgbouncer_lends_a_connection_by_transaction(
    pgbouncer_url: str, connection: Connection
) -> None:
    with closing(psycopg.connect(pgbouncer_url, autocommit=True)) as first:
        first.execute("BEGIN")
        pid = first.execute("SELECT pg_backend_pid()").fetchone()
        with closing(psycopg.connect(pgbouncer_url, autocommit=True)) as second:
            assert second.execute("SELECT pg_backend_pid()").fetchone() != pid
            first.execute("COMMIT")
            second.execute("BEGIN")
            assert second.execute("SELECT pg_backend_pid()").fetchone() == pid


def test_nothing_is_left(postgres_server: PostgresServer) -> None:
    assert postgres_server.is_running  # it is here, and a second one does not disturb it
    with PostgresServer(settings={"fsync": "off"}) as server:
        assert server.execute("SHOW fsync") == [("off",)]
        assert server.port != postgres_server.port
        assert len(server.processes()) > 1
    assert server.processes() == []
    assert not server.folder.exists()


@pytest.mark.postgres
def test_no_process_outlives_a_killed_test_run_even_if_it_is_frozen() -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False
    )
    assert run.returncode == -signal.SIGKILL
    server = PostgresServer()
    server._folder = Path(run.stdout.strip())
    until(lambda: not server.processes())
    subprocess.run(["rm", "-r", server.folder], check=True)
