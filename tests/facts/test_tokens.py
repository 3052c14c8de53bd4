"""Passwords and tokens on an open connection: ``connection.update-secret``, and tokens that expire.

RabbitMQ needs its OAuth 2 plugin for tokens, so a node of its own: in the long form only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pamqp import commands

from reliablepub.testing import FakeBroker
from tests.facts.conftest import Connect
from tests.facts.raw_client import RawClient
from tests.oauth import Issuer, node_with_oauth

Issue = Callable[[float], str]
QUEUE = "facts"


def updated(client: RawClient, secret: str) -> list[str]:
    """What is answered to another secret."""
    client.send(commands.Connection.UpdateSecret(secret, "a test"), 0)
    return client.told()


def test_another_password_is_taken_without_a_look(connect: Connect) -> None:
    """RabbitMQ's own users have nothing to renew: any secret will do, and the connection stays."""
    client = connect().opened()
    assert updated(client, "neither password nor token") == ["connection.updatesecretok"]
    client.publish(client.declare(QUEUE, durable=False, exclusive=True))
    assert client.told() == ["basic.ack 1"]


class Tokens:
    """A broker that lets in bearers of tokens."""

    def __init__(self, url: str, issue: Issue) -> None:
        self.issue = issue
        self._url = url
        self.open = ExitStack()

    def client(self, secret: str, user: str = "whoever") -> RawClient:
        """A connection that says nothing yet; the user name is ignored beside a token."""
        return self.open.enter_context(
            RawClient(self._url.replace("guest:guest", f"{user}:{secret}"))
        )


@pytest.fixture(scope="module")
def oauth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokens]:
    issuer = Issuer()
    folder: Path = tmp_path_factory.mktemp("oauth")
    with node_with_oauth(issuer, folder) as node:
        yield Tokens(node.url, issuer.token)


@pytest.fixture(params=["fake", pytest.param("real", marks=[pytest.mark.rabbit, pytest.mark.soak])])
def tokens(request: pytest.FixtureRequest) -> Iterator[Tokens]:
    """The bundled broker, or RabbitMQ with the OAuth 2 plugin."""
    if request.param == "fake":
        broker: FakeBroker = request.getfixturevalue("fake_broker")
        tokens = Tokens(broker.url, broker.issue_token)
    else:
        tokens = request.getfixturevalue("oauth")
    with tokens.open:
        yield tokens


def test_a_token_is_a_password(tokens: Tokens) -> None:
    client = tokens.client(tokens.issue(60)).opened()
    client.publish(client.declare(QUEUE, durable=False, exclusive=True))
    assert client.told() == ["basic.ack 1"]


def test_a_login_with_an_expired_token_is_refused(tokens: Tokens) -> None:
    client = tokens.client(tokens.issue(-10))
    client.start()
    client.log_in()
    words = (
        "connection.close 403 ACCESS_REFUSED - Login was refused using authentication mechanism "
        "PLAIN. For details see the broker logfile. (0, 0)"
    )
    assert client.told() == [words]


def test_what_is_no_token_ends_a_connection_that_has_one(tokens: Tokens) -> None:
    client = tokens.client(tokens.issue(60)).opened()
    refused = "NOT_ALLOWED - New secret was refused by one of the backends"
    assert updated(client, "garbage") == [f"connection.close 530 {refused} (10, 70)"]


def test_when_a_token_expires_the_connection_stays_and_publishes_are_refused(
    tokens: Tokens,
) -> None:
    """The words name a message's exchange, but no message is to blame."""
    client = tokens.client(tokens.issue(60)).opened()
    queue = client.declare(QUEUE, durable=False, exclusive=True)
    expired = tokens.issue(-10)
    assert updated(client, expired) == ["connection.updatesecretok"], "its end is not looked at"
    client.publish(queue)
    [closed] = client.told()
    assert closed.startswith(
        "channel.close 403 ACCESS_REFUSED - access to exchange 'amq.default' in vhost '/' refused "
        "for user '"
    )
    assert (
        "', backend rabbit_auth_backend_oauth2 returned an error: "
        '"Provided JWT token has expired at timestamp ' in closed
    )
    assert closed.endswith("(60, 40)")
    client.send(commands.Channel.CloseOk())
    client.open_channel()  # needs no permission
    assert updated(client, tokens.issue(60)) == ["connection.updatesecretok"]
    client.publish(queue)
    assert client.told() == ["basic.ack 1"], "it goes on with another token"


@pytest.mark.soak
@pytest.mark.rabbit
def test_a_busy_channel_of_rabbitmq_remembers_a_permission(oauth: Tokens) -> None:
    """A permission that was given is asked for again after a minute, or when the channel rests.

    So a publisher under load does not notice at once that its token has expired.
    """
    with oauth.open:
        client = oauth.client(oauth.issue(2)).opened()
        queue = client.declare(QUEUE, durable=False, exclusive=True)
        begun, count = time.monotonic(), 0
        while time.monotonic() < begun + 8:
            client.publish(queue)
            count += 1
            assert client.hear_only(commands.Basic.Ack).delivery_tag == count
            time.sleep(0.02)
