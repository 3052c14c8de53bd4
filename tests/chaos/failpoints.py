"""Named points in the life of a publisher at which it can be killed, by SIGKILL and from within.

It knows the code's inside; it must never know what is checked afterwards.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

from reliablepub._core.events import Acked, ChannelClosed, ChannelOpened, Connected, Nacked
from reliablepub.outbox.sqlite.lock import RelayLock
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.relay.handover import Chunk
from reliablepub.relay.relay import Relay
from reliablepub.relay.settling import Settling
from reliablepub.transport.pika import PikaTransport
from reliablepub.transport.pika_hooks import HookedConnection


@dataclass(frozen=True)
class Failpoint:
    """Before or after a call of a method.

    Attributes:
        owner: the class.
        method: its method.
        is_after: whether the call is done.
        counts: whether a call with these arguments is meant.
    """

    owner: type
    method: str
    is_after: bool = False
    counts: Callable[..., object] = lambda *_, **__: True


def _has(name: str) -> Callable[..., object]:
    return lambda _store, turn: getattr(turn, name)


def _hears(*kinds: type) -> Callable[..., object]:
    return lambda _relay, events: any(isinstance(event, kinds) for event in events)


FAILPOINTS: Final = {
    "the relay lock is held": Failpoint(RelayLock, "__init__", is_after=True),
    "the outbox is open": Failpoint(SqliteStore, "__init__", is_after=True),
    "before new messages are committed": Failpoint(SqliteStore, "commit", counts=_has("new")),
    "new messages are committed": Failpoint(
        SqliteStore, "commit", is_after=True, counts=_has("new")
    ),
    "before a caller hears that it is stored": Failpoint(Chunk, "stored"),
    "a caller has heard that it is stored": Failpoint(Chunk, "stored", is_after=True),
    "before tags are recorded": Failpoint(SqliteStore, "commit", counts=_has("sent")),
    "tags are recorded, nothing is written": Failpoint(PikaTransport, "send"),
    "written to the buffer": Failpoint(PikaTransport, "send", is_after=True),
    "connected": Failpoint(Relay, "handle", counts=_hears(Connected)),
    "a channel is asked for": Failpoint(PikaTransport, "open_channel", is_after=True),
    "a channel is open": Failpoint(Relay, "handle", counts=_hears(ChannelOpened)),
    "a channel was closed": Failpoint(Relay, "handle", counts=_hears(ChannelClosed)),
    "an ack is read, and not heard": Failpoint(Relay, "handle", counts=_hears(Acked)),
    "an ack is heard, and not judged": Failpoint(
        Relay, "handle", is_after=True, counts=_hears(Acked)
    ),
    "a nack is heard, and not judged": Failpoint(
        Relay, "handle", is_after=True, counts=_hears(Nacked)
    ),
    "a caller has heard that it is confirmed": Failpoint(Settling, "_confirmed", is_after=True),
    "before confirmed rows are deleted": Failpoint(SqliteStore, "commit", counts=_has("confirmed")),
    "confirmed rows are deleted": Failpoint(
        SqliteStore, "commit", is_after=True, counts=_has("confirmed")
    ),
    "before a message is parked": Failpoint(SqliteStore, "commit", counts=_has("parked")),
    "a message is parked": Failpoint(SqliteStore, "commit", is_after=True, counts=_has("parked")),
    "before a message is put off": Failpoint(SqliteStore, "commit", counts=_has("rescheduled")),
    "a message is put off": Failpoint(
        SqliteStore, "commit", is_after=True, counts=_has("rescheduled")
    ),
    "what fell due is read": Failpoint(SqliteStore, "read_due", is_after=True),
    "a backlog is read": Failpoint(SqliteStore, "read_ready", is_after=True),
    "closing": Failpoint(SqliteStore, "close"),
    "closed": Failpoint(SqliteStore, "close", is_after=True),
}
WITHIN_A_WRITE: Final = "half of a write has left"
NAMES: Final = (*FAILPOINTS, WITHIN_A_WRITE)


def arm(name: str, nth: int = 1) -> None:
    """Have this process killed when it comes to the point for the n-th time."""
    if name == WITHIN_A_WRITE:
        _arm_within_a_write(nth)
        return
    point = FAILPOINTS[name]
    real = getattr(point.owner, point.method)
    left = nth

    @wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal left
        is_meant = bool(point.counts(*args, **options))
        left -= is_meant
        if is_meant and left == 0 and not point.is_after:
            die()
        result = real(*args, **options)
        if is_meant and left == 0:
            die()
        return result

    setattr(point.owner, point.method, call)


def _arm_within_a_write(nth: int) -> None:
    left = nth

    def write_frames(self: Any, frames: Any) -> None:
        nonlocal left
        left -= 1
        if left:
            self._output_marshaled_frames(frames)
            return
        data = b"".join(frames)
        self._transport._sock.send(data[: len(data) // 2])
        die()

    HookedConnection.write_frames = write_frames  # type: ignore[method-assign]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
