"""The health endpoint, as anyone who reaches its port can use it."""

import json
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from urllib.error import HTTPError

import pytest

from reliablepub.observe import health as health_module
from reliablepub.observe.health import CONNECTIONS_MAX, REQUEST_BYTES_MAX, Health, HealthServer
from reliablepub.relay.status import Link, Status
from tests.waiting import until

SECRET = "ACCESS_REFUSED - user 'orders' at host-17.internal"


class Looks:
    """A status, which takes its time where a test has it wait."""

    def __init__(self) -> None:
        self.status = Status(link=Link.CONNECTED)
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self) -> Status:
        assert self.may_answer.wait(20)
        return self.status


@pytest.fixture
def looks() -> Looks:
    return Looks()


@pytest.fixture
def server(looks: Looks) -> Iterator[HealthServer]:
    with HealthServer("127.0.0.1", 0, Health(looks), "none here") as server:
        yield server


def connect(server: HealthServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def ask(server: HealthServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(server.url + path, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def ends(connection: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    found = b""
    try:
        while block := connection.recv(65_536):
            found += block
    except ConnectionResetError:
        pass
    return found


def test_clients_that_trickle_hold_few_threads_and_keep_no_other_out(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "REQUEST_WITHIN_S", 600.0)
    slow = [connect(server) for _ in range(3 * CONNECTIONS_MAX)]
    for connection in slow:
        connection.send(b"GET /live HTTP/1.1\r\nX-")
    status, _ = ask(server, "/live")
    assert status == 200
    until(lambda: threads() <= CONNECTIONS_MAX + 1)  # a thread takes a moment to end
    for connection in slow:
        connection.close()


def test_a_request_has_a_deadline_however_it_trickles(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "REQUEST_WITHIN_S", 0.4)
    begun, ended = time.monotonic(), False
    with closing(connect(server)) as connection:
        connection.settimeout(0.05)
        while not ended and time.monotonic() - begun < 60:
            try:
                connection.send(b"x")
                ended = connection.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
        assert ended
        assert time.monotonic() - begun >= 0.3


@pytest.mark.parametrize("text", [b"GET /live HTTP/1.1\r\nX: ", b"", b"GET "])
def test_a_request_has_a_size(server: HealthServer, text: bytes) -> None:
    with closing(connect(server)) as connection:
        connection.sendall(text + b"x" * (REQUEST_BYTES_MAX - len(text)))
        assert ends(connection) == b""


def test_a_request_may_come_in_pieces(server: HealthServer) -> None:
    for piece in (1, 7):
        with closing(connect(server)) as connection:
            text = b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n"
            for at in range(0, len(text), piece):
                connection.send(text[at : at + piece])
            assert b" 200 OK" in ends(connection).splitlines()[0]


def test_a_client_that_ends_early_costs_nothing(server: HealthServer) -> None:
    connect(server).close()
    with closing(connect(server)) as connection:
        connection.send(b"GET /live HTTP/1.1\r\n\r\n")
    assert ask(server, "/live")[0] == 200


def test_while_all_answers_are_being_made_no_more_are_taken(
    server: HealthServer, looks: Looks
) -> None:
    """Their threads cannot be ended, and may not become more."""
    looks.may_answer.clear()
    waiting = [connect(server) for _ in range(CONNECTIONS_MAX)]
    for connection in waiting:
        connection.send(b"GET /live HTTP/1.1\r\n\r\n")
    until(lambda: len(server._server._answering) == CONNECTIONS_MAX)
    with closing(connect(server)) as one_more:
        one_more.send(b"GET /ready HTTP/1.1\r\n\r\n")
        assert ends(one_more) == b""
    looks.may_answer.set()
    answers = [ends(connection) for connection in waiting]
    for connection in waiting:
        connection.close()
    until(lambda: not server._server._answering and not server._server._writing)
    assert all(b" 200 " in found.splitlines()[0] for found in answers)
    assert ask(server, "/live")[0] == 200


def test_clients_that_read_no_answer_keep_no_other_out(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "REQUEST_WITHIN_S", 60.0)
    answer = ("text/plain", bytes(16 << 20))  # more than the sockets hold
    with HealthServer("127.0.0.1", 0, Health(looks), lambda _accept: answer) as server:
        unread = [connect(server) for _ in range(CONNECTIONS_MAX)]
        for connection in unread:
            connection.send(b"GET /metrics HTTP/1.1\r\n\r\n")
        until(lambda: len(server._server._writing) == CONNECTIONS_MAX)
        assert ask(server, "/live")[0] == 200
        until(lambda: len(server._server._writing) == CONNECTIONS_MAX - 1)  # one has made room
        for connection in unread:
            connection.close()
        until(lambda: not server._server._writing)


@pytest.mark.parametrize(
    ("age_s", "live", "ready"),
    [(0.0, 200, 200), (9.0, 200, 200), (11.0, 200, 503), (29.0, 200, 503), (31.0, 503, 503)],
)
def test_both_answer_at_once_by_the_age_of_the_last_turn(
    server: HealthServer, looks: Looks, age_s: float, live: int, ready: int
) -> None:
    looks.status = replace(looks.status, turn_age_s=age_s)
    for path, expected in (("/live", live), ("/ready", ready)):
        begun = time.monotonic()
        status, text = ask(server, path)
        assert time.monotonic() - begun < 10
        because = [f"the relay has taken no turn for {age_s:.0f} s"] if expected == 503 else []
        assert (status, json.loads(text)["reasons"]) == (expected, because)


def test_a_relay_that_has_failed_is_neither(server: HealthServer, looks: Looks) -> None:
    looks.status = replace(looks.status, link=Link.FAILED, turn_age_s=99.0)
    for path in ("/live", "/ready"):
        status, text = ask(server, path)
        because = ["the relay has failed; the log has the cause"]
        assert (status, json.loads(text)["reasons"]) == (503, because)


@pytest.mark.parametrize("link", [Link.CONNECTED, Link.BLOCKED, Link.DISCONNECTED, Link.CONNECTING])
def test_a_broker_that_is_away_is_no_reason_and_its_words_are_not_shown(
    server: HealthServer, looks: Looks, link: Link
) -> None:
    looks.status = replace(looks.status, link=link, reason=SECRET)
    status, text = ask(server, "/ready")
    assert (status, json.loads(text)["link"]) == (200, link.value)
    assert "internal" not in text


def test_it_is_not_ready_while_nothing_can_be_stored(server: HealthServer, looks: Looks) -> None:
    looks.status = replace(looks.status, trouble="disk full")
    status, text = ask(server, "/ready")
    assert (status, json.loads(text)["reasons"]) == (503, ["disk full"])
    assert ask(server, "/live")[0] == 200


def test_what_is_not_there_is_told(server: HealthServer) -> None:
    assert ask(server, "/metrics") == (501, "none here\n")
    assert ask(server, "/") == (404, "there are /live, /ready and /metrics\n")


def test_a_client_that_resets_its_connection_leaves_no_trace(
    server: HealthServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for request in (
        b"POST /live HTTP/1.1\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET /live HTTP/1.0\r\n\r\n",
    ):
        for _ in range(10):
            connection = connect(server)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(request)
            connection.close()
    until(lambda: not threads())
    assert ask(server, "/live")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_collector_that_fails_is_told_to_the_scraper(
    looks: Looks, capfd: pytest.CaptureFixture[str]
) -> None:
    def expose(_accept: str) -> tuple[str, bytes]:
        raise KeyError(SECRET)

    with HealthServer("127.0.0.1", 0, Health(looks), expose) as server:
        assert ask(server, "/metrics") == (500, "the metrics cannot be collected: KeyError\n")
    assert capfd.readouterr().err == ""


def test_listening_waits_for_no_name_server(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(_host: str) -> str:
        pytest.fail("it looked up the name of the host")

    monkeypatch.setattr(socket, "getfqdn", look_up)
    with HealthServer("127.0.0.1", 0, Health(looks), "none here") as server:
        assert ask(server, "/live")[0] == 200
