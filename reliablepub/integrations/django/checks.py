"""Django's system checks of the setting ``RELIABLEPUB``.

Knows: settings. Must never know: outboxes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from reliablepub.integrations.django import aliases, option, where_of


def check_databases(**_: Any) -> list[checks.CheckMessage]:  # noqa: ANN401 - as Django calls it
    """Check that each database of the setting ``DATABASES`` is there, and can hold an outbox."""
    return list(_of_databases())


def _of_databases() -> Iterator[checks.CheckMessage]:
    for alias in aliases():
        if alias not in connections:
            said = f"RELIABLEPUB['DATABASES'] names {alias!r}, which DATABASES does not have"
            yield checks.Error(said, hint="Correct the alias.", id="reliablepub.E001")
            continue
        try:
            where_of(connections[alias])
        except ImproperlyConfigured as error:
            yield checks.Warning(str(error), id="reliablepub.W001")


def check_broker(**_: Any) -> list[checks.CheckMessage]:  # noqa: ANN401 - as Django calls it
    """Check, with ``check --deploy``, that ``relay_outbox`` finds its broker."""
    if option("URL", os.environ.get("RELIABLEPUB_URL")):
        return []
    said = "no broker is set for relay_outbox: RELIABLEPUB['URL'] or RELIABLEPUB_URL"
    return [checks.Warning(said, id="reliablepub.W002")]
