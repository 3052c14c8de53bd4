"""Passwords and tokens on an open connection: ``connection.update-secret``, and tokens that expire.

RabbitMQ needs its OAuth 2 plugin for tokens, so a node of its own: in the long form only.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from pamqp import commands

from reliablepub.testing import FakeBroker
from tests.facts.conftest import Connect
from tests.facts.raw_client import RawClient
from tests.facts.site import FakeSite
from tests.oauth import Issuer, node_with_oauth

Issue = Callable[[float], str]
QUEUE = "facts"
EXPIRED = (
    "', backend rabbit_auth_backend_oauth2 returned an error: "
    '"Provided JWT token has expired at timestamp '
)
ENDED = "connection.close 320 CONNECTION_FORCED - credential expired (0, 0)"


def updated(client: RawClient, secret: str) -> list[str]:
    """What is answered to another secret."""
    client.send(commands.Connection.UpdateSecret(secret, "a test"), 0)
    return client.told()


def test_another_password_is_taken_without_a_look(connect: Connect) -> None:
    """RabbitMQ's own users have nothing to renew: any secret will do, and the connection stays."""
    client = connect().opened()
    assert updated(client, "neither password nor token") == ["connection.updatesecretok"]
    assert client.publish(client.declare(QUEUE, durable=False, exclusive=True)).told() == [
        "basic.ack 1"
    ]


class Tokens:
    """A broker that lets in bearers of tokens.

    Args:
        url: its URL.
        version: of RabbitMQ, or the one that the fake follows.
        issue: returns a token that expires in so many seconds.
        let_pass: returns when so many seconds have gone by on the broker's clock.
    """

    def __init__(
        self, url: str, version: tuple[int, ...], issue: Issue, let_pass: Callable[[float], None]
    ) -> None:
        self.issue = issue
        self.let_pass = let_pass
        self.ends_connections = version >= (4, 3)
        self.version = version
        self._url = url
        self.open = ExitStack()

    def client(self, secret: str, user: str = "whoever") -> RawClient:
        """A connection that says nothing yet; the user name is ignored beside a token."""
        return self.open.enter_context(
            RawClient(self._url.replace("guest:guest", f"{user}:{secret}"))
        )


@pytest.fixture(scope="module")
def oauth() -> Iterator[Tokens]:
    issuer = Issuer()
    with node_with_oauth(issuer) as node:
        yield Tokens(node.url, node.version, issuer.token, time.sleep)


@pytest.fixture(params=["fake", pytest.param("real", marks=[pytest.mark.rabbit, pytest.mark.soak])])
def tokens(request: pytest.FixtureRequest) -> Iterator[Tokens]:
    """The bundled broker, or RabbitMQ with the OAuth 2 plugin."""
    if request.param == "fake":
        broker: FakeBroker = request.getfixturevalue("fake_broker")
        tokens = Tokens(broker.url, FakeSite.version, broker.issue_token, broker.advance)
    else:
        tokens = request.getfixturevalue("oauth")
    with tokens.open:
        yield tokens


def test_a_token_is_a_password(tokens: Tokens) -> None:
    client = tokens.client(tokens.issue(60)).opened()
    assert client.publish(client.declare(QUEUE, durable=False, exclusive=True)).told() == [
        "basic.ack 1"
    ]


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
    said = "New secret was refused by one of the backends"
    if tokens.version >= (4, 3):
        said = "Secret update failed"
    assert updated(client, "garbage") == [f"connection.close 530 NOT_ALLOWED - {said} (10, 70)"]


def test_a_token_that_has_expired_already(tokens: Tokens) -> None:
    """Until 4.3 its end is not looked at."""
    client = tokens.client(tokens.issue(60)).opened()
    [answer] = updated(client, tokens.issue(-10))
    if not tokens.ends_connections:
        assert answer == "connection.updatesecretok"
    else:
        assert answer.startswith("connection.close 530 NOT_ALLOWED - access to vhost '/' refused ")
        assert EXPIRED in answer


def test_another_token_lasts_as_long_as_it_says(tokens: Tokens) -> None:
    """Its end counts, not that of the one before."""
    client = tokens.client(tokens.issue(1)).opened()
    queue = client.declare(QUEUE, durable=False, exclusive=True)
    assert updated(client, tokens.issue(60)) == ["connection.updatesecretok"]
    tokens.let_pass(2.5)
    assert client.publish(queue).told() == ["basic.ack 1"]


def test_when_a_token_expires_the_connection_stays_and_publishes_are_refused(
    tokens: Tokens,
) -> None:
    """The words name a message's exchange, but no message is to blame. 4.3 ends the connection."""
    client = tokens.client(tokens.issue(1)).opened()
    queue = client.declare(QUEUE, durable=False, exclusive=True)
    tokens.let_pass(2.5)
    if tokens.ends_connections:
        assert client.told() == [ENDED]
        return
    client.publish(queue)
    [closed] = client.told()
    right = "" if tokens.version < (4, 0) else "write "
    assert closed.startswith(
        f"channel.close 403 ACCESS_REFUSED - {right}access to exchange 'amq.default' in vhost '/' "
        "refused for user '"
    )
    assert EXPIRED in closed
    assert closed.endswith("(60, 40)")
    client.send(commands.Channel.CloseOk())
    client.open_channel()  # needs no permission
    assert updated(client, tokens.issue(60)) == ["connection.updatesecretok"]
    assert client.publish(queue).told() == ["basic.ack 1"], "it goes on with another token"


@pytest.mark.soak
@pytest.mark.rabbit
def test_a_busy_channel_of_rabbitmq_remembers_a_permission(oauth: Tokens) -> None:
    """A permission that was given is asked for again after a minute, or when the channel rests.

    So a publisher under load does not notice at once that its token has expired; until 4.3, which
    ends the connection whatever it does.
    """
    with oauth.open:
        client = oauth.client(oauth.issue(2)).opened()
        queue = client.declare(QUEUE, durable=False, exclusive=True)
        begun, count, heard = time.monotonic(), 0, ""
        while time.monotonic() < begun + 8 and heard != ENDED:
            client.publish(queue)
            count += 1
            [heard] = client.told()
            assert heard in {f"basic.ack {count}", ENDED}
            time.sleep(0.02)
    assert (heard == ENDED) == oauth.ends_connections
    assert count > 10
