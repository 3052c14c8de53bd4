"""AMQPS: a broker with a certificate, and clients that look at it."""

import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import pika
import pytest

from reliablepub.testing import FakeBroker, faults
from tests.broker.raw_tcp import OPENED, OPENING, connected, hear_out


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a certificate of localhost that has signed itself, and its key."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command = ["openssl", "req", "-x509", *curve, "-days", "2", *names]
    subprocess.run(
        [*command, "-keyout", path, "-out", path.with_suffix(".crt")],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


@pytest.fixture
def broker(certificate: Path) -> Iterator[FakeBroker]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with FakeBroker(tls=context) as broker:
        broker.declare_queue("q")
        yield broker


@pytest.fixture
def trust(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate.with_suffix(".crt")))


def test_pika_publishes_over_tls(broker: FakeBroker, trust: ssl.SSLContext) -> None:
    assert broker.url.startswith("amqps://")
    parameters = pika.URLParameters(broker.url)
    parameters.ssl_options = pika.SSLOptions(trust, "127.0.0.1")
    connection = pika.BlockingConnection(parameters)
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_publish("", "q", bytes(300_000), mandatory=True)
    _, _, body = channel.basic_get("q", auto_ack=True)
    assert body == bytes(300_000)
    connection.close()
    broker.wait_for(lambda: broker.connections == 0, timeout_s=60)


async def test_aio_pika_publishes_over_tls(broker: FakeBroker, trust: ssl.SSLContext) -> None:
    async with await aio_pika.connect(broker.url, ssl_context=trust) as connection:
        channel = await connection.channel()
        await channel.default_exchange.publish(aio_pika.Message(b"one"), "q")
    assert [message.body for message in broker.messages("q")] == [b"one"]


def test_who_does_not_trust_the_certificate_goes(broker: FakeBroker) -> None:
    parameters = pika.URLParameters(broker.url)
    parameters.ssl_options = pika.SSLOptions(ssl.create_default_context(), "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        pika.BlockingConnection(parameters)
    assert broker.connections == 0


def test_who_does_not_speak_tls_is_not_heard(broker: FakeBroker) -> None:
    with socket.create_connection(("127.0.0.1", broker.port), 5) as sock:
        sock.sendall(OPENING)
        heard, _ = hear_out(sock)
        assert b"AMQP" not in heard
    assert broker.connections == 0


def test_a_client_without_a_certificate_is_told(certificate: Path, trust: ssl.SSLContext) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificate)
    context.load_cert_chain(certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    with FakeBroker(tls=context) as broker, connected(broker) as tcp:
        sock = trust.wrap_socket(tcp, server_hostname="localhost")
        with sock, pytest.raises(ssl.SSLError, match="certificate required"):
            sock.recv(1)


def test_a_client_that_speaks_no_common_version_is_told(
    certificate: Path, trust: ssl.SSLContext
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    trust.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        FakeBroker(tls=context) as broker,
        connected(broker) as tcp,
        pytest.raises(ssl.SSLError, match="protocol version"),
    ):
        trust.wrap_socket(tcp, server_hostname="localhost")


def test_faults_of_the_network_act_within_tls(broker: FakeBroker, trust: ssl.SSLContext) -> None:
    broker.inject(faults.SliceOutput(size=1))
    with (
        socket.create_connection(("127.0.0.1", broker.port), 5) as tcp,
        trust.wrap_socket(tcp, server_hostname="localhost") as sock,
    ):
        sock.sendall(OPENING)
        heard = b""
        while not heard.endswith(OPENED):
            piece = sock.recv(100)
            assert len(piece) == 1
            heard += piece


def test_input_that_is_not_decrypted_ends_a_connection_with_a_backlog(
    broker: FakeBroker, trust: ssl.SSLContext
) -> None:
    broker.inject(faults.SliceOutput(size=1))
    record = b"\x17\x03\x03\x00\x20" + bytes(32)  # application data that nobody encrypted
    with connected(broker) as tcp, trust.wrap_socket(tcp, server_hostname="localhost") as sock:
        sock.sendall(OPENING)
        assert sock.recv(1)  # of many that wait to be sent
        socket.socket.send(sock, record)
        with pytest.raises(ssl.SSLError, match="bad record mac"):
            hear_out(sock)


def test_a_broker_that_stops_says_goodbye(broker: FakeBroker, trust: ssl.SSLContext) -> None:
    with (
        socket.create_connection(("127.0.0.1", broker.port), 5) as tcp,
        trust.wrap_socket(tcp, server_hostname="localhost") as sock,
    ):
        sock.sendall(b"AMQP\x00\x00\x09\x02")
        assert sock.recv(100) == b"AMQP\x00\x00\x09\x01"
        assert sock.recv(100) == b""  # close_notify: without it this would be an error
