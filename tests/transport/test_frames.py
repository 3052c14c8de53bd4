"""Our frames are byte for byte those of an independent codec."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from pamqp import body as pamqp_body
from pamqp import commands, frame, header

from reliablepub import Message
from reliablepub.transport.frames import (
    FRAME_OVERHEAD,
    PublishFrames,
    attempt_number,
    encode_properties,
)

FRAME_MAX = 256
ATTEMPT = attempt_number(1, 1, 1)
names = st.text(max_size=60)
messages = st.builds(
    Message,
    st.binary(max_size=3 * FRAME_MAX),
    exchange=st.from_regex(r"[a-zA-Z0-9_.:-]{0,100}", fullmatch=True),  # what pamqp lets through
    routing_key=names,
    message_id=st.just("m"),
)


def by_pamqp(channel: int, message: Message) -> bytes:
    """The same publish, made by pamqp."""
    publish = commands.Basic.Publish(
        exchange=message.exchange, routing_key=message.routing_key, mandatory=True
    )
    properties = commands.Basic.Properties(
        headers={"rp-attempt": ATTEMPT}, delivery_mode=2, message_id="m"
    )
    size = FRAME_MAX - FRAME_OVERHEAD
    parts = [message.body[i : i + size] for i in range(0, len(message.body), size)]
    return b"".join(
        [
            frame.marshal(publish, channel),
            frame.marshal(header.ContentHeader(0, len(message.body), properties), channel),
            *(frame.marshal(pamqp_body.ContentBody(part), channel) for part in parts),
        ]
    )


def by_us(channel: int, batch: Sequence[Message]) -> bytes:
    properties = [encode_properties(message, ATTEMPT) for message in batch]
    pieces = PublishFrames(channel, FRAME_MAX).encode(batch, properties)
    return b"".join(piece.data for piece in pieces)


@given(channel=st.integers(1, 65_535), batch=st.lists(messages, max_size=5))
def test_a_batch_is_what_another_codec_makes_of_its_messages(
    channel: int, batch: list[Message]
) -> None:
    assert by_us(channel, batch) == b"".join(by_pamqp(channel, message) for message in batch)


def test_a_batch_is_written_in_pieces_that_are_large_but_not_huge() -> None:
    batch = [Message(b"x" * 1_024, message_id="m")] * 1_000
    properties = [encode_properties(message, ATTEMPT) for message in batch]
    pieces = PublishFrames(1, 131_072).encode(batch, properties)
    assert 5 < len(pieces) < 50
    firsts = [piece.first for piece in pieces]
    counts = [end - first for first, end in pairwise([*firsts, len(batch)])]
    assert firsts[0] == 0
    for piece, count in zip(pieces, counts, strict=True):
        assert not piece.is_rest
        assert piece.data.count(b"\0\x3c\0\x28") == count, "basic.publish"


def test_a_large_body_is_written_a_frame_at_a_time() -> None:
    sizes = [10, 3_000, 0, 500, 1]
    batch = [Message(bytes(size), message_id="m") for size in sizes]
    properties = [encode_properties(message, ATTEMPT) for message in batch]
    pieces = PublishFrames(1, 1_008).encode(batch, properties)
    assert [(piece.first, piece.is_rest) for piece in pieces] == [
        *((0, False), (1, True), (1, True)),
        *((2, False), (3, False)),
    ]
    assert max(len(piece.data) for piece in pieces) < 1_008 + 200


def test_ever_new_destinations_do_not_fill_the_memory() -> None:
    frames = PublishFrames(1, 131_072)
    for n in range(10_000):
        message = Message(b"", routing_key=str(n), message_id="m")
        [piece] = frames.encode([message], [encode_properties(message, ATTEMPT)])
        assert str(n).encode() in piece.data
    assert len(frames._methods) <= 4_096
