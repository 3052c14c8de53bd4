"""What others have written is seen, and does nothing."""

import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliablepub.errors import ReliablePubError, TopologyError, Unroutable
from reliablepub.hooks import AttemptBegun, AttemptEnded, MessageGivenUp, MessageStored
from reliablepub.message import Message
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.printable import named, one_line, printable


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("order.created é 注文 🙂 a b\u3000c\u00a0d", "order.created é 注文 🙂 a b\u3000c\u00a0d"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b31m", r"\x9b31m"),
        ("a\x00b\x7f", r"a\x00b\x7f"),
        ("a\r\nb\tc\x0b\x0c\x85", r"a\x0d\x0ab\x09c\x0b\x0c\x85"),
        ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
        (
            "\u202egnp.exe\u202c\u2066\u2069\u200e\u061c",
            r"\u202egnp.exe\u202c\u2066\u2069\u200e\u061c",
        ),
        ("a\u200bb\ufeffc", r"a\u200bb\ufeffc"),
        ("\ud800", r"\ud800"),
        ("\ue000\U0010ffff\U000e0001", r"\ue000\U0010ffff\U000e0001"),
        ("", ""),
    ],
)
def test_what_is_not_seen_as_itself_is_escaped(text: str, seen: str) -> None:
    assert printable(text) == seen


@given(st.text())
def test_nothing_is_left_that_acts(text: str) -> None:
    for result in (printable(text), one_line(text)):
        assert all(char.isprintable() or char.isspace() for char in result)
        assert not set(result) & set("\x1b\x9b\n\r\t\x00\x85\u2028\u202e")
        assert len(result.splitlines()) <= 1
        assert printable(result) == result


def test_a_line_is_a_line() -> None:
    assert one_line(" a\r\n\tb  c\x1b ") == r"a b c\x1b"


def test_errors_and_reprs_can_be_shown() -> None:
    error = Unroutable(message_id="m\nx", exchange="e", routing_key="k", reply_text="\x1b]0;x\x07")
    assert str(error).startswith(r"message m\x0ax to exchange 'e'")
    assert r"(\x1b]0;x\x07)" in str(error)
    assert error.reply_text == "\x1b]0;x\x07", "what it was stays"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(TopologyError(["a\x1b"])).endswith(r"a\x1b")
    assert "\x1b" not in repr(Message(b"", message_id="\x1b", exchange="\x1b"))
    assert str(ReliablePubError()) == ""
    try:
        raise error
    except Unroutable:
        record = logging.LogRecord("x", 30, "", 0, "%s", (error,), None)
    assert len(record.getMessage().splitlines()) == 1


def test_a_callback_without_a_name_is_named_by_its_kind() -> None:
    class Proxy:
        """As of a framework, outside of its context."""

        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

        def __call__(self) -> None: ...

    assert named(Proxy()).endswith("Proxy")
    assert named(test_a_line_is_a_line).endswith("test_printable.test_a_line_is_a_line")


def test_no_event_of_a_hook_shows_a_header() -> None:
    """Hooks log events as they are, and a header may hold a token or baggage."""
    message = ("m", "e", "k", {"token": "hush"}, 1)
    outcome = Outcome(OutcomeKind.CONFIRMED)
    for event in (
        MessageStored(*message),
        AttemptBegun(*message, epoch="1-1", tag=1, attempt=1),
        AttemptEnded(
            *message, epoch="1-1", tag=1, outcome=outcome, attempts=0, latency_s=0.0, stored_at=0.0
        ),
        MessageGivenUp(*message, outcome=outcome, attempts=1),
    ):
        assert event.headers == {"token": "hush"}
        assert "message_id='m'" in repr(event)
        assert "hush" not in repr(event)
