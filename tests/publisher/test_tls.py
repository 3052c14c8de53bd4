"""Certificates: verified unless code says otherwise, shown where the broker asks for one."""

import asyncio
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from reliablepub import (
    AsyncPublisher,
    CertificateFiles,
    ConfigurationError,
    Credentials,
    Message,
    Outbox,
    Publisher,
    Queue,
    RetryPolicy,
    Topology,
    provision,
)
from reliablepub.certificates import Validity, _validity, _validity_in
from reliablepub.cli.app import main
from reliablepub.cli.doctor.diagnosis import of_certificate
from reliablepub.cli.facts import Level
from reliablepub.testing import FakeBroker, NodeOptions
from reliablepub.transport.pika_hooks import hooks
from tests.amqp_probe import AmqpProbe
from tests.asking import fill
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
    refused = "the broker refused the tls connection: certificate required"
    assert_refused(broker.url, tmp_path / "none.db", refused, trusting(certificate))
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


EXTERNAL = "?auth_mechanism=external"


def files_of(certificate: Path) -> CertificateFiles:
    return CertificateFiles(authorities=certificate.with_name("ca.crt"), certificate=certificate)


def bare(url: str) -> str:
    """Without user and password."""
    return f"amqps://{url.rpartition('@')[2]}"


def publish_by(url: str, files: CertificateFiles) -> None:
    """By each door, through which nothing is returned or refused."""
    topology = Topology([], [Queue("q")])
    provision(url, topology, ssl_context=files)
    with Publisher(url, outbox=None, ssl_context=files) as publisher:
        publisher.publish(b"x", routing_key="q").result(60)

    async def publish() -> None:
        async with AsyncPublisher(url, outbox=None, ssl_context=files) as publisher:
            await publisher.publish(b"x", routing_key="q")

    asyncio.run(publish())


def test_a_certificate_of_the_future_is_a_problem() -> None:
    found = of_certificate(Validity(begins_at=1_500, ends_at=2_000), now=1_000)
    assert found.level is Level.PROBLEM
    assert "valid only in 8 min 20 s" in found.found


def test_the_certificate_logs_in(certificate: Path, tmp_path: Path) -> None:
    broker = broker_with(certificate, asks=True, options=NodeOptions(users={"leaf": "unused"}))
    url = bare(broker.url) + EXTERNAL
    publish_by(url, files_of(certificate))
    with Publisher(url, outbox=None, ssl_context=files_of(certificate)) as publisher:
        publisher.publish(b"x", routing_key="q").result(60)
        [client] = broker.clients()
        assert client.user == "leaf"
    tls = ["--tls-ca", str(certificate.with_name("ca.crt")), "--tls-certificate", str(certificate)]
    path = str(tmp_path / "o.db")
    fill(path, Message(b"x", routing_key="q"))
    for command in (["relay", "--drain"], ["doctor"]):
        result = CliRunner().invoke(main, [*command, "--outbox", path, "--url", url, *tls])
        assert result.exit_code == 0, result.output
    assert "the client certificate is valid for another" in " ".join(result.output.split())
    assert len(broker.messages("q")) == 4
    broker.stop()


@pytest.mark.parametrize(
    ("asks", "words"),
    [(True, "refused the user that the client certificate"), (False, "lacks EXTERNAL")],
)
def test_a_certificate_of_no_user_is_refused_as_such(
    certificate: Path, tmp_path: Path, *, asks: bool, words: str
) -> None:
    broker, files = broker_with(certificate, asks=asks), files_of(certificate)
    url, path = bare(broker.url) + EXTERNAL, tmp_path / "o.db"
    with Publisher(url, outbox=path, ssl_context=files, close_timeout_s=0) as publisher:
        until(lambda: words in publisher.status.reason)
    broker.stop()


@pytest.mark.rabbit
@pytest.mark.usefixtures("rabbitmq_node")
def test_the_certificate_logs_in_to_rabbitmq(certificate: Path) -> None:
    config = "auth_mechanisms.1 = PLAIN\nauth_mechanisms.2 = EXTERNAL\n"
    config += "ssl_cert_login_from = common_name\n"
    plugins = ("rabbitmq_auth_mechanism_ssl",)
    with RabbitMQNode(tls=certificate, plugins=plugins, config=config) as node:
        url, files = bare(node.amqps_url) + EXTERNAL, files_of(certificate)
        with Publisher(url, outbox=None, ssl_context=files, close_timeout_s=0) as publisher:
            words = "refused the user that the client certificate names"
            until(lambda: words in publisher.status.reason)
        node.ctl("add_user", "leaf", "unused")
        node.ctl("set_permissions", "leaf", ".*", ".*", ".*")
        publish_by(url, files)


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("amqps://h/?auth_mechanism=external", {}, "give a client certificate"),
        ("amqps://u@h/?auth_mechanism=external", {}, "a URL without user and password"),
        ("amqp://h/?auth_mechanism=external", {}, "needs amqps://"),
        ("amqps://h/?auth_mechanism=anonymous", {}, "a query other than auth_mechanism=external"),
        (
            "amqps://h/?auth_mechanism=external",
            {"credentials": lambda: Credentials("s"), "ssl_context": ssl.create_default_context()},
            "and a password was given",
        ),
        ("amqps://h/", {}, r"has no password for amqps://h:5671; the default one, guest, is"),
        ("amqps://relay@h/", {}, "the default one, guest, is for localhost alone"),
    ],
)
def test_a_login_that_cannot_be_meant_is_refused(
    url: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Publisher(url, outbox=None, **options)
    with pytest.raises(ConfigurationError, match=words):
        provision(url, Topology([], []), **options)


def test_a_certificate_alone_is_needed_of_files_too(certificate: Path) -> None:
    files = CertificateFiles(authorities=certificate.with_name("ca.crt"))
    with pytest.raises(ConfigurationError, match="give a client certificate"):
        Publisher("amqps://h/?auth_mechanism=external", outbox=None, ssl_context=files)


def test_certificates_that_were_renewed_are_used_at_the_next_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        signed(folder, "DNS:localhost", "IP:127.0.0.1")
    (tmp_path / "tls").symlink_to(old)  # as Kubernetes mounts a secret
    files = files_of(tmp_path / "tls" / "both.pem")
    broker = broker_with(old / "both.pem", asks=True)
    port = int(broker.url.rpartition(":")[2].partition("/")[0])
    with Publisher(broker.url, outbox=None, ssl_context=files, close_timeout_s=0) as publisher:
        publisher.publish(b"x", routing_key="q").result(60)
        broker.stop()
        broker = broker_with(new / "both.pem", asks=True, port=port)
        until(lambda: "CERTIFICATE_VERIFY_FAILED" in publisher.status.reason)
        switch(tmp_path / "tls", tmp_path)  # where there is none
        until(lambda: "what was read before stays in use" in caplog.text)
        assert publisher.status.certificate_ends_at == files.validity.ends_at  # type: ignore[union-attr]
        switch(tmp_path / "tls", new)
        publisher.publish(b"x", routing_key="q").result(60)
    broker.stop()
    assert caplog.text.count("what was read before stays in use") == 1


def switch(link: Path, to: Path) -> None:
    fresh = link.with_name("fresh")
    fresh.symlink_to(to)
    fresh.rename(link)


def test_the_validity_of_a_certificate(certificate: Path, tmp_path: Path) -> None:
    validity = files_of(certificate).validity
    assert validity is not None
    told = (
        subprocess.run(
            ["openssl", "x509", "-in", certificate, "-noout", "-enddate"],
            check=True,
            capture_output=True,
            text=True,
        )
        .stdout.strip()
        .removeprefix("notAfter=")
    )
    assert validity.ends_at == ssl.cert_time_to_seconds(told)
    assert validity.ends_at - validity.begins_at == 2 * 86_400
    assert files_of(certificate).has_certificate
    assert CertificateFiles().validity is None
    (tmp_path / "x.pem").write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----")
    assert _validity(tmp_path / "x.pem") is None
    assert _validity(tmp_path / "missing.pem") is None


@given(st.binary(max_size=200))
def test_what_is_no_certificate_has_no_validity(der: bytes) -> None:
    with suppress(ValueError, IndexError):
        _validity_in(der)


def test_the_connection_has_a_name(tmp_path: Path) -> None:
    with FakeBroker() as broker:
        for options, name in (
            ({}, f"reliablepub orders.db on {socket.gethostname()} ({os.getpid()})"),
            ({"connection_name": "orders, web-3"}, "orders, web-3"),
        ):
            with Publisher(broker.url, outbox=tmp_path / "orders.db", **options) as publisher:  # type: ignore[arg-type]
                until(lambda: publisher.status.connects == 1)
                [client] = broker.clients()
            told = client.properties
            assert told["connection_name"] == name
            assert told["product"] == "reliablepub"
            assert told["outbox"] == str(tmp_path / "orders.db")
            assert told["pid"] == str(os.getpid())
            until(lambda: not broker.clients())
    for wrong in ("", "x" * 256, 7, "\udc80"):
        with pytest.raises(ConfigurationError, match="connection_name is"):
            Publisher(broker.url, outbox=None, connection_name=wrong)  # type: ignore[arg-type]


def test_a_path_that_no_frame_holds_is_shown_in_part(tmp_path: Path) -> None:
    folder = tmp_path.joinpath("x" * 200, "x" * 100)
    folder.mkdir(parents=True)
    path = folder / os.fsdecode(b"\xff.db")
    with FakeBroker() as broker, Publisher(broker.url, outbox=path) as publisher:
        until(lambda: publisher.status.connects == 1)
        [client] = broker.clients()
        assert client.properties["outbox"].endswith(r"x/\udcff.db")
        assert len(client.properties["outbox"]) == 255


def test_a_secret_that_is_too_long_is_told(broker: AmqpProbe, tmp_path: Path) -> None:
    url = broker.url.replace("guest:guest@", f"guest:{'x' * 9_000}@")
    with Publisher(url, outbox=None, close_timeout_s=0) as publisher:
        until(lambda: "user and secret have 9005 bytes" in publisher.status.reason)
    path = str(tmp_path / "o.db")
    with Outbox(path) as outbox:
        outbox.create()
    told = CliRunner().invoke(main, ["doctor", "--outbox", path, "--url", url]).stdout
    assert "9005 bytes" in " ".join(told.split())
