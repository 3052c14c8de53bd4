"""The full-screen view of `reliablepub watch`, for terminals of any size.

Knows: the snapshot (`lookout`), and rich. Must never know: where the values come from, when to
refresh, or keys.

Two panels stand side by side from 80 columns on, and one above the other below that. The most
urgent lines come first, so a terminal with few lines cuts off the least important ones. A reason is
wrapped; only the newest failures, whose reasons are above them, are cut at the terminal's width.
"""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from reliablepub.cli.output import age, count_of, paused_words
from reliablepub.cli.watch.lookout import Look, disk_words, link_words
from reliablepub.printable import one_line, printable

WIDE: Final = 80
_REMEMBERED: Final = 60
_BARS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = "_.-~=+*#"
"""For a terminal whose encoding is not UTF-8."""
_PANEL: Final = 2
"""Lines of a panel's frame."""
_BESIDE: Final = 4
"""Columns of a panel's frame."""
_RELAY_SHARE: Final = 8
"""The relay and the advice above the panels have at most an eighth of the lines each, or one."""


class Trail:
    """Rates of the last 60 snapshots, drawn as small bars."""

    def __init__(self, *, is_unicode: bool = True) -> None:
        self._bars = _BARS if is_unicode else _ASCII_BARS
        self._rates: dict[str, deque[float]] = {}

    def add(self, seen: Look) -> None:
        """Add the rates of a snapshot."""
        for name in ("stored_per_s", "confirmed_per_s"):
            kept = self._rates.setdefault(name, deque(maxlen=_REMEMBERED))
            kept.append(seen.more[name] or 0.0)

    def bars(self, name: str, width: int) -> str:
        """Bars of the newest rates that fit into the width, scaled to the highest of them."""
        rates = list(self._rates.get(name, ()))[-width:] if width > 0 else []
        most = max(rates, default=0.0)
        if not most:
            return ""
        highest = len(self._bars) - 1
        return "".join(self._bars[round(rate / most * highest)] for rate in rates)


def draw(seen: Look, trail: Trail, *, width: int, height: int, hint: str) -> RenderableType:
    """The whole screen."""
    is_wide = width >= WIDE
    flow = _panel("flow", _flow(seen, trail, width // 2 if is_wide else width))
    counts = _panel("messages", _messages(seen))
    most = max(1, height // _RELAY_SHARE)
    urgent, relay = advice(seen), _fitting(_relay(seen, width), most)
    told = _fitting(_wrapped(urgent.plain, width, style=str(urgent.style), indent=2), most)
    above = 1 + len(relay) + len(told)
    parts: list[RenderableType] = [_head(seen), *relay, *told]
    if is_wide:
        beside = Table.grid(expand=True)
        beside.add_column(ratio=2)
        beside.add_column(ratio=3)
        beside.add_row(counts, flow)
        parts.append(beside)
        used = above + _PANEL + max(_COUNTS_LINES, _FLOW_LINES)
    else:
        parts += [counts, flow]
        used = above + 2 * _PANEL + _COUNTS_LINES + _FLOW_LINES
    paused, reasons = seen.more["paused"] or [], seen.more["reasons"]
    for title, rows in (
        ("paused destinations", _paused(paused, seen, width - _BESIDE)),
        ("why", _reasons(reasons, seen, width - _BESIDE)),
    ):
        room = height - used - _PANEL - 1
        if rows and room > 0:
            parts.append(_panel(title, Group(*_fitting(rows, room))))
            used += _PANEL + min(len(rows), room)
    room = height - used - _PANEL - 1
    if room > 0:
        parts.append(_panel("newest failures", Group(*_failures(seen, room, is_wide=is_wide))))
    parts.append(Text(hint, style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def advice(seen: Look) -> Text:
    """The most urgent state, and what the operator should do about it."""
    return _line(*(_of_relay(seen) or _of_connection(seen) or _of_messages(seen)))


def _of_relay(seen: Look) -> tuple[str, str] | None:
    """No relay takes turns, or it cannot store what happens."""
    rows = seen.more["relays"]
    missing = [row for row in rows if row["pid"] is None]
    if missing and seen.counts["open"]:
        what = "this outbox" if len(missing) == len(rows) else f"shard {missing[0]['shard']}"
        return f"no relay runs for {what}: start `reliablepub relay`", "bold red"
    if any(row["link"] == "failed" for row in missing):
        return "the relay has failed: start `reliablepub relay` again", "bold red"
    if any(row["silent_s"] is not None for row in rows):
        return "the relay hangs: find out what it waits for, and restart it", "bold red"
    if seen.more["is_disk_full"]:
        return "the disk is full: free space; no new message is stored until then", "bold red"
    # While a relay is connected, a reason is what keeps it from storing outcomes.
    reasons = [row["reason"] for row in rows if row["link"] == "connected" and row["reason"]]
    return (f"messages wait: {one_line(reasons[0])}", "bold red") if reasons else None


def _of_connection(seen: Look) -> tuple[str, str] | None:
    """The broker cannot be reached, or takes nothing."""
    links = {row["link"] for row in seen.more["relays"]}
    if "disconnected" in links:
        return "the relay is not connected; messages are safe, and wait", "bold red"
    if "blocked" in links:
        return "the broker accepts no messages: check its memory and disk", "bold yellow"
    return None


def _of_messages(seen: Look) -> tuple[str, str]:
    """Some messages do not get through; or nothing is wrong."""
    more, counts = seen.more, seen.counts
    given_up = counts["parked"] + counts["expired"]
    if more["paused"]:
        paused = count_of(more["paused_destinations"] or len(more["paused"]), "destination")
        words = f"{paused} paused: fix the cause, and publishing resumes"
    elif counts["held_keys"]:
        held = count_of(counts["held_keys"], "ordering key")
        words = f"{held} held: see `reliablepub outbox keys`"
    elif given_up:
        words = f"{count_of(given_up, 'message')} given up: see `reliablepub outbox list`"
    elif more["aside"]:
        aside = count_of(more["aside"], "message")
        words = f"{aside} set aside: see `reliablepub outbox list --sort attempts`"
    elif any(row["pid"] is not None and row["link"] is None for row in more["relays"]):
        words = "the relay shows no status: if that stays so, look into its log"
    else:
        return "nothing to do", "green"
    return words, "bold yellow"


def _head(seen: Look) -> Text:
    disk = disk_words(seen.more)
    return _line(f"{seen.more['outbox']}  ({disk})", "bold")


def _relay(seen: Look, width: int) -> list[Text]:
    pid, link = seen.more["relay_pid"], seen.more["link"]
    links = {row["link"] for row in seen.more["relays"]}
    one = f"relay {pid}" if len(seen.more["relays"]) == 1 else "relays"
    who = "no relay" if pid is None else one
    made = seen.more["connects"]
    again = f"; {count_of(made, 'connection')} made" if made and made > 1 else ""
    is_silent = any(row["silent_s"] is not None for row in seen.more["relays"])
    if is_silent or links & {"disconnected", "failed"}:
        style = "red"
    else:
        style = "yellow" if "blocked" in links else "green" if "connected" in links else ""
    words = "" if pid is None and link is None else f": {link_words(seen.more, seen.now)}"
    return _wrapped(f"{who}{words}{again}", width, style=style, indent=2)


_COUNTS_LINES: Final = 6


def _messages(seen: Look) -> Table:
    counts, more = seen.counts, seen.more
    window = f" of {more['window']}" if more["window"] else ""
    aside = f", {more['aside']} aside" if more["aside"] else ""
    rows = {
        "open": f"{counts['open']:,}",
        "in flight": f"{counts['in_flight']:,}{window}{aside}",
        "waiting": f"{counts['waiting']:,}",
        "parked": f"{counts['parked']:,}",
        "expired": f"{counts['expired']:,}",
        "confirmed": f"{counts['confirmed']:,}",
    }
    assert len(rows) == _COUNTS_LINES
    given_up = {name: "yellow" for name in ("parked", "expired") if counts[name]}
    return _pairs((name, Text(text, given_up.get(name, ""))) for name, text in rows.items())


_FLOW_LINES: Final = 6


def _flow(seen: Look, trail: Trail, width: int) -> Table:
    more = seen.more
    room = width - 36
    oldest = more["oldest_open_age_s"]
    latency = more["latency"]
    taken = ["", ""]
    if latency is not None:
        p50, p95, p99, most = (
            in_ms(latency[name]) for name in ("p50_s", "p95_s", "p99_s", "max_s")
        )
        taken = [f"p50 {p50}  p95 {p95}", f"p99 {p99}  max {most}"]
    rows = {
        "stored": f"{_rate(more['stored_per_s']):>12}  {trail.bars('stored_per_s', room)}",
        "confirmed": f"{_rate(more['confirmed_per_s']):>12}  {trail.bars('confirmed_per_s', room)}",
        "oldest open": "none" if oldest is None else f"{age(oldest)} old",
        "confirms in": taken[0] or "not measured",
        "": taken[1],
        "violations": f"{more['violations']} (answers that break the protocol)"
        if more["violations"]
        else "none",
    }
    assert len(rows) == _FLOW_LINES
    return _pairs((name, Text(text)) for name, text in rows.items())


def in_ms(seconds: float) -> str:
    """A latency in milliseconds: whole from 10 ms on, else with one decimal."""
    thousandth = seconds * 1_000
    return f"{thousandth:.0f} ms" if thousandth >= 10 else f"{thousandth:.1f} ms"  # noqa: PLR2004


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f}/s"


def _paused(paused: list[Mapping[str, Any]], seen: Look, width: int) -> list[Text]:
    lines = []
    for row in paused:
        words = paused_words(row, seen.now, seen.now)
        lines += _wrapped(words, width, style="yellow", indent=2)
    return lines


def _reasons(reasons: list[Mapping[str, Any]], seen: Look, width: int) -> list[Text]:
    lines = []
    for row in reasons:
        last = age(max(0.0, seen.now - row["last_at"]))
        words = f"{row['attempts']:>5} x  {_said(row)}  (last {last} ago)"
        lines += _wrapped(words, width, indent=9)
    return lines


def _failures(seen: Look, room: int, *, is_wide: bool) -> list[Text]:
    rows = seen.more["failures"][:room]
    if not rows:
        return [_line("none", "dim")]
    lines = []
    for row in rows:
        where = f"{_address(row['exchange'], row['routing_key'])}  " if is_wide else ""
        when = f"{age(max(0.0, seen.now - row['at']))} ago"
        lines.append(_line(f"{when:>14}  {row['id']:>7}  {where}{_said(row)}"))
    return lines


def _said(row: Mapping[str, Any]) -> str:
    code = f"{row['reply_code']} " if row["reply_code"] else ""
    return one_line(f"{row['outcome']}: {code}{row['reply_text']}")


def _address(exchange: str | None, routing_key: str | None) -> str:
    if exchange is None:
        return "(gone)"
    return one_line(f"{exchange or '(default)'} / {routing_key}")


def _wrapped(text: str, width: int, *, style: str = "", indent: int) -> list[Text]:
    """The text as lines of the width; the lines after the first are indented."""
    parts = textwrap.wrap(
        printable(text),
        max(width, 2 * indent),
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        replace_whitespace=False,
        break_on_hyphens=False,
    )
    return [_line(part, style) for part in parts] or [_line("", style)]


def _fitting(lines: list[Text], room: int) -> list[Text]:
    """The first lines, as many as there is room for; the last of them shows that more follow."""
    if len(lines) <= room:
        return lines
    last = lines[room - 1]
    return [*lines[: room - 1], _line(f"{last.plain}…", str(last.style))]


def _line(text: str, style: str = "") -> Text:
    """The text as one line, cut at the terminal's width."""
    return Text(printable(text), style, no_wrap=True, overflow="ellipsis")


def _pairs(rows: Iterable[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, text in rows:
        table.add_row(Text(name, "dim"), text)
    return table


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim", expand=True)
