"""A snapshot of an outbox and its relay, as named values.

Knows: which functions return the values. Must never know: how a snapshot is shown, SQL, or a
broker.

The names are the keys of ``--json``; times are seconds since 1970. Values that only a running relay
has are None without one.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from reliablepub.outbox.admin.inspection import read_failures, read_relays, read_status
from reliablepub.outbox.database import Database, Relaying
from reliablepub.relay.status import PAUSED_SHOWN, silent_s

FAILURES: int = 20
REASONS: int = 5

COUNTS = (
    *("stored", "open", "in_flight", "waiting", "held_keys"),
    *("confirmed", "parked", "expired", "discarded"),
)
RATES_KEPT: int = 150
"""In the chart of the dashboard, which looks every two seconds: five minutes."""
_SUMS = ("window", "paused_destinations", "rate_max")
_SUMS_CLOSELY = ("buffered", "aside", "connects", "violations")
"""Values of the relays' status files, added up over the shards."""


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot of an outbox and its relay."""

    at: float  # monotonic seconds, to compute rates from
    now: float  # seconds since 1970
    values: Mapping[str, Any]  # counts by state, rates, the relay, its connection, the disk
    # Stored and confirmed per second, of this snapshot and of those before it, the newest last
    rates: Sequence[tuple[float, float]] = ()

    def unreachable(self, reason: str) -> Look:
        """This snapshot, as the last of an outbox that cannot be read any more."""
        for_s = round(time.monotonic() - self.at, 1)
        values = {"unreachable_s": for_s, "unreachable_reason": reason}
        return replace(self, values={**self.values, **values})


def look(database: Database, before: Look | None = None, *, closely: bool = False) -> Look:
    """Take a read-only snapshot, with rates since `before`; if `closely`, with recent failures."""
    relays = read_relays(database)
    found, at, now = read_status(database), time.monotonic(), time.time()
    relay = Relaying.first(relays).status
    shown = [one.status for one in relays if one.pid is not None] or [relay]
    counts: dict[str, Any] = {name: getattr(found, name) for name in COUNTS}
    hanging = [one.silent_pid for one in relays if one.silent_pid is not None]
    oldest = found.oldest_open_at
    folder = None if database.file is None else database.file.parent
    seconds = at - before.at if before is not None else 0.0

    def rate(name: str) -> float | None:
        return round((counts[name] - before.values[name]) / seconds, 1) if before else None

    values = counts | {
        "outbox": database.name,
        "oldest_open_age_s": None if oldest is None else round(max(0.0, now - oldest), 1),
        "stored_per_s": rate("stored"),
        "confirmed_per_s": rate("confirmed"),
        "relay_pid": found.relay or next(iter(hanging), None),
        "relays": [
            {"shard": one.shard, "pid": one.pid or one.silent_pid, "host": one.host}
            | {name: one.status.get(name) for name in ("link", "reason", "server", "since")}
            | {"silent_s": _silent_s(database, one, oldest, now)}
            for one in relays
        ],
        "standbys": [
            {"host": one.host, "age_s": None if one.age_s is None else round(one.age_s, 1)}
            for one in database.standbys()
        ],
        "link": relay.get("link"),
        "link_reason": relay.get("reason"),
        "link_since": relay.get("since"),
        **{name: _sum(shown, name) for name in _SUMS},
        # Why a relay is slower; empty if none is
        "hooks_off": max(_values(shown, "hooks_off"), key=len, default=None),
        "paused": _paused(shown),
        "bytes_on_disk": found.bytes_on_disk,
        "log_bytes": found.log_bytes,
        "is_disk_full": found.is_disk_full,
        "bytes_free": None if folder is None else shutil.disk_usage(folder).free,
    }
    if closely:
        failures, reasons = read_failures(database, failures=FAILURES, reasons=REASONS)
        values |= {"at": now} | {name: _sum(shown, name) for name in _SUMS_CLOSELY}
        values |= {"latency": _latency(shown)}
        values |= {"reasons": reasons, "failures": failures}
    pair = (values["stored_per_s"] or 0.0, values["confirmed_per_s"] or 0.0)
    rates = (*(before.rates if before is not None else ()), pair)
    return Look(at, now, values, rates[-RATES_KEPT:])


def _silent_s(
    database: Database, relay: Relaying, oldest_open_at: float | None, now: float
) -> float | None:
    found = relay.silent_s  # in PostgreSQL
    if database.file is not None and relay.pid is not None:
        found = silent_s(relay.status, oldest_open_at, now)
    return None if found is None else round(found, 1)


def _values(shown: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [one[name] for one in shown if one.get(name) is not None]


def _sum(shown: Sequence[Mapping[str, Any]], name: str) -> int | None:
    found = _values(shown, name)
    return sum(found) if found else None


def _paused(shown: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """The paused destinations of all shards, the oldest pause first."""
    found = _values(shown, "paused")
    rows = sorted((row for rows in found for row in rows), key=itemgetter("since"))
    return rows[:PAUSED_SHOWN] if found else None


def _latency(shown: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Number of confirms of all shards; of each percentile, the highest of a shard."""
    found = _values(shown, "latency")
    if not found:
        return None
    highest = {name: max(one[name] for one in found) for name in found[0]}
    return highest | {"confirms": sum(one["confirms"] for one in found)}
