"""The publisher's log: one line for each failure and each change of state, at a bounded rate.

Knows: the events of hooks; names of loggers, levels and fields; the trace id in the header
``traceparent``. Must never know: bodies, other headers, credentials; how the log is stored or read.

The journal is a hook like those of an application; it listens to no event of a message that is
confirmed at its first attempt. If a broker refuses 10 000 messages a second, the log gets two lines
in ten seconds: the first refusal at once, then the number of further ones. Every record has the
field ``event`` and the fields that `EVENTS` lists; the text has the same content in prose.

Lines are written on a thread of their own (`LogWriter`). A logging handler of the application may
raise, publish, or wait for a lock that another thread holds while it publishes. On the relay's
thread this would be a deadlock, or end the relay. The thread starts with the first line.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from reliablepub.hooks import (
    AttemptEnded,
    DestinationChanged,
    LinkChanged,
    MessageEvent,
    MessageGivenUp,
)
from reliablepub.printable import one_line, printable
from reliablepub.relay.status import Status

LINES_MAX: Final = 1_000
"""Most lines that wait to be written. Further ones are dropped and counted."""
BELOW: Final = ("reliablepub.outbox", "reliablepub.link")
"""Loggers of the outbox and the transport. These floors cannot use a `LogWriter`, which belongs to
the relay above them, so it takes over their records (`LogWriter.attend`)."""
LAST_LINES_S: Final = 2.0
"""How long the end of the relay waits for the last lines to be written."""


@dataclass(slots=True)
class _Line:
    logger: logging.Logger
    level: int
    text: str
    fields: Mapping[str, object]
    error: BaseException | None


class LogWriter:
    """Writes lines of the relay to the log, on a thread of its own. Never blocks the relay."""

    def __init__(self) -> None:
        self._lines: SimpleQueue[_Line | logging.LogRecord | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dropped = 0

    def write(
        self,
        logger: logging.Logger,
        level: int,
        text: str,
        fields: Mapping[str, object],  # extra attributes of the record
        error: BaseException | None = None,  # its traceback follows the line
    ) -> None:
        """Queue a line, if its logger is enabled for the level."""
        if not is_on(logger, level):
            return
        self._put(logger, _Line(logger, level, text, fields, error))

    def attend(self) -> None:
        """Take over records that the outbox and the transport log on this thread, until `close`."""
        _attending[threading.get_ident()] = self
        for name in BELOW:
            logger = logging.getLogger(name)
            if _is_not_taken not in logger.filters:
                logger.addFilter(_is_not_taken)

    def take(self, record: logging.LogRecord) -> None:
        """Queue a finished record for the handlers of its logger."""
        self._put(logging.getLogger(record.name), record)

    def close(self) -> None:
        """Wait up to `LAST_LINES_S` for the last lines; a handler that hangs is abandoned."""
        _attending.pop(threading.get_ident(), None)
        if self._thread is not None:
            self._put_dropped(LINK)
            self._lines.put(None)
            self._thread.join(LAST_LINES_S)

    def _put(self, logger: logging.Logger, line: _Line | logging.LogRecord) -> None:
        """Queue a line, and before it one that tells how many were dropped."""
        if self._lines.qsize() >= LINES_MAX:
            self._dropped += 1
            return
        self._put_dropped(logger)
        self._lines.put(line)
        if self._thread is None:
            self._begin()

    def _put_dropped(self, logger: logging.Logger) -> None:
        if self._dropped:
            said = f"{self._dropped} lines were dropped here: a logging handler is too slow"
            self._lines.put(_Line(logger, logging.WARNING, said, {"event": "dropped"}, None))
            self._dropped = 0

    def _begin(self) -> None:
        thread = threading.Thread(target=self._main, name="reliablepub-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down, and starts no more threads
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
os.register_at_fork(after_in_child=_attending.clear)  # a child's threads may get the same ids


def _is_not_taken(record: logging.LogRecord) -> bool:
    """A logging filter: hands records of a thread that a `LogWriter` attends to it."""
    log_writer = _attending.get(record.thread or 0)
    if log_writer is not None:
        log_writer.take(record)
    return log_writer is None


def is_on(logger: logging.Logger, level: int) -> bool:
    """Whether a logger is enabled for a level."""
    # `logging.Logger.isEnabledFor` takes a lock that another thread may hold.
    is_wanted = level >= logger.getEffectiveLevel() and level > logger.manager.disable
    return is_wanted and not logger.disabled


def write(
    logger: logging.Logger,
    level: int,
    text: str,
    fields: Mapping[str, object],
    error: BaseException | None = None,
) -> None:
    """Write a line on the calling thread; exceptions of handlers are suppressed."""
    with suppress(BaseException):
        logger.log(level, "%s", text, extra=fields, exc_info=error)


Kind = TypeVar("Kind", bound=Hashable)

INTERVAL_S: Final = 10.0
KINDS_MAX: Final = 100


@dataclass(slots=True)
class Sum(Generic[Kind]):
    """A number of equal lines that were counted instead of written."""

    kind: Kind
    count: int
    seconds: float  # in which they were counted


@dataclass(slots=True)
class _Interval:
    begun_at: float
    count: int = 0


class Digest(Generic[Kind]):
    """Decides which of many equal log lines are written, and which are only counted. Pure.

    The first line of a kind is written at once. Those that follow within an interval are counted,
    and summed up at its end; while they continue, there is one sum per interval. After an interval
    without lines of the kind, the next one counts as the first again. Beyond ``kinds_max`` kinds, a
    further one counts as its wider kind.
    """

    def __init__(
        self,
        wider: Callable[[Kind], Kind],  # of wider kinds there are few
        interval_s: float = INTERVAL_S,
        kinds_max: int = KINDS_MAX,  # without the wider ones
    ) -> None:
        self._wider = wider
        self._interval_s = interval_s
        self._kinds_max = kinds_max
        self.intervals: dict[Kind, _Interval] = {}

    def is_said(self, kind: Kind, now: float) -> bool:
        """Whether to write this line; if not, it is counted."""
        found = self.intervals.get(kind)
        if found is None and len(self.intervals) >= self._kinds_max:
            kind = self._wider(kind)
            found = self.intervals.get(kind)
        if found is None:
            self.intervals[kind] = _Interval(now)
            return True
        found.count += 1
        return False

    def due(self, now: float) -> list[Sum[Kind]]:
        """The sums of intervals that have ended."""
        return self._summed(now, now - self._interval_s)

    def rest(self, now: float) -> list[Sum[Kind]]:
        """The sums of all intervals, ended or not. For the end of the log."""
        return self._summed(now, now)

    def _summed(self, now: float, begun_before: float) -> list[Sum[Kind]]:
        sums = []
        for kind, interval in list(self.intervals.items()):
            if interval.begun_at > begun_before:
                continue
            if interval.count:
                sums.append(Sum(kind, interval.count, now - interval.begun_at))
                self.intervals[kind] = _Interval(now)
            else:
                del self.intervals[kind]
        return sums


LINK: Final = logging.getLogger("reliablepub.link")
MESSAGES: Final = logging.getLogger("reliablepub.messages")
RELAY: Final = logging.getLogger("reliablepub.relay")

_ADDRESS: Final = ("message_id", "exchange", "routing_key")
_SAID: Final = ("reply_code", "reply_text", "attempts", "may_have_arrived")
_ATTEMPT: Final = (*_ADDRESS, *_SAID, "epoch", "tag", "trace_id")
_GIVEN_UP: Final = (*_ADDRESS, "outcome", *_SAID, "trace_id")
_PAUSE: Final = ("exchange", "routing_key", "refusals", "reply_code", "reply_text")
_LINK: Final = ("reason", "connects", "open")
_TROUBLE: Final = ("reason", "open")

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
    "trouble": (RELAY, logging.WARNING, _TROUBLE),
    "recovered": (RELAY, logging.INFO, _TROUBLE),
}
"""Logger, level and fields of each event; docs/observing.md shows them."""
SUM_FIELDS: Final = ("repeats", "exchange", "reply_code", "count", "seconds")
"""Fields of a sum. Its ``event`` is ``repeated``; its level is that of the lines it counts."""

_TRACE: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-|\Z)")

_WORDS: Final = {
    "connected": "connected to the broker",
    "disconnected": "not connected to the broker",
    "blocked": "the broker blocks publishing",
    "unblocked": "the broker accepts messages again",
    "trouble": "the outbox has trouble",
    "recovered": "the outbox has recovered",
}
_Kind = tuple[str, str | None, int]
"""Event, exchange (of other events than those of messages: the reason), and the broker's reply
code. None: any."""


def _any_of_its_event(kind: _Kind) -> _Kind:
    """The wider kind: any exchange and any code, but one event, so that no sum mixes events."""
    return kind[0], None, 0


class Journal:
    """A hook that writes the publisher's log."""

    def __init__(self, clock: Callable[[], float], log: Callable[..., None] = write) -> None:
        self._clock = clock  # monotonic
        self._log = log
        self._digest: Digest[_Kind] = Digest(_any_of_its_event)
        self._trouble = ""

    def calls(self) -> dict[str, Callable[[Sequence[Any]], None]]:
        """The callbacks of the journal, by event."""
        return {name: getattr(self, f"on_{name}") for name in EVENTS if hasattr(self, f"on_{name}")}

    def turned(self, status: Status) -> None:
        """Write what has changed and the sums that are due. Called after each turn of the relay."""
        if status.trouble != self._trouble:
            was, self._trouble = self._trouble, status.trouble
            name = "trouble" if status.trouble else "recovered"
            reason = one_line(status.trouble or was)
            if self._is_said(name, reason, 0):
                words = f"{_WORDS[name]}: {reason}; {_are_open(status.open)}"
                self._write(name, words, (reason, status.open))
        if self._digest.intervals:
            for found in self._digest.due(self._clock()):
                self._write_sum(found)

    def close(self) -> None:
        """Write the remaining sums."""
        for found in self._digest.rest(self._clock()):
            self._write_sum(found)

    def on_connected(self, events: Sequence[LinkChanged]) -> None:
        """The connection was made."""
        self._link("connected", events)

    def on_disconnected(self, events: Sequence[LinkChanged]) -> None:
        """The connection was lost, or could not be made."""
        self._link("disconnected", events)

    def on_blocked(self, events: Sequence[LinkChanged]) -> None:
        """The broker blocks publishing (``connection.blocked``)."""
        self._link("blocked", events)

    def on_unblocked(self, events: Sequence[LinkChanged]) -> None:
        """The broker accepts publishes again."""
        self._link("unblocked", events)

    def on_paused(self, events: Sequence[DestinationChanged]) -> None:
        """A destination was paused, because it keeps refusing messages."""
        self._destination("paused", events)

    def on_resumed(self, events: Sequence[DestinationChanged]) -> None:
        """A paused destination accepts messages again."""
        self._destination("resumed", events)

    def on_returned(self, events: Sequence[AttemptEnded]) -> None:
        """The broker returned a message: no queue is bound."""
        self._attempts("returned", events)

    def on_nacked(self, events: Sequence[AttemptEnded]) -> None:
        """The broker nacked a message: a queue has refused it."""
        self._attempts("nacked", events)

    def on_refused(self, events: Sequence[AttemptEnded]) -> None:
        """The broker closed a channel because of a message."""
        self._attempts("refused", events)

    def on_uncertain(self, events: Sequence[AttemptEnded]) -> None:
        """An attempt ended without an answer: the message may have arrived."""
        self._attempts("uncertain", events)

    def on_parked(self, events: Sequence[MessageGivenUp]) -> None:
        """A message was given up and kept."""
        self._given_up("parked", events)

    def on_expired(self, events: Sequence[MessageGivenUp]) -> None:
        """A message was given up because its deadline has passed."""
        self._given_up("expired", events)

    def on_discarded(self, events: Sequence[MessageGivenUp]) -> None:
        """A message was given up and deleted."""
        self._given_up("discarded", events)

    def _link(self, name: str, events: Sequence[LinkChanged]) -> None:
        for event in events:
            if self._is_said(name, event.reason, 0):
                why = f": {one_line(event.reason)}" if event.reason else ""
                values = (one_line(event.reason), event.connects, event.open)
                self._write(name, f"{_WORDS[name]}{why}; {_are_open(event.open)}", values)

    def _destination(self, name: str, events: Sequence[DestinationChanged]) -> None:
        for event in events:
            if self._is_said(name, event.exchange, 0):
                outcome = event.outcome
                said = (outcome.reply_code, one_line(outcome.reply_text))
                values = (event.exchange, event.routing_key, event.refusals, *said)
                after = f" after {event.refusals} in a row" if event.refusals > 1 else ""
                code = f"{outcome.reply_code} " if outcome.reply_code else ""
                where = _where(event.exchange, event.routing_key)
                if event.user_id is not None:
                    where = f"user_id {one_line(repr(event.user_id))}"
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
                    (*address, *said, event.epoch, event.tag, trace_id_of(event)),
                )

    def _given_up(self, name: str, events: Sequence[MessageGivenUp]) -> None:
        for event in events:
            if self._is_said(name, event.exchange, event.outcome.reply_code):
                said, outcome = _said(event), event.outcome.kind.value
                address = (event.message_id, event.exchange, event.routing_key)
                words = f"{_about(event)}: given up ({name}): {outcome}{_quoted(said)}"
                self._write(name, words, (*address, outcome, *said, trace_id_of(event)))

    def _is_said(self, name: str, what: str, code: int) -> bool:
        logger, level, _ = EVENTS[name]
        return is_on(logger, level) and self._digest.is_said((name, what, code), self._clock())

    def _write(self, name: str, words: str, values: Sequence[object]) -> None:
        logger, level, fields = EVENTS[name]
        safe = (printable(value) if isinstance(value, str) else value for value in values)
        self._log(logger, level, words, {"event": name, **dict(zip(fields, safe, strict=True))})

    def _write_sum(self, found: Sum[_Kind]) -> None:
        """Write one line for the lines of a kind that were only counted."""
        name, what, code = found.kind
        logger, level, _ = EVENTS[name]
        about = f"{name}{f', {code}' if code else ''}"
        has_reason = logger is not MESSAGES
        if what is None:
            about += ", for other reasons" if has_reason else ", other exchanges and codes"
        elif has_reason:
            about += f", {one_line(what)}" if what else ""
        else:
            about += f", exchange {what!r}"
        exchange = "" if has_reason else what and printable(what)
        values = (name, exchange, code, found.count, round(found.seconds, 1))
        fields = {"event": "repeated", **dict(zip(SUM_FIELDS, values, strict=True))}
        words = f"{about}: {found.count} more in {found.seconds:.1f} s"
        self._log(logger, level, words, fields)


def trace_id_of(event: MessageEvent) -> str | None:
    """The id of the trace in which the message was published; None without a valid one."""
    # The second part of W3C's header, which most propagators write
    found = (event.headers or {}).get("traceparent")
    fits = _TRACE.match(found) if isinstance(found, str) else None
    return None if fits is None else fits[1]


def _are_open(count: int) -> str:
    return f"{count} message{' is' if count == 1 else 's are'} open"


def _said(event: AttemptEnded | MessageGivenUp) -> tuple[int, str, int, bool]:
    words = one_line(event.outcome.reply_text)
    return event.outcome.reply_code, words, event.attempts, event.may_have_arrived


def _quoted(said: tuple[int, str, int, bool]) -> str:
    code, text, attempts, may_have_arrived = said
    words = f"{code or ''} {text}".strip()
    doubt = "; may have arrived" if may_have_arrived else ""
    return f"{': ' if words else ''}{words} (attempt {attempts}{doubt})"


def _about(event: AttemptEnded | MessageGivenUp) -> str:
    return f"message {printable(event.message_id)} to {_where(event.exchange, event.routing_key)}"


def _where(exchange: str, routing_key: str | None) -> str:
    routing = "" if routing_key is None else f" with routing key {routing_key!r}"
    return f"exchange {exchange!r}{routing}"
