"""Wakes an idle relay when an enqueuer commits, by a notification on the relay's own connection.

Knows: the lock by which a relay rests, and `LISTEN`. Must never know: what was written.

`NOTIFY` queues all commits of a cluster behind one lock. So enqueuers notify only while the relay
rests, which it begins when nothing has come for `CALM_S`. Then it holds a lock of which each
transaction that enqueues holds a share otherwise (``rest`` in queries.sql): a relay can rest only
while no such transaction is open, and none that begins later is missed.

Rows that no enqueuer of this library has stored do not ring, so the relay also polls.
"""

from __future__ import annotations

import select
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from reliablepub.errors import OutboxError

if TYPE_CHECKING:
    from reliablepub.outbox.postgres.server import Link

CALM_S: Final = 1.0
"""How long nothing must have come before a relay rests: each rest costs two statements."""


class Bell:
    """Rings when an enqueuer commits while the relay rests; `outbox.entry.Bell` is the contract."""

    rings_early: Final = False  # what has rung is visible

    def __init__(self, link: Link) -> None:
        self._link = link
        link.on_notify = self._rang
        self.shard = 0
        self._armed_on = 0  # the number of the connection; 0 if the bell is not armed
        self._has_rung = False
        self._calm_since = time.monotonic()
        # Of its own, so that the descriptor stays the same when the connection is lost.
        self._poll = select.epoll() if hasattr(select, "epoll") else None
        self._socket = -1

    @property
    def is_armed(self) -> bool:
        """Whether the next commit will ring: the relay rests."""
        return self._link.is_open and self._armed_on == self._link.connections

    def fileno(self) -> int:
        """Return the descriptor that is readable when the bell has rung; -1 if there is no bell."""
        return -1 if self._poll is None else self._poll.fileno()

    def arm(self) -> None:
        """Rest, if nothing has come for a while, and no transaction that enqueues is open."""
        is_calm = time.monotonic() - self._calm_since >= CALM_S
        if self._poll is None or not is_calm or not self._link.may_rest:
            return
        with suppress(OutboxError):  # the next look raises it
            if not self._link.rest(self.shard):
                self._calm_since = time.monotonic()  # try again later
                return
            self._armed_on = self._link.connections
            self._socket = self._link.open().fileno()
            self._poll.register(self._socket, select.EPOLLIN)

    def has_rung(self) -> bool:
        """Whether it has rung since the last call. If so, the relay rests no more."""
        if self._poll is not None and self._poll.poll(0):
            self._has_rung = True  # also if the connection is lost: a look will tell
            self._link.hear()
        if self._has_rung:
            self.rise()
        has_rung, self._has_rung = self._has_rung, False
        return has_rung

    def rise(self) -> None:
        """Rest no more: something has come."""
        self._calm_since = time.monotonic()
        if self._poll is not None and self._armed_on:
            with suppress(OSError):  # a lost connection has closed it
                self._poll.unregister(self._socket)
        if self.is_armed:
            self._link.rise(self.shard)
        self._armed_on = 0

    def close(self) -> None:
        """Close the descriptor."""
        self._armed_on = 0
        if self._poll is not None:
            self._poll.close()

    def _rang(self, _: object) -> None:
        self._has_rung = True
