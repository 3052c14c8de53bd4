"""Writes the lines of a relay's log, on a thread of its own.

Knows: loggers, and that their handlers are the application's. Must never know: what lines say.

A handler of the application's may do anything: wait for a lock that another thread holds while it
publishes, publish itself, take its time, raise. On the relay's thread that would be a deadlock, or
the end; here it holds up nothing but the lines behind it. The thread begins with the first line, so
a relay that has nothing to say has none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

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


class Scribe:
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


_attending: Final[dict[int, Scribe]] = {}


def _is_not_taken(record: logging.LogRecord) -> bool:
    """A filter: what is logged on a thread that a scribe attends is the scribe's."""
    scribe = _attending.get(record.thread or 0)
    if scribe is not None:
        scribe.take(record)
    return scribe is None


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
