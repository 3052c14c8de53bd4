"""A relay as a service: it notifies the service manager, and reopens on SIGHUP without a restart.

Knows: a publisher that only relays, the signals, and the service manager. Must never know: where
settings come from, or how messages are published.

The main thread feeds the watchdog only if the relay's thread has taken a turn since the last time.
So the service manager also restarts a relay that hangs while its main thread still runs.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from typing import Final, Self

import click

from reliablepub.cli import loglines
from reliablepub.cli.link import LinkNotes, describe
from reliablepub.cli.output import print_note
from reliablepub.cli.signals import Stop
from reliablepub.errors import (
    ConfigurationError,
    OutboxError,
    OutboxInUse,
    PublisherFailed,
    ReliablePubError,
)
from reliablepub.front.options import PublisherOptions
from reliablepub.front.publisher import Publisher
from reliablepub.outbox.admin.rekeying import missing_key
from reliablepub.outbox.database import Database
from reliablepub.outbox.entry import TRANSIENT
from reliablepub.printable import one_line
from reliablepub.relay.status import Link, Status
from reliablepub.transport.address import parse_addresses

_LOOK_S: Final = 0.05
_REST_S: Final = 1.0
"""The longest interval between two looks at a relay whose status does not change, and the shortest
between two messages to the service manager."""
_STANDBY_S: Final = 0.05
"""Interval at which a standby tries to own the outbox, if it is a file."""
_REMOTE_STANDBY_S: Final = 1.0
"""The interval if it is in a database, where each try is a connection."""
_OWNED: Final = "standing by: another relay owns the outbox"
_NOT_OPENED: Final = "standing by: the outbox cannot be opened for now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings with which a relay is opened and, after SIGHUP, reopened."""

    urls: tuple[str, ...] = field(repr=False)  # with passwords, unless there are `credentials`
    outbox: Database
    options: PublisherOptions
    # With the user, password and parameters that `outbox.name` lacks
    outbox_as_given: str = field(default="", repr=False)

    def open(self, hooks: Sequence[object]) -> Publisher:
        """Open a publisher, which relays the outbox."""
        options = self.options | PublisherOptions(hooks=hooks)
        return Publisher(self.urls, outbox=self.outbox, **options)


class Notifier:
    """Sends notifications to the service manager (sd_notify(3)); does nothing if there is none.

    The whole protocol is lines of ``NAME=value`` in a datagram, so no library is needed for it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # "@" stands for the leading zero byte of an abstract socket address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s: float | None = None  # interval of ``WATCHDOG=1``; None: none is expected
        patience_us = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if self._address and is_ours and patience_us.isdecimal() and int(patience_us):
            self.watchdog_s = int(patience_us) / 2e6  # half of the manager's timeout

    def tell(self, **variables: str | int) -> None:
        """Send variables; errors are ignored, because a missing listener must not end the relay."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in variables.items())
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as own:
            own.sendto(text.encode(), self._address)


@dataclass(eq=False)
class Service:
    """Relays one outbox within the ``with`` block."""

    settings: Settings  # with which the outbox was opened last
    reread: Callable[[], Settings]  # raises the errors of the command line
    _: KW_ONLY
    stop: Stop
    notifier: Notifier
    hooks: Sequence[object]
    is_standby: bool = False  # waits while another relay owns the outbox
    waits: bool = True  # at the start, until the outbox can be opened
    # Why it waits for the outbox; empty while it is relayed. `_why` has the details, for stderr
    standing_by: str = field(default=_NOT_OPENED, init=False)
    _why: str = field(default=_NOT_OPENED, init=False)
    confirmed: int = field(default=0, init=False)
    parked: int = field(default=0, init=False)  # below 0 if an operator has put back more
    last: Status = field(default_factory=Status, init=False)  # before the publisher was closed
    _new: Settings | None = field(default=None, init=False)  # read after SIGHUP, not opened yet
    _publisher: Publisher | None = field(default=None, init=False)
    _alive_at: float = field(default=0.0, init=False)
    _feed_at: float = field(default=0.0, init=False)
    _fed_turns: int = field(default=-1, init=False)
    _told: str = field(default="", init=False)
    _seen: Status = field(default_factory=Status, init=False)
    _pause_s: float = field(default=_LOOK_S, init=False)

    def __post_init__(self) -> None:
        """Print changes of the connection."""
        self._notes = _link_notes()

    def __enter__(self) -> Self:
        """Open the publisher, which starts relaying, or stand by until that is possible."""
        if not self._take_over(waits=self.waits or self.is_standby):
            print_note(self._why, event="standing_by")
        self.notifier.tell(READY=1, STATUS=self.standing_by or _in_short(self.status))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sending, wait up to 1 s for confirms of messages in flight, and close."""
        self.last = self.status
        self.notifier.tell(STOPPING=1)
        if self._publisher is not None:
            try:
                self._publisher.close()
            finally:
                self._count(self._publisher)
        if self.standing_by:
            self.settings.outbox.close()

    def _count(self, publisher: Publisher) -> None:
        """Add what was done since a publisher, which is closed now, took the outbox over."""
        now, before = publisher.status.counters, publisher.status.counters_at_start
        self.confirmed += now.confirmed - before.confirmed
        self.parked += now.parked - before.parked

    @property
    def status(self) -> Status:
        """Status of the relay; may be read from any thread, and before the relay is open."""
        if self._publisher is not None:
            return self._publisher.status
        # A standby can do nothing about an outbox that another relays, and nothing is wrong.
        return Status(trouble="" if self.standing_by == _OWNED else self.standing_by)

    def run(self, *, is_draining: bool) -> None:
        """Run until a signal stops the service; with `is_draining`, until no message is open."""
        while not self.stop.is_set:
            publisher = self._publisher
            if publisher is None:
                self._stand_by()
                continue
            try:
                if self._is_done(publisher, is_draining=is_draining):
                    return
            except (PublisherFailed, OutboxInUse, *TRANSIENT) as error:
                self._lose(publisher, error)
            self.stop.wait(_LOOK_S if is_draining else self._rest())
        self._notes.look(self.status)  # a signal may have ended the loop before it looked

    def _rest(self) -> float:
        """How long to wait for the next look: twice as long each time that nothing has changed."""
        before, self._seen = self._seen, self.status
        most_s = min(_REST_S, (self.notifier.watchdog_s or inf) / 2)
        self._pause_s = min(2 * self._pause_s, most_s) if self._seen == before else _LOOK_S
        return self._pause_s

    def _is_done(self, publisher: Publisher, *, is_draining: bool) -> bool:
        """Look after the publisher; return whether it is drained."""
        status = publisher.status
        if status.link is Link.FAILED:
            publisher.flush(timeout_s=0)  # raises the cause; a standby says it, and stands by again
        self._notes.look(status)
        if is_draining and publisher.flush(timeout_s=_LOOK_S).is_flushed:  # by the rows, not counts
            return True
        self._look_after(status, time.monotonic())
        if self.stop.is_reopen_due:
            self.stop.is_reopen_due = False
            self._reopen(publisher)
        return False

    def _take_over(self, *, waits: bool) -> bool:
        """Open the publisher; return whether the outbox is relayed here."""
        waited_at = self.settings.outbox
        try:
            self._publisher = self.stop.interrupting(self._opened)
        except OutboxInUse:
            if not self.is_standby:
                raise
            self.standing_by = self._why = _OWNED
            with suppress(OutboxError):  # it is listed after the next try
                waited_at.stand_by()
            return False
        except TRANSIENT as error:
            if not waits:  # no later try is to come
                raise
            self.standing_by, self._why = _NOT_OPENED, f"standing by: {error}"
            return False
        if self._publisher is None:  # a signal has ended the try
            return False
        waited_at.close()  # the connection by which a standby is listed
        self.standing_by = self._why = ""
        return True

    def _lose(self, publisher: Publisher, error: Exception) -> None:
        """Stand by until the outbox, which was lost, can be opened again."""
        lost = error.__cause__ if isinstance(error, PublisherFailed) else error
        is_owned = isinstance(lost, OutboxInUse)
        if not (self.is_standby if is_owned else isinstance(error, TRANSIENT)):
            raise error
        told = f"standing by: {lost}"
        print_note(told, event="standing_by")
        self.standing_by, self._why = (_OWNED, _OWNED) if is_owned else (_NOT_OPENED, told)
        self._publisher = None
        with suppress(PublisherFailed):
            publisher.close()
        self._count(publisher)

    def _stand_by(self) -> None:
        before = self._why
        if self._take_over(waits=True):
            self._notes = _link_notes()
            print_note("this relay has taken over the outbox", event="taken_over")
            return
        if self._why != before:
            print_note(self._why, event="standing_by")
        if self.stop.is_reopen_due:
            self.stop.is_reopen_due = False
            self._new = self._read_again() or self._new
        self.notifier.tell(STATUS="standing by", WATCHDOG=1)
        is_file = self.settings.outbox.file is not None
        self.stop.wait(_STANDBY_S if is_file else _REMOTE_STANDBY_S)

    def _look_after(self, status: Status, now: float) -> None:
        """Send the status (at most once a second) and the watchdog message when they are due."""
        if now >= self._alive_at:
            self._alive_at = now + _REST_S
            in_short = _in_short(status)
            if in_short != self._told:
                self._told = in_short
                self.notifier.tell(STATUS=in_short)
        patience_s = self.notifier.watchdog_s
        if patience_s is not None and now >= self._feed_at and status.turns != self._fed_turns:
            self._feed_at = now + patience_s
            self._fed_turns = status.turns
            self.notifier.tell(WATCHDOG=1)

    def _reopen(self, publisher: Publisher) -> None:
        """Read the settings again and reopen the publisher; wrong settings change nothing.

        Open messages stay in the outbox meanwhile. Messages in flight have up to 1 s to be
        confirmed; the others are sent again.
        """
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000
        self.notifier.tell(RELOADING=1, MONOTONIC_USEC=now_us)
        settings = self._read_again()
        try:
            if settings is not None:
                self._new = settings
                publisher.close()
                self._publisher = self.stop.interrupting(self._opened)
                self._count(publisher)
                self._notes = _link_notes()
                if self.settings is settings:
                    print_note("reopened", event="reopened")
        finally:  # also a standby that has lost the outbox to another goes on
            self._told = ""
            self.notifier.tell(READY=1)

    def _read_again(self) -> Settings | None:
        """The settings as they are now; None if they are wrong, which a line on stderr says."""
        try:
            settings = self.reread()
            parse_addresses(settings.urls, ssl_context=settings.options.get("ssl_context"))
            if settings.outbox.name != self.settings.outbox.name:
                raise click.UsageError(
                    "the outbox cannot be changed while the relay runs: restart the relay"
                )
            with suppress(OutboxError):  # it cannot be read now: `_opened` checks them again
                self._check_keys(settings)
        except (click.ClickException, ConfigurationError, OSError) as error:
            said = error.format_message() if isinstance(error, click.ClickException) else str(error)
            print_note(f"not reopened, nothing was changed: {said}", event="not_reopened")
            return None
        return settings

    def _check_keys(self, settings: Settings) -> None:
        """Refuse settings without a key that messages need: the relay would end."""
        before, now = (one.options.get("outbox_keys") for one in (self.settings, settings))
        name = missing_key(settings.outbox, before, now)
        if name is not None:
            raise ConfigurationError(f"messages are encrypted with key {name!r}, which is missing")

    def _opened(self) -> Publisher:
        """Open with the new settings, if there are any; with the earlier ones if they are wrong."""
        if self._new is None:
            return self.settings.open(self.hooks)
        try:
            self._check_keys(self._new)
            publisher = self._new.open(self.hooks)
        except OutboxInUse:  # not for the settings, which the next try uses
            raise
        except ReliablePubError as error:
            is_address_kept = self._new.outbox_as_given == self.settings.outbox_as_given
            if isinstance(error, TRANSIENT) and is_address_kept:
                raise  # another address may be wrong, and seem to be unreachable
            publisher = self.settings.open(self.hooks)
            print_note(f"reopened with the earlier settings: {error}", event="not_reopened")
        else:
            self.settings = self._new
        self._new = None
        return publisher


def _link_notes() -> LinkNotes:
    """Lines about the connection; none as JSON, because log records report each change."""
    say = (lambda _: None) if loglines.STDERR.is_json else print_note
    return LinkNotes(say, is_eager=True)


def _in_short(status: Status) -> str:
    """The status line that `systemctl status` shows."""
    counts = f"{status.open} open, {status.counters.parked} parked"
    return one_line(f"{describe(status)}; {counts}")
