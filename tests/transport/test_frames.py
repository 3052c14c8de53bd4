"""Our frames are byte for byte those of an independent codec."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from pamqp import body as pamqp_body
from pamqp import commands, frame, header

from reliablepub import Message
from reliablepub.transport.encoding import attempt_number, encode_properties
from reliablepub.transport.frames import FRAME_OVERHEAD, PublishFrames

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
    return b"".join(PublishFrames(channel, FRAME_MAX).encode(batch, properties))


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


def test_ever_new_destinations_do_not_fill_the_memory() -> None:
    frames = PublishFrames(1, 131_072)
    for n in range(10_000):
        message = Message(b"", routing_key=str(n), message_id="m")
        [piece] = frames.encode([message], [encode_properties(message, ATTEMPT)])
        assert str(n).encode() in piece
    assert len(frames._methods) <= 4_096
