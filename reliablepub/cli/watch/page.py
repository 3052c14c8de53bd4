"""The page that `reliablepub watch` shows, made of a snapshot; `status` takes its words from here.

Knows: what the values of a snapshot mean for an operator. Must never know: where they come from, or
how a page is drawn. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from reliablepub.cli.facts import Fact, Level, Page, warn_unless
from reliablepub.cli.output import age, answer_words, count_of, paused_words, size_of, standby_words
from reliablepub.cli.watch.lookout import COUNTS, Look
from reliablepub.printable import one_line

_SHOWN: Final = 60
"""Rates that bars are drawn of."""


def page_of(seen: Look) -> Page:
    """All that is shown of a snapshot that was taken closely."""
    values, now = seen.values, seen.now
    paused = [paused_words(row, now, now) for row in values["paused"] or ()]
    return Page(
        Fact("", f"{values['outbox']}  ({disk_words(values)})"),
        _relay(seen),
        _advice(values),
        {
            "messages": _messages(values),
            "flow": _flow(seen),
            "paused destinations": [Fact("", one, Level.WARNING) for one in paused],
            "why": [_reason(row, now) for row in values["reasons"]],
            "newest failures": [_failure(row, now) for row in values["failures"]]
            or [Fact("", "none")],
        },
    )


# ------------------------------------------------------------------ the relay, and what to do


def _relay(seen: Look) -> Fact:
    values = seen.values
    pid, made = values["relay_pid"], values["connects"]
    links = {row["link"] for row in values["relays"]}
    is_silent = any(row["silent_s"] is not None for row in values["relays"])
    level = None
    if is_silent or links & {"disconnected", "failed"}:
        level = Level.PROBLEM
    elif links & {"blocked", "connected"}:
        level = warn_unless("blocked" not in links)
    one = f"relay {pid}" if len(values["relays"]) == 1 else "relays"
    who = "no relay" if pid is None else one
    words = "" if pid is None and values["link"] is None else f": {link_words(values, seen.now)}"
    again = f"; {count_of(made, 'connection')} made" if made and made > 1 else ""
    return Fact("", f"{who}{words}{again}", level)


def _advice(values: Mapping[str, Any]) -> Fact:
    """The most urgent state, and what the operator should do about it."""
    rows = values["relays"]
    links = {row["link"] for row in rows}
    missing = [row for row in rows if row["pid"] is None]
    some = f"shard {missing[0]['shard']}" if len(missing) in range(1, len(rows)) else "this outbox"
    # While a relay is connected, a reason is what keeps it from storing outcomes.
    reasons = [row["reason"] for row in rows if row["link"] == "connected" and row["reason"]]
    given_up = values["parked"] + values["expired"]
    paused = count_of(values["paused_destinations"] or len(values["paused"] or ()), "destination")
    held = count_of(values["held_keys"], "ordering key")
    aside = count_of(values["aside"] or 0, "message")
    problems = {
        f"unreachable for {age(values.get('unreachable_s', 0))}, and these figures are as old: "
        f"{one_line(values.get('unreachable_reason', ''))}": "unreachable_s" in values,
        f"no relay runs for {some}: start `reliablepub relay`": missing and values["open"],
        "the relay has failed: start `reliablepub relay` again": any(
            row["link"] == "failed" for row in missing
        ),
        "the relay hangs: find out what it waits for, and restart it": any(
            row["silent_s"] is not None for row in rows
        ),
        "the disk is full: free space; no new message is stored until then": values["is_disk_full"],
        f"messages wait: {one_line(next(iter(reasons), ''))}": reasons,
        "the relay is not connected; messages are safe, and wait": "disconnected" in links,
    }
    warnings = {
        "the broker accepts no messages: check its memory and disk": "blocked" in links,
        f"{paused} paused: fix the cause, and publishing resumes": values["paused"],
        f"{held} held: see `reliablepub outbox keys`": values["held_keys"],
        f"{count_of(given_up, 'message')} given up: see `reliablepub outbox summary`": given_up,
        f"{aside} set aside: see `reliablepub outbox list --sort attempts`": values["aside"],
        "the relay shows no status: if this does not change, read its log": any(
            row["pid"] is not None and row["link"] is None for row in rows
        ),
    }
    for level, table in ((Level.PROBLEM, problems), (Level.WARNING, warnings)):
        for words, is_so in table.items():
            if is_so:
                return Fact("", words, level)
    return Fact("", "nothing to do", Level.OK)


# ------------------------------------------------------------------ the sections


def _messages(values: Mapping[str, Any]) -> list[Fact]:
    window = f" of {values['window']}" if values["window"] else ""
    aside = f", {values['aside']} aside" if values["aside"] else ""

    def fact(name: str, more: str = "", level: Level | None = None) -> Fact:
        return Fact(name, f"{values[name.replace(' ', '_')]:,}{more}", level)

    warning = {name: Level.WARNING for name in ("parked", "expired") if values[name]}
    return [
        fact("open"),
        fact("in flight", f"{window}{aside}"),
        fact("waiting"),
        fact("parked", level=warning.get("parked")),
        fact("expired", level=warning.get("expired")),
        fact("confirmed"),
    ]


def _flow(seen: Look) -> list[Fact]:
    values = seen.values
    stored, confirmed = zip(*seen.rates[-_SHOWN:], strict=True)
    latency, violations = values["latency"], values["violations"]
    taken = ("not measured", "")
    if latency is not None:
        p50, p95, p99, most = (
            in_ms(latency[name]) for name in ("p50_s", "p95_s", "p99_s", "max_s")
        )
        taken = (f"p50 {p50}  p95 {p95}", f"p99 {p99}  max {most}")
    broken = f"{violations} (answers that break the protocol)" if violations else "none"
    return [
        Fact("stored", _rate(values["stored_per_s"]), trend=stored),
        Fact("confirmed", _rate(values["confirmed_per_s"]), trend=confirmed),
        Fact("oldest open", oldest_words(values)),
        Fact("confirms in", taken[0]),
        Fact("", taken[1]),
        Fact("violations", broken),
    ]


def in_ms(seconds: float) -> str:
    """A latency in milliseconds: whole from 10 ms on, else with one decimal."""
    thousandth = seconds * 1_000
    return f"{thousandth:.0f} ms" if thousandth >= 10 else f"{thousandth:.1f} ms"  # noqa: PLR2004


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f}/s"


def _reason(row: Mapping[str, Any], now: float) -> Fact:
    last = age(max(0.0, now - row["last_at"]))
    return Fact(f"{row['attempts']} x", f"{answer_words(row)}  (last {last} ago)")


def _failure(row: Mapping[str, Any], now: float) -> Fact:
    address = "(gone)"
    if row["exchange"] is not None:
        address = one_line(f"{row['exchange'] or '(default)'} / {row['routing_key']}")
    when = f"{age(max(0.0, now - row['at']))} ago"
    return Fact(when, f"{row['id']}  {address}  {answer_words(row)}")


# ------------------------------------------------------------------ what `status` shows


def facts_of(seen: Look) -> list[Fact]:
    """All that `status` shows of a snapshot."""
    values, now = seen.values, seen.now
    rates = f"{values['stored_per_s']} stored/s, {values['confirmed_per_s']} confirmed/s"
    facts = [Fact(name, str(values[name])) for name in COUNTS]
    facts += [
        Fact("oldest open", oldest_words(values)),
        Fact("rates", "not measured" if values["stored_per_s"] is None else rates),
        Fact("relay", _each(values, _relay_words)),
    ]
    if standbys := [(one["host"], one["age_s"]) for one in values["standbys"]]:
        facts.append(Fact("standing by", standby_words(standbys)))
    facts += [Fact("broker", link_words(values, now)), Fact("window", _window(values))]
    if values["hooks_off"]:
        facts.append(Fact("client library", f"slower: {values['hooks_off']}"))
    paused = values["paused"] or []
    facts += [Fact(f"paused {n}", paused_words(row, now, now)) for n, row in enumerate(paused, 1)]
    if (left := (values["paused_destinations"] or 0) - len(paused)) > 0:
        facts.append(Fact("paused too", count_of(left, "destination")))
    return [*facts, Fact("on disk", disk_words(values))]


def _window(values: Mapping[str, Any]) -> str:
    if values["window"] is None:
        return "unknown"
    at_most = "" if values["rate_max"] is None else f", at most {values['rate_max']:g} per second"
    return f"{values['window']} messages{at_most}"


def oldest_words(values: Mapping[str, Any]) -> str:
    """The age of the oldest open message."""
    oldest = values["oldest_open_age_s"]
    return "none" if oldest is None else f"{age(oldest)} old"


def _relay_words(row: Mapping[str, Any]) -> str:
    """The process that relays the outbox, or one of its shards."""
    if row["pid"] is None:
        return "none"
    return f"process {row['pid']}{' on ' if row['host'] else ''}{one_line(row['host'])}"


def link_words(values: Mapping[str, Any], now: float) -> str:
    """The state of the relay's connection to the broker, its age and reason; or of each shard's."""
    return _each(values, lambda row: _link_words(row, now))


def _each(values: Mapping[str, Any], words_of: Callable[[Mapping[str, Any]], str]) -> str:
    rows = values["relays"]
    if len(rows) == 1:
        return words_of(rows[0])
    return "; ".join(f"shard {row['shard']}: {words_of(row)}" for row in rows)


def _link_words(row: Mapping[str, Any], now: float) -> str:
    if row["silent_s"] is not None:
        return f"unknown: its relay hangs, and has shown no sign of life for {age(row['silent_s'])}"
    if row["link"] is None:
        return f"unknown: {'no relay runs' if row['pid'] is None else 'its relay shows no status'}"
    link = {"connected": "connected", "blocked": "blocked by the broker", "failed": "failed"}
    words = link.get(row["link"], "not connected")
    lasts = age(max(0.0, now - row["since"])) if row["since"] else ""
    span = f" {lasts} ago" if row["link"] == "failed" else f" for {lasts}"
    reason = f": {one_line(row['reason'])}" if row["reason"] else ""
    return f"{words}{span if lasts else ''}{reason}"


def disk_words(values: Mapping[str, Any]) -> str:
    """The size of the outbox, the free space if it is known, and whether the disk is full."""
    words = size_of(values["bytes_on_disk"])
    if values["bytes_free"] is not None:
        words += f", {size_of(values['bytes_free'])} free"
    return f"{words}; disk full: no new message is stored" if values["is_disk_full"] else words
