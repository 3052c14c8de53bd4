"""examples/oauth_tokens.py at RabbitMQ with its OAuth 2 plugin: client credentials, end to end."""

import runpy
import time
from pathlib import Path

import pytest

from reliablepub import Publisher
from tests.amqp_probe import AmqpProbe
from tests.oauth import Issuer, node_with_oauth

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "oauth_tokens.py"))
LIFETIME_S = 3


@pytest.mark.soak
@pytest.mark.rabbit
def test_tokens_of_an_endpoint_are_renewed_on_the_open_connection(tmp_path: Path) -> None:
    issuer, count = Issuer(), 80
    endpoint = EXAMPLE["TokenEndpoint"](lambda: issuer.token(LIFETIME_S), lifetime_s=LIFETIME_S)
    with node_with_oauth(issuer) as node, endpoint:
        probe = AmqpProbe(node.url)
        queue = probe.declare_queue()
        provider = EXAMPLE["ClientCredentials"](endpoint.url, "orders", "hush")
        url = node.url.replace("guest:guest@", "")
        with Publisher(url, outbox=tmp_path / "o.db", credentials=provider) as publisher:
            for number in range(count):
                publisher.publish(b"", routing_key=queue, message_id=str(number))
                time.sleep(0.1)
            status = publisher.flush(timeout_s=30)
        assert [str(p.message_id) for _, p in probe.drain(queue, count)] == [
            str(number) for number in range(count)
        ]
        probe.close()
    assert (status.counters.confirmed, status.connects) == (count, 1)
    assert endpoint.issued > count * 0.1 / LIFETIME_S
