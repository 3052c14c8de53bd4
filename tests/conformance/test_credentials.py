"""Passwords that change and tokens that expire, under load: nothing is parked, nothing is lost."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from reliablepub import ConfigurationError, Credentials, Link, Message, PasswordFile
from reliablepub.testing import FakeBroker
from reliablepub.transport import login
from tests.amqp_probe import AmqpProbe
from tests.conformance.conftest import FrontDoor, is_guest
from tests.conformance.rig import PASSWORD, Rig
from tests.oauth import Issuer, node_with_oauth
from tests.stores import Where
from tests.waiting import until

PATIENCE_S = 60.0
SOAK_S = float(os.environ.get("RELIABLEPUB_TOKENS_S", "180"))
"""30 minutes in `make soak`'s long form."""
LIFETIME_S = float(os.environ.get("RELIABLEPUB_TOKEN_LIFETIME_S", "20"))


@pytest.fixture(autouse=True)
def _own_connections(front_door: FrontDoor) -> None:
    if is_guest(front_door):
        pytest.skip("credentials of a lent connection are the application's")


def numbered(queue: str, numbers: range) -> Iterator[Message]:
    return (Message(b"", routing_key=queue, message_id=f"m-{n}") for n in numbers)


def assert_none_is_lost(probe: AmqpProbe, queue: str, count: int) -> Counter[str]:
    arrived = Counter(str(properties.message_id) for _, properties in probe.drain(queue, count))
    assert set(arrived) == {f"m-{number}" for number in range(count)}
    return arrived


def test_a_password_is_changed_and_the_file_follows(
    rig: Rig, outbox: Where, front_door: FrontDoor, tmp_path: Path
) -> None:
    queue = rig.probe.declare_queue()
    url = rig.url_of_other_user().replace(f":{PASSWORD}@", "@")
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    options = {"outbox": outbox, "close_timeout_s": 0.2, "credentials": PasswordFile(path)}
    with front_door(url, **options) as publisher:
        publisher.publish_many(numbered(queue, range(100))).wait(PATIENCE_S)
        rig.change_password()
        publisher.publish_many(numbered(queue, range(100, 200)))
        until(lambda: publisher.status.refusals > 0)
        path.unlink()
        until(lambda: "cannot read the password file" in publisher.status.reason)
        publisher.publish_many(numbered(queue, range(200, 300)))
        new = path.with_name("new")
        new.write_text("another\n")
        new.rename(path)
        counters = publisher.flush(PATIENCE_S).counters
    assert (counters.confirmed, counters.parked, counters.expired) == (300, 0, 0)
    assert_none_is_lost(rig.probe, queue, 300)


def test_a_provider_that_hangs_does_not_hold_up_what_is_stored(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login, "PATIENCE_S", 0.2)
    fake.declare_queue("q")
    url, go_on = fake.url.replace("guest:guest@", ""), threading.Event()

    def provider() -> Credentials:
        go_on.wait(PATIENCE_S)
        return Credentials("guest", "guest")

    options = {"outbox": outbox, "close_timeout_s": 0.2, "credentials": provider}
    try:
        with front_door(url, **options) as publisher:
            until(lambda: "has not returned" in publisher.status.reason)
            assert publisher.status.refusals == 0
            receipt = publisher.publish_many(numbered("q", range(500)))  # returns meanwhile
            assert publisher.status.counters.parked == 0
            go_on.set()
            assert receipt.wait(PATIENCE_S).confirmed == 500
    finally:
        go_on.set()


def test_tokens_under_load(fake: FakeBroker, outbox: Where, front_door: FrontDoor) -> None:
    """Each is good for a moment only, and the endpoint fails every third time."""
    fake.declare_queue("q")
    asked: list[str] = []

    def provider() -> Credentials:
        asked.append(fake.issue_token(PATIENCE_S))
        if len(asked) % 3 == 0:
            raise ConfigurationError("the token endpoint says 503")
        # The last ones live longer: a slow machine needs more than a moment to log in.
        return Credentials(asked[-1], lifetime_s=0.3 if len(asked) < 8 else None)

    url, count = fake.url.replace("guest:guest@", ""), 0
    options = {"outbox": outbox, "close_timeout_s": 0.2, "credentials": provider}
    with front_door(url, **options) as publisher:
        while len(asked) < 8:
            publisher.publish_many(numbered("q", range(count, count + 20)))
            count += 20
            time.sleep(0.01)
        status = publisher.flush(PATIENCE_S)
        assert status.connects <= len(asked)
    assert (status.counters.confirmed, status.counters.parked) == (count, 0)
    arrived = {published.properties.message_id for published in fake.messages("q")}
    assert arrived == {f"m-{number}" for number in range(count)}


@dataclass
class Tokens:
    """A broker that lets in bearers of tokens.

    Attributes:
        url: without a user.
        probe: a look into it.
        issue: returns a token that is valid for so many seconds.
        lifetime_s: the shortest lifetime that it can be tried with.
    """

    url: str
    probe: AmqpProbe
    issue: Callable[[float], str]
    lifetime_s: float


@pytest.fixture(params=["fake", pytest.param("real", marks=[pytest.mark.rabbit, pytest.mark.soak])])
def tokens(request: pytest.FixtureRequest) -> Iterator[Tokens]:
    if request.param == "fake":
        fake: FakeBroker = request.getfixturevalue("fake")
        probe = AmqpProbe(fake.url)
        yield Tokens(fake.url.replace("guest:guest@", ""), probe, fake.issue_token, 1)
        probe.close()
        return
    issuer = Issuer()
    with node_with_oauth(issuer) as node:
        probe = AmqpProbe(node.url)
        yield Tokens(node.url.replace("guest:guest@", ""), probe, issuer.token, 3)
        probe.close()


def test_while_there_are_no_good_tokens_there_is_an_outage(
    tokens: Tokens, front_door: FrontDoor, tmp_path: Path
) -> None:
    """The provider fails, or the broker refuses what it gives: told, retried ever more rarely."""
    queue, asked, now = tokens.probe.declare_queue(), 0, "good"

    def provider() -> Credentials:
        nonlocal asked
        asked += 1
        if now == "failing":
            raise ConfigurationError("the vault is sealed")
        secret = "garbage" if now == "refused" else tokens.issue(tokens.lifetime_s)
        return Credentials(secret, lifetime_s=tokens.lifetime_s)

    def endure(trouble: str, reason: str, numbers: range) -> None:
        nonlocal now
        until(lambda: publisher.status.link is Link.CONNECTED)  # a token ends each second
        refusals = publisher.status.refusals
        now = trouble
        until(lambda: reason in publisher.status.reason)
        receipt, before = publisher.publish_many(numbered(queue, numbers)), asked
        time.sleep(1)
        status = publisher.status
        assert (status.counters.parked, status.open, receipt.open) == (0, 50, 50)
        assert status.link is not Link.CONNECTED
        assert (status.refusals > refusals) == (trouble == "refused")
        assert asked - before < 12
        now = "good"
        assert receipt.wait(PATIENCE_S).confirmed == 50

    options = {"outbox": tmp_path / "o.db", "credentials": provider, "close_timeout_s": 0.2}
    with front_door(tokens.url, **options) as publisher:
        publisher.publish_many(numbered(queue, range(50))).wait(PATIENCE_S)
        endure("failing", "no credentials: the vault is sealed", range(50, 100))
        endure("refused", "the broker refused the credentials", range(100, 150))
        counters = publisher.flush(PATIENCE_S).counters
    assert (counters.confirmed, counters.parked, counters.expired) == (150, 0, 0)
    assert_none_is_lost(tokens.probe, queue, 150)


@pytest.mark.soak
@pytest.mark.rabbit
@pytest.mark.timeout(4 * SOAK_S + 300)
def test_tokens_of_rabbitmq_under_load(front_door: FrontDoor, tmp_path: Path) -> None:
    """RabbitMQ with the OAuth 2 plugin; every fifth question is answered late, or not at all."""
    issuer, count, asked = Issuer(), 0, 0

    def provider() -> Credentials:
        nonlocal asked
        asked += 1
        if asked % 5 == 0:
            raise ConfigurationError("the token endpoint says 503")
        if asked % 5 == 3:
            time.sleep(1)
        return Credentials(issuer.token(LIFETIME_S), lifetime_s=LIFETIME_S)

    with node_with_oauth(issuer) as node:
        probe = AmqpProbe(node.url)
        queue = probe.declare_queue()
        arrived: Counter[str] = Counter()
        url = node.url.replace("guest:guest@", "")
        options = {"outbox": tmp_path / "o.db", "credentials": provider}
        with front_door(url, **options) as publisher:
            end = time.monotonic() + SOAK_S
            while time.monotonic() < end:
                publisher.publish_many(numbered(queue, range(count, count + 100)))
                count += 100
                arrived.update(str(p.message_id) for _, p in probe.drain(queue))
                assert publisher.status.open < 100_000
                time.sleep(0.1)
            status = publisher.flush(PATIENCE_S)
        arrived.update(str(p.message_id) for _, p in probe.drain(queue))
        probe.close()
        version = ".".join(map(str, node.version))
    print(
        f"\nRabbitMQ {version}: {count} messages, {issuer.issued} tokens of {LIFETIME_S:g} s, ",
        end="",
    )
    print(f"{status.connects} connections, {arrived.total() - len(arrived)} duplicates")
    counters = status.counters
    assert (counters.confirmed, counters.parked, counters.expired) == (count, 0, 0)
    assert set(arrived) == {f"m-{number}" for number in range(count)}
    assert issuer.issued > SOAK_S / LIFETIME_S
    assert status.connects <= issuer.issued
