"""Bytes of a broker on a lent connection, bent: what aiormq reads of them is told, or it ends."""

import asyncio
from typing import Any

import pytest
from aiormq.connection import FrameReceiver
from aiormq.exceptions import AMQPError
from hypothesis import given
from pamqp import commands, frame
from pamqp.exceptions import PAMQPException

from reliablepub._core.events import Acked, ChannelClosed, ChannelOpened, Nacked, Returned
from reliablepub.transport.aiormq_hooks import failure, read_any_reply_text
from reliablepub.transport.frames import attempt_number
from tests.fuzz.bounds import bounded, for_long, short
from tests.fuzz.test_frames import SAID, streams
from tests.transport.test_aiormq_hooks import EPOCH, Scene
from tests.transport.test_pika_hooks import HOOKED_CHANNEL

TOLD = (Acked, Nacked, Returned, ChannelOpened, ChannelClosed)
CUT = frame.marshal(commands.Channel.Close(404, "é" * 120, 60, 40), HOOKED_CHANNEL)
WORDS = [*SAID, CUT.replace("é".encode(), b"\xc3", 1) + b"\x00"]
OPENED = frame.marshal(commands.Channel.OpenOk(), HOOKED_CHANNEL)
TAGS = attempt_number(0, 1, 0)


async def read(scene: Scene, stream: list[bytes]) -> None:
    """Do as aiormq's reader does, until it would give up the connection."""
    channel = scene.home.open(EPOCH)
    assert channel is not None
    assert channel.number == HOOKED_CHANNEL
    channel.begin()
    reader = asyncio.StreamReader()
    for data in (OPENED, *stream):
        reader.feed_data(data)
    reader.feed_eof()
    async for _, number, one in FrameReceiver(reader):
        if number in scene.host.channels:
            await scene.host.read(number, one)
        scene.host.written()


def is_told_or_ends(stream: list[bytes]) -> None:
    read_any_reply_text()
    scenes: list[Scene] = []

    async def play() -> None:
        scenes.append(Scene())
        await read(scenes[0], stream)

    with bounded(4 << 20 | 200 * sum(map(len, stream))):
        try:
            asyncio.run(play())
        except (AMQPError, PAMQPException, *UNREADABLE):
            pass  # aiormq gives up the connection, whatever it was
    assert failure() == ""
    for event in scenes[0].told:
        assert isinstance(event, TOLD)
        is_what_the_core_takes(event)


UNREADABLE = (ValueError, LookupError, TypeError, OverflowError, ArithmeticError, AttributeError)
"""What pamqp raises on bytes that it cannot read; aiormq ends the connection on every exception."""


def is_what_the_core_takes(event: Any) -> None:
    match event:
        case Acked() | Nacked():
            assert 0 <= event.tag < 2**64
        case Returned():
            assert 0 <= event.tag < TAGS
            assert 0 <= event.reply_code <= 0xFFFF
            event.reply_text.encode()
        case ChannelClosed():
            assert 0 <= event.reply_code <= 0xFFFF
            event.reply_text.encode()


def test_bent_frames_on_a_lent_connection() -> None:
    short(given(streams(WORDS))(is_told_or_ends))()


def test_they_are_fine_to_begin_with() -> None:
    scene: list[Scene] = []

    async def play() -> None:
        scene.append(Scene())
        await read(scene[0], WORDS[:12])

    asyncio.run(play())
    assert [type(event) for event in scene[0].told][:2] == [Acked, Acked]
    assert any(isinstance(event, Returned) for event in scene[0].told)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_bent_frames_on_a_lent_connection_for_long() -> None:
    for_long(given(streams(WORDS))(is_told_or_ends))
