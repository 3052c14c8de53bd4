"""`reliablepub broker` as a process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pika
import pytest
from click.testing import CliRunner
from pika.exceptions import NackError

from reliablepub.testing.command import broker

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
    assert result.exit_code == 1
    assert "kind 'nakc' is none of" in result.output


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
    assert result.exit_code == 1
    assert "NAME:PASSWORD" in result.output


def test_a_port_that_is_taken_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(broker, ["--port", str(port)])
    assert result.exit_code == 1
    assert f"port {port} of 127.0.0.1 is taken" in result.output
    assert "--port 0" in result.output


def test_without_a_port_it_is_found_where_clients_look_for_rabbitmq() -> None:
    (port,) = [option for option in broker.params if option.name == "port"]
    assert port.default == 5672


def test_a_host_that_others_can_reach_is_refused() -> None:
    result = CliRunner().invoke(broker, ["--host", "0.0.0.0"])
    assert result.exit_code == 1
    assert "loopback" in result.output
