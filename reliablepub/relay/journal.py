"""The publisher's log: one line for each failure and each change of state, at a bounded rate.

Knows: the events of hooks; names of loggers, levels and fields; the trace id in the header
``traceparent``. Must never know: bodies, other headers, credentials; how the log is stored or read.

The journal is a hook like those of an application; it listens to no event of a message that is
confirmed at its first attempt. `EVENTS` has the logger, level, text and fields of each event. If a
broker refuses 10 000 messages per second, the log gets two lines in ten seconds (`Digest`): the
first refusal at once, then the number of further ones.

Lines are written on a thread of their own (`LogWriter`). A logging handler of the application may
raise, publish, or wait for a lock that another thread holds while it publishes. On the relay's
thread this would be a deadlock, or end the relay.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from logging import ERROR, INFO, WARNING
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from reliablepub.hooks import DestinationChanged, LinkChanged, MessageEvent
from reliablepub.printable import one_line, printable
from reliablepub.relay.status import Status

# ------------------------------------------------------------------ the thread that writes

LINES_MAX: Final = 1_000
"""Most lines that wait to be written. Further ones are dropped and counted."""
BELOW: Final = ("reliablepub.outbox", "reliablepub.link")
"""Loggers of the outbox and the transport. These floors cannot use a `LogWriter`, which belongs to
the relay above them, so it takes over their records (`LogWriter.attend`)."""
LAST_LINES_S: Final = 2.0
"""How long the end of the relay waits for the last lines to be written."""


class LogWriter:
    """Writes lines of the relay to the log, on a thread of its own. Never blocks the relay.

    The thread starts with the first line.
    """

    # Not `logging.handlers.QueueHandler`, which replaces the exception of a record by text, and
    # needs the record, which a factory of the application makes, on the relay's thread. And not
    # `QueueListener`, whose thread ends with the first handler that raises `SystemExit`, and whose
    # `stop` waits without limit for one that hangs.

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dropped = 0

    def write(
        self,
        logger: logging.Logger,
        level: int,
        text: str,
        extra: Mapping[str, object],  # attributes of the record
        error: BaseException | None = None,  # its traceback follows the line
    ) -> None:
        """Queue a line, if its logger is enabled for the level."""
        if is_on(logger, level):
            self.put(logger, partial(write, logger, level, text, extra, error))

    def attend(self) -> None:
        """Take over records that the outbox and the transport log on this thread, until `close`."""
        _attending[threading.get_ident()] = self
        for name in BELOW:
            logger = logging.getLogger(name)
            if _is_not_taken not in logger.filters:
                logger.addFilter(_is_not_taken)

    def close(self) -> None:
        """Wait up to `LAST_LINES_S` for the last lines; a handler that hangs is abandoned."""
        _attending.pop(threading.get_ident(), None)
        if self._thread is not None:
            self._put_dropped(LINK)
            self._calls.put(None)
            self._thread.join(LAST_LINES_S)

    def put(self, logger: logging.Logger, call: Callable[[], object]) -> None:
        """Queue a call of a logger, and before it a line that tells how many were dropped."""
        if self._calls.qsize() >= LINES_MAX:
            self._dropped += 1
            return
        self._put_dropped(logger)
        self._calls.put(call)
        if self._thread is None:
            self._begin()

    def _put_dropped(self, logger: logging.Logger) -> None:
        if self._dropped:
            said = f"{self._dropped} lines were dropped here: a logging handler is too slow"
            self._calls.put(partial(write, logger, WARNING, said, {"event": "dropped"}))
            self._dropped = 0

    def _begin(self) -> None:
        thread = threading.Thread(target=self._main, name="reliablepub-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down, and starts no more threads
            _attending.pop(threading.get_ident(), None)
            self._calls.put(None)
            self._main()
        else:
            self._thread = thread

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            with suppress(BaseException):
                call()


_attending: Final[dict[int, LogWriter]] = {}
os.register_at_fork(after_in_child=_attending.clear)  # a child's threads may get the same ids


def _is_not_taken(record: logging.LogRecord) -> bool:
    """A logging filter: hands records of a thread that a `LogWriter` attends to it."""
    log_writer = _attending.get(record.thread or 0)
    if log_writer is not None:
        logger = logging.getLogger(record.name)
        log_writer.put(logger, partial(logger.callHandlers, record))
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
    extra: Mapping[str, object],
    error: BaseException | None = None,
) -> None:
    """Write a line on the calling thread; exceptions of handlers are suppressed."""
    with suppress(BaseException):
        logger.log(level, "%s", text, extra=extra, exc_info=error)


# ------------------------------------------------------------------ the rate of lines

INTERVAL_S: Final = 10.0
KINDS_MAX: Final = 100


class Kind(NamedTuple):
    """Lines of one kind are counted together."""

    event: str
    about: str | None  # exchange of a message; otherwise the reason; None: any
    code: int  # the broker's reply code; 0: none, or any


class Digest:
    """Decides which of many equal log lines are written, and which are only counted. Pure.

    The first line of a kind is written at once. Those that follow within `INTERVAL_S` are counted,
    and summed up at its end; while they continue, there is one sum per interval. After an interval
    without lines of the kind, the next one counts as the first again. Beyond `KINDS_MAX` kinds,
    lines are counted by event alone, so that no sum mixes events.
    """

    def __init__(self) -> None:
        self._counted: dict[Kind, tuple[float, int]] = {}  # since when, and how many

    def is_said(self, kind: Kind, now: float) -> bool:
        """Whether to write this line; if not, it is counted."""
        found = self._counted.get(kind)
        if found is None and len(self._counted) >= KINDS_MAX:
            kind = Kind(kind.event, None, 0)
            found = self._counted.get(kind)
        since, count = found or (now, -1)
        self._counted[kind] = since, count + 1
        return found is None

    def due(self, now: float, interval_s: float = INTERVAL_S) -> list[tuple[Kind, int, float]]:
        """The sums of intervals that have ended: kind, number of lines, and seconds."""
        sums = []
        for kind, (since, count) in list(self._counted.items()):
            if since + interval_s > now:
                continue
            if count:
                sums.append((kind, count, now - since))
                self._counted[kind] = now, 0
            else:
                del self._counted[kind]
        return sums


# ------------------------------------------------------------------ what the lines say

LINK: Final = logging.getLogger("reliablepub.link")
MESSAGES: Final = logging.getLogger("reliablepub.messages")
RELAY: Final = logging.getLogger("reliablepub.relay")

_LINK: Final = ("reason", "connects", "open")
_PAUSE: Final = ("exchange", "routing_key", "refusals", "reply_code", "reply_text")
_ADDRESS: Final = ("message_id", "exchange", "routing_key")
_SAID: Final = ("reply_code", "reply_text", "attempts", "may_have_arrived")
_ATTEMPT: Final = (*_ADDRESS, *_SAID, "epoch", "tag", "trace_id")
_FINAL: Final = (*_ADDRESS, "outcome", *_SAID, "trace_id")
_TROUBLE: Final = ("reason", "open")


class Line(NamedTuple):
    """The log line of an event; `_values` has what text and fields name."""

    logger: logging.Logger
    level: int
    text: str
    fields: tuple[str, ...]


EVENTS: Final[Mapping[str, Line]] = {
    "connected": Line(LINK, INFO, "connected to the broker{why}; {are_open}", _LINK),
    "disconnected": Line(LINK, WARNING, "not connected to the broker{why}; {are_open}", _LINK),
    "blocked": Line(LINK, WARNING, "the broker blocks publishing{why}; {are_open}", _LINK),
    "unblocked": Line(LINK, INFO, "the broker accepts messages again{why}; {are_open}", _LINK),
    "paused": Line(MESSAGES, WARNING, "{where}: paused{after}: {outcome}{reply}", _PAUSE),
    "resumed": Line(MESSAGES, INFO, "{where}: resumed{after}: {outcome}{reply}", _PAUSE),
    "returned": Line(MESSAGES, WARNING, "{message}: returned{reply}", _ATTEMPT),
    "nacked": Line(MESSAGES, WARNING, "{message}: nacked{reply}", _ATTEMPT),
    "refused": Line(MESSAGES, WARNING, "{message}: refused{reply}", _ATTEMPT),
    "uncertain": Line(MESSAGES, INFO, "{message}: uncertain{reply}", _ATTEMPT),
    "parked": Line(MESSAGES, ERROR, "{message}: given up (parked): {outcome}{reply}", _FINAL),
    "expired": Line(MESSAGES, ERROR, "{message}: given up (expired): {outcome}{reply}", _FINAL),
    "discarded": Line(MESSAGES, ERROR, "{message}: given up (discarded): {outcome}{reply}", _FINAL),
    "trouble": Line(RELAY, WARNING, "the outbox has trouble{why}; {are_open}", _TROUBLE),
    "recovered": Line(RELAY, INFO, "the outbox works again, after{why}; {are_open}", _TROUBLE),
}
"""docs/observing.md shows them."""
SUM_FIELDS: Final = ("repeats", "exchange", "reply_code", "count", "seconds")
"""Fields of a sum. Its ``event`` is ``repeated``; its level is that of the lines it counts."""

_TRACE: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-|\Z)")


class Journal:
    """A hook that writes the publisher's log."""

    def __init__(self, clock: Callable[[], float], log: Callable[..., None] = write) -> None:
        self._clock = clock  # monotonic
        self._log = log
        self._digest = Digest()
        self._trouble = ""

    def calls(self) -> dict[str, Callable[[Sequence[Any]], None]]:
        """The callbacks of the journal, by event of hooks."""
        names = (name for name, line in EVENTS.items() if line.logger is not RELAY)
        return {name: partial(self._tell, name) for name in names}

    def turned(self, status: Status) -> None:
        """Write what has changed and the sums that are due. Called after each turn of the relay."""
        if status.trouble != self._trouble:
            was, self._trouble = self._trouble, status.trouble
            name = "trouble" if status.trouble else "recovered"
            # Like a change of the connection, it has a reason and a number of open messages.
            self._tell(name, [LinkChanged(status.trouble or was, status.connects, status.open)])
        for found in self._digest.due(self._clock()):
            self._write_sum(*found)

    def close(self) -> None:
        """Write the remaining sums."""
        for found in self._digest.due(self._clock(), interval_s=0.0):
            self._write_sum(*found)

    def _tell(self, name: str, events: Sequence[Any]) -> None:
        """Write the line of each event, or count it."""
        logger, level, text, names = EVENTS[name]
        if not is_on(logger, level):
            return
        for event in events:
            if isinstance(event, LinkChanged):
                kind = Kind(name, event.reason, 0)
            elif isinstance(event, DestinationChanged):
                kind = Kind(name, event.exchange, 0)  # a pause is of any code
            else:
                kind = Kind(name, event.exchange, event.outcome.reply_code)
            if self._digest.is_said(kind, self._clock()):
                values = _values(event)
                extra = {field: values[field] for field in names}
                self._log(logger, level, text.format(**values), {"event": name, **extra})

    def _write_sum(self, kind: Kind, count: int, seconds: float) -> None:
        """Write one line for the lines of a kind that were only counted."""
        name, about, code = kind
        logger, level, *_ = EVENTS[name]
        is_message = logger is MESSAGES
        if about is None:
            which = ", other exchanges and codes" if is_message else ", for other reasons"
        elif is_message:
            which = f", exchange {about!r}"
        else:
            which = f", {one_line(about)}" if about else ""
        exchange = about and printable(about) if is_message else ""
        values = (name, exchange, code, count, round(seconds, 1))
        extra = {"event": "repeated", **dict(zip(SUM_FIELDS, values, strict=True))}
        text = f"{name}{f', {code}' if code else ''}{which}: {count} more in {seconds:.1f} s"
        self._log(logger, level, text, extra)


def _values(event: Any) -> dict[str, Any]:  # noqa: ANN401 - an event of hooks
    """The fields of an event and the parts of its text that `EVENTS` names, all printable."""
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if isinstance(event, LinkChanged):
        values["reason"] = one_line(event.reason)
        values["why"] = f": {values['reason']}" if event.reason else ""
        values["are_open"] = f"{event.open} message{' is' if event.open == 1 else 's are'} open"
        return values
    code, words = event.outcome.reply_code, one_line(event.outcome.reply_text)
    reply = f"{code or ''} {words}".strip()
    values["reply"] = f": {reply}" if reply else ""
    values |= {"outcome": event.outcome.kind.value, "reply_code": code, "reply_text": words}
    routing = "" if event.routing_key is None else f" with routing key {event.routing_key!r}"
    values["where"] = f"exchange {event.exchange!r}{routing}"
    if isinstance(event, DestinationChanged):
        values["after"] = f" after {event.refusals} in a row" if event.refusals > 1 else ""
        if event.user_id is not None:
            values["where"] = f"user_id {event.user_id!r}"
    else:
        doubt = "; may have arrived" if event.may_have_arrived else ""
        values["reply"] += f" (attempt {event.attempts}{doubt})"
        values["message"] = f"message {event.message_id} to {values['where']}"
        values["trace_id"] = trace_id_of(event)
    return {
        key: printable(value) if isinstance(value, str) else value for key, value in values.items()
    }


def trace_id_of(event: MessageEvent) -> str | None:
    """The id of the trace in which the message was published; None without a valid one."""
    # The second part of W3C's header, which most propagators write
    found = (event.headers or {}).get("traceparent")
    fits = _TRACE.match(found) if isinstance(found, str) else None
    return None if fits is None else fits[1]
