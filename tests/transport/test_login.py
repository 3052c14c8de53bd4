"""Credentials that a provider gives: asked for at each connection, renewed on the open one."""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from reliablepub import ConfigurationError, Credentials, PasswordFile
from reliablepub._core.events import Acked, AckedEach, ChannelOpened, Connected, ConnectionLost
from reliablepub.credentials import CredentialsProvider
from reliablepub.message import Message
from reliablepub.testing import FakeBroker
from reliablepub.transport import login
from reliablepub.transport.address import parse_addresses
from reliablepub.transport.pika import PikaTransport

SECRET = "s3cr3t"
PATIENCE_S = 60.0


def bare(broker: FakeBroker) -> str:
    """Its URL without user and password."""
    return broker.url.replace("guest:guest@", "")


class Wire:
    """A transport with a provider, and every event that it has reported."""

    def __init__(self, broker: FakeBroker, provider: CredentialsProvider) -> None:
        addresses = parse_addresses(bare(broker), credentials=provider)
        self.transport = PikaTransport(addresses, run=1, heartbeat_s=600, credentials=provider)
        self.events: list[object] = []

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.events
            self.events += self.transport.listen(0.05)

    def connect(self) -> object:
        """What becomes of an attempt."""
        self.events.clear()
        self.transport.connect()
        self.until(lambda: bool(self.events))
        return self.events[0]

    def publish(self) -> None:
        """One message on a new channel, until it is confirmed."""
        self.events.clear()
        self.transport.open_channel(1)
        self.until(lambda: ChannelOpened(1) in self.events)
        self.transport.send(1, 1, [Message(b"x", routing_key="q", message_id="m")])
        self.until(lambda: any(isinstance(one, Acked | AckedEach) for one in self.events))


Open = Callable[[CredentialsProvider], Wire]


@pytest.fixture
def renewed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the end, so that no slow machine comes too late."""
    monkeypatch.setattr(login, "_RENEW_AFTER", 0.001)
    monkeypatch.setattr(login, "_RENEW_MIN_S", 0.05)


@pytest.fixture
def wire(fake_broker: FakeBroker) -> Iterator[Open]:
    wires: list[Wire] = []

    def build(provider: CredentialsProvider) -> Wire:
        wires.append(Wire(fake_broker, provider))
        return wires[-1]

    yield build
    for one in wires:
        one.transport.close()


def reason(event: object) -> str:
    assert isinstance(event, ConnectionLost), event
    assert SECRET not in repr(event)
    assert not event.is_refusal
    return event.reason


def test_it_is_asked_at_each_connection(fake_broker: FakeBroker, wire: Open) -> None:
    asked: list[str] = []

    def provider() -> Credentials:
        asked.append(threading.current_thread().name)
        return Credentials("guest", "guest")

    own = wire(provider)
    assert asked == [], "no connection was asked for"
    for _ in range(3):
        assert isinstance(own.connect(), Connected)
        own.transport.disconnect("a test")
        own.until(lambda: isinstance(own.events[-1], ConnectionLost))
    assert asked == ["reliablepub-credentials"] * 3


def test_a_password_that_was_changed_is_read_anew(
    fake_broker: FakeBroker, wire: Open, tmp_path: Path
) -> None:
    file = PasswordFile(tmp_path / "password")
    file_path = tmp_path / "password"
    file_path.write_text("wrong\n")
    own = wire(file)
    lost = own.connect()
    assert isinstance(lost, ConnectionLost)
    assert lost.is_refusal
    file_path.write_text("guest\n")
    assert isinstance(own.connect(), Connected)
    file_path.unlink()
    own.transport.disconnect("a test")
    own.connect()
    own.until(lambda: len(own.events) > 1)  # the loss, then the attempt
    words = f"no credentials: cannot read the password file {file_path}: No such file or directory"
    assert reason(own.events[-1]) == words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError(SECRET), "the credentials provider raised ValueError"),
        (SystemExit(SECRET), "the credentials provider raised SystemExit"),
        (ConnectionRefusedError(111, "refused", SECRET), "provider raised ConnectionRefusedError"),
        (ConfigurationError("the vault is sealed"), "the vault is sealed"),
    ],
)
def test_one_that_raises_is_an_outage(wire: Open, error: BaseException, words: str) -> None:
    def provider() -> Credentials:
        raise error

    own = wire(provider)
    for _ in range(2):
        assert words in reason(own.connect())


def test_a_thread_that_cannot_be_started_is_an_outage(
    wire: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of threads that is reached for a while must not end the relay."""
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread"))
        )
        own = wire(lambda: Credentials("guest", "guest"))
        words = "no credentials: the credentials provider has no thread: can't start new thread"
        assert reason(own.connect()) == words
    assert isinstance(own.connect(), Connected)


def test_it_is_asked_while_the_interpreter_shuts_down(
    wire: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 starts no thread then."""
    own = wire(lambda: Credentials("guest", "guest"))
    monkeypatch.setattr(
        threading.Thread,
        "start",
        Mock(side_effect=RuntimeError("can't create new thread at interpreter shutdown")),
    )
    assert isinstance(own.connect(), Connected)


def test_one_that_returns_something_else_is_an_outage(wire: Open) -> None:
    own = wire(lambda: SECRET)  # type: ignore[arg-type,return-value]
    words = "no credentials: the credentials provider returned str, not Credentials"
    assert reason(own.connect()) == words


def test_one_that_hangs_is_an_outage_and_costs_one_thread(
    wire: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login, "PATIENCE_S", 0.2)
    go_on = threading.Event()
    calls: list[int] = []

    def provider() -> Credentials:
        calls.append(1)
        go_on.wait(PATIENCE_S)
        return Credentials("guest", "guest")

    own = wire(provider)
    try:
        for _ in range(3):
            words = "no credentials: the credentials provider has not returned within 0.2 s"
            assert reason(own.connect()) == words
        assert len(calls) == 1
        monkeypatch.setattr(login, "PATIENCE_S", PATIENCE_S)
    finally:
        go_on.set()
    assert isinstance(own.connect(), Connected), "the answer that came late is good"
    assert len(calls) == 1


def test_a_late_answer_grows_old(wire: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "PATIENCE_S", 0.05)
    go_on = threading.Event()
    calls: list[int] = []

    def provider() -> Credentials:
        calls.append(1)
        go_on.wait(PATIENCE_S)
        return Credentials("guest", "guest")

    own = wire(provider)
    reason(own.connect())
    time.sleep(0.2)
    go_on.set()
    assert own.transport._login is not None
    question = own.transport._login._question
    assert question is not None
    own.until(lambda: question.answer is not None)
    monkeypatch.setattr(login, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(login, "STALE_S", 0.0)
    assert isinstance(own.connect(), Connected)
    assert len(calls) == 2


def test_its_thread_ends_with_the_transport(fake_broker: FakeBroker) -> None:
    own = Wire(fake_broker, lambda: Credentials("guest", "guest"))
    assert isinstance(own.connect(), Connected)
    assert own.transport._login is not None
    thread = own.transport._login._thread
    assert thread is not None
    own.transport.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_closing_does_not_wait_for_one_that_hangs(fake_broker: FakeBroker) -> None:
    go_on = threading.Event()

    def provider() -> Credentials:
        go_on.wait(PATIENCE_S)
        return Credentials("guest", "guest")

    own = Wire(fake_broker, provider)
    with closing(own.transport):
        own.transport.connect()
        own.transport.listen(0.01)
        own.transport.disconnect("enough")
        own.until(lambda: bool(own.events))
    go_on.set()
    assert reason(own.events[0]).endswith("enough")


@pytest.mark.usefixtures("renewed_soon")
def test_tokens_are_renewed_on_the_open_connection(fake_broker: FakeBroker, wire: Open) -> None:
    fake_broker.declare_queue("q")
    tokens: list[str] = []

    def provider() -> Credentials:
        fake_broker.expire_tokens()
        tokens.append(fake_broker.issue_token(PATIENCE_S))
        return Credentials(tokens[-1], lifetime_s=PATIENCE_S if len(tokens) < 4 else None)

    own = wire(provider)
    own.connect()
    own.until(lambda: len(tokens) == 4)
    own.publish()
    assert not any(isinstance(one, ConnectionLost) for one in own.events)
    assert fake_broker.connections == 1


def test_a_token_of_the_broker_that_expires(fake_broker: FakeBroker, wire: Open) -> None:
    """Without a lifetime it is not renewed; the broker's refusal ends the connection."""
    fake_broker.declare_queue("q")
    tokens = [fake_broker.issue_token(PATIENCE_S), fake_broker.issue_token(PATIENCE_S)]
    own = wire(lambda: Credentials(tokens[0]))
    own.connect()
    own.publish()
    fake_broker.expire_tokens()
    own.events.clear()
    own.transport.send(1, 2, [Message(b"x", routing_key="q", message_id="m")])
    own.until(lambda: any(isinstance(one, ConnectionLost) for one in own.events))
    assert "token has expired" in reason(own.events[-1])
    tokens[0] = fake_broker.issue_token(PATIENCE_S)
    assert isinstance(own.connect(), Connected)
    own.publish()


@pytest.mark.usefixtures("renewed_soon")
def test_while_renewing_fails_the_connection_lasts_until_the_end(
    fake_broker: FakeBroker, wire: Open, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def provider() -> Credentials:
        calls.append(1)
        if len(calls) > 1:
            raise ConfigurationError("the vault is sealed")
        return Credentials(fake_broker.issue_token(PATIENCE_S), lifetime_s=PATIENCE_S)

    own = wire(provider)
    with caplog.at_level(logging.WARNING, "reliablepub.link"):
        assert isinstance(own.connect(), Connected)
        own.until(lambda: len(calls) > 2)
        tenure = own.transport._tenure
        assert tenure is not None
        tenure._answer = replace(tenure._answer, asked_at=time.monotonic() - PATIENCE_S)
        tenure._watch_end()
        own.until(lambda: any(isinstance(one, ConnectionLost) for one in own.events))
    assert "the credentials have expired; the vault is sealed" in reason(own.events[-1])
    assert "the credentials could not be renewed: the vault is sealed" in caplog.text
    assert reason(own.connect()) == "no credentials: the vault is sealed"


@pytest.mark.usefixtures("renewed_soon")
def test_another_user_needs_another_connection(fake_broker: FakeBroker, wire: Open) -> None:
    """Vault makes a user for each lease, and deletes it with the lease."""
    fake_broker.set_password("second", SECRET)
    users = iter([("guest", "guest"), ("second", SECRET)])
    asked: list[int] = []

    def provider() -> Credentials:
        asked.append(1)
        user, secret = next(users)
        return Credentials(secret, user, PATIENCE_S if user == "guest" else None)

    own = wire(provider)
    assert isinstance(own.connect(), Connected)
    own.until(lambda: len(own.events) > 1)
    assert "names another user" in reason(own.events[-1])
    assert isinstance(own.connect(), Connected)
    assert len(asked) == 2


def test_a_lost_connection_does_not_stay_in_memory_until_its_credentials_end(
    wire: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = wire(lambda: Credentials("guest", "guest", lifetime_s=86_400.0))
    monkeypatch.setattr(own.transport, "_heartbeat_s", 1)
    connections = []
    for _ in range(3):
        assert isinstance(own.connect(), Connected)
        connections.append(weakref.ref(own.transport._connection))
        own.transport.disconnect("a test")
        own.until(lambda: isinstance(own.events[-1], ConnectionLost))

    def are_gone() -> bool:
        gc.collect()
        return not any(one() for one in connections)

    own.until(are_gone)


def test_a_token_that_ends_while_connecting_is_an_outage(wire: Open) -> None:
    """A `Connected` after the loss would have the relay wait for channels that nobody opens."""
    lifetimes = iter([1e-9, PATIENCE_S])
    own = wire(lambda: Credentials("guest", "guest", next(lifetimes)))
    assert "the credentials have expired" in reason(own.connect())
    assert len(own.events) == 1
    assert own.connect() == Connected(own.transport._where)


@pytest.mark.usefixtures("renewed_soon")
def test_a_secret_that_stays_the_same_is_not_sent_again(
    fake_broker: FakeBroker, wire: Open
) -> None:
    calls: list[int] = []

    def provider() -> Credentials:
        calls.append(1)
        return Credentials("guest", "guest", lifetime_s=PATIENCE_S)

    own = wire(provider)
    own.connect()
    own.until(lambda: len(calls) >= 3)
    assert fake_broker.connections == 1
    assert not any(isinstance(one, ConnectionLost) for one in own.events)


@pytest.mark.usefixtures("renewed_soon")
def test_a_secret_that_the_broker_refuses_ends_the_connection(
    fake_broker: FakeBroker, wire: Open
) -> None:
    secrets = iter([fake_broker.issue_token(PATIENCE_S), SECRET])
    own = wire(lambda: Credentials(next(secrets), lifetime_s=PATIENCE_S))
    assert isinstance(own.connect(), Connected)
    own.until(lambda: any(isinstance(one, ConnectionLost) for one in own.events))
    assert "530 NOT_ALLOWED - New secret was refused by one of the backends" in reason(
        own.events[-1]
    )


def test_a_url_with_a_password_and_a_provider_are_one_too_many() -> None:
    provider = PasswordFile("nowhere")
    with pytest.raises(ConfigurationError, match="the URL has a password, and a provider") as no:
        parse_addresses(f"amqp://a:{SECRET}@b/", credentials=provider)
    assert SECRET not in str(no.value)
    with pytest.raises(ConfigurationError, match="must be a callable"):
        parse_addresses("amqp://b/", credentials=SECRET)  # type: ignore[arg-type]


def test_a_secret_of_a_provider_is_exposed_without_tls() -> None:
    [address] = parse_addresses("amqp://192.0.2.1/", credentials=PasswordFile("nowhere"))
    assert address.is_exposed
