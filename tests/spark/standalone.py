"""A Spark cluster on loopback, and a Spark Connect server: processes of our own.

Knows: Spark's scripts and classes. Must never know: sinks, brokers.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyspark

from tests.rabbitmq import free_ports

HOME = Path(pyspark.__file__).parent
_CLASSES = "org.apache.spark.deploy"
_CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"
_START_TIMEOUT_S = 600.0


@contextmanager
def standalone(folder: Path, python: Path = Path(sys.executable)) -> Iterator[str]:
    """A master, and workers on two hosts, 127.0.0.2 and 127.0.0.3; gives the master's address.

    Args:
        folder: for what the workers write.
        python: what runs the tasks.
    """
    port = str(*free_ports(1))
    master = f"spark://127.0.0.1:{port}"
    commands = [["master.Master", "--host", "127.0.0.1", "--port", port, "--webui-port", "0"]]
    for host in ("127.0.0.2", "127.0.0.3"):
        worker = ["worker.Worker", "--host", host, "-c", "2", "-m", "1500m", "--webui-port", "0"]
        commands.append([*worker, "-d", str(folder / host), master])
    processes = [
        subprocess.Popen(
            [HOME / "bin" / "spark-class", f"{_CLASSES}.{name}", *arguments],
            env=environment(python),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, *arguments in commands
    ]
    try:
        yield master
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def connect_server(
    folder: Path, master: str, python: Path, path: Path | None = None, **more: str
) -> Iterator[str]:
    """A Spark Connect server; gives its address.

    Args:
        folder: its working folder, with its log.
        master: of the cluster that it uses.
        python: what runs its tasks and its planner.
        path: what the planner's Python has on its path besides.
        more: of its configuration.
    """
    (port,) = free_ports(1)
    confs = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "600m",
        "spark.ui.enabled": "false",
        **more,
    }
    command = submit(master, confs, "--class", _CONNECT, "spark-internal")
    log = folder / "connect.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, cwd=folder, env=environment(python, path), stdout=out, stderr=out
        )
    try:
        _wait_until_it_listens(server, port, log)
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def submit(master: str, confs: Mapping[str, object], *arguments: str) -> list[str]:
    """The command that submits a program."""
    options = [option for name, value in confs.items() for option in ("--conf", f"{name}={value}")]
    return [str(HOME / "bin" / "spark-submit"), "--master", master, *options, *arguments]


def environment(python: Path, path: Path | None = None) -> dict[str, str]:
    """For Spark's scripts: this Python for all they start here, with this folder on its path."""
    pythons = dict.fromkeys(("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"), str(python))
    extended = {} if path is None else {"PYTHONPATH": str(path)}
    return os.environ | {"SPARK_HOME": str(HOME)} | pythons | extended


def _wait_until_it_listens(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
