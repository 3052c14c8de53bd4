"""The connection with which an `Outbox` writes to its file."""

from reliablepub import Outbox
from reliablepub.outbox.sqlite.database import Writer
from reliablepub.outbox.sqlite.sessions import SqliteDatabase


def writer_of(outbox: Outbox) -> Writer:
    database = outbox._database
    assert isinstance(database, SqliteDatabase)
    return database._writer
