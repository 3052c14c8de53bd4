"""``reliablepub outbox explain``: why a message is not delivered, and what happens next.

Knows: the `Story` of a message, and how to print it. Must never know: SQL, or a broker.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from operator import itemgetter
from typing import Any, Final

import click

from reliablepub.cli.choosing import rows_named
from reliablepub.cli.commands import command
from reliablepub.cli.options import inspected_option, json_option
from reliablepub.cli.output import (
    age,
    ago,
    answer_words,
    count_of,
    paused_words,
    print_json,
    print_result,
    same_outbox,
)
from reliablepub.cli.progress import patiently
from reliablepub.errors import Expired, Nacked, Refused, Unroutable
from reliablepub.outbox.admin.selection import OPEN_STATES
from reliablepub.outbox.admin.story import Next, Story, tell
from reliablepub.outbox.database import Database
from reliablepub.printable import one_line
from reliablepub.relay.status import Link, silent_s

_WHERE: Final = {
    "ready": "is open, and ready to be sent",
    "in flight": "is in flight: it was sent, and the broker has not answered yet",
    "parked": "is parked: it was given up, and is kept for you to decide",
    "expired": "has expired: its own deadline passed before it was confirmed",
    "confirmed": "was confirmed, and is no longer in the outbox",
    "discarded": "was discarded by an operator",
    "gone": "was stored here and is gone: most likely it was confirmed at the first "
    "attempt, which leaves no trace, or its history was pruned",
}
_DELIVERED: Final = {
    "not written": "no queue has it",
    "possibly persisted": "a queue may or may not have it",
    "persisted": "the broker has taken responsibility for it",
}
_ERRORS: Final = {"returned": Unroutable, "nacked": Nacked, "refused": Refused, "expired": Expired}
_UNFIT: Final = (
    "retried as it is, it is parked again; see docs/on-call.md, Messages are parked, for the reason"
)
_COUNTS: Final = ("nacked", "returned", "refused", "uncertain")
_ATTEMPT_LINES: Final = 20
"""Most lines of history in the text output: of a longer one, the first ten and the last ten."""


@command(exits={2: "bad usage, or the outbox has no record of this message"})
@click.argument("name", metavar="ID")
@inspected_option
@json_option
def explain(name: str, database: Database, as_json: bool) -> None:
    """Explain a message: where it is and why, every attempt, and what happens next.

    ID is the number of a row, a message id, a key of Outbox.enqueue, or a correlation id, which is
    the id of a Celery task. Each attempt is shown with the channel epoch, the delivery tag, the
    broker's answer, and whether a queue may have the message.

    \b
    Examples:
      reliablepub outbox explain 17 --outbox outbox.db
      reliablepub outbox explain 7e6b9a0c-52f1-4a53-9d6a-6a0b0f6f5d0e \\
        --outbox outbox.db
    """
    with patiently("looking for it"):
        rows = rows_named(database, (name,))
    stories = [tell(database, id_) for id_ in rows]
    if as_json:
        print_json([asdict(story) for story in stories])
        return
    for number, story in enumerate(stories):
        if number:
            print_result("")
        for line in told(story, database, time.time()):
            print_result(line)


def told(story: Story, database: Database, now: float) -> list[str]:
    """The story of a message as lines of text."""
    message = story.message
    lines = [f"message {story.id} ({story.message_id or 'its message id is not known'})"]
    if message:
        key = f", ordering key {message['ordering_key']!r}" if message["ordering_key"] else ""
        where = f"exchange {message['exchange']!r} with routing key {message['routing_key']!r}"
        lines.append(f"  to {where}{key}; {count_of(message['body_bytes'], 'byte')}")
        expires_at = message["expires_at"]
        deadline = "" if expires_at is None else f"; its deadline: {ago(expires_at, now)}"
        lines.append(f"  stored {ago(message['stored_at'], now)}{deadline}")
    damaged = f"has the state {story.state!r:.40}, which only a damaged row has"
    where = _waiting(story, now) if story.state == "waiting" else _WHERE.get(story.state, damaged)
    if story.state in OPEN_STATES and _is_past(message.get("expires_at"), now):
        where = "is open, but its deadline has passed: a relay only moves it to the expired ones"
    if story.message.get("confirmed_at") is not None:
        where = f"was confirmed {ago(story.message['confirmed_at'], now)}, and is kept for a while"
    lines += ["", f"It {where}."]
    lines += _why(story)
    if story.persistence is not None:
        lines.append(f"Delivered? {story.persistence}: {_DELIVERED[story.persistence]}.")
    lines.append(f"Next: {next_words(story, database, now)}")
    lines += _history(story, now)
    return lines


def _waiting(story: Story, now: float) -> str:
    """Where a waiting message is: it may never have been sent."""
    if _is_past(story.message.get("due_at"), now):
        return "is open, and due"
    if story.message.get("is_held"):
        return "is open, and waits for its destination"
    was_tried = story.attempts or any(story.message.get(count) for count in _COUNTS)
    return f"is open, and waits {'to be sent again' if was_tried else 'for its time'}"


def _is_past(at: object, now: float) -> bool:
    """Whether a time is past; a damaged row may hold anything."""
    return isinstance(at, int | float) and at <= now


def pause_of(story: Story) -> dict[str, Any] | None:
    """The pause of the message's destination, if the relay's status file lists it."""
    address = (story.message["exchange"], story.message["routing_key"])
    for row in story.relay.get("paused") or ():
        if row.get("user_id") is not None:
            if row["user_id"] == story.message.get("user_id"):
                return dict(row)
        elif row["exchange"] == address[0] and row["routing_key"] in (None, address[1]):
            return dict(row)
    return None


def _why(story: Story) -> list[str]:
    """The reason of the message's state, and the remedy."""
    pause = pause_of(story) if story.next is Next.PAUSED else None
    if pause is not None:
        return [f"Why: {one_line(pause['reason'])}"]
    last = story.message if story.message.get("outcome") else None
    if last is None and story.message and story.attempts:
        last = story.attempts[-1]
    if last is None or last["outcome"] == "confirmed":  # and replayed since
        return []
    lines = [f"Why: {answer_words(last)}"]
    # The relay itself refuses what it cannot send, such as a damaged row; it has no code.
    error = _ERRORS.get(last["outcome"])
    if last["outcome"] == "refused" and not last["reply_code"]:
        lines.append(f"What to do: {_UNFIT}.")
    elif error is not None:
        advice = error.advice(may_have_arrived=story.message["may_have_arrived"])
        lines.append(f"What to do: {advice}.")
    return lines


def next_words(story: Story, database: Database, now: float) -> str:
    """What happens next, and what the operator can do."""
    since, span = ago(story.relay.get("since"), now), _span(story, now)
    reason = one_line(story.relay.get("reason") or "no connection yet")
    is_blocked = story.relay.get("link") == "blocked"
    whole = "this outbox" if story.shard is None else f"shard {story.shard}, which has it"
    words = {
        Next.ANSWER: "the relay waits for the broker's answer, and sends it again if none comes"
        + (f"; but the broker has blocked the relay{span}: {reason}" if is_blocked else ""),
        Next.SENT: f"the relay (process {story.relay_pid}) sends it "
        + (f"after the {count_of(story.before, 'message')} before it" if story.before else "next"),
        Next.SENT_LATER: f"the relay (process {story.relay_pid}) sends it "
        f"{ago(story.next_at, now)}{_until_given_up(story, now)}; `reliablepub outbox retry "
        f"{story.id}` sends it now",
        Next.HELD: f"it waits for message {story.held_by}, which has the same ordering key and "
        f"goes first; see `reliablepub outbox explain {story.held_by}`",
        Next.PAUSED: _paused_words(story, now),
        Next.CONNECTED: f"nothing until the relay (process {story.relay_pid}) is connected; it "
        f"has not been{span}: {reason}",
        Next.UNBLOCKED: f"nothing until the broker lifts its block, which it set {since}: {reason}",
        Next.RELAYED: f"nothing, because no relay runs for {whole}; start one: "
        f"`reliablepub relay {same_outbox(database.name)}`"
        if story.relay_silent_s is None
        else f"nothing, because the relay of {whole} hangs, without a sign of life for "
        f"{age(story.relay_silent_s)}: restart it",
        Next.DECIDED: f"nothing until you decide: `reliablepub outbox retry {story.id}`, `reroute` "
        "or `discard`",
        Next.NOTHING: "nothing: it is not sent again"
        if story.state == "discarded"
        else "nothing; if it did not arrive, look at the queue and its consumers",
    }
    is_the_relays = story.next not in {Next.RELAYED, Next.DECIDED, Next.NOTHING}
    return words[story.next] + (_but(story, database, now) if is_the_relays else "")


def _until_given_up(story: Story, now: float) -> str:
    """When a refused message is given up, if the relay has told for how long it is retried."""
    since, outcome = story.message.get("refused_at"), (story.attempts or [{}])[-1].get("outcome")
    lasts = (story.relay.get("lasts") or {}).get(outcome)
    if lasts is None or not isinstance(since, int | float):
        return ""
    return f", and gives it up {ago(since + lasts, now)} unless it is accepted by then"


def _but(story: Story, database: Database, now: float) -> str:
    """What may keep the relay from sending the message; empty if nothing does."""
    if story.relay_pid is None:
        return ""
    stored_at = story.message.get("stored_at")
    oldest = stored_at if isinstance(stored_at, int | float) else None
    silent = None if database.file is None else silent_s(story.relay, oldest, now)
    if silent is not None:
        return f"; but the relay hangs, and has shown no sign of life for {age(silent)}"
    # While the relay is connected, a reason is trouble with the outbox.
    is_connected = story.relay.get("link") == Link.CONNECTED
    reason = one_line(story.relay.get("reason") or "") if is_connected else ""
    return f"; but the outbox has had trouble{_span(story, now)}: {reason}" if reason else ""


def _span(story: Story, now: float) -> str:
    """How long the connection has been as it is, if that is known."""
    since = story.relay.get("since")
    return "" if since is None else f" for {age(max(0.0, now - since))}"


def _paused_words(story: Story, now: float) -> str:
    row = pause_of(story) if story.next is Next.PAUSED else None
    pause = f" ({paused_words(row, story.relay.get('at', now), now)})" if row is not None else ""
    return (
        f"its destination is paused, because it kept refusing{pause}; the relay sends a probe now "
        "and then, and the other messages once a probe is confirmed"
    )


def _history(story: Story, now: float) -> list[str]:
    """Attempts and interventions in the order of time, as lines of text."""
    events: list[tuple[float, str]] = [
        (attempt["at"], _attempt(attempt)) for attempt in story.attempts
    ]
    events += [(event["at"], _intervention(event)) for event in story.interventions]
    if story.in_flight is not None:
        sent = story.in_flight
        where = f"epoch {sent['epoch']}, tag {sent['tag']}"
        is_awaited = story.state == "in flight"
        answer = "no answer yet" if is_awaited else "its relay ended before an answer"
        events.append((sent["sent_at"], f"sent ({where}); {answer}"))
    if not events:
        return ["", "No attempt has failed so far."] if story.message else []
    # A damaged row may hold any time; it counts as the oldest.
    timed = [(at if isinstance(at, int | float) else 0.0, words) for at, words in events]
    timed.sort(key=itemgetter(0))
    lines = [f"  {age(max(0.0, now - at)):>12} ago  {words}" for at, words in timed]
    if len(lines) > _ATTEMPT_LINES:
        half = _ATTEMPT_LINES // 2
        left_out = len(lines) - 2 * half
        lines = [*lines[:half], f"  ... {left_out} more (see --json) ...", *lines[-half:]]
    return ["", "What happened:", *lines]


def _attempt(attempt: dict[str, Any]) -> str:
    code = f"{attempt['reply_code']} " if attempt["reply_code"] else ""
    words = one_line(f"{code}{attempt['reply_text']}")
    where = f"epoch {attempt['epoch']}, tag {attempt['tag']}; " if attempt["tag"] else ""
    return f"{attempt['outcome']} ({where}{attempt['persistence']}){': ' if words else ''}{words}"


def _intervention(event: dict[str, Any]) -> str:
    done = {
        "retry": "put back",
        "park": "parked",
        "discard": "discarded",
        "edit": "edited",
        "replay": "put back after its confirm",
        "skip": "skipped, so that the next message of its key is sent,",
        "reroute": f"rerouted from exchange {event['exchange']!r}, routing key "
        f"{event['routing_key']!r},",
    }.get(event["action"], f"{event['action']!r:.40} (damaged)")
    return f"{done} by {event['person']}{': ' if event['note'] else ''}{event['note']}"
