"""Prints the relay's log lines about failed messages on stderr.

Knows: the logger. Must never know: what is logged, and how often; `relay.journal` decides that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from reliablepub.cli.output import print_note
from reliablepub.relay.journal import MESSAGES


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_note(record.getMessage())


@contextmanager
def failures_noted() -> Iterator[None]:
    """Print log records about messages, of level WARNING and above, within the block."""
    notes = _Notes(logging.WARNING)
    MESSAGES.addHandler(notes)
    try:
        yield
    finally:
        MESSAGES.removeHandler(notes)
