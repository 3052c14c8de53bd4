"""The log of a publisher: one line for each failure and each change of state, and never a flood.

Knows: what hooks are told, the names of loggers, levels and fields. Must never know: bodies,
headers, credentials; who reads the log.

The journal is a hook like those of an application, and listens to nothing while all is well. A
broker that refuses ten thousand messages a second makes two lines in ten seconds: the first one at
once, then how many there were. Every record has the field ``event`` and those of `FIELDS`; the text
says the same to people.

Lines are written on a thread of their own (`LogWriter`). A logging handler of the application may
wait for a lock that another thread holds while it publishes, or publish itself, or raise: on the
relay's thread that would be a deadlock, or the end. The thread begins with the first line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from reliablepub.hooks import AttemptEnded, DestinationChanged, LinkChanged, MessageGivenUp
from reliablepub.printable import one_line, printable

LINES_MAX: Final = 1_000
"""Lines that wait to be written; what is more is only counted."""
BELOW: Final = ("reliablepub.outbox", "reliablepub.link")
"""Loggers of the outbox and the transport, which know of no scribe."""
LAST_LINES_S: Final = 2.0
"""How long the end of the relay waits for them."""


@dataclass(frozen=True, slots=True)
class _Line:
    logger: logging.Logger
    level: int
    text: str
    fields: Mapping[str, object]
    error: BaseException | None


class LogWriter:
    """Takes lines from the relay's thread, and never keeps it waiting."""

    def __init__(self) -> None:
        self._lines: SimpleQueue[_Line | logging.LogRecord | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dropped = 0

    def write(
        self,
        logger: logging.Logger,
        level: int,
        text: str,
        fields: Mapping[str, object],
        error: BaseException | None = None,
    ) -> None:
        """Have a line written, if its logger is on for it; the error's traceback below it."""
        if not is_on(logger, level):
            return
        if self._lines.qsize() >= LINES_MAX:
            self._dropped += 1
            return
        if self._dropped:
            said = f"{self._dropped} lines are missing here: a handler of the log was too slow"
            self._lines.put(_Line(logger, logging.WARNING, said, {"event": "dropped"}, None))
            self._dropped = 0
        self._lines.put(_Line(logger, level, text, fields, error))
        if self._thread is None:
            self._begin()

    def attend(self) -> None:
        """Take over what rooms below the relay log on the calling thread, until `close`."""
        _attending[threading.get_ident()] = self
        for name in BELOW:
            logger = logging.getLogger(name)
            if _is_not_taken not in logger.filters:
                logger.addFilter(_is_not_taken)

    def take(self, record: logging.LogRecord) -> None:
        """Have a finished record handled."""
        if self._lines.qsize() < LINES_MAX:
            self._lines.put(record)
            if self._thread is None:
                self._begin()

    def close(self) -> None:
        """Wait a moment for the last lines; a handler that hangs is left behind."""
        _attending.pop(threading.get_ident(), None)
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(LAST_LINES_S)

    def _begin(self) -> None:
        thread = threading.Thread(target=self._main, name="reliablepub-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and begins no thread any more
            _attending.pop(threading.get_ident(), None)
            self._lines.put(None)
            self._main()
        else:
            self._thread = thread

    def _main(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, logging.LogRecord):
                with suppress(BaseException):
                    logging.getLogger(line.name).callHandlers(line)
            else:
                write(line.logger, line.level, line.text, line.fields, line.error)


_attending: Final[dict[int, LogWriter]] = {}


def _is_not_taken(record: logging.LogRecord) -> bool:
    """A filter: what is logged on a thread that a scribe attends is the scribe's."""
    log_writer = _attending.get(record.thread or 0)
    if log_writer is not None:
        log_writer.take(record)
    return log_writer is None


def is_on(logger: logging.Logger, level: int) -> bool:
    """What `logging.Logger.isEnabledFor` says; that takes a lock, which others may hold."""
    is_wanted = level >= logger.getEffectiveLevel() and level > logger.manager.disable
    return is_wanted and not logger.disabled


def write(
    logger: logging.Logger,
    level: int,
    text: str,
    fields: Mapping[str, object],
    error: BaseException | None = None,
) -> None:
    """Write a line here and now; a handler that raises is the application's affair."""
    with suppress(BaseException):
        logger.log(level, "%s", text, extra=fields, exc_info=error)


Kind = TypeVar("Kind", bound=Hashable)

INTERVAL_S: Final = 10.0
KINDS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Sum(Generic[Kind]):
    """Things that were not said one by one.

    Attributes:
        kind: what they are called; None for kinds that were one too many.
        count: how many.
        seconds: in which time.
    """

    kind: Kind | None
    count: int
    seconds: float


@dataclass(slots=True)
class _Interval:
    begun_at: float
    count: int = 0


class Digest(Generic[Kind]):
    """Decides which of many equal log lines are written, and which are only counted. Pure.

    The first of a kind is written at once. Those that follow within an interval are counted, and
    summed up at its end; as long as they go on, there is one sum an interval. After an interval
    without any, the next one is a first again. A kind beyond ``kinds_max`` is counted with others.

    Args:
        interval_s: how long equal things are gathered.
        kinds_max: most kinds at a time.
    """

    def __init__(self, interval_s: float = INTERVAL_S, kinds_max: int = KINDS_MAX) -> None:
        self._interval_s = interval_s
        self._kinds_max = kinds_max
        self._intervals: dict[Kind | None, _Interval] = {}

    def is_said(self, kind: Kind, now: float) -> bool:
        """Whether this one is said at once; otherwise it is counted.

        Args:
            kind: what it is called.
            now: monotonic seconds.
        """
        found = self._intervals.get(kind)
        if found is None and len(self._intervals) >= self._kinds_max:
            found = self._intervals.setdefault(None, _Interval(now))
        if found is None:
            self._intervals[kind] = _Interval(now)
            return True
        found.count += 1
        return False

    def due(self, now: float) -> list[Sum[Kind]]:
        """The sums of the intervals that are over."""
        if not self._intervals:
            return []
        return self._summed(now, now - self._interval_s)

    def rest(self, now: float) -> list[Sum[Kind]]:
        """The sums of everything; nothing more will come."""
        return self._summed(now, now)

    def _summed(self, now: float, begun_before: float) -> list[Sum[Kind]]:
        sums = []
        for kind, interval in list(self._intervals.items()):
            if interval.begun_at > begun_before:
                continue
            if interval.count:
                sums.append(Sum(kind, interval.count, now - interval.begun_at))
                self._intervals[kind] = _Interval(now)
            else:
                del self._intervals[kind]
        return sums


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
