"""The one place that reaches behind aiormq's public interface: channels of ours on its connection.

Knows: how aiormq's connection tells its channels apart, what its reader and writer expect, AMQP's
methods as pamqp names them. Must never know: aio-pika, threads, which message is which.

aiormq's own channel hides delivery tags behind one future a publish, matches returns by
``message_id``, can wedge when a publish is cancelled, and may write on after a ``channel.close``,
for which the broker ends the whole connection. So ours is not one of them. It has a number of its
own among ``connection.channels``, where the reader finds it and hands it every frame undigested;
and its frames go into ``connection.write_queue``, finished. Handshake, TLS and heartbeats stay
aiormq's, and so does everything that the application does.

Six things keep the application's connection out of harm's way:

- Nothing is awaited and no task is started, so there is nothing that could be cancelled.
- After ``channel.close``, from whichever side, nothing is written on that channel but
  ``close-ok``: publishes that have not reached the write queue by then never do. Before our own
  ``close`` a large one that was begun is finished.
- A number that we have once had stays ours, for the next epoch, until we leave for good. aiormq
  frees a number as soon as the broker's ``channel.close`` is read: a ``channel.open`` under it can
  overtake the ``close-ok``, theirs or ours, and the broker ends the connection for that.
- What we do within aiormq's tasks raises nothing there: whatever fails is noted (`failure`), and
  from then on this process opens no channels below aiormq any more. There is no public way to
  confirms with tags that could be taken instead.
- Half of the write queue is left to the application, and the writer waits for the socket between
  two pieces of ours.
- RabbitMQ cuts a reply text at 252 bytes, also inside a character. pamqp raises on that, and aiormq
  gives up the whole connection, the application's own channels with it. So, from the first lent
  connection on, pamqp reads ``channel.close`` and ``connection.close`` by the classes below: the
  same, but bytes that are not UTF-8 become U+FFFD. This holds for the whole process.
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
    """Set the arguments of a ``close`` from its bytes."""
    method.reply_code, length = _CODE_AND_LENGTH.unpack_from(data)
    end = _CODE_AND_LENGTH.size + length
    method.reply_text = text(data[_CODE_AND_LENGTH.size : end])
    method.class_id, method.method_id = _IDS.unpack_from(data, end)


class ChannelClose(commands.Channel.Close):
    """A ``channel.close`` with any reply text."""

    def unmarshal(self, data: bytes) -> None:
        """Read its arguments; pamqp calls this."""
        _read(self, data)


class ConnectionClose(commands.Connection.Close):
    """A ``connection.close`` with any reply text."""

    def unmarshal(self, data: bytes) -> None:
        """Read its arguments; pamqp calls this."""
        _read(self, data)


def read_any_reply_text() -> None:
    """Have pamqp use the classes above from now on, unless it uses other ones than its own."""
    methods: dict[int, type[Frame]] = commands.INDEX_MAPPING
    for own, ours in (
        (commands.Channel.Close, ChannelClose),
        (commands.Connection.Close, ConnectionClose),
    ):
        if methods.get(own.index) is own:
            methods[own.index] = ours


TESTED_VERSIONS: Final = ("7.2.2", "7.2.3", "7.2.4")
FOUND_VERSION: Final = version("aiormq")  # read once, and not on the application's loop

_BASIC_PUBLISH: Final = (60, 40)
_FRAME_MAX: Final = 131_072
_CHANNEL_MAX: Final = 65_535
_TAGS: Final = 1 << 64  # pamqp reads the upper half of them as negative numbers
_SETTLE_S: Final = 0.02
"""How long a number that is new to us is left alone: time for the ``close-ok`` of a channel of
aiormq's that may have had it until just now."""
_QUEUE_FULL_S: Final = 0.001
"""How long to wait for aiormq's writer while its queue has half its room, and nothing of ours."""


@dataclass(slots=True, eq=False)
class _Piece:
    """Bytes on their way to aiormq's write queue.

    Attributes:
        channel: which they are for.
        payload: finished frames.
        tag: of the first publish among them; 0 for the opening of the channel, -1 for its end.
        is_rest: whether they go on with a publish that was begun before.
        when_queued: called when they are in the queue.
        end: their place in the stream of ours.
    """

    channel: GuestChannel
    payload: bytes
    tag: int
    is_rest: bool = False
    when_queued: Callable[[], None] | None = None
    end: int = 0

    @property
    def is_publish(self) -> bool:
        """Whether they need not be written when the channel is closed."""
        return self.tag > 0


class _Finished(ChannelFrame):
    """Frames of ours in aiormq's write queue, which logs each at DEBUG: without the bodies.

    aiormq's writer writes them, asks whether it shall wait until most of that has left the event
    loop's buffer, waits, and tells. So we learn of both, and the writer takes one piece after the
    other: what is not taken when a channel ends is never written.
    """

    def __init__(self, piece: _Piece, home: GuestChannels) -> None:
        super().__init__(payload=piece.payload, should_close=False)
        object.__setattr__(self, "_told", (home, piece.end))

    @property
    def should_drain(self) -> bool:
        """Asked when they are written."""
        with contained("writing"):
            home, end = self._told
            home.written = end
        return True

    def drain(self) -> None:
        """Told when most of it has left."""
        with contained("writing"):
            home, _ = self._told
            home.drained()

    def __repr__(self) -> str:
        return f"<{len(self.payload)} bytes of reliablepub's>"

    _told: tuple[GuestChannels, int]


class GuestChannels:
    """Our channels on one connection of aiormq's. All of it on the connection's event loop.

    Args:
        connection: aiormq's; it is open.
        run: number of the relay's run.
        tell: told what happens on the channels.

    Attributes:
        written: place in the stream of ours up to which aiormq has written.
    """

    def __init__(
        self, connection: AbstractConnection, *, run: int, tell: Callable[[ChannelEvent], None]
    ) -> None:
        self.connection = connection
        self._channels: dict[int, Any] = connection.channels  # aiormq's own, and ours
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
        self.written = 0

    @property
    def is_blocked(self) -> bool:
        """Whether the broker has sent ``connection.blocked``: then aiormq is not `ready`."""
        ready: Any = self.connection.ready()
        try:
            ready.send(None)
        except StopIteration:
            return False
        ready.close()
        return True

    @property
    def is_empty(self) -> bool:
        """Whether none of our channels is open, or about to be closed."""
        return not self._open

    def open(self, epoch: int) -> GuestChannel | None:
        """Begin to open a channel; None where there is no free number for one."""
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
        """Give our numbers back to aiormq; all channels are closed."""
        for number in self._idle:
            del self._channels[number]
        self._idle.clear()

    def _free_number(self) -> int | None:
        """The one that aiormq would take, or else the lowest that is free."""
        number_max = self.connection.connection_tune.channel_max or _CHANNEL_MAX
        after_all = max(self._channels, default=0) + 1
        if after_all <= number_max:
            return after_all
        return next((n for n in range(1, number_max + 1) if n not in self._channels), None)

    # ------------------------------------------------------------------ for the channels

    def hold(self, channel: GuestChannel) -> None:
        """Have the channel's number taken, and its frames handed to it."""
        self._channels[channel.number] = channel

    def closed(self, channel: GuestChannel) -> None:
        """Nothing more comes or goes on it; its number is for the next one."""
        self._open.discard(channel)
        self._idle.append(channel.number)

    def tell(self, event: ChannelEvent) -> None:
        """Pass on what happened."""
        self._tell(event)

    def tag_of(self, headers: object, epoch: int) -> int:
        """The delivery tag of a returned message; 0 if it is none of this epoch's."""
        return attempt_tag(headers, self._run, epoch)

    def write(self, *pieces: _Piece) -> None:
        """Hand pieces to aiormq's writer, in order."""
        for piece in pieces:
            self._handed_over += len(piece.payload)
            piece.end = self._handed_over
            if piece.tag >= 0:
                self._departures.add(piece.end, piece.channel.epoch, piece.tag)
        self._waiting += pieces
        if self._retry is None:
            self._hand_over()

    def drained(self) -> None:
        """A piece has left aiormq's queue, and most of it the event loop's buffer."""
        self._queued -= 1
        if self._waiting and self._retry is None:  # in its turn: the loop has others to serve
            self._retry = asyncio.get_running_loop().call_soon(self._hand_over)

    def look_what_left(self) -> None:
        """Report what is on its way, if it moves."""
        if not self._departures:
            return
        held = 0
        if self._writer is not None:
            held = self._writer.transport.get_write_buffer_size()  # the application's bytes too
            sock = self._writer.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                held += held_by_kernel(sock.fileno())
        for event in self._departures.look(self.written - held):
            self._tell(event)

    def drop_publishes(self, channel: GuestChannel, *, but_end: bool) -> None:
        """What of the channel's publishes is still here is never written.

        Args:
            channel: which one.
            but_end: finish the one that was begun: the broker expects the rest of it before
                anything else on this channel, unless it has closed that itself.
        """
        kept: deque[_Piece] = deque()
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
    """A channel in confirm mode; aiormq's reader takes it for one of its own.

    Args:
        home: the connection.
        epoch: ours.
        number: the broker's.
        encoder: makes the frames of publishes on it; for the relay's thread.

    Attributes:
        encoder: as given.
        epoch: as given.
        frames: where aiormq's reader puts what it reads for this channel.
        number: as given.
    """

    def __init__(
        self, home: GuestChannels, epoch: int, number: int, encoder: PublishFrames
    ) -> None:
        self.number = number
        self.encoder = encoder
        self.frames = self
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
        """Ask the broker for the channel; `ChannelOpened` follows."""
        self._is_begun = True
        if self._is_over:  # closed before it began
            self._home.closed(self)
        else:
            self._write(commands.Channel.Open(), 0)

    def publish(self, first_tag: int, pieces: Sequence[Piece]) -> None:
        """Write finished frames, unless the channel is closed by now."""
        if not self._is_over:
            self._home.write(
                *(_Piece(self, data, first_tag + first, rest) for first, data, rest in pieces)
            )

    def close(self) -> None:
        """Close it; its number is free again when the broker has answered."""
        if self._is_over:
            return
        self._is_over = True
        self._home.drop_publishes(self, but_end=True)
        if self._is_begun:
            self._awaits_close_ok = True
            self._write(commands.Channel.Close(200, "", 0, 0))

    async def put(self, item: tuple[int, Any]) -> None:
        """Hear a frame; aiormq's reader calls this, and must never be held up or hurt.

        What comes after the channel's end is told like the rest: the core counts what is late.
        """
        try:
            handle = self._on.get(type(item[1]))
            if handle is not None:
                handle(item[1])
        except Exception as error:  # noqa: BLE001 - whatever aiormq is by now
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
        """The second frame of a return; the body, which may follow, tells nothing new."""
        returned, self._returned = self._returned, None
        if returned is not None:
            tag = self._home.tag_of(frame.properties.headers, self.epoch)
            code, text = returned.reply_code or 0, returned.reply_text or ""
            self._home.tell(Returned(self.epoch, tag, code, text, frame.body_size or 0))

    def _on_close(self, frame: commands.Channel.Close) -> None:
        """The broker closes the channel; aiormq has freed its number just before.

        If our own ``channel.close`` is on its way too, the broker will answer it: the number stays
        ours until then.
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
    """The stream that aiormq's writer task writes to, which it keeps to itself; None if unknown."""
    task = getattr(connection, "_writer_task", None)
    stack = task.get_stack() if task is not None else []
    found = [frame.f_locals.get("writer") for frame in stack]
    return next((one for one in found if isinstance(one, asyncio.StreamWriter)), None)


_failures: Final[list[str]] = []


@contextmanager
def contained(doing: str) -> Iterator[None]:
    """Let nothing out of this that fails; it is the last time."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever aiormq is by now
        _note_failure(doing, error)


def _note_failure(doing: str, error: Exception) -> None:
    if not _failures:
        what = f"a hook failed {doing}, {type(error).__name__}: {error}"
        _failures.append(f"aiormq {FOUND_VERSION}: {what}; give a URL instead of a connection")


def failure() -> str:
    """Why this process opens no channels below aiormq any more; empty as long as it does."""
    return _failures[0] if _failures else ""


def untested() -> str:
    """Why this aiormq cannot be used; empty where it can."""
    if FOUND_VERSION in TESTED_VERSIONS:
        return failure()
    return (
        f"aiormq is {FOUND_VERSION}, and tested were {', '.join(TESTED_VERSIONS)}: "
        f"pip install aiormq=={TESTED_VERSIONS[-1]}, or give a URL instead of a connection"
    )


def problem(connection: object) -> str | None:
    """What keeps us from opening channels of our own on this aiormq connection; None if nothing."""
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
        f"aiormq {FOUND_VERSION} is not as it was tested: its connection lacks what channels of "
        "ours need; give a URL instead"
    )
