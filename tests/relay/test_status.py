"""What the relay tells of why messages are open."""

import pytest

from reliablepub.front.receipt import still_open
from reliablepub.relay.status import Link, Paused, Status, waits_for

PAUSED = Paused("orders", None, 1, 2.0, 0.0, "refused: 404 NOT_FOUND\nx", 7)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (Status(link=Link.CONNECTED), []),
        (Status(), ["the publisher is disconnected"]),
        (
            Status(link=Link.CONNECTING, trying="rabbit-1:5672"),
            ["the publisher is connecting to rabbit-1:5672"],
        ),
        (
            Status(link=Link.CONNECTING, trying="two:5672", reason="one:5672: refused"),
            ["the publisher is connecting: one:5672: refused"],
        ),
        (
            Status(link=Link.BLOCKED, reason="low on memory"),
            ["the publisher is blocked: low on memory"],
        ),
        (Status(link=Link.CONNECTED, trouble="disk full: x"), ["disk full: x"]),
        (
            Status(link=Link.CONNECTED, paused=(PAUSED,) * 4, paused_destinations=9),
            [
                *["exchange 'orders' is paused, 7 messages wait: refused: 404 NOT_FOUND x"] * 3,
                "6 more destinations are paused",
            ],
        ),
        (
            Status(
                link=Link.CONNECTED,
                paused=(Paused("", "q", 5, 2.0, 0.0, "nacked", 1),),
                paused_destinations=1,
            ),
            ["exchange '', routing key 'q' is paused, 1 message waits: nacked"],
        ),
    ],
)
def test_why_messages_are_open(status: Status, told: list[str]) -> None:
    assert [line.replace("\\n", " ") for line in waits_for(status)] == told
    error = str(still_open("message m", 5, status))
    assert error.startswith("message m is still open after 5 s; the publisher continues to send it")
    assert error.count("; ") == 1 + len(told)
