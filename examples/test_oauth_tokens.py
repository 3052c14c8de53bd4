"""Tests of the provider in oauth_tokens.py, to copy: ``pytest examples/test_oauth_tokens.py``."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from oauth_tokens import ClientCredentials, TokenEndpoint

from reliablepub import ConfigurationError, Publisher
from reliablepub.testing import FakeBroker


@pytest.fixture
def endpoint(fake_broker: FakeBroker) -> Iterator[TokenEndpoint]:
    """An endpoint whose tokens the fake broker accepts for one second."""
    with TokenEndpoint(lambda: fake_broker.issue_token(1), lifetime_s=1) as endpoint:
        yield endpoint


def test_an_endpoint_that_fails_is_an_outage(
    endpoint: TokenEndpoint, fake_broker: FakeBroker, tmp_path: Path
) -> None:
    fake_broker.declare_queue("orders")
    url = fake_broker.url.replace("guest:guest@", "")
    provider = ClientCredentials(endpoint.url, "orders", "hush")
    with Publisher(url, outbox=tmp_path / "outbox.db", credentials=provider) as publisher:
        publisher.publish(b"1", routing_key="orders").result(timeout_s=30)
        endpoint.is_failing = True
        while publisher.status.reason != "no credentials: the token endpoint answers 503":
            time.sleep(0.01)
        receipt = publisher.publish(b"2", routing_key="orders")  # returns: it is on disk
        endpoint.is_failing = False
        receipt.result(timeout_s=30)
        assert publisher.status.counters.parked == 0
    assert [message.body for message in fake_broker.messages("orders")] == [b"1", b"2"]


def test_the_reason_says_what_the_endpoint_said_and_no_secret(endpoint: TokenEndpoint) -> None:
    for url, reason in (
        (endpoint.url, "the token endpoint says invalid_client"),
        ("http://127.0.0.1:1/token", "no token endpoint: ConnectionError"),
    ):
        with pytest.raises(ConfigurationError) as raised:
            ClientCredentials(url, "orders", "wrong")()
        assert str(raised.value) == reason
