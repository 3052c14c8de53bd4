"""`reliablepub broker` as a process."""

import json
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pika
import pytest
from click.testing import CliRunner
from pika.exceptions import ChannelClosedByBroker, NackError, ProbableAccessDeniedError

from reliablepub.testing.command import broker
from tests.certificates import signed

ROOT = Path(__file__).parents[2]
RUN = "from reliablepub.testing.command import broker; broker()"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_its_url_and_serves_until_told_to_stop(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "faults.toml"
    script.write_text("[[fault]]\nkind = 'nack'\n")
    with subprocess.Popen(
        [sys.executable, "-c", RUN, "--port", "0", "--faults", str(script), "--seed", "3"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        connection = pika.BlockingConnection(pika.URLParameters(process.stdout.readline().strip()))
        channel = connection.channel()
        channel.confirm_delivery()
        with pytest.raises(NackError):
            channel.basic_publish("", "q", b"one")
        connection.close()
        process.send_signal(number)
        assert process.wait(60) == 0


def test_a_bad_fault_file_is_an_error_and_not_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "faults.toml"
    script.write_text("[[fault]]\nkind = 'nakc'\n")
    result = CliRunner().invoke(broker, ["--faults", str(script)])
    assert result.exit_code == 2
    assert "kind 'nakc' is not one of" in result.output


def test_a_program_that_calls_it_has_its_signal_handlers_back(tmp_path: Path) -> None:
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.getsignal(number) for number in numbers]
    script = tmp_path / "faults.toml"
    script.write_text("[[fault]]\nkind = 'nakc'\n")
    CliRunner().invoke(broker, ["--faults", str(script)])
    assert [signal.getsignal(number) for number in numbers] == before


def test_users_have_names_and_passwords() -> None:
    command = [
        sys.executable,
        "-c",
        RUN,
        "--port",
        "0",
        "--user",
        "ann:se:cret",
        "--user",
        "bob:secret",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("amqp://ann:se%3Acret@")
        pika.BlockingConnection(pika.URLParameters(url)).close()
        other = url.replace("ann:se%3Acret", "bob:secret")
        pika.BlockingConnection(pika.URLParameters(other)).close()
        process.terminate()
    result = CliRunner().invoke(broker, ["--user", "ann"])
    assert result.exit_code == 2
    assert "NAME:PASSWORD" in result.output


def test_a_port_that_is_taken_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(broker, ["--port", str(port)])
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 is taken" in result.output
    assert "--port 0" in result.output


@pytest.mark.parametrize("option", ["--port", "--control-port"])
@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_none_can_have_is_bad_usage(option: str, port: str) -> None:
    result = CliRunner().invoke(broker, [option, port])
    assert result.exit_code == 2
    assert "is not in the range 0<=x<=65535" in result.output


def test_without_a_port_it_is_found_where_clients_look_for_rabbitmq() -> None:
    (port,) = [option for option in broker.params if option.name == "port"]
    assert port.default == 5672


def test_a_host_that_others_can_reach_is_refused() -> None:
    result = CliRunner().invoke(broker, ["--host", "0.0.0.0"])
    assert result.exit_code == 2
    assert "loopback" in result.output
    assert "give --allow-remote" in result.output


def test_the_control_port_virtual_hosts_and_limits() -> None:
    options = ["--control-port", "0", "--vhost", "/", "--vhost", "shop", "--history-max", "1"]
    with started("--port", "0", *options, "--history-bytes-max", "100") as process:
        assert process.stdout is not None
        url, control = (process.stdout.readline().strip() for _ in range(2))
        assert url.startswith("amqp://guest:guest@127.0.0.1:")
        with urlopen(f"{control}/queues?vhost=shop", timeout=60) as answer:
            assert json.load(answer) == []
        connection = pika.BlockingConnection(pika.URLParameters(url))
        channel = connection.channel()
        channel.confirm_delivery()
        for body in (b"one", b"two"):
            channel.basic_publish("", "q", body)
        connection.close()
        with urlopen(f"{control}/published", timeout=60) as answer:
            published = json.load(answer)
        assert published["count"] == 2
        assert [one["body"] for one in published["messages"]] == ["two"]
        process.terminate()
        assert process.wait(60) == 0


def test_permissions_are_given_as_rabbitmqctl_takes_them() -> None:
    users = ["--user", "guest:guest", "--user", "shop:secret", "--vhost", "/", "--vhost", "shop"]
    with started("--port", "0", *users, "--permissions", "shop", "shop", "", "^o", "") as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().replace("guest:guest", "shop:secret")
        with pytest.raises(ProbableAccessDeniedError):
            pika.BlockingConnection(pika.URLParameters(url))
        connection = pika.BlockingConnection(pika.URLParameters(url.replace("%2F", "shop")))
        with pytest.raises(
            ChannelClosedByBroker, match="access to queue 'o' in vhost 'shop' refused"
        ):
            connection.channel().queue_declare("o")
        connection.close()
        process.terminate()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("guest", "/", "(", "", ""), "configure '(' is not a regular expression"),
        (("ann", "/", "", "", ""), "'ann', who is not one of the users"),
        (("guest", "shop", "", "", ""), "there is no virtual host 'shop'"),
    ],
)
def test_permissions_that_could_never_apply_are_refused(given: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(broker, ["--port", "0", "--permissions", *given])
    assert result.exit_code == 2
    assert words in result.output


def test_a_certificate_makes_it_amqps(tmp_path: Path) -> None:
    both = signed(tmp_path, "IP:127.0.0.1")
    with started("--port", "0", "--tls-certificate", str(both)) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("amqps://")
        parameters = pika.URLParameters(url)
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        parameters.ssl_options = pika.SSLOptions(context, "127.0.0.1")
        pika.BlockingConnection(parameters).close()
        process.terminate()
    result = CliRunner().invoke(broker, ["--tls-key", str(both)])
    assert "give --tls-certificate too" in result.output
    (tmp_path / "empty").touch()
    result = CliRunner().invoke(broker, ["--tls-certificate", str(tmp_path / "empty")])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_control_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(broker, ["--port", "0", "--control-port", str(port)])
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 is taken" in result.output


def started(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *options], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
