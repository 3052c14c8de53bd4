"""A relay as a service: watched, asked over HTTP, reopened."""

import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from reliablepub import Message, Outbox, OutboxKeys, Publisher
from reliablepub.cli import main
from reliablepub.cli.relay.service import Notifier, Service, Settings
from reliablepub.cli.signals import Stop
from reliablepub.errors import (
    OutboxDiskFull,
    OutboxError,
    OutboxInUse,
    OutboxLocked,
    OutboxUnreachable,
)
from reliablepub.observe.health import Health, HealthServer
from reliablepub.outbox.admin.rekeying import missing_key
from reliablepub.outbox.database import Session
from reliablepub.outbox.opening import outbox_at
from reliablepub.relay.status import Status
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.conftest import NOBODY, Cli, line_of, lines_of
from tests.waiting import until


class Manager:
    """What systemd is to a service: a datagram socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(60)
        self.heard: list[dict[str, str]] = []

    def until(self, name: str) -> dict[str, str]:
        """Listen until a variable is told; everything that was told with it."""
        while True:
            lines = self._socket.recv(4096).decode().splitlines()
            told = dict(line.split("=", 1) for line in lines)
            self.heard.append(told)
            if name in told:
                return told

    def is_told(self) -> bool:
        """Whether a datagram was waiting; reads it."""
        try:
            self._socket.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


def enqueue(cli: Cli, body: bytes) -> None:
    fill(cli.folder / "o.db", Message(body, routing_key="all"))


def plain(fake: FakeBroker) -> str:
    """Its URL without the password, which is the default one."""
    return fake.url.replace("guest:guest@", "")


def test_systemd_is_told_everything_it_asks_for(
    cli: Cli, fake: FakeBroker, manager: Manager
) -> None:
    cli.environment |= {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "200000"}
    relay = cli.begin("relay", "--outbox", "o.db")
    assert manager.until("READY")["STATUS"].endswith("0 open, 0 parked")
    while manager.until("STATUS")["STATUS"] != "connected to the broker; 0 open, 0 parked":
        pass
    manager.until("WATCHDOG")
    manager.until("WATCHDOG")
    relay.send_signal(signal.SIGHUP)
    assert int(manager.until("RELOADING")["MONOTONIC_USEC"]) > 0
    manager.until("READY")
    manager.until("WATCHDOG")
    relay.send_signal(signal.SIGTERM)
    manager.until("STOPPING")
    assert cli.ended(relay).code == 0


def test_a_hangup_reads_the_configuration_again_and_loses_nothing(
    cli: Cli, fake: FakeBroker
) -> None:
    del cli.environment["RELIABLEPUB_URL"]
    config = cli.folder / "relay.toml"
    config.write_text(f'url = "{plain(fake)}"\noutbox = "o.db"\n')
    relay = cli.relay("--config", "relay.toml", "--json")
    enqueue(cli, b"1")
    fake.wait_for(1, timeout_s=60)

    for text, problem in (
        ("outbxo = 'o.db'\n", "not reopened, nothing was changed: relay.toml: unknown key"),
        ("url = 'http://x/'\noutbox = 'o.db'\n", "not reopened, nothing was changed: the"),
    ):
        config.write_text(text)
        relay.send_signal(signal.SIGHUP)
        assert line_of(relay).startswith(problem)
    enqueue(cli, b"2")
    fake.wait_for(2, timeout_s=60)

    with FakeBroker() as second:
        second.declare_queue("all")
        config.write_text(f'url = "{plain(second)}"\noutbox = "o.db"\n')
        relay.send_signal(signal.SIGHUP)
        assert line_of(relay) == "reopened\n"
        enqueue(cli, b"3")
        second.wait_for(1, timeout_s=60)
        assert [message.body for message in second.messages("all")] == [b"3"]
        assert line_of(relay) == "connected to the broker\n"

        config.write_text(f'url = "{plain(second)}"\noutbox = "other.db"\n')
        relay.send_signal(signal.SIGHUP)
        assert "the outbox cannot be changed while the relay runs" in line_of(relay)
        until(lambda: Outbox(cli.folder / "o.db").status().open == 0, 60)
        ended = cli.stop(relay)
    assert ended.code == 0
    assert (ended.json["confirmed"], ended.json["open"]) == (3, 0)


def test_a_hangup_drops_no_key_that_a_message_needs(cli: Cli, fake: FakeBroker) -> None:
    keys, old, new = cli.folder / "keys", f"old {'0f' * 32}\n", f"new {'f0' * 32}\n"
    keys.touch(0o600)
    keys.write_text(old)
    with Outbox(cli.folder / "o.db", keys=OutboxKeys.read(keys)) as outbox:
        outbox.enqueue(Message(b"1", routing_key="nowhere"), key="waits")
    relay = cli.begin("relay", "--outbox", "o.db", "--outbox-keys", "keys")
    assert relay.stderr is not None
    assert any(line == "connected to the broker\n" for line in lines_of(relay))
    for text in (new, f"old {'f0' * 32}\n"):
        keys.write_text(text)
        relay.send_signal(signal.SIGHUP)
        ends = ("not reopened", "reopened", "the relay has failed")
        told = next(line for line in lines_of(relay) if line.startswith(ends))
        assert told == (
            "not reopened, nothing was changed: messages are encrypted with key 'old', which is "
            "missing\n"
        )
    keys.write_text(new + old)
    relay.send_signal(signal.SIGHUP)
    assert any(line == "reopened\n" for line in lines_of(relay))
    assert cli.stop(relay).code == 0
    with Outbox(cli.folder / "o.db", keys=OutboxKeys.read(keys)) as outbox:
        assert outbox.rekey().changed == 1
    keys.write_text(new)
    before = OutboxKeys({"new": bytes.fromhex("f0" * 32), "old": bytes.fromhex("0f" * 32)})
    database = outbox_at(cli.folder / "o.db")
    assert missing_key(database, before, OutboxKeys.read(keys)) is None
    assert missing_key(database, before, None) == "new"


def test_health_and_metrics_are_served(cli: Cli, fake: FakeBroker) -> None:
    relay = cli.begin("relay", "--outbox", "o.db", "--health-port", "0")
    found = re.match(r"health: (http://127\.0\.0\.1:\d+)/live", line_of(relay))
    assert found is not None
    url = found[1]
    assert line_of(relay) == "connected to the broker\n"
    assert get(f"{url}/live") == (200, {"live": True, "reasons": []})
    is_ready = {"ready": True, "reasons": [], "link": "connected"}
    assert get(f"{url}/ready") == (200, {**is_ready, "open": 0, "in_flight": 0, "parked": 0})
    enqueue(cli, b"1")
    fake.wait_for(1, timeout_s=60)
    confirmed = 'reliablepub_ended_attempts_total{outbox="o.db",outcome="confirmed"} 1.0'
    until(lambda: confirmed in text_of(f"{url}/metrics"), 60)
    assert "process_resident_memory_bytes" in text_of(f"{url}/metrics")
    fake.stop()
    assert line_of(relay).startswith("not connected to the broker")
    assert get(f"{url}/ready")[0] == 200  # messages can be stored
    until(lambda: get(f"{url}/ready")[1]["link"] == "disconnected")  # it tries again now and then
    assert get(f"{url}/live")[0] == 200
    assert get(f"{url}/else")[0] == 404
    assert cli.stop(relay).code == 0


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read()
            is_json = error.headers["Content-Type"] == "application/json"
            return error.code, json.loads(text) if is_json else text.decode()


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def test_without_the_extra_metrics_say_what_is_missing() -> None:
    health = Health(Status)
    with HealthServer("::1", 0, health, "no metrics: pip install it") as server:
        assert get(f"{server.url}/metrics") == (501, "no metrics: pip install it\n")
        assert get(f"{server.url}/live")[0] == 200


class Rig:
    """A service in this thread: with each wait, the life that a test gives it takes a step."""

    def __init__(
        self,
        settings: Settings,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self.settings = settings
        self.is_set = self.is_reopen_due = False  # as in `Stop`
        self.windows: list[int] = []  # of the settings of each opening
        self.fails: Callable[[int, int], None] = lambda _call, _window: None
        """Called before an opening, with its number and its window."""
        self.told: list[str] = []  # names that the service manager was told
        self._capsys = capsys
        opened = Settings.open

        def open_(settings: Settings, hooks: Sequence[object]) -> Publisher:
            self.windows.append(settings.options.get("window_max", 0))
            self.fails(len(self.windows), self.windows[-1])
            return opened(settings, hooks)

        monkeypatch.setattr(Settings, "open", open_)

    def interrupting(self, call: Callable[[], Publisher]) -> Publisher:
        return call()

    def live(
        self,
        life: Iterator[None],
        *,
        again: Settings | None = None,  # found after SIGHUP
        is_standby: bool = False,
        hooks: Sequence[object] = (),
        watchdog_s: float | None = None,
    ) -> str:
        """Run a service until its life ends; what it has said."""
        self._life = life
        tell = SimpleNamespace(tell=lambda **told: self.told.extend(told), watchdog_s=watchdog_s)
        self.service = Service(
            self.settings,
            lambda: again or self.settings,
            stop=cast("Stop", self),
            notifier=cast("Notifier", tell),
            hooks=hooks,
            is_standby=is_standby,
        )
        with self.service:
            self.service.run(is_draining=False)
        return self._capsys.readouterr().err

    def wait(self, _timeout_s: float) -> bool:
        time.sleep(0.001)
        self.is_set = next(self._life, "over") == "over"
        return self.is_set

    def hang_up(self, until: Callable[[], bool]) -> Iterator[None]:
        """SIGHUP, and then steps until a condition holds."""
        self.is_reopen_due = True
        while not until():
            yield


@pytest.fixture
def rig(
    fake: FakeBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Rig:
    outbox = outbox_at(tmp_path / "o.db")
    settings = Settings(urls=(fake.url,), outbox=outbox, options={"window_max": 1_000})
    return Rig(settings, monkeypatch, capsys)


@pytest.fixture
def other(rig: Rig) -> Settings:
    """Settings with another window."""
    return replace(rig.settings, options={"window_max": 777})


def test_before_the_outbox_is_open_nothing_can_be_stored(rig: Rig) -> None:
    """The health port, which is open first, must not call the relay ready."""
    troubles: list[str] = []
    rig.fails = lambda _call, _window: troubles.append(rig.service.status.trouble)
    rig.live(iter(()))
    troubles.append(rig.service.status.trouble)
    assert troubles == ["standing by: the outbox cannot be opened for now", ""]


def test_what_cannot_be_opened_is_reopened_as_it_was(rig: Rig, fake: FakeBroker) -> None:
    def life() -> Iterator[None]:
        yield from rig.hang_up(lambda: not rig.is_reopen_due)
        fill(rig.settings.outbox, Message(b"", routing_key="all"))
        while not fake.messages("all"):
            yield

    said = rig.live(life(), again=replace(rig.settings, options={"window_max": 0}))
    assert "reopened with the earlier settings: window_max is 0" in said


def test_what_is_confirmed_at_once_counts_too(
    rig: Rig, other: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the publisher was opened again."""
    opened = Settings.open

    def open_(settings: Settings, hooks: Sequence[object]) -> Publisher:
        fill(settings.outbox, Message(b"", routing_key="all"), Message(b"", routing_key="all"))
        publisher = opened(settings, hooks)
        publisher.flush(timeout_s=30)  # this thread is the last to run
        return publisher

    monkeypatch.setattr(Settings, "open", open_)
    rig.live(rig.hang_up(lambda: rig.windows == [1_000, 777]), again=other)
    assert rig.service.confirmed == 4


def test_a_standby_that_loses_the_outbox_as_it_reopens_keeps_the_new_settings(
    rig: Rig, other: Settings
) -> None:
    def fail(call: int, _window: int) -> None:
        if call == 2:  # another standby was faster
            raise OutboxInUse("another relay has it")

    rig.fails = fail
    life = rig.hang_up(lambda: len(rig.windows) >= 3)
    said = rig.live(life, again=other, is_standby=True)
    assert rig.windows == [1_000, 777, 777]
    reloaded = rig.told[rig.told.index("RELOADING") :]
    assert "READY" in reloaded, "systemd waits for the end of the reload"
    assert "standing by: another relay has it" in said
    assert "earlier settings" not in said


def test_a_standby_waits_while_the_outbox_cannot_be_reached(rig: Rig) -> None:
    gone = OutboxUnreachable("the server is away")
    ends = iter([OutboxInUse("another relay has it"), gone, gone, OutboxLocked("locked")])

    def fail(_call: int, _window: int) -> None:
        for error in ends:
            raise error

    def life() -> Iterator[None]:
        while rig.service.status.connects == 0:
            yield

    rig.fails = fail
    told = rig.live(life(), is_standby=True).splitlines()[:4]
    assert [line.partition("standing by: ")[2] for line in told[:3]] == [
        *("another relay owns the outbox", "the server is away", "locked")
    ]
    assert told[3] == "this relay has taken over the outbox"


@pytest.mark.parametrize("trouble", [OutboxUnreachable, OutboxDiskFull])
def test_a_relay_that_cannot_open_the_outbox_again_for_now_waits_for_it(
    rig: Rig, other: Settings, trouble: type[OutboxError]
) -> None:
    """Such as one that gets SIGHUP during a fail-over of PostgreSQL, or beside a full disk."""
    troubles: set[str] = set()

    def fail(call: int, _window: int) -> None:
        if 1 < call < 4:
            raise trouble("the server is away")

    def is_back() -> bool:
        troubles.add(rig.service.status.trouble)
        return len(rig.windows) >= 4

    rig.fails = fail
    said = rig.live(rig.hang_up(is_back), again=other)
    assert rig.windows == [1_000, 777, 777, 777], "the new settings are not at fault"
    assert troubles >= {"standing by: the outbox cannot be opened for now"}, "it is public"
    assert len(troubles - {""}) == 1
    assert said.count("standing by: the server is away") == 1
    assert "this relay has taken over the outbox\n" in said
    assert "earlier settings" not in said


def test_a_relay_goes_on_with_the_settings_that_open_the_outbox(rig: Rig, other: Settings) -> None:
    """A wrong password looks like a server that is away: both are tried until one is right."""

    def fail(call: int, window: int) -> None:
        if window == 777:
            raise OutboxUnreachable("password authentication failed")
        if 1 < call < 5:
            raise OutboxUnreachable("the server is away")

    rig.fails = fail
    life = rig.hang_up(lambda: not rig.service.status.trouble and len(rig.windows) >= 5)
    said = rig.live(life, again=replace(other, outbox_as_given="postgresql://x:wrong@db/"))
    assert rig.windows == [1_000, 777, 1_000, 777, 1_000]
    assert said.count("standing by: ") == 1
    assert "reopened with the earlier settings: password authentication failed\n" in said


def test_keys_that_could_not_be_checked_are_checked_before_the_outbox_is_opened(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, database = OutboxKeys({"old": bytes.fromhex("0f" * 32)}), rig.settings.outbox
    fill(database, Message(b"1", routing_key="nowhere"), keys=keys)
    rig.settings = replace(rig.settings, options={"outbox_keys": keys})
    reading = database.reading
    is_away = False

    def reading_() -> AbstractContextManager[Session]:
        if is_away:
            raise OutboxUnreachable("the server is away")
        return reading()

    monkeypatch.setattr(database, "reading", reading_)

    def life() -> Iterator[None]:
        nonlocal is_away
        is_away = True
        yield from rig.hang_up(lambda: not rig.is_reopen_due)
        is_away = False
        while rig.service.standing_by:
            yield

    said = rig.live(life(), again=replace(rig.settings, options={"outbox_keys": None}))
    assert "standing by: the server is away\n" in said
    gone = "messages are encrypted with key 'old', which is missing\n"
    assert f"reopened with the earlier settings: {gone}" in said


def test_a_relay_whose_outbox_another_has_taken_meanwhile_ends_unless_it_is_a_standby(
    rig: Rig,
) -> None:
    ends = iter([OutboxLocked("locked"), OutboxInUse("another relay has it")])

    def fail(call: int, _window: int) -> None:
        if call > 1:
            raise next(ends)

    rig.fails = fail
    with pytest.raises(OutboxInUse, match="another relay has it"):
        rig.live(rig.hang_up(lambda: False))


def test_a_relay_that_hangs_feeds_no_watchdog(rig: Rig) -> None:
    """It is fed by the main thread, which goes on; but only for turns of the relay's."""
    hanging, released = threading.Event(), threading.Event()

    class Hang:
        def on_sent(self, _events: object) -> None:
            hanging.set()
            released.wait(60)

    def fed() -> int:
        return rig.told.count("WATCHDOG")

    def life() -> Iterator[None]:
        """What happens while the service waits, step by step."""
        while fed() < 3:
            yield
        fill(rig.settings.outbox, Message(b"", routing_key="all"))
        while not hanging.is_set():
            yield
        yield  # the last turn before it may have been noticed only now
        before = fed()
        for _ in range(20):
            yield
        assert fed() == before
        age_s = rig.service.status.turn_age_s
        yield
        assert rig.service.status.turn_age_s > age_s
        released.set()
        while fed() == before:
            yield

    rig.live(life(), hooks=[Hang()], watchdog_s=0.0)


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, None),  # nothing listens
        ({"NOTIFY_SOCKET": "@x"}, None),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "3000000"}, 1.5),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "me"}, 0.5),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_fed_twice_in_its_time(
    environment: dict[str, str], watchdog_s: float | None
) -> None:
    if environment.get("WATCHDOG_PID") == "me":
        environment = {**environment, "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(environment)
    assert notifier.watchdog_s == watchdog_s
    notifier.tell(READY=1)  # to an abstract address without a listener: no error


def test_an_abstract_address_is_one_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind("")  # the kernel picks one
        name = heard.getsockname()
        Notifier({"NOTIFY_SOCKET": "@" + name[1:].decode()}).tell(READY=1, STATUS="well")
        assert heard.recv(100) == b"READY=1\nSTATUS=well"


def run(*arguments: str | Path) -> tuple[int, str]:
    """A relay in this process, for what needs no other: its exit code, and what is on stderr."""
    result = CliRunner().invoke(main, ["relay", *map(str, arguments)])
    return result.exit_code, result.stderr


def test_who_cannot_listen_does_not_relay(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        path = tmp_path / "o.db"
        code, said = run("--outbox", path, "--url", NOBODY, "--health-port", port)
    assert code == 4, "a service manager tries again"
    assert f"cannot listen on 127.0.0.1 port {port} for --health-port: Address already" in said
    assert not path.exists()


def test_tracing_without_an_sdk_says_that_nothing_comes_of_it(
    cli: Cli, fake: FakeBroker, tmp_path: Path
) -> None:
    enqueue(cli, b"1")
    path = tmp_path / "o.db"
    code, said = run("--outbox", path, "--url", fake.url, "--drain", "--tracing")
    assert code == 0
    assert "no OpenTelemetry SDK is configured" in said
    assert len(fake.messages("all")) == 1
