"""Where the outbox of a Django database is: the path of its file, or its URL.

Knows: the settings of Django's backends for SQLite and PostgreSQL. Must never know: messages, and
what an outbox does with the place.
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote, urlencode

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.base import BaseDatabaseWrapper

_HOST: Final = re.compile(r"[\w.-]+")
"""A name or an IPv4 address. Sockets, IPv6 addresses and lists are parameters of the URL."""


def where_of(connection: BaseDatabaseWrapper) -> str:
    """Return where an `Outbox` finds the database of a connection: a path, or a URL with password.

    The test runner replaces the name of a database, so the answer holds for this moment.

    Raises:
        ImproperlyConfigured: the database cannot hold an outbox.
    """
    if connection.vendor == "postgresql":
        return _url(connection)
    if connection.vendor != "sqlite":
        raise ImproperlyConfigured(
            f"database {connection.alias!r} is of {connection.vendor}; an outbox needs SQLite or "
            "PostgreSQL"
        )
    name = str(connection.settings_dict["NAME"])
    if name == ":memory:" or "mode=memory" in name:
        raise ImproperlyConfigured(
            f"database {connection.alias!r} is in memory, where no outbox can be; for tests, give "
            'it a file: DATABASES = {"default": {..., "TEST": {"NAME": "test.db"}}}'
        )
    return name


def _url(connection: BaseDatabaseWrapper) -> str:
    from psycopg import pq  # noqa: PLC0415 - only an outbox on PostgreSQL needs it

    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    given: dict[str, Any] = connection.get_connection_params()  # Django's own options are in it too
    options = {
        name: str(value) for name, value in given.items() if name in known and value is not None
    }
    host = ""
    if _HOST.fullmatch(options.get("host", "")):
        host = options.pop("host")
        if options.get("port", "").isdecimal():
            host += ":" + options.pop("port")
    database = quote(options.pop("dbname", ""), "")
    return f"postgresql://{host}/{database}?{urlencode(options, quote_via=quote)}"
