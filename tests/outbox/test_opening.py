"""The one place that tells a path from a URL."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from reliablepub import ConfigurationError, Message, Outbox
from reliablepub.outbox.admin.inspection import read_status
from reliablepub.outbox.database import Database, file_of
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.postgres.database import PostgresDatabase
from reliablepub.outbox.sqlite.database import SqliteDatabase


def test_a_path_is_a_sqlite_file(path: Path) -> None:
    for where in (path, str(path)):
        database = outbox_at(where)
        assert isinstance(database, SqliteDatabase)
        assert (database.file, database.name) == (path, str(path))
    assert outbox_at(database) is database


def test_it_exists_when_it_holds_an_outbox(path: Path) -> None:
    with closing(outbox_at(path)) as database:
        assert not database.exists()
        path.touch()
        assert not database.exists(), "an application's, without an outbox"
        Outbox(database).enqueue(Message(b"x"))
        assert database.exists()
        assert read_status(database).open == 1


@pytest.mark.parametrize("url", ["postgresql://u:secret@host/db", "postgres:///db?schema=x"])
def test_a_url_of_postgresql_is_opened_when_it_is_used(url: str) -> None:
    database = outbox_at(url)
    assert isinstance(database, PostgresDatabase)
    assert database.name == url.replace("u:secret@", "").replace("postgres:", "postgresql:")
    assert "secret" not in repr(database.server)


def test_an_outbox_in_postgresql_needs_psycopg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for name in [name for name in sys.modules if name.startswith("reliablepub.outbox.postgres.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigurationError, match=r"install reliablepub with the extra postgres"):
        outbox_at("postgresql://host/db")


def test_other_urls_are_refused() -> None:
    words = r"^an outbox is a file or a postgresql:// URL; mysql:// is neither$"
    with pytest.raises(ConfigurationError, match=words):
        outbox_at("mysql://u:secret@host/db")


@pytest.mark.parametrize(
    "where",
    [
        "postgresql://app:p/s3cret@db/shop",
        "postgresql://app:p@s3cret@db/shop",
        "postgresql://app:s3cret/shop",
        "postgresql://app:p@db:s3cret/shop",
        "postgresql://app:p@[::1]:s3cret/shop",
        "postgresql:/app:s3cret@db/shop",
        "postgres:app:s3cret@db/shop",
        "sqlite:///app:s3cret@db",
        "host=db password=s3cret",
        "password = s3cret",
        "dbname=s3cret user=app",
        "app:s3cret@db/shop",
        "app:s3cret@db",
        "postgresql//app:s3cret@db/shop",
        "postgresql://db/shop&password=s3cret",
        "postgresql://db/shop;password=s3cret",
        "postgresql://db/shop?schema=mail?password=s3cret",
        "postgresql://db/shop?schema=mail;password=s3cret",
        "sqlite+pysqlcipher:////srv/app.db?key=s3cret",
    ],
)
def test_a_mistaken_url_is_refused_and_not_quoted(where: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        outbox_at(where)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app:p%40%2F@db:5432/shop",
        "postgresql://[::1]:5432,db,other:5433/shop",
        "postgresql:///shop?host=/run/postgresql",
    ],
)
def test_a_url_with_several_hosts_or_none_is_understood(url: str) -> None:
    assert isinstance(outbox_at(url), PostgresDatabase)


@pytest.mark.parametrize(
    ("url", "environment", "mode"),
    [
        ("postgresql://app:s3cret@db/shop", {}, "prefer"),
        ("postgresql://app:s3cret@db/shop?sslmode=disable", {}, "disable"),
        ("postgresql://app:s3cret@db/shop", {"PGSSLMODE": "allow"}, "allow"),
        ("postgresql://app:s3cret@localhost,db/shop", {}, "prefer"),
        ("postgresql://app:s3cret@localhost/shop?hostaddr=192.0.2.1", {}, "prefer"),
        ("postgresql://app:s3cret@[fe80::1]/shop", {}, "prefer"),
        ("postgresql:///shop?password=s3cret", {"PGHOST": "db"}, "prefer"),
        ("postgresql:///shop?password=s3cret", {"PGHOSTADDR": "192.0.2.1"}, "prefer"),
        ("postgresql://app@db/shop?sslmode=require", {}, None),
        ("postgresql://app@db/shop", {"PGSSLMODE": "verify-full"}, None),
        ("postgresql://app@localhost,127.0.0.2,[::1]/shop", {}, None),
        ("postgresql://app@db/shop?hostaddr=127.0.0.1", {}, None),
        ("postgresql:///shop", {}, None),
        ("postgresql:///shop?host=/run/postgresql,@abstract", {}, None),
        ("postgresql://app@db/shop?service=shop", {}, None),
        ("postgresql://app@db/shop", {"PGSERVICE": "shop"}, None),
    ],
)
def test_an_unencrypted_way_to_the_database_is_told(
    url: str, environment: dict[str, str], mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGSSLMODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = outbox_at(url).exposure()
    assert (f"unencrypted (sslmode={mode}); add sslmode=verify-full" in words) is (mode is not None)
    assert bool(words) is (mode is not None)
    assert "s3cret" not in words


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("sqlite:///app.db", "sqlite:// is neither; write its path alone: app.db"),
        ("sqlite+pysqlite:////srv/app.db", "is neither; write its path alone: /srv/app.db"),
        ("sqlite://", "sqlite:// is neither$"),
        (
            ":memory:",
            r"':memory:' is not one; for messages in memory only, Publisher\(url, outbox=",
        ),
        ("file:app.db?mode=ro", "needs the path of a file; 'file:app.db"),
        ("", "needs the path of a file; '' is not one"),
        ("~/outbox.db", "only a shell expands ~"),
        ("postgresql:/host/db", "begins with postgresql://"),
        ("a\0b", "has the character U.0000"),
        ("postgresql+psycopg://host/db", "write postgresql://, without the driver"),
    ],
)
def test_names_that_mean_something_else_to_sqlite_are_refused(where: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        outbox_at(where)


def test_what_is_done_to_files_asks_for_one(path: Path) -> None:
    assert file_of(outbox_at(path)) == path

    class OnServer(SqliteDatabase):
        def __init__(self) -> None:
            self.name = "postgresql://host/db"  # type: ignore[misc]
            self.file = None  # type: ignore[misc, assignment]

    elsewhere: Database = OnServer()
    with pytest.raises(ConfigurationError, match="outbox postgresql://host/db is on a server"):
        file_of(elsewhere)
