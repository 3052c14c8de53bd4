"""A relay as a service: told of its state, watched, and reopened without being stopped.

Knows: a publisher that is handed nothing, the signals, and whom to tell. Must never know: where
settings come from, how it publishes.

The watchdog is fed here, on the main thread, but only after the relay's thread has taken a turn
since the last time: a service whose main thread lives, and whose relay hangs, is restarted.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import click

from reliablepub.cli.link import LinkNotes, describe
from reliablepub.cli.notify import Notifier
from reliablepub.cli.output import print_note
from reliablepub.cli.signals import Stop
from reliablepub.errors import ConfigurationError, ReliablePubError
from reliablepub.front.publisher import Publisher
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.policy import RetryPolicy
from reliablepub.printable import one_line
from reliablepub.relay.status import Status
from reliablepub.transport.address import parse_addresses

_LOOK_S: Final = 0.05
_ALIVE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What a relay is opened with, and opened with again.

    Attributes:
        urls: of the broker.
        outbox: which is relayed.
        outbox_keys: that encrypt it, or None.
        keep_confirmed_s: how long confirmed messages stay.
        window_min: most messages in flight at first.
        window_max: most messages in flight ever.
        ssl_context: for ``amqps``; None: the system's authorities.
        retry: how long refusals are tried again.
    """

    urls: tuple[str, ...] = field(repr=False)
    outbox: Path
    outbox_keys: OutboxKeys | None
    keep_confirmed_s: float
    window_min: int
    window_max: int
    ssl_context: ssl.SSLContext | None = None
    retry: RetryPolicy | None = None

    def open(self, hooks: Sequence[object]) -> Publisher:
        """A publisher that relays."""
        return Publisher(
            self.urls,
            outbox=self.outbox,
            outbox_keys=self.outbox_keys,
            keep_confirmed_s=self.keep_confirmed_s,
            window_min=self.window_min,
            window_max=self.window_max,
            ssl_context=self.ssl_context,
            close_timeout_s=0,
            retry=self.retry,
            hooks=hooks,
        )


class Service:
    """Keeps one outbox relayed, between ``with`` and its end.

    Args:
        settings: to begin with.
        reread: gives those of now, when it is to be reopened; raises as the command line does.
        stop: the signals.
        notifier: who is told.
        hooks: for the publisher.

    Attributes:
        status: of the relay now, or at its end.
        last: as it was when the end was asked for.
        before: as it was at the beginning.
    """

    def __init__(
        self,
        settings: Settings,
        reread: Callable[[], Settings],
        *,
        stop: Stop,
        notifier: Notifier,
        hooks: Sequence[object],
    ) -> None:
        self._settings = settings
        self._reread = reread
        self._stop = stop
        self._notifier = notifier
        self._hooks = hooks
        self._notes = LinkNotes(print_note, is_eager=True)
        self._alive_at = 0.0
        self._feed_at = 0.0
        self._fed_turns = -1
        self._told = ""
        self._publisher: Publisher | None = None
        self.last = Status()

    def __enter__(self) -> Self:
        """Open it; from here on it relays."""
        self._publisher = self._settings.open(self._hooks)
        self.before = self._publisher.status
        self._notifier.tell(READY=1, STATUS=_in_short(self.status))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop sending, wait a moment for what is in flight, and let go."""
        self.last = self.status
        self._notifier.tell(STOPPING=1)
        if self._publisher is not None:
            self._publisher.close()

    @property
    def status(self) -> Status:
        """Of the relay now; from any thread, and before it is opened too."""
        return Status() if self._publisher is None else self._publisher.status

    def run(self, *, is_draining: bool) -> None:
        """Until the signal; or until nothing is open, if that is the task.

        Raises:
            PublisherClosed: the relay has failed.
        """
        publisher = self._publisher
        assert publisher is not None
        while not self._stop.is_set:
            status = publisher.status
            self._notes.look(status)
            if is_draining and (not status.open or publisher.flush(timeout=_LOOK_S).is_flushed):
                return
            self._look_after(publisher, status, time.monotonic())
            if self._stop.is_reopen_due:
                self._stop.is_reopen_due = False
                publisher = self._reopened(publisher)
            self._stop.wait(_LOOK_S)
        self._notes.look(self.status)  # the signal may have come before it was looked at

    def _look_after(self, publisher: Publisher, status: Status, now: float) -> None:
        """Tell the service manager what it wants to know, but not too often."""
        if now >= self._alive_at:
            self._alive_at = now + _ALIVE_S
            publisher.flush(timeout=0)  # raises if the publisher has failed
            in_short = _in_short(status)
            if in_short != self._told:
                self._told = in_short
                self._notifier.tell(STATUS=in_short)
        patience_s = self._notifier.watchdog_s
        if patience_s is not None and now >= self._feed_at and status.turns != self._fed_turns:
            self._feed_at = now + patience_s
            self._fed_turns = status.turns
            self._notifier.tell(WATCHDOG=1)

    def _reopened(self, publisher: Publisher) -> Publisher:
        """Read the configuration again, and open anew with it; one that is wrong changes nothing.

        What is open stays in the outbox meanwhile; what is in flight is given a moment.
        """
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000
        self._notifier.tell(RELOADING=1, MONOTONIC_USEC=now_us)
        try:
            settings = self._reread()
            parse_addresses(settings.urls, ssl_context=settings.ssl_context)
            if settings.outbox != self._settings.outbox:
                raise click.UsageError("another outbox takes another relay: restart this one")
        except (click.ClickException, ConfigurationError, OSError) as error:
            said = error.format_message() if isinstance(error, click.ClickException) else str(error)
            print_note(f"not reopened, and everything stays as it is: {said}")
        else:
            publisher.close()
            self._publisher = publisher = self._opened_anew(settings)
            self._notes = LinkNotes(print_note, is_eager=True)
        self._told = ""
        self._notifier.tell(READY=1)
        return publisher

    def _opened_anew(self, settings: Settings) -> Publisher:
        """With new settings; with the old ones, where a publisher cannot be opened with these."""
        try:
            publisher = settings.open(self._hooks)
        except ReliablePubError as error:
            publisher = self._settings.open(self._hooks)
            print_note(f"reopened, but as it was: {error}")
        else:
            self._settings = settings
            print_note("reopened")
        return publisher


def _in_short(status: Status) -> str:
    """For one line of `systemctl status`."""
    counts = f"{status.open} open, {status.counters.parked} parked"
    return one_line(f"{describe(status)}; {counts}")
