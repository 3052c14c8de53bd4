"""Hooks into aiormq's private interface: reliablepub's own channels on an aiormq connection.

Knows: how aiormq's connection finds its channels, what its reader and writer expect, and AMQP's
methods as pamqp names them. Must never know: aio-pika, threads, or which message is which.

aiormq's own channels cannot be used. They hide delivery tags behind one future for each publish,
match returns by ``message_id``, can wedge when a publish is cancelled, and may write after a
``channel.close``, for which the broker closes the whole connection. A `GuestChannel` is registered
under a number of its own in ``connection.channels``, so aiormq's reader passes it every frame of
that channel. Its encoded frames go into ``connection.write_queue``. Handshake, TLS, heartbeats and
the application's channels remain aiormq's.

Six rules protect the application's connection:

- The hooks await nothing and start no task, so nothing of theirs can be cancelled.
- After a ``channel.close`` from either side, only ``close-ok`` is written on that channel.
  Publishes that are not in the write queue by then are dropped. Before the hooks' own ``close``, a
  large publish that is partly written is completed.
- A channel number, once used, is kept for the next epoch until `GuestChannels.leave`. aiormq frees
  a number as soon as it reads the broker's ``channel.close``. A ``channel.open`` with that number
  could overtake the ``close-ok`` of either user of the number, and the broker closes the connection
  for that.
- The hooks raise nothing in aiormq's tasks. Any failure is recorded (`failure`), and from then on
  this process opens no more channels through aiormq: its public interface gives no access to
  confirms with delivery tags.
- Half of the write queue is left to the application, and the writer waits for the socket between
  two pieces of the hooks.
- RabbitMQ truncates a reply text to 252 bytes, possibly within a UTF-8 character. pamqp raises on
  that, and aiormq drops the whole connection, including the application's channels. So, from the
  first lent connection on, pamqp decodes ``channel.close`` and ``connection.close`` with the
  classes below, which replace invalid bytes by U+FFFD. This affects the whole process.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from struct import Struct
from typing import Any, Final

from aiormq.abc import AbstractConnection, ChannelFrame
from pamqp import commands
from pamqp.base import Frame
from pamqp.header import ContentHeader

from reliablepub._core.events import (
    Acked,
    ChannelClosed,
    ChannelEvent,
    ChannelOpened,
    Nacked,
    Returned,
)
from reliablepub.transport.base import text
from reliablepub.transport.departures import Departures, held_by_kernel
from reliablepub.transport.frames import Piece, PublishFrames, attempt_tag

_CODE_AND_LENGTH: Final = Struct(">HB")
_IDS: Final = Struct(">HH")


def _read(method: commands.Channel.Close | commands.Connection.Close, data: bytes) -> None:
    """Decode the arguments of a ``close`` method."""
    method.reply_code, length = _CODE_AND_LENGTH.unpack_from(data)
    end = _CODE_AND_LENGTH.size + length
    method.reply_text = text(data[_CODE_AND_LENGTH.size : end])
    method.class_id, method.method_id = _IDS.unpack_from(data, end)


class ChannelClose(commands.Channel.Close):
    """``channel.close`` that accepts a reply text with invalid UTF-8."""

    def unmarshal(self, data: bytes) -> None:
        """Decode the arguments; called by pamqp."""
        _read(self, data)


class ConnectionClose(commands.Connection.Close):
    """``connection.close`` that accepts a reply text with invalid UTF-8."""

    def unmarshal(self, data: bytes) -> None:
        """Decode the arguments; called by pamqp."""
        _read(self, data)


def read_any_reply_text() -> None:
    """Make pamqp use the classes above, unless other code has already replaced pamqp's own."""
    methods: dict[int, type[Frame]] = commands.INDEX_MAPPING
    for own, ours in (
        (commands.Channel.Close, ChannelClose),
        (commands.Connection.Close, ConnectionClose),
    ):
        if methods.get(own.index) is own:
            methods[own.index] = ours


TESTED_VERSION: Final = "7.2.4"
FOUND_VERSION: Final = version("aiormq")  # reads a file, so not on the application's event loop

_BASIC_PUBLISH: Final = (60, 40)
_FRAME_MAX: Final = 131_072
_CHANNEL_MAX: Final = 65_535
_TAGS: Final = 1 << 64  # pamqp decodes tags from 2^63 on as negative numbers
_SETTLE_S: Final = 0.02
"""Seconds before a channel number is used for the first time: time for the ``close-ok`` of a
channel of aiormq's that may have used the number just before."""
_QUEUE_FULL_S: Final = 0.001
"""Seconds between attempts to queue pieces while the application alone fills half of the queue."""


@dataclass(slots=True, eq=False)
class _Piece:
    """Encoded frames on their way to aiormq's write queue."""

    channel: GuestChannel
    payload: bytes
    tag: int  # of the first publish in it; 0 opens the channel, -1 ends it
    is_rest: bool = False  # continues a publish that an earlier piece began
    when_queued: Callable[[], None] | None = None
    end: int = 0  # position of its end in the stream of all pieces

    @property
    def is_publish(self) -> bool:
        """Whether the piece is dropped when the channel is closed."""
        return self.tag > 0


class _Finished(ChannelFrame):
    """A piece in aiormq's write queue.

    aiormq's writer writes the payload, reads `should_drain`, waits until most of it has left the
    event loop's buffer, and calls `drain`. So the hooks learn of the write and of the drain. Pieces
    that are not in the queue when a channel ends are never written. aiormq logs each item at DEBUG;
    `__repr__` keeps bodies out of the log.
    """

    def __init__(self, piece: _Piece, home: GuestChannels) -> None:
        super().__init__(payload=piece.payload, should_close=False)
        object.__setattr__(self, "_told", (home, piece.end))

    @property
    def should_drain(self) -> bool:
        """Whether the writer waits for the drain. Read right after the write."""
        with contained("writing"):
            home, end = self._told
            home.written = end
        return True

    def drain(self) -> None:
        """Note that most of the payload has left the event loop's buffer; called by the writer."""
        with contained("writing"):
            home, _ = self._told
            home.drained()

    def __repr__(self) -> str:
        return f"<{len(self.payload)} bytes of reliablepub's>"

    _told: tuple[GuestChannels, int]


class GuestChannels:
    """reliablepub's channels on one aiormq connection.

    All methods must be called on the connection's event loop.
    """

    def __init__(
        self, connection: AbstractConnection, *, run: int, tell: Callable[[ChannelEvent], None]
    ) -> None:
        self.connection = connection
        self._channels: dict[int, Any] = connection.channels  # aiormq's own channels too
        self._run = run
        self._tell = tell
        self._open: set[GuestChannel] = set()
        self._idle: list[int] = []
        self._waiting: deque[_Piece] = deque()
        self._queued = 0
        self._retry: asyncio.Handle | None = None
        self._handed_over = 0
        self._departures = Departures()
        self._writer = _writer_of(connection)
        self.written = 0  # position in the stream of pieces up to which aiormq has written

    @property
    def is_blocked(self) -> bool:
        """Whether the broker has sent ``connection.blocked``: aiormq's `ready` would wait then."""
        ready: Any = self.connection.ready()
        try:
            ready.send(None)
        except StopIteration:
            return False
        ready.close()
        return True

    @property
    def is_empty(self) -> bool:
        """Whether none of these channels is open or being closed."""
        return not self._open

    def open(self, epoch: int) -> GuestChannel | None:
        """Start opening a channel; None if no channel number is free."""
        is_known = bool(self._idle)
        number = self._idle.pop() if is_known else self._free_number()
        if number is None:
            return None
        frames = PublishFrames(number, self.connection.connection_tune.frame_max or _FRAME_MAX)
        channel = GuestChannel(self, epoch, number, frames)
        self._open.add(channel)
        self.hold(channel)
        if is_known:
            channel.begin()
        else:
            asyncio.get_running_loop().call_later(_SETTLE_S, channel.begin)
        return channel

    def leave(self) -> None:
        """Return all channel numbers to aiormq. All channels must be closed."""
        for number in self._idle:
            del self._channels[number]
        self._idle.clear()

    def _free_number(self) -> int | None:
        """The channel number that aiormq would use next, else the lowest free one; None if none."""
        number_max = self.connection.connection_tune.channel_max or _CHANNEL_MAX
        after_all = max(self._channels, default=0) + 1
        if after_all <= number_max:
            return after_all
        return next((n for n in range(1, number_max + 1) if n not in self._channels), None)

    # ------------------------------------------------------------------ for the channels

    def hold(self, channel: GuestChannel) -> None:
        """Register a channel under its number, so that it receives its frames."""
        self._channels[channel.number] = channel

    def closed(self, channel: GuestChannel) -> None:
        """Note that a channel has ended; its number is kept for the next channel."""
        self._open.discard(channel)
        self._idle.append(channel.number)

    def tell(self, event: ChannelEvent) -> None:
        """Report an event."""
        self._tell(event)

    def tag_of(self, headers: object, epoch: int) -> int:
        """The delivery tag of a returned message; 0 if its headers name no attempt of the epoch."""
        return attempt_tag(headers, self._run, epoch)

    def write(self, *pieces: _Piece) -> None:
        """Queue pieces for aiormq's writer, in order."""
        for piece in pieces:
            self._handed_over += len(piece.payload)
            piece.end = self._handed_over
            if piece.tag >= 0:
                self._departures.add(piece.end, piece.channel.epoch, piece.tag)
        self._waiting += pieces
        if self._retry is None:
            self._hand_over()

    def drained(self) -> None:
        """Note that a piece was written, and that most of it has left the event loop's buffer."""
        self._queued -= 1
        # Not called directly, so that the event loop can run other callbacks in between.
        if self._waiting and self._retry is None:
            self._retry = asyncio.get_running_loop().call_soon(self._hand_over)

    def look_what_left(self) -> None:
        """Report what has not left this host, if bytes are leaving."""
        if not self._departures.under_way:
            return
        held = 0
        if self._writer is not None:
            # Includes bytes of the application, so publishes may be reported for too long.
            held = self._writer.transport.get_write_buffer_size()
            sock = self._writer.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                held += held_by_kernel(sock.fileno())
        for event in self._departures.look(self.written - held):
            self._tell(event)

    def drop_publishes(self, channel: GuestChannel, *, but_end: bool) -> None:
        """Drop the channel's publishes that are not in aiormq's queue yet."""
        kept: deque[_Piece] = deque()
        # The broker expects the rest of a publish that is partly queued before any other frame of
        # the channel, unless it has closed the channel itself.
        is_begun = but_end
        for piece in self._waiting:
            if piece.channel is channel and piece.is_publish:
                is_begun = is_begun and piece.is_rest
                if not is_begun:
                    continue
            kept.append(piece)
        self._waiting = kept

    def _hand_over(self) -> None:
        self._retry = None
        if not self.connection.is_opened:
            self._waiting.clear()
        queue = self.connection.write_queue
        while self._waiting and queue.qsize() < max(1, queue.maxsize // 2):
            piece = self._waiting.popleft()
            queue.put_nowait(_Finished(piece, self))
            self._queued += 1
            if piece.when_queued is not None:
                piece.when_queued()
        if self._waiting and not self._queued:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(_QUEUE_FULL_S, self._hand_over)


class GuestChannel:
    """A channel in confirm mode, which aiormq's reader treats as one of its own."""

    def __init__(
        self, home: GuestChannels, epoch: int, number: int, encoder: PublishFrames
    ) -> None:
        self.number = number
        self.encoder = encoder  # used on the relay's thread
        self.frames = self  # to whose `put` aiormq's reader passes frames
        self.epoch = epoch
        self._home = home
        self._is_begun = False
        self._is_over = False
        self._awaits_close_ok = False
        self._returned: commands.Basic.Return | None = None
        self._on: dict[type, Callable[[Any], None]] = {
            commands.Channel.OpenOk: self._on_open_ok,
            commands.Confirm.SelectOk: self._on_select_ok,
            commands.Basic.Ack: self._on_ack,
            commands.Basic.Nack: self._on_nack,
            commands.Basic.Return: self._on_return,
            ContentHeader: self._on_header,
            commands.Channel.Close: self._on_close,
            ChannelClose: self._on_close,
            commands.Channel.CloseOk: self._on_close_ok,
        }

    def begin(self) -> None:
        """Send ``channel.open``; `ChannelOpened` follows."""
        self._is_begun = True
        if self._is_over:  # closed before it was opened
            self._home.closed(self)
        else:
            self._write(commands.Channel.Open(), 0)

    def publish(self, first_tag: int, pieces: Sequence[Piece]) -> None:
        """Write encoded frames, unless the channel has been closed."""
        if not self._is_over:
            self._home.write(
                *(_Piece(self, data, first_tag + first, rest) for first, data, rest in pieces)
            )

    def close(self) -> None:
        """Close the channel. Its number is free again once the broker has answered."""
        if self._is_over:
            return
        self._is_over = True
        self._home.drop_publishes(self, but_end=True)
        if self._is_begun:
            self._awaits_close_ok = True
            self._write(commands.Channel.Close(200, "", 0, 0))

    async def put(self, item: tuple[int, Any]) -> None:
        """Process a frame. Called by aiormq's reader; never waits and never raises.

        Frames that arrive after the channel's end are reported too; the core ignores and counts
        them.
        """
        try:
            handle = self._on.get(type(item[1]))
            if handle is not None:
                handle(item[1])
        except Exception as error:  # noqa: BLE001 - must not reach aiormq's reader
            self._on = {}  # the frame may have been a return, whose ack must confirm nothing
            _note_failure("reading", error)

    # ------------------------------------------------------------------ frames

    def _on_open_ok(self, _frame: commands.Channel.OpenOk) -> None:
        if not self._is_over:
            self._write(commands.Confirm.Select(), 0)

    def _on_select_ok(self, _frame: commands.Confirm.SelectOk) -> None:
        self._home.tell(ChannelOpened(self.epoch))

    def _on_ack(self, frame: commands.Basic.Ack) -> None:
        self._home.tell(Acked(self.epoch, frame.delivery_tag % _TAGS, frame.multiple))

    def _on_nack(self, frame: commands.Basic.Nack) -> None:
        self._home.tell(Nacked(self.epoch, frame.delivery_tag % _TAGS, frame.multiple))

    def _on_return(self, frame: commands.Basic.Return) -> None:
        self._returned = frame

    def _on_header(self, frame: ContentHeader) -> None:
        """Report a return at its header frame; body frames that follow are ignored."""
        returned, self._returned = self._returned, None
        if returned is not None:
            tag = self._home.tag_of(frame.properties.headers, self.epoch)
            code, text = returned.reply_code or 0, returned.reply_text or ""
            self._home.tell(Returned(self.epoch, tag, code, text, frame.body_size or 0))

    def _on_close(self, frame: commands.Channel.Close) -> None:
        """Report that the broker closed the channel, and answer ``close-ok``.

        aiormq has just freed the channel's number, so it is registered again. If a
        ``channel.close`` of this side is under way too, the number is kept until the broker has
        answered it.
        """
        by_publish = (frame.class_id, frame.method_id) == _BASIC_PUBLISH
        code, text = frame.reply_code or 0, frame.reply_text or ""
        self._home.tell(ChannelClosed(self.epoch, code, text, by_publish))
        self._is_over = True
        self._home.drop_publishes(self, but_end=False)
        self._home.hold(self)
        when_queued = None if self._awaits_close_ok else partial(self._home.closed, self)
        self._write(commands.Channel.CloseOk(), when_queued=when_queued)

    def _on_close_ok(self, _frame: commands.Channel.CloseOk) -> None:
        self._home.hold(self)
        self._home.closed(self)

    def _write(
        self,
        method: Frame,
        tag: int = -1,
        when_queued: Callable[[], None] | None = None,
    ) -> None:
        payload = ChannelFrame.marshall(self.number, [method]).payload
        self._home.write(_Piece(self, payload, tag, when_queued=when_queued))


def _writer_of(connection: AbstractConnection) -> asyncio.StreamWriter | None:
    """The stream of aiormq's writer task, a local variable of the task; None if not found."""
    task = getattr(connection, "_writer_task", None)
    stack = task.get_stack() if task is not None else []
    found = [frame.f_locals.get("writer") for frame in stack]
    return next((one for one in found if isinstance(one, asyncio.StreamWriter)), None)


_failures: Final[list[str]] = []


@contextmanager
def contained(doing: str) -> Iterator[None]:
    """Suppress exceptions, and record the first one; after it, the hooks are not used any more."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - must not reach the application's event loop
        _note_failure(doing, error)


def _note_failure(doing: str, error: Exception) -> None:
    if not _failures:
        what = f"a hook failed {doing}, {type(error).__name__}: {error}"
        _failures.append(f"aiormq {FOUND_VERSION}: {what}; give a URL instead of a connection")


def failure() -> str:
    """Why this process opens no more channels through aiormq; empty if it still does."""
    return _failures[0] if _failures else ""


def untested() -> str:
    """Why this version of aiormq cannot be used; empty if it can."""
    if FOUND_VERSION == TESTED_VERSION:
        return failure()
    return (
        f"aiormq is {FOUND_VERSION}; the tested version is {TESTED_VERSION}: "
        f"pip install aiormq=={TESTED_VERSION}, or give a URL instead of a connection"
    )


def problem(connection: object) -> str | None:
    """Why the hooks cannot be used on this aiormq connection; None if they can."""
    if untested():
        return untested()
    fields = list(inspect.signature(ChannelFrame).parameters)
    if (
        isinstance(getattr(connection, "channels", None), dict)
        and isinstance(getattr(connection, "write_queue", None), asyncio.Queue)
        and inspect.iscoroutinefunction(getattr(connection, "ready", None))
        and {"payload", "should_close"} <= set(fields)
        and {"should_drain", "drain"} <= set(dir(ChannelFrame))
        and hasattr(connection, "connection_tune")
    ):
        return None
    return (
        f"aiormq {FOUND_VERSION} differs from the tested one: its connection lacks an attribute "
        "that reliablepub's channels need; give a URL instead of a connection"
    )
