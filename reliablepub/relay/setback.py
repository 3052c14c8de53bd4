"""A setback: the store fails for now, so the relay slows down, and says why.

Knows: errors of the store that pass, and times. Must never know: chunks, entries, SQL.
"""

from __future__ import annotations

from math import inf
from typing import Final

from reliablepub.errors import (
    OutboxDiskFailed,
    OutboxDiskFull,
    OutboxError,
    OutboxLocked,
    OutboxUnreachable,
    OutboxUnsure,
)

RETRY_S: Final = 0.25
"""Pause after a commit failed: the disk is full or failing, or another process locks the file."""
_TROUBLE: Final = {
    OutboxDiskFull: "disk full: nothing can be recorded until space is freed",
    OutboxDiskFailed: "the disk of the outbox fails: look at the system's log",
    OutboxLocked: "the outbox is locked by another process",
    OutboxUnreachable: "the database of the outbox cannot be reached",
}
"""Texts of `Status.trouble`. They hold no details, so the text is constant while trouble lasts."""


class Setback:
    """What the relay does not do for `RETRY_S` after the store has failed."""

    def __init__(self) -> None:
        self.trouble: str = ""  # text of `Status.trouble`
        self.refusal: OutboxError | None = None  # why new messages are rejected
        self._refusal_ends_at = self._backoff_ends_at = inf

    def commit_failed(self, error: OutboxError, now: float, *, has_new: bool) -> None:
        """Reject new messages if the commit held any; otherwise hold commits and sending."""
        if isinstance(error, OutboxUnsure):  # which is true only of messages of that commit
            error = _cause_of(error)
        self.trouble = _TROUBLE[type(error)]
        if has_new:
            self._refuse(error, now)  # so that stored messages can drain
        else:
            self._backoff_ends_at = now + RETRY_S

    def read_failed(self, error: OutboxError, now: float) -> None:
        """Do both: what cannot be read now cannot be written either."""
        self.commit_failed(error, now, has_new=False)
        self._refuse(error, now)

    def committed(self) -> None:
        """Note that a commit has succeeded. One that wrote nothing does not end a refusal."""
        if self.refusal is None:
            self.trouble = ""

    def look(self, now: float, *, is_readable: bool) -> None:
        """End what has lasted long enough, and the trouble with it if the last read succeeded."""
        if now >= self._backoff_ends_at:
            self._backoff_ends_at = inf
        if now >= self._refusal_ends_at:
            self.refusal, self._refusal_ends_at = None, inf
        if self.trouble and is_readable and self.refusal is None and not self.backs_off:
            self.trouble = ""

    @property
    def backs_off(self) -> bool:
        """Whether commits and sending pause."""
        return self._backoff_ends_at < inf

    @property
    def next_at(self) -> float:
        """When to `look` again (monotonic); infinity if nothing is held back."""
        return min(self._refusal_ends_at, self._backoff_ends_at)

    def _refuse(self, error: OutboxError, now: float) -> None:
        self.refusal, self._refusal_ends_at = error, now + RETRY_S


def _cause_of(unsure: OutboxUnsure) -> OutboxError:
    """Why a commit was cut off, which callers are told whose messages were not in it."""
    cause = unsure.__cause__
    if isinstance(cause, OutboxError) and type(cause) in _TROUBLE:
        return cause
    words = "the previous commit was cut off, so this message was not stored; try again"
    error = OutboxDiskFailed(f"{words} ({unsure})")
    error.__cause__ = unsure
    return error
