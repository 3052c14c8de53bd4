"""What the relay logs of messages that fail, as lines on stderr.

Knows: the log's name. Must never know: what is logged, and how often (`relay.journal`).
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
    """Print each line about messages, from warnings on."""
    notes = _Notes(logging.WARNING)
    MESSAGES.addHandler(notes)
    try:
        yield
    finally:
        MESSAGES.removeHandler(notes)
