"""When the relay shows its status to those who look at the outbox from outside.

Knows: a status, and when the last one was shown. Must never know: where it is shown.

At once when the connection changes, otherwise once a second at most, and never while nothing
changes: an idle relay writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Final

from reliablepub.relay.latency import Percentiles
from reliablepub.relay.status import Link, Status

EVERY_S: Final = 1.0
PAUSED_SHOWN: Final = 10


class Beacon:
    """Shows what is new.

    Args:
        show: takes the picture.
        latency: how long confirms took of late; asked for each picture, and not for each turn.
        wall: wall clock, seconds since 1970.
        monotonic: monotonic clock, seconds.
    """

    def __init__(
        self,
        show: Callable[[Mapping[str, object]], None],
        latency: Callable[[], Percentiles | None],
        *,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._show = show
        self._latency = latency
        self._wall = wall
        self._monotonic = monotonic
        self._last: Status | None = None
        self._next_at = 0.0
        self._where: tuple[str, str] | None = None
        self._since = 0.0

    def turned(self, status: Status) -> None:
        """The relay has taken a turn."""
        last, now = self._last, self._monotonic()
        if status == last:
            return
        # To be trying again is no news, and a relay without a broker does little else.
        link = Link.DISCONNECTED if status.link is Link.CONNECTING else status.link
        where = (link.value, status.reason)
        is_new_link = where != self._where
        if not is_new_link and now < self._next_at:
            return
        wall = self._wall()
        if is_new_link:
            self._where, self._since = where, wall
        self._last, self._next_at = status, now + EVERY_S
        latency = self._latency()
        self._show(_picture(replace(status, link=link), wall, self._since, latency))


def failed_picture(status: Status, wall: float) -> Mapping[str, object]:
    """What is shown of a relay that has failed, until there is another one."""
    return _picture(status, wall, wall, None)


def _picture(
    status: Status, wall: float, since: float, latency: Percentiles | None
) -> Mapping[str, object]:
    return {
        "at": wall,
        "link": status.link.value,
        "reason": status.reason,
        "since": since,
        "in_flight": status.in_flight,
        "window": status.window,
        "buffered": status.buffered,
        "aside": status.aside,
        "hooks_off": status.hooks_off,
        "connects": status.connects,
        "violations": status.violations,
        "stale": status.stale,
        "latency": None if latency is None else asdict(latency),
        "paused": [asdict(paused) for paused in status.paused[:PAUSED_SHOWN]],
        "paused_destinations": status.paused_destinations,
    }
