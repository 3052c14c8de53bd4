"""Changes of the connection, each said once."""

from reliablepub.cli.link import LinkNotes
from reliablepub.relay.status import Link, Status

REFUSED = Status(link=Link.DISCONNECTED, reason="Connection refused")
TRYING = Status(link=Link.CONNECTING, reason="Connection refused")
CONNECTED = Status(link=Link.CONNECTED)


def said(*statuses: Status, is_eager: bool = True) -> list[str]:
    lines: list[str] = []
    notes = LinkNotes(lines.append, is_eager=is_eager)
    for status in statuses:
        notes.look(status)
    return lines


def test_trying_again_is_no_news() -> None:
    assert said(Status(), REFUSED, TRYING, REFUSED, CONNECTED, CONNECTED) == [
        "not connected to the broker: connection refused; trying again",
        "connected to the broker",
    ]


def test_another_reason_is_news() -> None:
    assert len(said(REFUSED, Status(link=Link.DISCONNECTED, reason="Timed out"))) == 2


def test_the_reasons_of_several_hosts_are_said_once_in_an_outage() -> None:
    one, two = (Status(link=Link.DISCONNECTED, reason=f"{host}: refused") for host in ("a", "b"))
    assert len(said(*(one, two) * 9)) == 2
    assert len(said(*(one, two) * 9, CONNECTED, *(one, two) * 9)) == 5


def test_that_it_is_connected_is_only_said_where_it_was_in_doubt() -> None:
    assert said(CONNECTED, is_eager=False) == []
    assert len(said(CONNECTED, REFUSED, CONNECTED, is_eager=False)) == 2


def test_blocked_is_said_with_the_reason() -> None:
    blocked = Status(link=Link.BLOCKED, reason="low on memory")
    assert said(blocked) == ["blocked by the broker: low on memory"]


def test_a_connection_that_is_lost_and_back_between_two_looks_is_said() -> None:
    first, second = (Status(link=Link.CONNECTED, connects=connects) for connects in (1, 2))
    assert said(first, first, second, second) == ["connected to the broker"] * 2
    assert said(first, second, is_eager=False) == ["connected to the broker"]
    lost = Status(link=Link.DISCONNECTED, reason="Connection refused", connects=1)
    assert len(said(first, lost, second)) == 3
