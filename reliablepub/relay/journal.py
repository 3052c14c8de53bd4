"""The log of a publisher: one line for each failure and each change of state, and never a flood.

Knows: what hooks are told, the names of loggers, levels and fields. Must never know: bodies,
headers, credentials; who reads the log.

It is a hook like those of an application, and listens to nothing that happens while all is well. A
broker that refuses ten thousand messages a second makes two lines in ten seconds: the first one at
once, then how many there were (`digest`). Every record has the field ``event`` and those of
`FIELDS`; the text says the same to people.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from reliablepub.hooks import AttemptEnded, DestinationChanged, LinkChanged, MessageGivenUp
from reliablepub.printable import one_line, printable
from reliablepub.relay.digest import Digest, Sum
from reliablepub.relay.scribe import is_on, write

LINK: Final = logging.getLogger("reliablepub.link")
MESSAGES: Final = logging.getLogger("reliablepub.messages")

_ADDRESS: Final = ("message_id", "exchange", "routing_key")
_SAID: Final = ("reply_code", "reply_text", "attempts")
_ATTEMPT: Final = (*_ADDRESS, *_SAID, "epoch", "tag")
_GIVEN_UP: Final = (*_ADDRESS, "outcome", *_SAID)
_PAUSE: Final = ("exchange", "routing_key", "refusals", "reply_code", "reply_text")
_LINK: Final = ("reason", "connects", "open")

EVENTS: Final[Mapping[str, tuple[logging.Logger, int, tuple[str, ...]]]] = {
    "connected": (LINK, logging.INFO, _LINK),
    "disconnected": (LINK, logging.WARNING, _LINK),
    "blocked": (LINK, logging.WARNING, _LINK),
    "unblocked": (LINK, logging.INFO, _LINK),
    "paused": (MESSAGES, logging.WARNING, _PAUSE),
    "resumed": (MESSAGES, logging.INFO, _PAUSE),
    "returned": (MESSAGES, logging.WARNING, _ATTEMPT),
    "nacked": (MESSAGES, logging.WARNING, _ATTEMPT),
    "refused": (MESSAGES, logging.WARNING, _ATTEMPT),
    "uncertain": (MESSAGES, logging.INFO, _ATTEMPT),
    "parked": (MESSAGES, logging.ERROR, _GIVEN_UP),
    "expired": (MESSAGES, logging.ERROR, _GIVEN_UP),
    "discarded": (MESSAGES, logging.ERROR, _GIVEN_UP),
}
"""Logger, level and fields of each event; docs/observing.md shows them."""
SUM_FIELDS: Final = ("repeats", "exchange", "reply_code", "count", "seconds")
"""Fields of the sum of many; its event is ``repeated``, its level that of what was repeated."""

_WORDS: Final = {
    "connected": "connected to the broker",
    "disconnected": "not connected to the broker",
    "blocked": "the broker blocks publishing",
    "unblocked": "the broker takes messages again",
}
_Kind = tuple[str, str, int]
"""Event, exchange (of a link: the reason), and the broker's code."""


class Journal:
    """Writes the log.

    Args:
        clock: monotonic seconds.
        log: writes a line, as `Scribe.write` does.
    """

    def __init__(self, clock: Callable[[], float], log: Callable[..., None] = write) -> None:
        self._clock = clock
        self._log = log
        self._digest: Digest[_Kind] = Digest()

    def calls(self) -> dict[str, Callable[[Sequence[Any]], None]]:
        """What is to be called, by event."""
        return {name: getattr(self, f"on_{name}") for name in EVENTS}

    def turned(self) -> None:
        """The relay has taken a turn: sums may be due."""
        for found in self._digest.due(self._clock()):
            self._write_sum(found)

    def close(self) -> None:
        """Nothing more will happen."""
        for found in self._digest.rest(self._clock()):
            self._write_sum(found)

    def on_connected(self, events: Sequence[LinkChanged]) -> None:
        """The connection was made."""
        self._link("connected", events)

    def on_disconnected(self, events: Sequence[LinkChanged]) -> None:
        """It was lost, or could not be made."""
        self._link("disconnected", events)

    def on_blocked(self, events: Sequence[LinkChanged]) -> None:
        """The broker takes no publishes."""
        self._link("blocked", events)

    def on_unblocked(self, events: Sequence[LinkChanged]) -> None:
        """It takes them again."""
        self._link("unblocked", events)

    def on_paused(self, events: Sequence[DestinationChanged]) -> None:
        """A destination keeps refusing."""
        self._destination("paused", events)

    def on_resumed(self, events: Sequence[DestinationChanged]) -> None:
        """It has confirmed something."""
        self._destination("resumed", events)

    def on_returned(self, events: Sequence[AttemptEnded]) -> None:
        """No queue is bound."""
        self._attempts("returned", events)

    def on_nacked(self, events: Sequence[AttemptEnded]) -> None:
        """A queue has refused."""
        self._attempts("nacked", events)

    def on_refused(self, events: Sequence[AttemptEnded]) -> None:
        """The broker has closed a channel because of it."""
        self._attempts("refused", events)

    def on_uncertain(self, events: Sequence[AttemptEnded]) -> None:
        """Nobody knows."""
        self._attempts("uncertain", events)

    def on_parked(self, events: Sequence[MessageGivenUp]) -> None:
        """Given up, and kept."""
        self._given_up("parked", events)

    def on_expired(self, events: Sequence[MessageGivenUp]) -> None:
        """Too late."""
        self._given_up("expired", events)

    def on_discarded(self, events: Sequence[MessageGivenUp]) -> None:
        """Given up, and deleted."""
        self._given_up("discarded", events)

    def _link(self, name: str, events: Sequence[LinkChanged]) -> None:
        for event in events:
            if self._is_said(name, event.reason, 0):
                why = f": {one_line(event.reason)}" if event.reason else ""
                values = (one_line(event.reason), event.connects, event.open)
                self._write(name, f"{_WORDS[name]}{why}; {event.open} messages are open", values)

    def _destination(self, name: str, events: Sequence[DestinationChanged]) -> None:
        for event in events:
            if self._is_said(name, event.exchange, 0):
                outcome = event.outcome
                said = (outcome.reply_code, one_line(outcome.reply_text))
                values = (event.exchange, event.routing_key, event.refusals, *said)
                after = f" after {event.refusals} in a row" if event.refusals > 1 else ""
                code = f"{outcome.reply_code} " if outcome.reply_code else ""
                where = _where(event.exchange, event.routing_key)
                words = f"{where}: {name}{after}: {outcome.kind}: {code}{said[1]}"
                self._write(name, words, values)

    def _attempts(self, name: str, events: Sequence[AttemptEnded]) -> None:
        for event in events:
            if self._is_said(name, event.exchange, event.outcome.reply_code):
                said = _said(event)
                address = (event.message_id, event.exchange, event.routing_key)
                self._write(
                    name,
                    f"{_about(event)}: {name}{_quoted(said)}",
                    (*address, *said, event.epoch, event.tag),
                )

    def _given_up(self, name: str, events: Sequence[MessageGivenUp]) -> None:
        for event in events:
            if self._is_said(name, event.exchange, event.outcome.reply_code):
                said, outcome = _said(event), event.outcome.kind.value
                address = (event.message_id, event.exchange, event.routing_key)
                words = f"{_about(event)}: given up ({name}): {outcome}{_quoted(said)}"
                self._write(name, words, (*address, outcome, *said))

    def _is_said(self, name: str, what: str, code: int) -> bool:
        logger, level, _ = EVENTS[name]
        return is_on(logger, level) and self._digest.is_said((name, what, code), self._clock())

    def _write(self, name: str, words: str, values: Sequence[object]) -> None:
        logger, level, fields = EVENTS[name]
        safe = (printable(value) if isinstance(value, str) else value for value in values)
        self._log(logger, level, words, {"event": name, **dict(zip(fields, safe, strict=True))})

    def _write_sum(self, found: Sum[_Kind]) -> None:
        """How many more there were, in the words of the first one."""
        name, what, code = found.kind or ("", "", 0)
        logger, level, _ = EVENTS.get(name, (MESSAGES, logging.WARNING, ()))
        about = "lines of other kinds"
        if found.kind is not None:
            is_link = logger is LINK
            about = f"more: {name}{f', {code}' if code else ''}"
            about += f", {one_line(what)}" if is_link and what else ""
            about += "" if is_link else f", exchange {what!r}"
        values = (name, "" if logger is LINK else what, code, found.count, round(found.seconds, 1))
        fields = {"event": "repeated", **dict(zip(SUM_FIELDS, values, strict=True))}
        self._log(logger, level, f"{found.count} {about} in {found.seconds:.0f} s", fields)


def _said(event: AttemptEnded | MessageGivenUp) -> tuple[int, str, int]:
    return event.outcome.reply_code, one_line(event.outcome.reply_text), event.attempts


def _quoted(said: tuple[int, str, int]) -> str:
    code, text, attempts = said
    words = f"{code or ''} {text}".strip()
    return f"{': ' if words else ''}{words} (attempt {attempts})"


def _about(event: AttemptEnded | MessageGivenUp) -> str:
    return f"message {printable(event.message_id)} to {_where(event.exchange, event.routing_key)}"


def _where(exchange: str, routing_key: str | None) -> str:
    routing = "every routing key" if routing_key is None else f"routing key {routing_key!r}"
    return f"exchange {exchange!r} with {routing}"
