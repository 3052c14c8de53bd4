"""The findings of ``doctor`` about an outbox in PostgreSQL.

Knows: facts about the server, and what they mean for delivery. Must never know: how facts are
gathered, or how findings are printed. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from reliablepub.cli.doctor.diagnosis import of_clock, of_messages
from reliablepub.cli.facts import Finding, Level, finding, unless, warn_unless
from reliablepub.cli.output import age, count_of, passed_over_words, standby_words
from reliablepub.outbox.admin.inspection import OutboxStatus
from reliablepub.outbox.database import LostCommits, Relaying
from reliablepub.outbox.postgres.environment import Owner, ServerSurroundings
from reliablepub.printable import one_line

SILENT_S: Final = 3.0
"""Seconds without a turn after which another relay may take over."""
CLOCK_OFF_S: Final = 5.0
LONG_S: Final = 600.0
OLD_TRANSACTIONS: Final = 1_000_000
DEAD_MANY: Final = 200_000
"""Ten times the dead rows after which autovacuum is to clean a table of the outbox."""
DAY_S: Final = 86_400.0
_REPLICA_S: Final = 5.0
"""A commit that waits for a replica for longer is told."""
_FULL: Final = 0.9


def of_server(
    status: OutboxStatus,
    around: ServerSurroundings,
    now: float,
    relays: Sequence[Relaying],
    failed: str = "",  # why the last relay failed
) -> Iterator[Finding]:
    """Findings about an outbox in PostgreSQL."""
    yield _relay(status, around.owners, failed)
    if standbys := [(one.host, one.age_s) for one in around.standbys]:
        yield finding("standbys", Level.OK, standby_words(standbys))
    yield from of_messages(status, now, relays)
    server = around.server
    yield _server(server)
    yield _functions(around.changed)
    yield _sequences(around.behind)
    yield _lost(around.lost, now)
    yield _passed_over(around.passed_over)
    yield _durability(server)
    yield of_privileges(server)
    if server["sees_activity"]:
        yield _replicas(server)
        yield _horizon(server)
        yield _connections(server)
    yield _dead(server)
    yield of_clock(around.ahead_s)
    off_s = around.clock_off_s
    yield finding(
        "server clock",
        warn_unless(abs(off_s) < CLOCK_OFF_S),
        f"{abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} the clock of this host",
        "delays and deadlines of messages depend on the clocks of the hosts: check NTP",
    )


def _relay(status: OutboxStatus, owners: Sequence[Owner], failed: str) -> Finding:
    words, missing, hanging = [], 0, 0
    for owner in owners:
        where = f"shard {owner.shard}: " if len(owners) > 1 else ""
        is_there = not owner.is_free and owner.silent_s < SILENT_S
        missing += not is_there
        if owner.pid is None:
            words.append(f"{where}none yet")
            continue
        said = f"process {owner.pid} on {one_line(owner.host)}"
        silent = age(max(0.0, owner.silent_s))
        last = f"none, the last was {said}, {silent} ago"
        if not (is_there or owner.is_free) and owner.is_linked:
            hanging += 1
            last = f"{said} hangs, or is cut off: no sign of life for {silent}"
        words.append(f"{where}{said if is_there else last}")
    reason = f"; it has failed: {one_line(failed)}" if failed and missing else ""
    opened = f"; {count_of(status.open, 'message')} open" if missing else ""
    level = Level.WARNING if 0 < missing < len(owners) else Level.OK
    if missing and (status.open or failed):
        level = Level.PROBLEM
    return finding(
        "relay",
        level,
        "; ".join(words) + reason + opened,
        "restart that relay; with another one that has --standby, it would have been replaced"
        if hanging
        else "start `reliablepub relay`, one for each shard",
    )


def _server(server: Mapping[str, Any]) -> Finding:
    found = f"PostgreSQL {server['version']}"
    if server["is_replica"]:
        remedy = "name the primary: libpq takes several hosts and target_session_attrs=read-write"
        return finding("server", Level.PROBLEM, f"{found}, a read-only replica", remedy)
    if server["autovacuum"] != "on":
        remedy = "the tables grow without bound: set autovacuum = on"
        return finding("server", Level.WARNING, f"{found}, autovacuum is off", remedy)
    return finding("server", Level.OK, found)


def _functions(changed: Sequence[str]) -> Finding:
    wrong = f"not as this version creates them: {', '.join(changed)}" if changed else ""
    remedy = (
        "another version has created the outbox, or another program has changed it: its owner runs "
        "`reliablepub outbox upgrade`"
    )
    return unless(wrong, "schema", "its functions are those of this version", remedy)


def _sequences(behind: Mapping[str, int]) -> Finding:
    wrong = f"behind their rows: {', '.join(behind)}" if behind else ""
    calls = "; ".join(f"SELECT setval('{name}', {most})" for name, most in behind.items())
    remedy = f"start a relay, which raises them, or run as the owner of the outbox: {calls}"
    return unless(wrong, "sequences", "not behind their rows", remedy, level=Level.PROBLEM)


def _lost(lost: Sequence[LostCommits], now: float) -> Finding:
    recent = [one for one in lost if now - one.at < DAY_S]
    if not recent:
        return finding("fail-over", Level.OK, "no relay has lost commits in the last day")
    run, ago = recent[0].run, age(max(0.0, now - recent[0].at))
    found = f"run {run} started over {ago} ago: {one_line(recent[0].reason)}"
    remedy = (
        "messages that were accepted before may be lost, and others are sent again: compare with "
        "what the applications have stored; `reliablepub outbox audit` lists each fail-over"
    )
    return finding("fail-over", Level.WARNING, found, remedy)


def _passed_over(ids: Sequence[int]) -> Finding:
    fine = "no due message is left out by a running relay"
    remedy = (
        "restart the relay; if they stay, `reliablepub outbox explain` the first, and report it"
    )
    wrong = passed_over_words(ids) if ids else ""
    return unless(wrong, "passed over", fine, remedy, level=Level.PROBLEM)


def _durability(server: Mapping[str, Any]) -> Finding:
    commit = server["synchronous_commit"]
    found = f"fsync {server['fsync']}, synchronous_commit {commit}"
    if server["fsync"] != "on" or server["full_page_writes"] != "on":
        found = f"{found}, full_page_writes {server['full_page_writes']}"
        remedy = "a crash of the server's host loses or damages messages: set both to on"
        return finding("durability", Level.PROBLEM, found, remedy)
    if server["unlogged"]:
        remedy = "a crash of the server empties them: ALTER TABLE ... SET LOGGED"
        return finding("durability", Level.PROBLEM, f"unlogged: {server['unlogged']}", remedy)
    if commit != "off":
        return finding("durability", Level.OK, found)
    if server["allows_loss"]:
        found += ", as the outbox allows"
        remedy = "a crash of the server loses messages that were accepted in its last 0.6 s or so"
        return finding("durability", Level.WARNING, found, remedy)
    remedy = (
        "reliablepub turns it on in its own transactions; messages that are enqueued in the "
        "application's transactions may be lost by a crash: set it to on there"
    )
    return finding("durability", Level.WARNING, found, remedy)


def _replicas(server: Mapping[str, Any]) -> Finding:
    count, waits_s = server["replicas"], server["replica_wait_s"] or 0.0
    found = count_of(count, "replica") + " connected" if count else "none is connected"
    is_named = bool(server["synchronous_standbys"])
    is_waited_for = is_named and server["synchronous_commit"] not in ("off", "local")
    if waits_s > _REPLICA_S or (is_waited_for and not count):
        found += f", synchronous_standby_names is {server['synchronous_standbys']!r}"
        found += f", a commit has waited for {waits_s:.0f} s" if waits_s else ""
        remedy = "a commit does not return: start the replica, or take it from the setting"
        return finding("replicas", Level.PROBLEM, found, remedy)
    if not count:
        return finding("replicas", Level.OK, found)
    if is_waited_for:
        return finding("replicas", Level.OK, f"{found}, a commit waits for synchronous ones")
    remedy = (
        "a fail-over to a replica loses messages that were accepted and had not reached it: set "
        "synchronous_standby_names, and synchronous_commit to on"
    )
    return finding("replicas", Level.WARNING, f"{found}, no commit waits for one", remedy)


def _horizon(server: Mapping[str, Any]) -> Finding:
    held = []
    seconds, transactions = server["oldest_s"], server["oldest_age"]
    if seconds is not None and seconds > LONG_S:
        held.append(f"a transaction that began {age(seconds)} ago")
    elif transactions is not None and transactions > OLD_TRANSACTIONS:
        held.append(f"a transaction that is {transactions} transactions old")
    if server["prepared_s"] is not None and server["prepared_s"] > LONG_S:
        held.append(f"a transaction that was prepared {age(server['prepared_s'])} ago")
    if server["slot_age"] is not None and server["slot_age"] > OLD_TRANSACTIONS:
        held.append(f"a replication slot that is {server['slot_age']} transactions behind")
    remedy = (
        "vacuum cannot remove rows that were deleted since, so the outbox grows: end it "
        "(pg_stat_activity, pg_prepared_xacts, pg_replication_slots)"
    )
    wrong = f"held by {', '.join(held)}" if held else ""
    return unless(wrong, "vacuum horizon", "no long transaction holds it", remedy)


def _connections(server: Mapping[str, Any]) -> Finding:
    used, most = server["connections"], server["connections_max"]
    return finding(
        "connections",
        warn_unless(used / most < _FULL),
        f"{used} of {most} in use",
        "a new relay or enqueuer may get none: raise max_connections, or put PgBouncer in between",
    )


def of_privileges(server: Mapping[str, Any]) -> Finding:
    """The finding about what the role that asks may not do; ``outbox create`` prints it, too."""
    role, kept = server["role"], server["sequences_kept"]
    found, remedies = [], []
    if kept:
        found.append(f"may not set the sequences {kept}, which a relay raises after a move")
        remedies.append(f"GRANT UPDATE ON SEQUENCE {kept} TO {role}")
    if not server["sees_activity"]:
        found.append(
            "does not see the server's processes: a standby takes over in 3 to 5 s, not at once; "
            "doctor sees neither connections, replicas nor long transactions"
        )
        remedies.append(f"GRANT EXECUTE ON FUNCTION pg_stat_get_activity(integer) TO {role}")
    said = "; and ".join(found) or "has what a relay and doctor need"
    return finding(
        "privileges",
        warn_unless(not found),
        f"role {role} {said}",
        f"as an administrator: {'; '.join(remedies)}",
    )


def _dead(server: Mapping[str, Any]) -> Finding:
    dead, live = server["dead"], server["live"]
    return finding(
        "dead rows",
        warn_unless(dead <= max(live, DEAD_MANY)),
        f"{dead} dead rows beside {live} live ones",
        "autovacuum does not keep up, or is held up: see the vacuum horizon and "
        "autovacuum_max_workers",
    )
