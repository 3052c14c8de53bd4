"""`reliablepub doctor`: what is wrong is found, and each finding comes with a remedy."""

import errno
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from click.testing import CliRunner, Result
from pamqp import body, commands, frame, header
from yarl import URL

from reliablepub import Message, Outbox, Publisher
from reliablepub.cli import main
from reliablepub.cli.doctor.diagnosis import FREE_MIN, of_broker, of_outbox
from reliablepub.cli.facts import Level
from reliablepub.outbox.admin.inspection import read_relays
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite.checkup import Surroundings, look_around
from reliablepub.outbox.sqlite.lock import RelayLock
from reliablepub.outbox.sqlite.status_file import status_file_path
from reliablepub.testing import FakeBroker, faults
from reliablepub.testing.faults import StallHandshake
from reliablepub.transport import probe as probe_module
from reliablepub.transport.address import parse_addresses
from reliablepub.transport.pika_hooks import WatchedLoop
from reliablepub.transport.probe import Probe
from tests.asking import fill
from tests.chaos.proxy import Proxy
from tests.cli.conftest import NOBODY, Run
from tests.cli.test_app import section
from tests.names import HANGS_UP, half_dead_name
from tests.waiting import until

GIB = 1024**3
GOOD = Surroundings(
    sqlite="3.51.3",
    journal="wal",
    is_shared=False,
    sync_ms=1.0,
    bytes_free=GIB,
    bytes_total=9 * GIB,
    ahead_s=0.0,
    exchanges=[],
    queues=[],
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "o.db"
    addresses = (("flights", "flight.1"), ("nowhere", "k"), ("", "all"), ("", "no queue"))
    fill(path, *(Message(b"secret", *address) for address in addresses))
    return path


@pytest.fixture
def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("RELIABLEPUB_OUTBOX", str(path))
    monkeypatch.delenv("RELIABLEPUB_URL", raising=False)

    def invoke(*arguments: object) -> Result:
        result = CliRunner().invoke(main, ["doctor", *map(str, arguments)])
        assert "hush" not in result.output
        return result

    return invoke


def test_it_looks_at_the_outbox_alone(run: Run) -> None:
    result = run("--json")
    assert result.exit_code == 4, "messages are open, and no relay runs"
    rows = json.loads(result.stdout)
    assert {row["about"] for row in rows} == {"outbox", "client"}
    assert {row["check"] for row in rows if row["level"] != "ok"} >= {"relay"}
    assert all(row["remedy"] for row in rows if row["level"] != "ok")
    assert all(f"`{name}`" in section("reliablepub doctor") for name in rows[0])


def test_names_that_the_broker_does_not_have_are_found(
    run: Run, path: Path, fake: FakeBroker
) -> None:
    with Publisher(NOBODY, outbox=path, close_timeout_s=0):
        result = run("--url", fake.url, "--json")
    assert result.exit_code == 2
    rows = json.loads(result.stdout)
    problems = [row["found"] for row in rows if row["check"] in ("exchange", "queue")]
    assert [problem.split(",")[0] for problem in problems] == [
        *("exchange 'nowhere'", "queue 'no queue'")
    ]
    assert "404 NOT_FOUND" in problems[0]
    assert not fake.messages("all")


def test_a_broker_with_everything_is_fine(run: Run, path: Path, fake: FakeBroker) -> None:
    fake.declare_exchange("nowhere", "direct")
    fake.declare_queue("no queue")
    with Publisher(fake.url, outbox=path, close_timeout_s=0):
        result = run("--url", fake.url)
    assert result.exit_code == 0
    assert "ok  broker  connection" in result.stdout
    assert "frame_max 131072" in result.stdout


def test_each_address_of_a_name_is_tried(run: Run, fake: FakeBroker) -> None:
    with half_dead_name(fake) as url:
        found = {row["check"]: row for row in json.loads(run("--url", url, "--json").stdout)}
        assert found["connection"]["level"] == "ok"
        assert "404 NOT_FOUND" in found["exchange"]["found"]
        fake.inject(HANGS_UP)
        *_, row = json.loads(run("--url", url, "--json").stdout)
    assert (row["check"], row["level"]) == ("connection", "problem")


def test_the_versions_that_a_report_needs_are_named(run: Run, fake: FakeBroker) -> None:
    rows = json.loads(run("--url", fake.url, "--json").stdout)
    found = {row["check"]: row["found"] for row in rows}
    assert f"reliablepub {version('reliablepub')}, pika {version('pika')}" in found["versions"]
    assert "RabbitMQ 3.13.7" in found["connection"]


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_host_that_cannot_be_looked_up_is_refused(run: Run, host: str) -> None:
    result = run("--url", f"amqp://u:hush@{host}/")
    assert result.exit_code == 2
    assert "the URL's host is no host name" in result.output


@pytest.mark.parametrize(
    ("change", "found", "remedy"),
    [
        (lambda _: NOBODY, "Connection refused", "start the broker"),
        (lambda url: url.replace("guest:guest", "guest:hush"), "credentials", "correct user and"),
        (lambda url: url.replace("amqp:", "amqps:"), "SSL", "is the port one for TLS?"),
        (lambda url: url.replace("%2F", "none"), "access to the vhost", "rabbitmqctl"),
    ],
)
def test_a_connection_that_fails_is_explained(
    run: Run, fake: FakeBroker, change: Callable[[str], str], found: str, remedy: str
) -> None:
    *_, row = json.loads(run("--url", change(fake.url), "--json").stdout)
    assert (row["about"], row["check"], row["level"]) == ("broker", "connection", "problem")
    assert found in row["found"]
    assert remedy in row["remedy"]


def returned(body_bytes: int) -> bytes:
    properties = commands.Basic.Properties()
    return frame.marshal(commands.Basic.Return(312, "NO_ROUTE", "", "q"), 1) + frame.marshal(
        header.ContentHeader(0, body_bytes, properties), 1
    )


FRAME = b"\x01\x00\x00\xff\xff\xff\xff"


@contextmanager
def broker_that(talks: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of one that says to its client what it likes, for a block."""

    def talk(server: socket.socket) -> None:
        with server.accept()[0] as peer, suppress(OSError):
            talks(peer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        talker = threading.Thread(target=talk, args=(server,))
        talker.start()
        yield f"amqp://guest:guest@127.0.0.1:{server.getsockname()[1]}"
        talker.join()


@pytest.mark.parametrize("words", [FRAME, returned(2**62)], ids=["frame", "message"])
def test_a_broker_that_says_too_much_is_left(run: Run, words: bytes) -> None:
    """It would be read for ever: each byte of it is held, and looked at again with the next."""
    sent = 0

    def talk(peer: socket.socket) -> None:
        nonlocal sent
        peer.recv(8)
        peer.sendall(words)
        while sent < 64 << 20:
            sent += peer.send(frame.marshal(body.ContentBody(bytes(100_000)), 1))

    with broker_that(talk) as url:
        *_, row = json.loads(run("--url", url, "--json").stdout)
    assert (row["check"], row["level"]) == ("connection", "problem")
    assert "the broker began a frame" in row["found"] or "an unexpected message" in row["found"]
    assert "is RabbitMQ listening there?" in row["remedy"]
    assert sent < 16 << 20, "the rest of what the sockets hold"


def greeting(properties: bytes, minor: int = 9) -> bytes:
    """A ``connection.start``; its server properties are encoded already."""
    said = b"".join(struct.pack(">I", len(one)) + one for one in (properties, b"PLAIN", b"en_US"))
    payload = struct.pack(">HHBB", 10, 10, 0, minor) + said
    return struct.pack(">BHI", 1, 0, len(payload)) + payload + b"\xce"


def long_text(words: bytes) -> bytes:
    return b"S" + struct.pack(">I", len(words)) + words


ANSWERS = {
    b"AMQP": b"",
    struct.pack(">HH", 10, 11): frame.marshal(commands.Connection.Tune(9, 131_072, 60), 0),
    struct.pack(">HH", 10, 40): frame.marshal(commands.Connection.OpenOk(), 0),
}
"""What a broker answers until it is logged in; its greeting answers the protocol header."""


@pytest.mark.parametrize(
    "first",
    [
        greeting(b"\x0ccapabilities" + long_text(b"x") + b"\x07version" + long_text(b"9" * 99_999)),
        greeting(b"\x01a" + long_text(b"\x1b" * 99_999), minor=7),
    ],
    ids=["properties of another type", "another version"],
)
def test_a_broker_that_describes_itself_oddly_is_told_in_few_words(run: Run, first: bytes) -> None:
    def talk(peer: socket.socket) -> None:
        while heard := peer.recv(1 << 20):
            answers = [answer for method, answer in ANSWERS.items() if method in heard]
            if not answers:
                return
            peer.sendall(answers[-1] or first)

    with broker_that(talk) as url:
        result = run("--url", url, "--json")
    bad = {row["check"] for row in json.loads(result.stdout) if row["level"] == "problem"}
    assert "connection" in bad
    assert len(result.stdout) < 5_000


def test_a_broker_that_does_not_answer_is_left(run: Run, fake: FakeBroker) -> None:
    with Proxy(URL(fake.url).port or 0) as proxy:

        def silenced(*_: object, **__: object) -> None:
            proxy.is_silent_down = True

        with (
            patch.object(probe_module, "_note", silenced),
            patch.object(probe_module._Asking._answer, "__defaults__", (0.5,)),
        ):
            *_, row = json.loads(run("--url", proxy.url, "--json").stdout)
    assert (row["check"], row["level"]) == ("connection", "problem")
    assert "the broker has not answered within 0.5 s" in row["found"]


MOMENTS: dict[str, Callable[[WatchedLoop], bool]] = {
    "DNS": lambda _: any(isinstance(one, threading.Timer) for one in threading.enumerate()),
    "TCP": lambda loop: loop.is_writing,
    "AMQP": lambda loop: loop.fd is not None and not loop.is_writing,
}
"""While the probe waits for what: pika resolves names on timers, and sees a connect by a write."""


@pytest.mark.timeout(20)
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_while_connecting_ends_every_attempt(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The next address that pika tries would open a connection that is never closed."""
    port = URL(fake.url).port
    ports = [1, port] if moment == "TCP" else [port]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", one)) for one in ports]
    closed = threading.Event()
    poll = WatchedLoop.poll

    def resolve(**_: object) -> object:
        if moment == "DNS":
            closed.wait(5)
        return found

    def interrupt(loop: WatchedLoop) -> None:
        if MOMENTS[moment](loop):
            monkeypatch.setattr(WatchedLoop, "poll", poll)
            raise KeyboardInterrupt
        poll(loop)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(WatchedLoop, "poll", interrupt)
    (address,) = parse_addresses(fake.url)
    fake.inject(StallHandshake())  # the first connection uses it up
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        probe_module.probe(address, exchanges=[], queues=[])
    closed.set()
    assert time.monotonic() - begun < 4
    time.sleep(0.2)  # the broker accepts what was opened
    assert moment == "AMQP" or fake.faults, "another address was tried"
    until(lambda: not fake._node.connections)


@pytest.mark.parametrize(
    ("around", "status", "check", "level"),
    [
        ({}, {}, "disk", Level.OK),
        ({"bytes_free": GIB - 1}, {}, "disk", Level.WARNING),
        ({"bytes_free": FREE_MIN - 1}, {}, "disk", Level.PROBLEM),
        ({"sync_ms": 0.001}, {}, "durability", Level.WARNING),
        ({"sync_ms": 200.0}, {}, "durability", Level.WARNING),
        ({"sync_ms": None}, {}, "durability", Level.WARNING),
        ({"ahead_s": 60.0}, {}, "clock", Level.WARNING),
        ({"journal": "delete"}, {}, "sqlite", Level.WARNING),
        ({}, {"is_disk_full": True}, "disk", Level.PROBLEM),
        ({}, {"log_bytes": 64 * 1024**2 - 1}, "log", Level.OK),
        ({}, {"log_bytes": 64 * 1024**2}, "log", Level.WARNING),
    ],
)
def test_the_outbox_and_its_surroundings_are_judged(
    path: Path, around: dict[str, Any], status: dict[str, Any], check: str, level: Level
) -> None:
    shown = replace(Outbox(path).status(), **status)
    found = {f.check: f for f in of_outbox(shown, replace(GOOD, **around), shown.stored, {})}
    assert found[check].level is level
    assert (found[check].remedy == "") == (level is Level.OK)


@pytest.mark.parametrize(
    ("version", "is_shared", "words"),
    [
        ("3.51.3", True, []),
        ("3.51.2", False, ["WAL-reset"]),
        ("3.40.1", True, ["WAL-reset", "wal_autocheckpoint = 0"]),
    ],
)
def test_an_old_sqlite_is_told(
    path: Path, version: str, *, is_shared: bool, words: list[str]
) -> None:
    around = replace(GOOD, sqlite=version, is_shared=is_shared)
    (row,) = (f for f in of_outbox(Outbox(path).status(), around, 0.0, {}) if f.check == "sqlite")
    assert row.found.startswith(f"version {version}, journal mode wal")
    assert [one for one in ("WAL-reset", "wal_autocheckpoint = 0") if one in row.found] == words


def test_an_old_backlog_is_a_warning(path: Path) -> None:
    status = Outbox(path).status()
    assert status.oldest_open_at is not None
    found = of_outbox(status, look_around(path), status.oldest_open_at + 7_200, {})
    assert {f.check: f.level for f in found}["backlog"] is Level.WARNING


def test_paused_destinations_are_a_warning_with_all_that_is_known(path: Path) -> None:
    row = {
        "exchange": "orders",
        "routing_key": None,
        "refusals": 3,
        "waiting": 4645,
        "reason": "refused: 404 NOT_FOUND - no exchange 'orders' in vhost '/'",
        "since": 1_000.0,
        "probe_in_s": 12.0,
        "gives_up_at": 1_900.0,
    }
    picture = {"at": 1_060.0, "paused": [row], "paused_destinations": 3}
    found = {f.check: f for f in of_outbox(Outbox(path).status(), GOOD, 1_061.0, picture)}
    assert found["paused"].level is Level.WARNING
    assert found["paused"].found == (
        "3 destinations paused: orders / every routing key: refused: 404 NOT_FOUND - no exchange "
        "'orders' in vhost '/'; for 1 min 1 s; 4645 messages wait; probed in 11 s; given up in "
        "13 min 59 s, unless this ends (and 2 more)"
    )
    assert "permission or binding" in found["paused"].remedy
    found = {f.check: f for f in of_outbox(Outbox(path).status(), GOOD, 1_061.0, {})}
    assert (found["paused"].level, found["paused"].remedy) == (Level.OK, "")


@pytest.mark.parametrize(
    ("url", "probe", "check"),
    [
        ("amqp://broker/", Probe("", frame_max=131_072, can_confirm=True), "tls"),
        ("amqps://broker/", Probe("", frame_max=4_096, can_confirm=True), "limits"),
        ("amqps://broker/", Probe("", frame_max=131_072, can_confirm=False), "confirms"),
    ],
)
def test_a_broker_is_judged(url: str, probe: Probe, check: str) -> None:
    (address,) = parse_addresses(url)
    bad = [f for f in of_broker(address, probe) if f.level is not Level.OK]
    assert [f.check for f in bad] == [check]
    assert bad[0].remedy


def test_a_relay_that_has_failed_is_a_problem_with_its_reason(path: Path) -> None:
    said = "the relay has failed: ZeroDivisionError: a bug"
    (row,) = (
        f for f in of_outbox(Outbox(path).status(), GOOD, 0.0, {}, said) if f.check == "relay"
    )
    assert (row.level, row.found) == (Level.PROBLEM, f"none: {said}")
    assert "reliablepub relay" in row.remedy


def link_found(run: Run, path: Path, link: str) -> dict[str, str]:
    """The finding about the running relay's connection, once the relay says so of it."""

    def is_shown() -> bool:
        (shown,) = (relay.status for relay in read_relays(outbox_at(path)))
        return shown.get("link") == link and (link == "connected" or bool(shown["reason"]))

    until(is_shown)
    result = run("--json")
    rows = json.loads(result.stdout)
    (row,) = (row for row in rows if (row["about"], row["check"]) == ("broker", "relay"))
    assert (result.exit_code == 0) == (row["level"] == "ok")
    return dict(row)


def test_a_password_that_only_the_relay_has_wrong_is_a_problem(
    run: Run, path: Path, fake: FakeBroker
) -> None:
    url = fake.url.replace("guest:guest", "guest:hush")
    with Publisher(url, outbox=path, close_timeout_s=0):
        row = link_found(run, path, "disconnected")
    assert (row["about"], row["check"], row["level"]) == ("broker", "relay", "problem")
    assert row["found"].startswith("the relay has not been connected for")
    assert "credentials" in row["found"]
    assert "its own URL, user, password" in row["remedy"]


def test_of_a_broker_that_refuses_every_message_the_login_is_not_blamed(
    run: Run, path: Path, fake: FakeBroker
) -> None:
    fake.inject(faults.CloseChannel(code=406, text="Server low on disk space", keep=True))
    with Publisher(fake.url, outbox=path, close_timeout_s=0) as publisher:
        publisher.publish_many(Message(b"", routing_key="all") for _ in range(5))
        row = link_found(run, path, "disconnected")
    assert "refuses every message: 406 PRECONDITION_FAILED - Server low" in row["found"]
    assert "password" not in row["remedy"]


def test_a_token_is_told_with_its_end(run: Run, fake: FakeBroker, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    url = fake.url.replace("guest:guest@", "whoever@")

    def found() -> tuple[dict[str, str], dict[str, str]]:
        rows = json.loads(run("--json", "--url", url, "--password-file", str(token)).stdout)
        by_check = {row["check"]: row for row in rows if row["about"] == "broker"}
        return by_check["credentials"], by_check["connection"]

    token.write_text(fake.issue_token(600))
    credentials, connection = found()
    assert (credentials["level"], connection["level"]) == ("ok", "ok")
    assert "is valid for another 9 min" in credentials["found"]
    token.write_text(fake.issue_token(-60))
    credentials, connection = found()
    assert (credentials["level"], connection["level"]) == ("problem", "problem")
    assert f"the token in {token} expired 6" in credentials["found"]
    assert "what should replace it" in credentials["remedy"]


def test_a_relay_that_an_alarm_blocks_is_a_problem(run: Run, path: Path, fake: FakeBroker) -> None:
    with Publisher(fake.url, outbox=path, close_timeout_s=0) as publisher:
        row = link_found(run, path, "connected")
        assert (row["about"], row["check"], row["remedy"]) == ("broker", "relay", "")
        fake.block("low on memory")
        publisher.publish(b"1", routing_key="all")
        row = link_found(run, path, "blocked")
        fake.unblock()
    assert (row["about"], row["check"], row["level"]) == ("broker", "relay", "problem")
    assert row["found"].endswith("low on memory")
    assert "rabbitmq-diagnostics alarms" in row["remedy"]


def test_a_relay_that_hangs_is_a_problem_and_its_connection_is_not_vouched_for(path: Path) -> None:
    now = time.time() + 60
    shown = {"pid": 17, "link": "connected", "reason": "", "since": now - 90, "at": now - 59.5}
    status = replace(Outbox(path).status(), relay=17)
    (row,) = (f for f in of_outbox(status, GOOD, now, shown) if f.check == "relay")
    assert (row.level, row.found) == (Level.PROBLEM, "process 17 hangs: no sign of life for 59 s")
    assert "py-spy dump --pid 17" in row.remedy
    found = of_outbox(status, GOOD, now, {**shown, "at": now - 29})
    assert [f.level for f in found if f.check == "relay"] == [Level.OK, Level.OK]


def test_a_forged_status_is_a_finding(run: Run, path: Path) -> None:
    relay_lock, file = RelayLock(path), status_file_path(path)
    for forged in ({"since": None}, {"reason": 5}, {"paused": [1]}, {"link": ["x"]}, {"at": "x"}):
        file.write_text(json.dumps({"pid": os.getpid(), "link": "disconnected", **forged}))
        file.chmod(0o600)
        found = next(row for row in json.loads(run("--json").stdout) if row["check"] == "relay")
        assert (found["level"], "shows no status" in found["found"]) == ("warning", True)
    relay_lock.release()


def test_a_disk_that_nothing_can_be_written_to_is_a_problem(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "reliablepub.outbox.sqlite.checkup.TemporaryFile",
        Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS), "/var/lib/orders")),
    )
    result = run("--json")
    assert result.exit_code == 4
    rows = {row["check"]: row for row in json.loads(result.stdout)}
    assert rows["durability"]["level"] == "problem"
    assert "Read-only file system" in rows["durability"]["found"]
    assert rows["backlog"]["found"].startswith("4 messages open")


UNANSWERED = "host:5672 has not answered its first attempt"
SHOWN: dict[str, tuple[dict[str, Any], Level]] = {
    "process 17, which shows no status": ({}, Level.WARNING),
    "the relay is connected, but disk full: no space (for 1 min 0 s)": (
        {"link": "connected", "reason": "disk full: no space", "since": 0.0, "at": 0.0},
        Level.PROBLEM,
    ),
    f"the relay has not been connected for 1 min 0 s: {UNANSWERED}": (
        {"link": "disconnected", "reason": "", "since": 0.0, "at": 0.0, "trying": "host:5672"},
        Level.PROBLEM,
    ),
    "the relay has not been connected yet, for 1 s": (
        {"link": "disconnected", "reason": "", "since": 59.0, "at": 59.0},
        Level.WARNING,
    ),
}


@pytest.mark.parametrize("found", SHOWN)
def test_what_a_relay_shows_of_itself_is_judged(path: Path, found: str) -> None:
    shown, level = SHOWN[found]
    status = replace(Outbox(path).status(), relay=17)
    *process, row = (f for f in of_outbox(status, GOOD, 60.0, shown) if f.check == "relay")
    assert (row.level, row.found, bool(row.remedy)) == (level, found, True)
    assert len(process) == bool(shown)
