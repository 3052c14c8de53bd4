"""The findings of ``doctor`` and ``outbox check``: each fact's level, and the remedy.

Knows: facts about an outbox, a broker and the client, and what they mean for delivery. Must never
know: how facts are gathered, or how findings are printed. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from reliablepub.certificates import Validity
from reliablepub.cli.facts import Finding, Level, finding, unless, warn_unless
from reliablepub.cli.output import age, count_of, paused_words, quoted, size_of
from reliablepub.credentials import CredentialsProvider
from reliablepub.errors import ConfigurationError
from reliablepub.outbox.admin.inspection import OutboxStatus
from reliablepub.outbox.admin.integrity import Audit
from reliablepub.outbox.database import Relaying
from reliablepub.outbox.sqlite.checkup import Checkup, Surroundings
from reliablepub.outbox.sqlite.mounts import UNSHARED_VARIABLE, Mount
from reliablepub.printable import one_line
from reliablepub.relay.status import Link, silent_s
from reliablepub.transport.address import Address
from reliablepub.transport.probe import Probe

_MIB: Final = 1024 * 1024
FREE_MIN: Final = 100 * _MIB
FREE_GOOD: Final = 1024 * _MIB
LOG_LONG: Final = 64 * _MIB
"""A relay whose checkpoints succeed keeps the write-ahead log below 20 MiB."""
SYNC_TOO_FAST_MS: Final = 0.02
SYNC_SLOW_MS: Final = 50.0
OLD_S: Final = 3_600.0
AHEAD_S: Final = 5.0
CONNECTING_S: Final = 30.0
"""Time within which a relay's first attempt to connect succeeds or fails."""
WAL_RESET_FIXED: Final = (3, 51, 3)
"""The first SQLite without the WAL-reset bug, which `outbox/sqlite/checkpoints.py` describes."""
FRAME_BYTES_MIN: Final = 131_072
_SHOWN: Final = 5
"""Examples in a finding that concerns many things of one kind."""


_RENEWED_BY: Final = 0.1
"""What renews certificates has done so before this part of their lifetime is left."""


def of_outbox(
    status: OutboxStatus,
    around: Surroundings,
    now: float,
    relay_status: Mapping[str, Any],  # empty without a status file
    failed: str = "",  # why the last relay failed
) -> Iterator[Finding]:
    """Findings about an outbox."""
    silent = silent_s(relay_status, status.oldest_open_at, now)
    yield _relay(status, relay_status, silent, failed)
    # The connection that a silent relay had says nothing about the one it has.
    shown = relay_status if silent is None else {**relay_status, "link": None}
    yield from of_messages(status, now, [Relaying(0, status.relay, shown)])
    yield _sqlite(around)
    yield _sync(around.sync_ms, around.sync_problem)
    yield _disk(status, around)
    if around.mount is not None:
        yield _mount(around.mount)
    yield _log(status)
    yield of_clock(around.ahead_s)


def of_messages(status: OutboxStatus, now: float, relays: Sequence[Relaying]) -> Iterator[Finding]:
    """Findings about messages and their way to the broker, for a file or a server."""
    for relay in relays:
        if relay.pid is not None and relay.status.get("link"):
            whose = "the relay" if len(relays) == 1 else f"the relay of shard {relay.shard}"
            yield _link(whose, relay.status, now)
    yield _backlog(status, now)
    yield _paused([relay.status for relay in relays], now)
    parked = status.parked + status.expired
    yield finding(
        "given up",
        warn_unless(not parked),
        f"{count_of(parked, 'message')} parked or expired",
        "reliablepub outbox summary --state parked --state expired",
    )


def of_clock(ahead_s: float) -> Finding:
    """The finding about the newest message, which was stored `ahead_s` in the future."""
    if ahead_s < AHEAD_S:
        return finding("clock", Level.OK, "no message has a time in the future")
    found = f"the newest message has a time {age(ahead_s)} in the future"
    remedy = "the clock was set back, and delays and deadlines depend on it: check NTP"
    return finding("clock", Level.WARNING, found, remedy)


def _paused(shown: Sequence[Mapping[str, Any]], now: float) -> Finding:
    rows = [(row, one.get("at", now)) for one in shown for row in one.get("paused") or ()]
    if not rows:
        return finding("paused", Level.OK, "no destination is paused")
    count = sum(one.get("paused_destinations") or len(one.get("paused") or ()) for one in shown)
    words = [paused_words(row, at, now) for row, at in rows[:_SHOWN]]
    left = f" (and {count - len(words)} more)" if count > len(words) else ""
    return finding(
        "paused",
        Level.WARNING,
        f"{count_of(count, 'destination')} paused: {'; '.join(words)}{left}",
        "fix the cause (a missing exchange, permission or binding, or a full queue): the messages "
        "wait, and are then published; or `reliablepub outbox reroute` them",
    )


def of_client(relay: str | None, here: str, tested: Sequence[str]) -> Finding:
    """The finding about pika: whether the fast path through its internals is on."""
    whose = "here" if relay is None else "in the relay"  # None: no relay reports it
    why = here if relay is None else relay  # empty if the fast path is on
    return finding(
        "pika",
        warn_unless(not why),
        f"the fast path is off {whose}: {why}" if why else f"the fast path is on {whose}",
        f"publishing is slower but just as safe; tested pika versions: {', '.join(tested)}",
        about="client",
    )


def of_versions(versions: Mapping[str, str]) -> Finding:
    """The finding that names the versions of packages here, for the report of a bug."""
    words = ", ".join(f"{name} {version}" for name, version in versions.items())
    return finding("versions", Level.OK, words, about="client")


def of_credentials(provider: CredentialsProvider) -> Iterator[Finding]:
    """A finding about a token in the password file; none about a password."""
    try:
        lifetime_s = provider().lifetime_s
    except ConfigurationError as error:
        remedy = "check what should replace it; the relay reads the file again by itself"
        yield finding("credentials", Level.PROBLEM, str(error), remedy, about="broker")
        return
    if lifetime_s is not None:
        words = f"the token of the password file is valid for another {age(lifetime_s)}"
        yield finding("credentials", Level.OK, words, about="broker")


def of_certificate(validity: Validity, now: float) -> Finding:
    """The finding about the client certificate."""
    left_s, whole_s = validity.ends_at - now, validity.ends_at - validity.begins_at
    level = Level.PROBLEM
    if left_s < 0:
        words = f"the client certificate expired {age(-left_s)} ago"
    elif now < validity.begins_at:
        wait = age(validity.begins_at - now)
        words = f"the client certificate is valid only in {wait}, by the clock of this host"
    else:
        words = f"the client certificate is valid for another {age(left_s)}, of {age(whole_s)}"
        level = warn_unless(left_s > _RENEWED_BY * whole_s)
    remedy = "check what should renew it; a relay reads the files again by itself"
    return finding("certificate", level, words, remedy, about="broker")


def of_broker(address: Address, probe: Probe) -> Iterator[Finding]:
    """Findings about a broker: connection, TLS, limits, and exchanges and queues it lacks."""
    of_this = partial(finding, about="broker")
    where = probe.address
    if probe.problem:
        yield of_this("connection", Level.PROBLEM, f"{where}: {probe.problem}", probe.remedy)
        return
    words = f"{where}: {probe.product}, connected in {probe.seconds * 1_000:.0f} ms"
    yield of_this("connection", Level.OK, words)
    yield of_this(
        "tls",
        warn_unless(address.is_tls or address.is_local),
        "encrypted, and its certificate is verified" if address.is_tls else "not encrypted",
        "passwords and messages can be read on the network: use amqps://",
    )
    yield of_this(
        "limits",
        warn_unless(probe.frame_max == 0 or probe.frame_max >= FRAME_BYTES_MIN),
        f"frame_max {probe.frame_max}, channel_max {probe.channel_max}, "
        f"heartbeat {probe.heartbeat_s} s",
        f"headers of more than {probe.frame_max} bytes cannot be sent: raise frame_max to 131072",
    )
    if not probe.can_confirm:
        remedy = "without them no delivery can be guaranteed; use RabbitMQ"
        yield of_this("confirms", Level.PROBLEM, "no publisher confirms", remedy)
    for kind, name, said in probe.missing:
        yield of_this(
            kind,
            Level.PROBLEM,
            f"{kind} {name!r}, which messages name: {said}",
            "declare it, grant the user access to it, or `reliablepub outbox reroute` the messages",
        )


def of_file(path: Path, found: Checkup, audit: Audit | None) -> Iterator[Finding]:
    """Findings about an outbox's file."""
    salvage = f"stop its relay, then `reliablepub outbox salvage {quoted(path)} NEW`"
    yield _of_file("pages", found.pages, "every page is whole", salvage)
    parts = [f"{name} is missing" for name in found.missing]
    parts += [f"{name} was changed" for name in found.changed]
    rebuild = f"another program has edited it; {salvage}, which creates the whole schema"
    yield _of_file("schema", parts, "tables, indexes, triggers and views are unchanged", rebuild)
    if audit is not None and not audit.structure:  # None: the tables cannot be read
        differences = [f"{by:+d} {name}" for name, by in audit.differences.items()]
        damaged = [f"message {id_}: {reason}" for id_, reason in audit.damaged.items()]
        compared = f"{count_of(audit.rows, 'message')} compared with their checksums"
        remedy = "the relay parks damaged messages; get them from their sender, then discard them"
        yield _of_file("messages", damaged, compared, remedy)
        remedy = f"another program has edited the tables; {salvage}, which recounts"
        yield _of_file("ledger", differences, "it adds up", remedy)
    yield finding(
        "journal",
        warn_unless(found.journal == "wal"),
        f"mode {found.journal}",
        "another program has changed it; the next relay sets it to wal again",
    )
    yield _unused(found)
    exposed = "its mode lets other users read or write it" if found.exposed else ""
    remedy = f"they can read message bodies: chmod 600 {' '.join(map(quoted, found.exposed))}"
    yield unless(exposed, "access", "only the owner has access", remedy)
    if found.folder:
        where, _, remedy = found.folder.partition("; ")
        yield finding("directory", Level.WARNING, where, remedy)
    if found.keys.keys() - {None}:
        yield _encryption(found.keys)
    if found.rescued:
        yield finding(
            "rescued",
            Level.WARNING,
            f"{', '.join(file.name for file in found.rescued)} holds the messages that a relay had "
            "when the files of the outbox were moved",
            "import the missing ones (docs/on-call.md, The file was moved), then remove the copy",
        )
    names = ", ".join(file.name for file in found.leftovers)
    left = f"a relay that was killed has left {names}; the next one replaces it"
    yield finding("files", Level.OK, left if names else "nothing was left behind")


def _of_file(check: str, wrong: Sequence[str], fine: str, remedy: str) -> Finding:
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    words = "; ".join(wrong[:_SHOWN]) + more
    return unless(words, check, fine, remedy, level=Level.PROBLEM)


def _encryption(keys: Mapping[str | None, int]) -> Finding:
    counts = [f"{count_of(n, 'message')} with key {name!r}" for name, n in keys.items() if name]
    plain = keys.get(None, 0)
    if plain:
        counts.append(f"{count_of(plain, 'message')} not encrypted")
    return finding(
        "encryption",
        warn_unless(not plain),
        ", ".join(counts),
        "a relay with keys parks messages that are not encrypted: encrypt your own with "
        "`reliablepub outbox rekey --accept-plaintext`",
    )


def _unused(found: Checkup) -> Finding:
    words = f"{size_of(found.bytes_unused)} unused in the file"
    remedy = "reliablepub outbox prune" if found.can_shrink else "VACUUM, by the database's owner"
    is_little = found.bytes_unused < FREE_MIN
    return finding("space", warn_unless(is_little), words, f"to give it back: {remedy}")


def _relay(
    status: OutboxStatus, relay_status: Mapping[str, Any], silent: float | None, failed: str
) -> Finding:
    if status.relay is not None and silent is not None:
        found = f"process {status.relay} hangs: no sign of life for {age(silent)}"
        remedy = f"find out what it waits for (py-spy dump --pid {status.relay}); restart it"
        return finding("relay", Level.PROBLEM, found, remedy)
    if status.relay is not None and not relay_status:
        found = f"process {status.relay}, which shows no status"
        remedy = "run this again in a few seconds; if there is still no status, read its log"
        return finding("relay", Level.WARNING, found, remedy)
    if status.relay is not None:
        return finding("relay", Level.OK, f"process {status.relay}")
    if failed:
        remedy = "start `reliablepub relay`; if it fails again, report that with its log"
        return finding("relay", Level.PROBLEM, f"none: {one_line(failed)}", remedy)
    found = f"none, and {count_of(status.open, 'message')} open"
    if not status.open:
        return finding("relay", Level.OK, found)
    return finding("relay", Level.PROBLEM, found, "start `reliablepub relay`")


def _link(whose: str, relay_status: Mapping[str, Any], now: float) -> Finding:
    """The finding about the connection that a running relay itself has, or lacks."""
    link, reason = relay_status["link"], one_line(relay_status.get("reason", ""))
    lasts = max(0.0, now - relay_status.get("since", now))
    span = f"for {age(lasts)}"
    if link == Link.CONNECTED and not reason:
        return finding("relay", Level.OK, f"{whose} has been connected {span}", about="broker")
    if link == Link.CONNECTED:
        found = f"{whose} is connected, but {reason} ({span})"
        return finding("relay", Level.PROBLEM, found, "remove the cause; messages wait")
    if link == Link.BLOCKED:
        found = f"the broker has blocked {whose} {span}: {reason or 'it gave no reason'}"
        remedy = (
            "run `rabbitmq-diagnostics alarms` on the broker, and free its memory or disk: the "
            "messages wait, and are then published"
        )
        return finding("relay", Level.PROBLEM, found, remedy, about="broker")
    if not reason and lasts < CONNECTING_S:
        found = f"{whose} has not been connected yet, {span}"
        return finding(
            "relay", Level.WARNING, found, "run this again in a few seconds", about="broker"
        )
    tried = one_line(relay_status.get("trying") or "the broker")
    reason = reason or f"{tried} has not answered its first attempt"
    remedy = (
        "the relay keeps trying; compare its own URL, user, password and TLS files, which may "
        "differ from those given here, with the broker's, and read the broker's log"
    )
    if "refuses every message" in reason:  # `Session.refuses_all`
        remedy = (
            "an alarm of the broker's disk ends when there is space; if the messages are unfit, "
            "`reliablepub outbox list` shows them, and `outbox park` takes them out of the way"
        )
    found = f"{whose} has not been connected {span}: {reason}"
    return finding("relay", Level.PROBLEM, found, remedy, about="broker")


def _backlog(status: OutboxStatus, now: float) -> Finding:
    if status.oldest_open_at is None:
        return finding("backlog", Level.OK, "nothing is open")
    old_s = max(0.0, now - status.oldest_open_at)
    found = f"{count_of(status.open, 'message')} open, the oldest for {age(old_s)}"
    remedy = "reliablepub outbox list --sort age, and explain the oldest message"
    return finding("backlog", warn_unless(old_s < OLD_S), found, remedy)


def _sqlite(around: Surroundings) -> Finding:
    found = f"version {around.sqlite}, journal mode {around.journal}"
    if around.journal != "wal":
        remedy = "another program has changed the journal mode; the next relay sets it to wal again"
        return finding("sqlite", Level.WARNING, found, remedy)
    if tuple(map(int, around.sqlite.split("."))) >= WAL_RESET_FIXED:
        return finding("sqlite", Level.OK, found)
    # Not a warning: another connection's wal_autocheckpoint cannot be read from this one.
    excluded = "its WAL-reset bug is excluded, since the relay alone checkpoints"
    if around.is_shared:
        excluded += ", where the application's connections have PRAGMA wal_autocheckpoint = 0"
    return finding("sqlite", Level.OK, f"{found}; {excluded}")


def _sync(sync_ms: float | None, sync_problem: str = "") -> Finding:
    if sync_problem:
        found = f"no page can be written beside the outbox: {sync_problem}"
        remedy = "look at the system's log, and at how the disk is mounted: nothing can be stored"
        return finding("durability", Level.PROBLEM, found, remedy)
    if sync_ms is None:
        found = "not measured, because the disk is full"
        remedy = "free disk space, and run this again"
        return finding("durability", Level.WARNING, found, remedy)
    found = f"{sync_ms:.2f} ms to write and sync a page"
    if sync_ms < SYNC_TOO_FAST_MS:
        remedy = "too fast for a real sync: a power failure may lose synced data"
        return finding("durability", Level.WARNING, found, remedy)
    if sync_ms > SYNC_SLOW_MS:
        remedy = "every publish() and every batch waits that long: use batches, or a faster disk"
        return finding("durability", Level.WARNING, found, remedy)
    return finding("durability", Level.OK, found)


def _mount(mount: Mount) -> Finding:
    found = f"{mount.kind}, mounted at {mount.point}"
    if mount.is_in_memory:
        remedy = "in memory: a restart of the machine loses the messages; keep the outbox on a disk"
        return finding("mount", Level.WARNING, found, remedy)
    if mount.is_shared:
        found += f", which {UNSHARED_VARIABLE} says no other machine uses"
    return finding("mount", Level.OK, found)


def _log(status: OutboxStatus) -> Finding:
    found = f"{size_of(status.log_bytes)} of write-ahead log"
    remedy = (
        "a read transaction that stays open, usually the application's, blocks checkpoints: find "
        "the process that has the file open (fuser), and end its transaction; Litestream keeps one "
        "on purpose, and then its own settings decide about the log"
    )
    return finding("log", warn_unless(status.log_bytes < LOG_LONG), found, remedy)


def _disk(status: OutboxStatus, around: Surroundings) -> Finding:
    free = around.bytes_free
    found = f"{size_of(free)} of {size_of(around.bytes_total)} free"
    if status.is_disk_full:
        found = f"disk full: {found}, and the rest is reserved for publishing"
        remedy = "free disk space: new messages are refused until then"
        return finding("disk", Level.PROBLEM, found, remedy)
    level = Level.OK if free >= FREE_GOOD else Level.WARNING if free >= FREE_MIN else Level.PROBLEM
    return finding("disk", level, found, "free disk space: publish() raises when the disk is full")
