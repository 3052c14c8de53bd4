"""The broker's words, whatever bytes they are; pamqp would end a connection over them."""

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, frame
from pamqp.exceptions import UnmarshalingException

from reliablepub.transport.aiormq_hooks import ChannelClose, ConnectionClose, read_any_reply_text
from reliablepub.transport.base import text


@given(st.one_of(st.none(), st.text(), st.binary()))
def test_whatever_it_is_it_can_be_stored_and_shown_unless_it_was_no_text_before(
    words: str | bytes | None,
) -> None:
    said = text(words)
    assert isinstance(said, str)
    if isinstance(words, str):
        assert said == words
    else:
        assert said.encode().decode() == said


@pytest.fixture
def pamqp_as_it_is() -> Iterator[None]:
    """The classes of aiormq itself, although an earlier test lent a connection."""
    kinds = (commands.Channel.Close, commands.Connection.Close)
    before = {kind.index: commands.INDEX_MAPPING[kind.index] for kind in kinds}
    commands.INDEX_MAPPING.update({kind.index: kind for kind in kinds})
    yield
    commands.INDEX_MAPPING.update(before)


def close_frame(index: int, said: bytes) -> bytes:
    payload = struct.pack(">IHB", index, 404, len(said)) + said + struct.pack(">HH", 60, 40)
    return struct.pack(">BHI", 1, 3, len(payload)) + payload + b"\xce"


@pytest.mark.usefixtures("pamqp_as_it_is")
@pytest.mark.parametrize(
    ("index", "kind"),
    [
        (commands.Channel.Close.index, commands.Channel.Close),
        (commands.Connection.Close.index, commands.Connection.Close),
    ],
)
def test_pamqp_reads_a_reply_text_that_is_cut_inside_a_character(
    index: int, kind: type[commands.Channel.Close | commands.Connection.Close]
) -> None:
    cut = close_frame(index, b"no exchange '\xc3...")
    with pytest.raises(UnmarshalingException):
        frame.unmarshal(cut)
    read_any_reply_text()
    read_any_reply_text()  # each connection that is lent asks for it
    for data, said in (
        (cut, "no exchange '\N{REPLACEMENT CHARACTER}..."),
        (close_frame(index, "é".encode()), "é"),
        (close_frame(index, b""), ""),
    ):
        length, channel, heard = frame.unmarshal(data)
        assert (length, channel) == (len(data), 3)
        assert isinstance(heard, kind)
        assert (heard.reply_code, heard.reply_text) == (404, said)
        assert (heard.class_id, heard.method_id) == (60, 40)
        assert heard.name == kind.name
        whole = frame.marshal(kind(404, said, 60, 40), 3)
        assert frame.marshal(heard, 3) == whole


@pytest.mark.usefixtures("pamqp_as_it_is")
def test_classes_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(commands.Channel.Close):
        pass

    monkeypatch.setitem(commands.INDEX_MAPPING, Theirs.index, Theirs)
    read_any_reply_text()
    assert commands.INDEX_MAPPING[Theirs.index] is Theirs
    assert commands.INDEX_MAPPING[commands.Connection.Close.index] is ConnectionClose
    assert ChannelClose.index == Theirs.index
