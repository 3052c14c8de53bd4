"""Certificates: verified unless code says otherwise, shown where the broker asks for one."""

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reliablepub import ConfigurationError, Publisher, RetryPolicy
from reliablepub.testing import FakeBroker
from reliablepub.transport.pika_hooks import hooks
from tests.certificates import broker_with, signed
from tests.chaos.proxy import Proxy
from tests.conformance.test_slow_links import assert_sent_once
from tests.rabbitmq import RabbitMQNode
from tests.waiting import until


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signed(tmp_path_factory.mktemp("tls"), "DNS:localhost", "IP:127.0.0.1")


@pytest.fixture
def tls_broker(certificate: Path) -> Iterator[FakeBroker]:
    broker = broker_with(certificate)
    yield broker
    broker.stop()


def trusting(certificate: Path, *, shown: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificate.with_name("ca.crt")))
    if shown is not None:
        context.load_cert_chain(shown)
    return context


def assert_refused(url: str, outbox: Path, words: str, context: ssl.SSLContext | None) -> None:
    """Nothing is sent, everything is kept, and the reason can be read."""
    with Publisher(url, outbox=outbox, ssl_context=context, close_timeout_s=0) as publisher:
        publisher.publish(b"secret", routing_key="q")
        until(lambda: publisher.status.reason and publisher.status.open)
        status = publisher.status
        assert words in status.reason.lower()
        # RabbitMQ's reset may overtake its alert, as the client already writes.
        assert status.refusals > 0 or "it wants a client certificate" in status.reason
        assert status.connects == 0
        assert status.open == 1
        assert "guest" not in status.reason


@pytest.fixture(params=["hooks", "the public way"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through pika."""
    if request.param == "the public way":
        monkeypatch.setattr(hooks, "_why_off", "a test takes the other way")


@pytest.mark.usefixtures("_both_ways")
def test_a_trusted_broker_gets_the_message(
    tls_broker: FakeBroker, certificate: Path, tmp_path: Path
) -> None:
    context = trusting(certificate)
    with Publisher(tls_broker.url, outbox=tmp_path / "o.db", ssl_context=context) as publisher:
        receipts = [publisher.publish(bytes(size), routing_key="q") for size in (0, 10, 300_000)]
        for receipt in receipts:
            receipt.result(60)
    assert [len(message.body) for message in tls_broker.messages("q")] == [0, 10, 300_000]


@pytest.mark.usefixtures("_both_ways")
def test_a_message_that_takes_longer_than_a_confirm_is_sent_once(
    tls_broker: FakeBroker, certificate: Path, tmp_path: Path
) -> None:
    """What TLS makes of the bytes is more than what was written, and leaves just as well."""
    with Proxy(tls_broker.port, held_bytes=16 * 1024) as proxy:
        proxy.bytes_per_s = 400_000
        with Publisher(
            proxy.url.replace("amqp:", "amqps:"),
            outbox=tmp_path / "o.db",
            ssl_context=trusting(certificate),
            confirm_timeout_s=1.5,
        ) as publisher:

            def publish() -> None:
                since = time.monotonic()
                publisher.publish(bytes(1_000_000), routing_key="q").result(60)
                assert time.monotonic() - since > 1.5

            assert_sent_once(publish, tmp_path / "o.db")


def test_an_untrusted_certificate_is_refused_by_default(
    tls_broker: FakeBroker, tmp_path: Path
) -> None:
    assert_refused(tls_broker.url, tmp_path / "o.db", "certificate", None)
    assert not tls_broker.messages("q")


def test_a_certificate_of_another_host_is_refused(tmp_path: Path) -> None:
    other = signed(tmp_path, "DNS:elsewhere.example")
    broker = broker_with(other)
    assert_refused(broker.url, tmp_path / "o.db", "certificate", trusting(other))
    broker.stop()


@pytest.mark.parametrize("query", ["verify=verify_none", "no_verify_ssl=1", "ssl_options={}"])
def test_a_url_cannot_switch_that_off(tls_broker: FakeBroker, query: str) -> None:
    with pytest.raises(ConfigurationError, match="query") as error:
        Publisher(f"{tls_broker.url}?{query}", outbox=None)
    assert "guest" not in str(error.value)


def test_code_can_and_has_to_spell_it_out(tls_broker: FakeBroker, tmp_path: Path) -> None:
    blind = ssl.create_default_context()
    blind.check_hostname = False
    blind.verify_mode = ssl.CERT_NONE
    with Publisher(tls_broker.url, outbox=tmp_path / "o.db", ssl_context=blind) as publisher:
        publisher.publish(b"x", routing_key="q").result(60)


def test_a_client_shows_its_certificate(certificate: Path, tmp_path: Path) -> None:
    broker = broker_with(certificate, asks=True)
    context = trusting(certificate, shown=certificate)
    with Publisher(broker.url, outbox=tmp_path / "o.db", ssl_context=context) as publisher:
        publisher.publish(b"x", routing_key="q").result(60)
    assert_refused(broker.url, tmp_path / "none.db", "certificate required", trusting(certificate))
    broker.stop()


@pytest.mark.rabbit
@pytest.mark.usefixtures("rabbitmq_node")  # which says what to do where there is no RabbitMQ
def test_rabbitmq_takes_only_clients_that_show_a_certificate(
    certificate: Path, tmp_path: Path
) -> None:
    with RabbitMQNode(tls=certificate) as node:
        context, prompt = trusting(certificate, shown=certificate), RetryPolicy.prompt()
        with Publisher(node.amqps_url, outbox=None, ssl_context=context, retry=prompt) as publisher:
            receipt = publisher.publish(b"x", routing_key="nobody-is-bound-here")
            until(lambda: publisher.status.connects == 1)
            until(lambda: receipt.is_settled)
        assert_refused(node.amqps_url, tmp_path / "none.db", "certificate", trusting(certificate))
        assert_refused(node.amqps_url, tmp_path / "default.db", "certificate", None)


def test_a_host_name_is_resolved_anew_for_each_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that has moved is found where its name points now."""
    real, asked = socket.getaddrinfo, []
    with FakeBroker() as broker:
        broker.declare_queue("q")
        port = int(broker.url.rsplit(":", 1)[1].split("/")[0])

        def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
            if host != "broker.example":
                return real(host, *arguments, **options)
            asked.append(host)
            where = "127.0.0.1" if len(asked) > 2 else "127.0.0.2"  # nothing listens there
            return real(where, *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        url = f"amqp://guest:guest@broker.example:{port}/"
        with Publisher(url, outbox=tmp_path / "o.db") as publisher:
            publisher.publish(b"x", routing_key="q").result(60)
        assert len(asked) == 3
