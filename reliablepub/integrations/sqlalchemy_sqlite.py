"""How transactions of SQLAlchemy begin and end in Python's sqlite3.

Knows: SQLAlchemy's connections, the modes of sqlite3. Must never know: sessions, outboxes.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from sqlalchemy import Connection

from reliablepub import ConfigurationError


def begin_immediate(connection: Connection) -> None:
    """Begin a transaction of SQLAlchemy with ``BEGIN IMMEDIATE``, unless it is in ``AUTOCOMMIT``.

    Raises:
        ConfigurationError: the commit of sqlite3 would not end it.
    """
    if _is_autocommit(connection):
        return  # its caller commits nothing, so a transaction would be rolled back
    driver: Any = connection.connection.dbapi_connection
    own: Any = connection.connection.driver_connection
    if getattr(getattr(own, "_conn", own), "autocommit", None) in {True, False}:
        raise ConfigurationError(
            "immediate_transactions needs an engine without autocommit in connect_args: sqlite3 "
            "would begin transactions itself (False), or never commit what is begun here (True)"
        )
    # SQLAlchemy sets it when it opens a connection, and again after one was in AUTOCOMMIT.
    if driver.isolation_level is not None:
        driver.isolation_level = None  # sqlite3 begins no transaction of its own
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _is_autocommit(connection: Connection) -> bool:
    level = connection.get_execution_options().get("isolation_level")
    # That of `create_engine`, which SQLAlchemy tells nowhere else.
    level = level or getattr(connection.dialect, "_on_connect_isolation_level", None)
    return level == "AUTOCOMMIT"


def check_control(connection: Connection, own: sqlite3.Connection) -> None:
    """Check that commit and rollback of SQLAlchemy apply to what sqlite3 is given.

    Args:
        connection: SQLAlchemy's.
        own: the connection of sqlite3 below it.

    Raises:
        ConfigurationError: they do not.
    """
    autocommit = getattr(own, "autocommit", None)  # of Python 3.12; neither bool by default
    if _is_autocommit(connection) or autocommit is False:
        return
    does_begin = own.isolation_level is not None  # before INSERT, UPDATE and DELETE only
    call = (
        "Nothing was stored; call "
        "reliablepub.integrations.sqlalchemy.immediate_transactions(engine) at the start"
    )
    # With autocommit, sqlite3's commit and rollback do nothing, not even after a BEGIN.
    if autocommit is True or not (does_begin or own.in_transaction):
        raise ConfigurationError(
            "the session's connection is in sqlite3's autocommit mode, so the message would not be "
            "committed and rolled back with the session: leave autocommit and isolation_level out "
            f"of connect_args. {call}"
        )
    # Without a listener that begins the transaction, the savepoint itself has.
    if connection.in_nested_transaction() and (does_begin or not connection.dispatch.begin):
        raise ConfigurationError(
            "the session is in a savepoint, and Python's sqlite3 begins no transaction before one: "
            f"the message could be stored without it. {call}"
        )
