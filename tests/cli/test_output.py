"""How numbers are written for people."""

import pytest

from reliablepub.cli.output import age, count_of
from reliablepub.printable import one_line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3_600, "1 h 0 min"), (90_000, "1 d 1 h")],
)
def test_an_age_has_two_units(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_one_is_not_many() -> None:
    assert [count_of(n, "message") for n in (0, 1, 2)] == ["0 messages", "1 message", "2 messages"]


def test_a_line_is_a_line() -> None:
    assert one_line("a\r\n\tb  c") == "a b c"
